"""Promise: snapshots reach a sidecar that is well, and training does not notice an ill one."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.descriptors import open_descriptors
from tests.scripted_sidecar import DEADLINE, ScriptedSidecar, until
from tests.trainer.small_runs import Run, adamw, same_bits
from tiercheck import failpoints
from tiercheck.protocol.artifacts.slot import read_header
from tiercheck.protocol.local import Reply, Request, Welcome
from tiercheck.protocol.version import Kind, Version
from tiercheck.trainer.backends import sidecar_backend
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.process import StepSuspected


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedSidecar]:
    monkeypatch.setenv("TIERCHECK_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TIERCHECK_ATTEMPT", "3")
    monkeypatch.setattr(sidecar_backend, "_BACKOFF", (0.05, 0.1))
    scripted = ScriptedSidecar(tmp_path, Welcome(attempt=3, snapshot_every=2))
    yield scripted
    scripted.stop()


def trained(tmp_path: Path, steps: int = 4) -> Run:
    run = Run(adamw, tmp_path / "unused", every=None)
    run.checkpointer.restore()
    for _ in range(steps):
        run.train(1)
        run.checkpointer.wait(DEADLINE)
    return run


def test_snapshots_arrive_complete_as_often_as_the_job_says(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    run = trained(tmp_path)
    run.checkpointer.close()
    assert not (tmp_path / "unused").exists()
    assert [request.step for request in sidecar.asked("complete")] == [2, 4]
    assert (run.checkpointer.captured, run.checkpointer.skipped) == (2, 0)
    newest = sidecar.asked("complete")[-1].path
    header = read_header(Path(newest).read_bytes())
    assert (header.rank, header.version, header.world_size) == (0, Version(4, 3), 1)
    state = {name: value for name, value in run.state().items() if name != "model/last.weight"}
    same_bits({name: value for name, value in load_file(newest).items() if name in state}, state)


def test_slots_are_reserved_before_the_first_snapshot_is_due(
    sidecar: ScriptedSidecar, tmp_path: Path
) -> None:
    run = trained(tmp_path, steps=1)
    run.checkpointer.close()
    (reserved,) = sidecar.asked("reserve")
    assert reserved.bytes > 0
    assert sidecar.asked("begin") == []


def test_offered_version_is_restored_and_acknowledged(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    first = trained(tmp_path)
    expected = first.train(2)
    first.checkpointer.close()
    offered = tmp_path / "offered"
    shutil.copy(sidecar.asked("complete")[1].path, offered)
    offered.chmod(0o400)
    sidecar.welcome = dataclasses.replace(
        sidecar.welcome, restore_version=Version(4, 3), restore_path=str(offered)
    )
    sidecar.requests.clear()
    second = Run(adamw, tmp_path, seed=5, every=None)
    assert second.checkpointer.restore() == 4
    assert [request.step for request in sidecar.asked("restored")] == [4]
    assert second.train(2) == expected
    second.checkpointer.close()


def test_slot_of_another_version_than_offered_is_refused(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    first = trained(tmp_path)
    first.checkpointer.close()
    path = sidecar.asked("complete")[0].path  # holds step 2
    sidecar.welcome = dataclasses.replace(sidecar.welcome, restore_version=Version(4, 3), restore_path=path)
    with pytest.raises(RestoreError, match="holds step 2"):
        Run(adamw, tmp_path).checkpointer.restore()


def test_torn_slot_is_never_loaded(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    torn = tmp_path / "torn"
    torn.write_bytes(bytes(10_000))
    sidecar.welcome = dataclasses.replace(
        sidecar.welcome, restore_version=Version(4, 3), restore_path=str(torn)
    )
    with pytest.raises(RestoreError, match="torn"):
        Run(adamw, tmp_path).checkpointer.restore()


def test_sidecar_dies_and_training_goes_on_and_saves_again_when_it_is_back(
    sidecar: ScriptedSidecar, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = trained(tmp_path)
    sidecar.stop()
    assert len(run.train(6)) == 6
    run.checkpointer.wait(DEADLINE)
    assert run.checkpointer.skipped == 3
    assert caplog.text.count("WARNING") <= 2  # one per kind of trouble
    captured = run.checkpointer.captured
    sidecar.start()

    def saves_again() -> bool:
        run.train(2)
        run.checkpointer.wait(DEADLINE)
        return run.checkpointer.captured > captured

    until(saves_again, "a snapshot after the sidecar came back")
    assert len(sidecar.asked("reserve")) == 2  # the new sidecar was told the size
    run.checkpointer.close()


def test_silent_sidecar_costs_training_a_bounded_wait(
    sidecar: ScriptedSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_backend.SidecarBackend, "patience", 0.05)
    monkeypatch.setattr(sidecar_backend, "ANSWER_SECONDS", 0.5)
    run = trained(tmp_path)
    sidecar.answer = lambda request: None
    assert len(run.train(6)) == 6
    run.checkpointer.wait(DEADLINE)
    assert run.checkpointer.captured == 2
    assert run.checkpointer.skipped == 3
    run.checkpointer.close()


def test_slot_granted_too_late_is_given_back_and_never_completed(
    sidecar: ScriptedSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_backend.SidecarBackend, "patience", 0.05)
    run = trained(tmp_path)
    updated = threading.Event()

    sidecar.grants_no_slot_before(updated)
    run.train(3)
    updated.set()
    run.checkpointer.wait(DEADLINE)
    assert [request.step for request in sidecar.asked("abandon")] == [6]
    assert [request.step for request in sidecar.asked("complete")] == [2, 4]
    assert run.checkpointer.skipped == 1
    run.checkpointer.close()


def test_no_free_slot_is_a_skipped_snapshot(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    run = trained(tmp_path)
    sidecar.answer = lambda request: (
        Reply(True, skip="all slots are needed") if request.op == "begin" else sidecar.behave(request)
    )
    run.train(2)
    run.checkpointer.wait(DEADLINE)
    sidecar.answer = sidecar.behave
    run.train(2)
    run.checkpointer.close()
    assert [request.step for request in sidecar.asked("complete")] == [2, 4, 8]
    assert run.checkpointer.skipped == 1


def test_stale_attempt_stops_saving_for_good_but_not_training(
    sidecar: ScriptedSidecar, tmp_path: Path
) -> None:
    run = trained(tmp_path)
    sidecar.welcome = Welcome(attempt=4, snapshot_every=2, error="attempt 3 is over")
    sidecar.answer = lambda request: (
        None if request.op == "progress" else Reply(False, error="attempt 3 is over")
    )
    for _ in range(4):
        run.train(2)
        run.checkpointer.wait(DEADLINE)
    until(lambda: len(sidecar.hellos) == 2, "the rank asked once whether it is still wanted")
    sidecar.welcome = Welcome(attempt=4, snapshot_every=2)
    sidecar.answer = sidecar.behave
    for _ in range(4):
        run.train(2)
        run.checkpointer.wait(DEADLINE)
    run.checkpointer.close()
    assert len(sidecar.hellos) == 2
    assert [request.step for request in sidecar.asked("complete")] == [2, 4]


def test_stale_rank_does_not_begin_to_train(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    sidecar.welcome = Welcome(attempt=4, snapshot_every=2, error="attempt 3 is over")
    with pytest.raises(RestoreError, match="attempt 3 is over"):
        Run(adamw, tmp_path).checkpointer.restore()


def test_without_a_sidecar_nobody_starts_from_scratch_by_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIERCHECK_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(sidecar_backend, "FIRST_CONNECT_SECONDS", 0.2)
    with pytest.raises(RestoreError, match="does not answer"):
        Run(adamw, tmp_path).checkpointer.restore()


def test_rank_waits_until_the_sidecar_lets_it_in(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    wanted = sidecar.welcome
    sidecar.welcome = Welcome(attempt=3, snapshot_every=0, error="not every rank is restored yet")
    run = Run(adamw, tmp_path, every=None)
    restoring = threading.Thread(target=run.checkpointer.restore)
    restoring.start()
    until(lambda: len(sidecar.hellos) >= 2, "the rank asks again")
    sidecar.welcome = wanted
    restoring.join(DEADLINE)
    assert not restoring.is_alive()
    assert run.checkpointer.every == 2
    run.checkpointer.close()


def test_first_and_last_step_are_reported_though_not_every_one_is(
    sidecar: ScriptedSidecar, tmp_path: Path
) -> None:
    run = Run(adamw, tmp_path, every=1000)
    run.checkpointer.restore()
    run.train(1)
    until(lambda: len(sidecar.asked("progress")) == 1, "the first step is reported at once")
    with run.checkpointer._backend._progress_lock:  # type: ignore[attr-defined]  # nobody gets to tell anything
        losses = run.train(200)
    until(
        lambda: sidecar.asked("progress")[-1].step == 201, "the last step is reported though training pauses"
    )
    reported = sidecar.asked("progress")
    assert [each.step for each in reported] == [1, 201]
    assert reported[-1].loss is not None
    assert reported[-1].loss.hex() == losses[-1]
    assert reported[-1].step_seconds is not None
    run.checkpointer.close()


def test_not_finite_snapshot_is_given_back(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    run = trained(tmp_path, steps=3)
    run.update()
    run.checkpointer.step(float("inf"))
    run.checkpointer.close()
    assert [request.step for request in sidecar.asked("abandon")] == [4]
    assert [request.step for request in sidecar.asked("complete")] == [2]
    until(lambda: sidecar.asked("progress")[-1].step == 4, "the last step is reported")
    assert sidecar.asked("progress")[-1].loss is None


def test_long_phase_without_steps_can_say_that_all_is_well(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    run = trained(tmp_path, steps=3)
    before = len(sidecar.asked("progress"))
    run.checkpointer.alive()
    run.checkpointer.wait(DEADLINE)
    until(lambda: len(sidecar.asked("progress")) > before, "it is told")
    assert sidecar.asked("progress")[-1].step == 3
    assert run.checkpointer.step_number == 3
    run.checkpointer.close()


def end_with(run: Run, error: BaseException) -> None:
    """A script as people write it, and what ends it."""
    with run.checkpointer:
        run.checkpointer.restore()
        run.train(2)
        raise error


def test_exception_that_ends_training_is_told_before_the_connection_closes(
    sidecar: ScriptedSidecar, tmp_path: Path
) -> None:
    hook = sys.excepthook
    run = Run(adamw, tmp_path, every=1000)
    with pytest.raises(ValueError, match="bad sample"):
        end_with(run, ValueError("bad sample"))
    (told,) = sidecar.asked("failing")
    assert (told.reason, told.message, told.exit_code) == ("UncaughtException", "ValueError: bad sample", 1)
    assert sys.excepthook is hook, "nothing of ours stays behind"


def test_end_of_a_script_that_does_well_is_no_failure(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    run = Run(adamw, tmp_path, every=1000)
    with pytest.raises(SystemExit):
        end_with(run, SystemExit(0))
    assert not sidecar.asked("failing")


def test_host_memory_does_not_grow_with_what_was_saved(
    sidecar: ScriptedSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """marin#6774, the hero run: each save left something in the host's memory, and every few hours the kernel
    ended the training."""
    turn = iter(range(10**6))

    def two_slots(request: Request) -> Reply | None:
        reply = sidecar.behave(request)
        if request.op != "begin" or reply is None:
            return reply
        slot = Path(reply.path).with_name(f"slot-{next(turn) % 2}")
        if not slot.exists():
            Path(reply.path).rename(slot)
        return Reply(True, path=str(slot))

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count(str(tmp_path / "slots"))

    sidecar.answer = two_slots
    monkeypatch.setattr(sidecar_backend, "ANSWER_SECONDS", DEADLINE)
    run = trained(tmp_path, 12)
    descriptors, threads, maps = open_descriptors(), set(threading.enumerate()), mapped()
    captured = run.checkpointer.captured
    for _ in range(20):
        run.train(2)
        run.checkpointer.wait(DEADLINE)
    assert run.checkpointer.captured == captured + 20
    assert mapped() == maps
    assert not open_descriptors() - descriptors
    assert not set(threading.enumerate()) - threads
    run.checkpointer.close()


@pytest.mark.parametrize("what", ["exception", "enospc"])
@pytest.mark.parametrize("point", ["mid-copy", "before-state-word", "after-state-word"])
def test_slot_is_given_back_whatever_kept_it_from_being_written(
    sidecar: ScriptedSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, what: str
) -> None:
    """Else it stays begun for as long as the connection lasts, and with the last of them nothing is saved any
    more."""
    armed = tmp_path / "armed"
    armed.write_text(f"{point} {what} times=2\n")
    monkeypatch.setattr(failpoints, "_points", failpoints.Failpoints(str(armed)))
    monkeypatch.setattr(sidecar_backend, "ANSWER_SECONDS", DEADLINE)
    run = trained(tmp_path, 8)
    run.checkpointer.close()
    begun = [request.step for request in sidecar.asked("begin")]
    ended = [request.step for request in (*sidecar.asked("complete"), *sidecar.asked("abandon"))]
    assert sorted(ended) == [2, 4, 6, 8] == begun
    assert (run.checkpointer.captured, run.checkpointer.skipped) == (2, 2)


def test_two_threads_that_ask_at_once_each_get_their_own_answer(
    sidecar: ScriptedSidecar, tmp_path: Path
) -> None:
    sidecar.answer = lambda request: Reply(True, path=str(getattr(request, "step", "")))
    backend = sidecar_backend.SidecarBackend(tmp_path, 0, 1)
    assert backend.find() is None
    wrong: list[tuple[int, str]] = []

    def ask(steps: range) -> None:
        answers = ((step, backend.begin(step, 0, Kind.SNAPSHOT)) for step in steps)
        wrong.extend((step, answer) for step, answer in answers if answer != str(step))

    saver = threading.Thread(target=ask, args=(range(1, 400),))
    saver.start()
    ask(range(1000, 1400))
    saver.join(DEADLINE)
    backend.close()
    assert wrong == []


def test_training_waits_for_no_answer_about_its_resume(
    sidecar: ScriptedSidecar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar_backend, "ANSWER_SECONDS", 2 * DEADLINE)
    first = trained(tmp_path)
    first.checkpointer.close()
    sidecar.offer(4, 4)
    trained_on, waited = threading.Event(), []

    def answer(request: Request) -> Reply | None:
        if request.op == "resume":
            waited.append(not trained_on.wait(DEADLINE))
        return sidecar.behave(request)

    sidecar.answer = answer
    second = Run(adamw, tmp_path, seed=5, every=None)
    assert second.checkpointer.restore() == 4
    second.train(1)
    trained_on.set()
    second.checkpointer.close()
    assert waited == [False]


def test_nothing_of_a_suspected_step_is_saved_and_the_job_hears_of_it_before_the_step_is_left(
    sidecar: ScriptedSidecar, tmp_path: Path
) -> None:
    run = trained(tmp_path, steps=3)
    run.checkpointer.suspect("the loss is too large")
    with pytest.raises(StepSuspected, match="step 4 is suspected: the loss is too large"):
        run.train(1)
    (told,) = sidecar.asked("failing")
    assert (told.reason, told.message) == ("StepSuspected", "step 4 is suspected: the loss is too large")
    run.checkpointer.close()
    assert [request.step for request in sidecar.asked("begin")] == [2], "a snapshot of step 4 was due"


def test_step_that_has_ended_cannot_be_suspected_any_more(sidecar: ScriptedSidecar, tmp_path: Path) -> None:
    run = Run(adamw, tmp_path / "unused", every=None)
    with next(run.checkpointer.steps(3)):
        run.train(1)
        with pytest.raises(RuntimeError, match="step 1 has ended: call suspect before"):
            run.checkpointer.suspect("too late")
    run.checkpointer.close()
