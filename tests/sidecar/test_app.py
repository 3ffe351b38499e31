"""The sidecar serves its control API, health and metrics, and installs the library."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sidecar.world import MakeWorld, error_of, until
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase, Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.report import Report
from tiercheck.protocol.version import Version
from tiercheck_sidecar.decoding import decode
from tiercheck_sidecar.install_library import install


def test_directive_is_idempotent_and_strangers_ones_are_refused(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.new_attempt()
    directive = replace(world.directive(0, Phase.HOLD), instance=world.report(0).instance, number=1)
    for _ in range(2):
        status, body = world.call(0, "PUT", "/v1/directive", to_json(directive))
        assert status == 200
        assert decode(body, Report).revision == directive.revision
    for wrong in (replace(directive, job_uid="other"), replace(directive, worker=5)):
        status, body = world.send(0, wrong)
        assert status == 403
        assert error_of(body)
    for garbage in (b"", b"{", b'{"attempt": 1}'):
        assert world.call(0, "PUT", "/v1/directive", garbage)[0] == 422
    assert world.call(0, "GET", "/v1/report?after=x")[0] == 422
    assert world.report(0).restore.state.value == "Ready", "nothing to restore in a first attempt"


def test_report_leaves_out_what_is_held_for_who_does_not_want_it(make_world: MakeWorld) -> None:
    world = make_world().launch()
    with world.ranks() as (rank,):
        assert rank.save(10)
        world.reach("snapshot", Version(10, 1))
    said = [world.call(0, "GET", f"/v1/report{query}")[1] for query in ("", "?holdings=no")]
    whole, bare = (decode(text, Report) for text in said)
    assert whole.holdings
    assert whole.tells_holdings
    assert not bare.holdings
    assert not bare.tells_holdings
    assert bare.serial == whole.serial, "it is no news"


def test_what_is_held_is_told_once_to_who_names_what_he_knows(make_world: MakeWorld) -> None:
    world = make_world().launch()

    def asked(instance: str, held: int) -> Report:
        return decode(world.call(0, "GET", f"/v1/report?held={instance}.{held}")[1], Report)

    with world.ranks() as (rank,):
        assert rank.save(10)
        until(lambda: world.holds(0, 0, Version(10, 1), Tier.LOCAL), "sealed")
        first = asked("", 0)
        assert first.holdings
        again = asked(first.instance, first.held)
        assert (again.holdings, again.tells_holdings, again.held) == ((), False, first.held)
        assert asked("another", first.held).holdings, "numbers are of one process"
        assert rank.save(20)
        until(lambda: world.holds(0, 0, Version(20, 1), Tier.LOCAL), "sealed")
    later = asked(first.instance, first.held)
    assert later.tells_holdings
    assert later.held > first.held
    assert Version(20, 1) in {holding.version for holding in later.holdings}


def test_long_poll_answers_when_something_happens(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    serial = world.report(0).serial
    answers: list[tuple[int, bytes]] = []
    waiter = threading.Thread(
        target=lambda: answers.append(world.call(0, "GET", f"/v1/report?after={serial}&wait=8"))
    )
    began = time.monotonic()
    waiter.start()
    world.new_attempt()
    world.direct(Phase.HOLD)
    waiter.join()
    assert decode(answers[0][1], Report).serial > serial
    assert world.call(0, "GET", "/v1/report?after=999999&wait=0.1")[0] == 200
    assert time.monotonic() - began < 60


def test_health_and_metrics_are_plain_http(make_world: MakeWorld) -> None:
    world = make_world().launch()
    with world.ranks() as (rank,):
        rank.save(10)
        until(lambda: 'tiercheck_watermark_step{tier="local"} 10.0' in world.metrics(), "it is shown")
    told = world.metrics().splitlines()
    assert {
        "tiercheck_captured_total 1.0", "tiercheck_attempt 1.0", "tiercheck_snapshot_every 1.0",
        'tiercheck_held{kind="snapshot",tier="local"} 1.0', "tiercheck_deltas_skipped_total 0.0",
        "tiercheck_replay_mismatches_total 0.0",
    } <= set(told)  # fmt: skip


def test_wrong_environment_is_named_and_ends_the_process(make_world: MakeWorld) -> None:
    world = make_world()
    env = {**world.env(0), names.ENV_WORKER: "first"}
    done = subprocess.run(
        [sys.executable, "-m", "tiercheck_sidecar"], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "TIERCHECK_WORKER is not a whole number" in done.stderr


def test_sidecar_of_a_running_job_ends_at_once_when_its_pod_is_deleted(make_world: MakeWorld) -> None:
    world = make_world().launch()
    assert world.terminate(0) == 0


def test_library_is_copied_whole_and_again(tmp_path: Path) -> None:
    for _ in range(2):
        target = install(tmp_path / "lib")
    assert (target / "protocol" / "artifacts" / "slot.py").is_file()
    assert [each.name for each in (tmp_path / "lib").iterdir()] == ["tiercheck"]
    code = "import tiercheck.protocol.artifacts.slot as s; print(s.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "lib")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(tmp_path))


def test_sidecar_that_ends_in_native_code_says_where(make_world: MakeWorld) -> None:
    world = make_world()
    world.start()
    world.ask_to_end(0, signal.SIGSEGV)
    assert world.end_of(0) == -signal.SIGSEGV
    assert "Segmentation fault" in world.logs(0)
    assert "tiercheck_sidecar" in world.logs(0), "the stacks of its threads"


def test_sidecar_starts_without_numpy_which_only_parity_needs() -> None:
    """It would be a third of the start."""
    script = "import sys, tiercheck_sidecar.app; print('numpy' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout == "False\n"


ALL_AT_ONCE = """
import sys, threading
from tiercheck.protocol.report import Report
from tiercheck_sidecar.decoding import Malformed, decode

sys.setswitchinterval(1e-6)
text = (
    b'{"restore": {"state": "Ready"}, "trainer": {"step": 1}, "holdings": [{"rank": 1}], '
    b'"problems": [{"reason": "x"}]}'
)
found, begin = [], threading.Barrier(8)

def hear():
    begin.wait()
    for _ in range(20):
        try:
            decode(text, Report)
        except Malformed as error:
            found.append(str(error))

threads = [threading.Thread(target=hear) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 160 and len(set(found)) == 1, found
"""


@pytest.mark.parametrize("life", range(8))
def test_first_messages_of_many_threads_are_all_judged_alike(life: int) -> None:
    """Decoders are made on first use, so each life is a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ALL_AT_ONCE], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr or f"ended by signal {-done.returncode}"
