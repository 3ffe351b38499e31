"""Promise: deltas cost little, are never queued, never wrong, and never in the way of training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.lives import Lives
from tests.scripted_sidecar import DEADLINE, ScriptedSidecar, until
from tests.trainer.deltas.replaying import Script, loop, mean_square, saved, started, survives, train, trained
from tiercheck.protocol.artifacts.slot import read_header
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import Reply, Request, Welcome
from tiercheck.protocol.version import Kind
from tiercheck.trainer.backends import sidecar_backend
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.save import staging


def simple() -> Script:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return loop(model, optimizer, loss_of=mean_square(4, 8))


def low_rank() -> Script:
    """A large frozen layer, and a small one beside it that learns."""
    model = nn.ModuleDict(
        {"base": nn.Linear(1536, 1536), "down": nn.Linear(1536, 1), "up": nn.Linear(1, 1536)}
    )
    model["base"].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def adapted(model: nn.ModuleDict) -> Tensor:
        x = torch.randn(2, 1536)
        loss: Tensor = (model["base"](x) + model["up"](model["down"](x))).square().mean()
        return loss

    return loop(model, optimizer, loss_of=adapted)


def sizes(sidecar: ScriptedSidecar, kind: Kind) -> dict[int, int]:
    return {request.step: request.bytes for request in sidecar.asked("complete", kind)}


def test_delta_is_a_readable_file_that_says_what_it_is(delta_sidecar: ScriptedSidecar) -> None:
    running, checkpointer = trained(simple, 5)
    gradients = {name: p.grad.clone() for name, p in running.model.named_parameters() if p.grad is not None}
    checkpointer.close()
    path = delta_sidecar.completed(Kind.DELTA)[5]
    size = sizes(delta_sidecar, Kind.DELTA)[5]
    header = read_header(Path(path).read_bytes())
    assert (header.kind, header.version.step, header.size) == (Kind.DELTA, 5, size)
    trimmed = Path(path).with_suffix(".safetensors")
    trimmed.write_bytes(Path(path).read_bytes()[:size])
    stored = load_file(trimmed)
    for name, gradient in gradients.items():
        assert torch.equal(stored[f"gradient0/{name}"], gradient)


def test_low_rank_training_has_small_deltas(delta_sidecar: ScriptedSidecar) -> None:
    survives(delta_sidecar, low_rank)
    (snapshot,) = {size for step, size in sizes(delta_sidecar, Kind.SNAPSHOT).items() if step == 4}
    assert max(sizes(delta_sidecar, Kind.DELTA).values()) <= snapshot / 100


def test_slots_are_reserved_for_what_deltas_need(delta_sidecar: ScriptedSidecar) -> None:
    saved(low_rank, 1)
    (reserved,) = delta_sidecar.asked("reserve")
    assert reserved.bytes > 1536 * 1536 * 4
    assert 0 < reserved.delta_bytes < reserved.bytes / 50
    assert delta_sidecar.asked("begin", Kind.DELTA) == []


def test_delta_that_outgrows_its_slot_is_skipped_and_the_next_chain_fits(
    delta_sidecar: ScriptedSidecar,
) -> None:
    delta_sidecar.welcome = dataclasses.replace(delta_sidecar.welcome, snapshot_every=2)
    used = [3]

    def build() -> Script:
        table = nn.Embedding(20_000, 16)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        return loop(table, optimizer, loss_of=lambda table: table(torch.arange(used[0])).square().sum())

    running, checkpointer = trained(build, 3)
    checkpointer.wait(DEADLINE)
    used[0] = 19_000
    train(running, checkpointer, 1, wait=True)
    train(running, checkpointer, 1)
    checkpointer.close()
    assert sorted(delta_sidecar.completed(Kind.DELTA)) == [3, 5]
    small, large = (request.delta_bytes for request in delta_sidecar.asked("reserve"))
    assert small < 300_000 < 20_000 * 16 * 4 <= large < 20_000 * 16 * 4 + 300_000


def test_first_delta_after_a_restore_from_a_snapshot_alone_has_its_slot_in_time(
    delta_sidecar: ScriptedSidecar,
) -> None:
    """How large it will be lies in the snapshot: a sidecar in a new pod knows nothing of it."""
    running, checkpointer = trained(simple, 5)
    checkpointer.close()
    delta_sidecar.offer(base=4, step=4)
    delta_sidecar.requests.clear()
    running, checkpointer = started(simple)
    assert checkpointer.restore() == 4
    checkpointer.wait(DEADLINE)
    (reserved,) = delta_sidecar.asked("reserve")
    train(running, checkpointer, 1)
    checkpointer.close()
    assert 0 < sizes(delta_sidecar, Kind.DELTA)[5] <= (reserved.delta_bytes or 0)


def test_without_a_free_slot_deltas_wait_for_the_next_snapshot(delta_sidecar: ScriptedSidecar) -> None:
    running, checkpointer = trained(simple, 5)
    checkpointer.wait(DEADLINE)

    def full(request: Request) -> Reply | None:
        if request.op == "begin" and request.kind is Kind.DELTA:
            return Reply(True, skip="all slots are needed")
        return delta_sidecar.behave(request)

    delta_sidecar.answer = full
    train(running, checkpointer, 1, wait=True)
    delta_sidecar.answer = delta_sidecar.behave
    asked = len(delta_sidecar.asked("begin", Kind.DELTA))
    train(running, checkpointer, 2)
    assert len(delta_sidecar.asked("begin", Kind.DELTA)) == asked  # 7 and 8 would lead nowhere
    train(running, checkpointer, 2)
    checkpointer.close()
    assert sorted(delta_sidecar.completed(Kind.DELTA)) == [5, 9, 10]
    assert checkpointer.deltas_skipped == 3


def test_silent_sidecar_costs_a_bounded_wait_and_nothing_is_queued(
    delta_sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, checkpointer = trained(simple, 5)
    checkpointer.wait(DEADLINE)
    monkeypatch.setattr(sidecar_backend.SidecarBackend, "patience", 0.05)
    monkeypatch.setattr(sidecar_backend, "ANSWER_SECONDS", 0.5)
    delta_sidecar.answer = lambda request: None
    train(running, checkpointer, 6, wait=True)
    assert checkpointer.deltas == 1
    assert checkpointer.deltas_skipped == 6
    assert checkpointer.skipped == 1
    checkpointer.close()


def test_gradient_overwritten_while_it_is_copied_never_becomes_a_delta(
    delta_sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, checkpointer = trained(simple, 3, every=1)
    checkpointer.wait(DEADLINE)
    copy = staging.copy_tensor

    def overwrite(target: Tensor, source: Tensor) -> None:
        copy(target, source)
        if source is running.model[0].weight.grad:
            source.zero_()

    monkeypatch.setattr(staging, "copy_tensor", overwrite)
    train(running, checkpointer, 1, wait=True)
    assert checkpointer.deltas_skipped == 1
    train(running, checkpointer, 2)  # copied at once from now on
    checkpointer.close()
    assert sorted(delta_sidecar.completed(Kind.DELTA)) == [2, 3, 5, 6]


def test_replay_that_goes_wrong_is_told_and_training_does_not_begin(delta_sidecar: ScriptedSidecar) -> None:
    saved(simple, 7)
    delta_sidecar.offer(base=4, step=7)
    path = Path(delta_sidecar.completed(Kind.DELTA)[6])
    content = bytearray(path.read_bytes())
    place = next(t for t in read_header(bytes(content)).tensors if t.name == "gradient0/0.weight")
    content[place.begin + 3] ^= 0x80  # the sign of one element
    path.write_bytes(content)
    _, again = started(simple, seed=5)
    with pytest.raises(RestoreError, match="replaying step"):
        again.restore()
    again.close()
    (told,) = delta_sidecar.asked("mismatch", Kind.DELTA)
    assert 6 <= told.step <= 7
    assert "differs" in told.message
    assert not [request for request in delta_sidecar.asked("restored") if request.step == 7]


def test_chain_with_a_hole_is_refused(delta_sidecar: ScriptedSidecar) -> None:
    saved(simple, 7)
    delta_sidecar.offer(base=4, step=7)
    whole = delta_sidecar.welcome.restore_deltas
    delta_sidecar.welcome = dataclasses.replace(delta_sidecar.welcome, restore_deltas=(whole[0], whole[2]))
    _, again = started(simple)
    with pytest.raises(RestoreError, match="needs step 6"):
        again.restore()
    again.close()


def test_cadence_follows_the_replies_unless_the_script_has_its_own(delta_sidecar: ScriptedSidecar) -> None:
    running, checkpointer = started(simple)
    checkpointer.restore()
    assert checkpointer.every == 4
    delta_sidecar.answer = lambda request: (
        dataclasses.replace(reply, snapshot_every=3) if (reply := delta_sidecar.behave(request)) else None
    )
    train(running, checkpointer, 1, wait=True)
    assert checkpointer.every == 3
    checkpointer.close()
    _, stubborn = started(simple, every=7)
    stubborn.restore()
    assert stubborn.every == 7
    stubborn.close()


@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_steps_that_are_not_finite_are_refused_counted_in_a_row_and_reported(
    delta_sidecar: ScriptedSidecar, poison: str
) -> None:
    running, checkpointer = trained(simple, 3, every=1)
    for step in (4, 5):
        loss = float(running.update().detach())
        if poison == "gradient":
            running.optimizers[0].zero_grad()
            running.model[0].weight.grad = torch.full((8, 8), float("inf"))
            running.optimizers[0].step()
        checkpointer.step(float("nan") if poison == "loss" else loss)
        checkpointer.wait(DEADLINE)
        assert step not in delta_sidecar.completed(Kind.DELTA)
        assert step not in delta_sidecar.completed(Kind.SNAPSHOT)
    assert checkpointer._saver.sanity.in_a_row == 2
    running.update()
    checkpointer.step(float("nan"))
    until(lambda: delta_sidecar.asked("progress")[-1].step == 6, "the last step is reported")
    assert delta_sidecar.asked("progress")[-1].not_finite == 3
    checkpointer.close()


def test_a_good_step_ends_the_row(delta_sidecar: ScriptedSidecar) -> None:
    running, checkpointer = started(simple)
    checkpointer.restore()
    for loss in (1.0, float("nan"), float("nan")):
        running.update()
        checkpointer.step(loss)
    assert checkpointer._saver.sanity.in_a_row == 2
    train(running, checkpointer, 1, wait=True)
    assert checkpointer._saver.sanity.in_a_row == 0
    checkpointer.close()


@pytest.mark.parametrize(
    ("job", "own", "kept"), [(True, None, []), (False, None, [1]), (True, False, [1]), (False, True, [])]
)
def test_gate_is_as_the_job_says_unless_the_script_does(
    delta_sidecar: ScriptedSidecar, job: bool, own: bool | None, kept: list[int]
) -> None:
    delta_sidecar.welcome = dataclasses.replace(delta_sidecar.welcome, sanity_gate=job)
    running, checkpointer = started(simple, every=1, sanity_gate=own)
    checkpointer.restore()
    running.update()
    checkpointer.step(float("nan"))
    checkpointer.close()
    assert sorted(delta_sidecar.completed(Kind.SNAPSHOT)) == kept


KILLED = """
import os, signal
from tests.trainer.deltas.replaying import train, trained
from tests.trainer.deltas.test_deltas_with_sidecar import simple
from tiercheck.trainer.deltas.delta_format import Item
running, checkpointer = trained(simple, 7)
checkpointer.wait()
def die(item):
    os.kill(os.getpid(), signal.SIGKILL)
Item.copied = die  # after the first one
train(running, checkpointer, 9)
"""


def test_trainer_killed_in_mid_copy_leaves_a_torn_slot_and_everything_before_it(
    delta_sidecar: ScriptedSidecar, lives: Lives, tmp_path: Path
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    env = {"TIERCHECK_RUN_DIR": str(tmp_path), "TIERCHECK_ATTEMPT": "1"}
    lives.run(["tiercheck"], [script], kill_at=0, env=env)
    assert sorted(delta_sidecar.completed(Kind.DELTA)) == [5, 6, 7]
    (torn,) = (p for p in Path(delta_sidecar.completed(Kind.DELTA)[7]).parent.glob("delta-8-*"))
    assert torn.read_bytes()[:8] == bytes(8)
    delta_sidecar.offer(base=4, step=7)
    _, again = started(simple, seed=3)
    assert again.restore() == 7
    again.close()


def test_sidecar_that_was_away_is_told_again_that_there_are_no_deltas(delta_sidecar: ScriptedSidecar) -> None:
    running, checkpointer = started(simple)
    checkpointer.restore()
    checkpointer._deltas.give_up("a reason")
    checkpointer.wait(DEADLINE)
    delta_sidecar.stop()
    train(running, checkpointer, 1)
    delta_sidecar.requests.clear()
    delta_sidecar.welcome = Welcome(attempt=1, snapshot_every=2, delta=DeltaMode.AUTO)
    delta_sidecar.start()

    def told_again() -> bool:
        train(running, checkpointer, 2, wait=True)
        return bool(delta_sidecar.asked("no-deltas"))

    until(told_again, "the new sidecar is told")
    assert delta_sidecar.asked("no-deltas")[0].message == "a reason"
    checkpointer.close()


def test_rank_restored_without_a_chain_does_not_say_that_it_takes_no_deltas(
    delta_sidecar: ScriptedSidecar,
) -> None:
    running, checkpointer = trained(simple, 4)
    checkpointer.close()
    delta_sidecar.offer(base=4, step=4)
    before = len(delta_sidecar.asked("reserve"))
    running, again = started(simple, seed=5)
    again.restore()
    train(running, again, 3)
    again.close()
    assert all(request.delta_bytes > 0 for request in delta_sidecar.asked("reserve")[before:])
    assert {5, 6, 7} <= set(delta_sidecar.completed(Kind.DELTA))
