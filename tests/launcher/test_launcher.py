"""Promise: the user's command runs exactly when the sidecar says so, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.launcher_harness import SLEEP, Launch, Launched, alive, order, released, shell
from tests.scripted_sidecar import until
from tiercheck.launcher import app
from tiercheck.launcher.environment import command_environment
from tiercheck.protocol.directive import Phase
from tiercheck_sidecar.install_library import install

STUBBORN = 'trap "" TERM; echo $$; while :; do sleep 600; done'


def test_command_waits_for_release(launch: Launch) -> None:
    launched = launch(shell(SLEEP))
    assert launched.sidecar.hears("idle", 0)
    assert launched.sidecar.hellos[0].role == "launcher"
    launched.sidecar.say(order(1, Phase.HOLD))
    assert launched.sidecar.hears("idle", 1)
    assert not any(event.event == "started" for event in launched.sidecar.events)
    launched.sidecar.say(order(1, Phase.RELEASE))
    assert launched.sidecar.hears("started", 1)
    assert launched.line().endswith("attempt 1")


def test_released_twice_is_started_once(launch: Launch) -> None:
    launched = launch(shell("sleep 0.2"))
    for _ in range(2):
        launched.sidecar.say(order(1, Phase.RELEASE))
    launched.sidecar.hears("exited", 1)
    assert [event.event for event in launched.sidecar.events].count("started") == 1


def test_newer_attempt_stops_the_command_and_starts_it_again_in_place(launch: Launch) -> None:
    launched = released(launch, SLEEP)
    first = int(launched.line().split()[0])
    launched.sidecar.say(order(2, Phase.HOLD))
    launched.sidecar.hears("idle", 2)
    assert not alive(first)
    launched.sidecar.say(order(2, Phase.RELEASE))
    launched.sidecar.hears("started", 2)
    pid, said = launched.line().split(" ", 1)
    assert said == "attempt 2"
    assert int(pid) != first
    assert launched.process.poll() is None
    assert not any(
        event.event == "exited" for event in launched.sidecar.events
    )  # it was told to stop, it did not fail


SHOW = """
import os, sys
import tiercheck.launcher
print(os.environ["PYTHONPATH"], tiercheck.__file__, *map(os.environ.get, sys.argv[1:]), sep="|")
"""


@pytest.mark.parametrize("former", [None, "", "{theirs}", "{theirs}:/opt/other"])
@pytest.mark.parametrize("safe", ["", "1"])
def test_command_sees_the_variables_of_its_container_with_the_library_in_front(
    tmp_path: Path, launch: Launch, former: str | None, safe: str
) -> None:
    """The image may set any of them; the modules of the launcher's own folder hide none of the script's."""
    install(tmp_path / "lib")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "command.py").write_text("WORD = 'theirs'")
    script = SHOW if not former else f"import command; assert command.WORD == 'theirs'\n{SHOW}"
    (tmp_path / "show.py").write_text(script)
    kept = {"LD_LIBRARY_PATH": "/opt/lib", "PYTHONSTARTUP": "/opt/start.py", "PYTHONNOUSERSITE": "1"}
    paths = {} if former is None else {"PYTHONPATH": former.format(theirs=theirs)}
    launched = launch(
        [sys.executable, str(tmp_path / "show.py"), *kept],
        program=(str(tmp_path / "lib/tiercheck/launcher/__main__.py"),),
        cleared="PYTHONPATH",
        **kept, **paths, PYTHONSAFEPATH=safe, TIERCHECK_WARM="0",
    )  # fmt: skip
    launched.sidecar.say(order(1, Phase.RELEASE))
    path, library, *others = launched.line().split("|")
    assert path == ":".join(filter(None, [str(tmp_path / "lib"), paths.get("PYTHONPATH")]))
    assert library.startswith(str(tmp_path / "lib"))
    assert others == list(kept.values())


def test_order_of_an_older_attempt_is_ignored(launch: Launch) -> None:
    launched = released(launch, SLEEP, 2)
    pid = int(launched.line().split()[0])
    launched.sidecar.say(order(1, Phase.FINISH))
    launched.sidecar.say(order(3, Phase.HOLD))
    launched.sidecar.hears("idle", 3)  # so the order before it has been read, and the launcher still lives
    assert not alive(pid)


def test_command_that_ignores_the_signal_is_killed(launch: Launch) -> None:
    launched = released(launch, STUBBORN, TIERCHECK_STOP_SECONDS="0.2")
    pid = int(launched.line())
    launched.sidecar.say(order(1, Phase.FINISH))
    assert launched.exit_code() == 0
    assert not alive(pid)


def test_restart_costs_no_second_to_a_command_that_would_save_at_sigterm(
    launch: Launch, tmp_path: Path
) -> None:
    """Where the next attempt begins is decided by then, so nothing that it could still save would be used."""
    saved = tmp_path / "saved"
    script = f'trap "touch {saved}; sleep 600" TERM; echo $$; while :; do sleep 0.05; done'
    launched = released(launch, script, TIERCHECK_STOP_SECONDS="600")
    pid = int(launched.line())
    launched.sidecar.say(order(2, Phase.HOLD))
    launched.sidecar.hears("idle", 2)
    assert not alive(pid)
    assert not saved.exists()


def test_command_that_saves_at_the_end_of_the_pod_or_the_job_has_its_time(
    launch: Launch, tmp_path: Path
) -> None:
    for way in ("signal", "finish"):
        saved = tmp_path / way
        script = f'trap "touch {saved}; exit 0" TERM; echo $$; while :; do sleep 0.05; done'
        launched = launch(shell(script), TIERCHECK_STOP_SECONDS="600")
        launched.sidecar.say(order(1, Phase.RELEASE))
        launched.line()
        if way == "signal":
            launched.signal(signal.SIGTERM)
        else:
            launched.sidecar.say(order(1, Phase.FINISH))
        assert launched.exit_code() == 0
        assert saved.exists()
        launched.sidecar.stop()
        (tmp_path / "launcher.attempt").unlink()


def test_everything_the_command_started_ends_with_it_even_in_another_session(launch: Launch) -> None:
    launched = released(launch, "setsid sleep 600 & echo $!; exit 3")
    left = int(launched.line())
    assert launched.sidecar.hears("exited", 1).exit_code == 3
    assert not alive(left)


def test_killed_launcher_takes_the_command_with_it(launch: Launch) -> None:
    launched = released(launch, SLEEP)
    pid = int(launched.line().split()[0])
    launched.signal(signal.SIGKILL)
    until(lambda: not alive(pid), "the command dies with its launcher")


def test_orphans_are_reaped_so_that_no_zombie_stays(launch: Launch) -> None:
    launched = released(launch, "(sh -c 'exit 0' & echo $!); exec sleep 600")
    orphan = int(launched.line())
    until(lambda: not Path(f"/proc/{orphan}").exists(), "the orphan is reaped")


@pytest.mark.parametrize(
    ("script", "code", "reason", "message"),
    [
        ("exit 0", 0, "", ""),
        ("exit 7", 7, "Crashed", "a warning"),
        ("kill -9 $$", 137, "Signalled", "SIGKILL"),
        ("kill -ABRT $$", 134, "Signalled", "SIGABRT: a warning"),
    ],
)
def test_end_of_the_command_is_told_and_the_launcher_waits_for_orders(
    launch: Launch, script: str, code: int, reason: str, message: str
) -> None:
    launched = released(launch, f"echo a warning >&2; {script}")
    ended = launched.sidecar.hears("exited", 1)
    assert (ended.exit_code, ended.reason, ended.message) == (code, reason, message)
    assert launched.process.poll() is None
    launched.sidecar.say(order(2, Phase.RELEASE))  # straight to release, as after a crash in place
    assert launched.sidecar.hears("exited", 2).exit_code == code
    launched.sidecar.say(order(2, Phase.FINISH))
    assert launched.exit_code() == 0


def test_finish_stops_a_running_command_and_the_container_succeeds(launch: Launch) -> None:
    launched = released(launch, SLEEP)
    pid = int(launched.line().split()[0])
    launched.sidecar.say(order(1, Phase.FINISH))
    assert launched.exit_code() == 0
    assert not alive(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_reaches_the_command_and_its_exit_code_is_the_containers(
    launch: Launch, number: signal.Signals
) -> None:
    launched = released(launch, 'trap "exit 23" TERM INT; echo ready; while :; do sleep 0.05; done')
    assert launched.line() == "ready"
    launched.signal(number)
    assert launched.exit_code() == 23


def test_signal_before_release_ends_the_launcher(launch: Launch) -> None:
    launched = launch(shell(SLEEP))
    launched.sidecar.hears("idle", 0)
    launched.signal(signal.SIGTERM)
    assert launched.exit_code() == 128 + signal.SIGTERM


def test_signal_that_comes_while_the_loop_takes_over_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then, the handler of the first line would have ended the process."""
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
    }
    replace = signal.signal

    def replace_and_receive(number: signal.Signals, handler: Callable[..., object]) -> None:
        replace(number, handler)
        if callable(handler):
            signal.raise_signal(number)

    monkeypatch.setattr(signal, "signal", replace_and_receive)
    try:
        with app._signals() as wakeups:
            assert set(wakeups.recv(4096)) == set(handlers)
    finally:
        for number, handler in handlers.items():
            replace(number, handler)


def test_launcher_waits_for_a_sidecar_that_comes_late(launch: Launch, tmp_path: Path) -> None:
    launched = launch(shell(SLEEP), listen=False)
    launched.sidecar.start()
    launched.sidecar.say(order(1, Phase.RELEASE))
    launched.sidecar.hears("started", 1)


def test_sidecar_restarts_and_the_command_runs_on_and_is_told_again(launch: Launch) -> None:
    launched = released(launch, SLEEP, 4)
    pid = int(launched.line().split()[0])
    launched.sidecar.hears("started", 4)
    launched.sidecar.restart()
    launched.sidecar.hears("started", 4)
    assert alive(pid)
    launched.sidecar.say(order(4, Phase.FINISH))
    assert launched.exit_code() == 0


DIES_BETWEEN_TWO_WORDS = """
import socket, sys
from tiercheck.launcher import app
from tiercheck.launcher.sidecar_connection import SidecarConnection

send, broken = SidecarConnection.send, []

def send_to_one_that_has_just_died(line, event):
    if not broken:
        broken.append(event)
        line.channel.shutdown(socket.SHUT_RDWR)
    send(line, event)

SidecarConnection.send = send_to_one_that_has_just_died
sys.exit(app.main(sys.argv[1:]))
"""


def test_sidecar_that_dies_while_it_is_greeted_costs_nothing(launch: Launch) -> None:
    launched = launch(shell(SLEEP), program=("-c", DIES_BETWEEN_TWO_WORDS))
    until(lambda: bool(launched.sidecar.hellos), "the launcher to have greeted")
    launched.sidecar.restart()
    launched.sidecar.hears("idle", 0)
    launched.sidecar.say(order(1, Phase.RELEASE))
    launched.sidecar.hears("started", 1)


FAILS_ITSELF = """
import sys
from tiercheck.launcher import app

follow = app.Launcher._follow

def fail(launcher, order):
    follow(launcher, order)
    if order.attempt == 1 and launcher._busy:
        raise KeyError("a fault of ours")

app.Launcher._follow = fail
sys.exit(app.main(sys.argv[1:]))
"""


def test_fault_of_its_own_ends_no_running_command(launch: Launch) -> None:
    launched = released(launch, SLEEP, program=("-c", FAILS_ITSELF), merge_errors=True)
    pid = int(launched.line().split()[0])
    launched.sidecar.hears("started", 1)
    launched.sidecar.say(order(1, Phase.RELEASE))
    until(launched.sidecar.has_heard_all, "the launcher to hang up")
    launched.sidecar.restart()
    assert launched.sidecar.hears("started", 1).fault.startswith("KeyError in "), "the job hears of it"
    launched.sidecar.restart()
    assert launched.sidecar.hears("started", 1).fault == "", "once"
    assert alive(pid)
    launched.sidecar.say(order(1, Phase.FINISH))
    until(lambda: not alive(pid), "the command to be ended")
    assert launched.exit_code() == 0
    assert launched.process.stdout is not None
    printed = launched.process.stdout.read()
    assert printed.count("KeyError: 'a fault of ours'") == 1, "it was met twice, and is told once"


def test_command_that_ends_while_the_sidecar_is_away_is_told_afterwards(
    launch: Launch, tmp_path: Path
) -> None:
    launched = released(launch, f'while [ ! -e "{tmp_path}/go" ]; do sleep 0.02; done; exit 5')
    launched.sidecar.hears("started", 1)
    launched.sidecar.stop()
    (tmp_path / "go").touch()
    launched.sidecar.start()
    assert launched.sidecar.hears("exited", 1).exit_code == 5


def test_restarted_container_does_not_run_the_same_attempt_twice(launch: Launch) -> None:
    launched = released(launch, SLEEP)
    launched.sidecar.hears("started", 1)
    launched.signal(signal.SIGKILL)
    launched.exit_code()
    launched.sidecar.stop()
    again = launch(shell(SLEEP))
    again.sidecar.say(order(1, Phase.RELEASE))
    assert again.sidecar.hears("exited", 1).reason == "ContainerRestarted"
    again.sidecar.say(order(2, Phase.RELEASE))
    again.sidecar.hears("started", 2)


def test_attempt_that_cannot_be_noted_on_a_full_disk_is_not_run_and_the_next_one_may_be(
    launch: Launch, tmp_path: Path
) -> None:
    """Another container might run it twice. The job has not failed for good: the disk may be freed."""
    launched = launch(shell(SLEEP))
    marker = next(tmp_path.rglob("*.sock")).parent / "launcher.attempt"
    marker.mkdir()  # as an error that no account is exempt from
    launched.sidecar.say(order(1, Phase.RELEASE))
    told = launched.sidecar.hears("exited", 1)
    assert (told.reason, told.exit_code) == ("Crashed", 1)
    assert "launcher.attempt cannot be written: Is a directory. Look at the disk" in told.message
    marker.rmdir()
    launched.sidecar.say(order(2, Phase.RELEASE))
    launched.sidecar.hears("started", 2)


def test_image_without_torch_is_told_in_a_sentence(launch: Launch, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S -I "$@"\n')  # type: ignore[attr-defined]
    python.chmod(0o755)
    launched = launch([str(python), "-c", "print('must not run')"])
    launched.sidecar.say(order(1, Phase.RELEASE))
    told = launched.sidecar.hears("exited", 1)
    assert told.reason == "TorchMissing"
    assert "use an image with torch" in told.message
    assert launched.process.poll() is None


@pytest.mark.parametrize(
    ("program", "advice"),
    [
        ("/no/such/program", "Check the command of the trainer container."),
        ("python train.py --lr 1", "Write each word as an item of its own"),
        ("script", "The interpreter that its first line names does not exist"),
    ],
)
def test_command_that_cannot_be_executed_is_told_in_a_sentence(
    launch: Launch, tmp_path: Path, program: str, advice: str
) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    program = str(script) if program == "script" else program
    launched = launch([program])
    launched.sidecar.say(order(1, Phase.RELEASE))
    told = launched.sidecar.hears("exited", 1)
    assert (told.reason, told.exit_code) == ("CannotStart", 127)
    assert program in told.message
    assert advice in told.message
    assert launched.process.poll() is None


def test_command_finds_its_place_in_the_environment(launch: Launch) -> None:
    names = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PET_NNODES",
        "PET_NODE_RANK",
    ]
    dump = f"import json, os; print(json.dumps({{name: os.environ.get(name) for name in {names}}}))"
    launched = launch([sys.executable, "-c", dump])
    launched.sidecar.say(order(1, Phase.RELEASE))
    assert json.loads(launched.line()) == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "127.0.0.9",
        "MASTER_PORT": "29400",
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
    }


def test_what_another_controller_says_about_the_rendezvous_is_overruled() -> None:
    """In an attached pod: a PyTorchJob's or TrainJob's variables are the first attempt's at best."""
    theirs = {
        "PATH": "/bin", "MASTER_ADDR": "bert-master-0", "MASTER_PORT": "23456", "RANK": "2",
        "WORLD_SIZE": "3",
        "PET_NNODES": "1:3", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "bert-worker-0:23456",
        "PET_MAX_RESTARTS": "100",
        "PET_STANDALONE": "1",
    }  # fmt: skip
    made = command_environment(theirs, order(3, Phase.RELEASE))
    assert (made["PATH"], made["RANK"], made["WORLD_SIZE"]) == ("/bin", "1", "2")
    assert (made["MASTER_ADDR"], made["MASTER_PORT"]) == ("127.0.0.9", "29400")
    assert (made["PET_NNODES"], made["PET_RDZV_BACKEND"], made["PET_MAX_RESTARTS"]) == ("2", "static", "0")
    assert not {"PET_RDZV_ENDPOINT", "PET_STANDALONE"} & set(made), (
        "torchrun would go there in place of the attempt's own address"
    )


def test_launcher_of_a_job_that_was_given_up_ends_with_the_code_that_it_is_told(launch: Launch) -> None:
    launched = launch(["true"])
    launched.sidecar.say(order(1, Phase.FINISH, exit_code=7))
    assert launched.exit_code() == 7


def test_both_spellings_of_the_command_line_are_understood(tmp_path: Path) -> None:
    assert os.system(f"{sys.executable} -m tiercheck.launcher 2>/dev/null") >> 8 == 2
    assert os.system(f"{sys.executable} -m tiercheck launch 2>/dev/null") >> 8 == 2
    assert os.system(f"{sys.executable} -m tiercheck 2>/dev/null") >> 8 == 1


def cgroup(folder: Path, kills: int, **files: str) -> Path:
    """What a container sees of its cgroup (v2)."""
    folder.mkdir(exist_ok=True)
    (folder / "memory.events").write_text(
        f"low 0\nhigh 0\nmax 7\noom 3\noom_kill {kills}\noom_group_kill 0\n"
    )
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return folder


@pytest.mark.parametrize("script", ["kill -9 $$", "exit 1"])
def test_kill_for_want_of_memory_is_told_from_others_with_numbers(
    launch: Launch, tmp_path: Path, script: str
) -> None:
    seen = cgroup(tmp_path / "cgroup", kills=2, memory_max="68719476736\n", memory_peak="68719476000\n")
    launched = released(
        launch, f"echo oom_kill 3 > {seen}/memory.events; {script}", TIERCHECK_CGROUP_DIR=str(seen)
    )
    event = launched.sidecar.hears("exited", 1)
    assert event.reason == "OOMKilled"
    assert "ended 1 of its processes" in event.message
    assert "limit is 64.0 GiB" in event.message


def test_kill_of_an_earlier_command_is_not_that_of_the_next(launch: Launch, tmp_path: Path) -> None:
    seen = cgroup(tmp_path / "cgroup", kills=0, memory_max="max\n")
    launched = released(
        launch,
        f"[ $TIERCHECK_ATTEMPT = 1 ] && echo oom_kill 1 > {seen}/memory.events; kill -9 $$",
        TIERCHECK_CGROUP_DIR=str(seen),
    )
    assert launched.sidecar.hears("exited", 1).reason == "OOMKilled"
    launched.sidecar.say(order(2, Phase.RELEASE))
    assert launched.sidecar.hears("exited", 2).reason == "Signalled"


HANGING = """
import sys, time
from tiercheck.trainer.process import answer_with_stacks
assert answer_with_stacks()
def stuck_in_a_collective():
    sys.stdout.write("ready\\n"); sys.stdout.flush()
    time.sleep(600)
stuck_in_a_collective()
"""


def test_hung_command_is_asked_for_its_stacks_once_and_lives_on(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "hang.py").write_text(HANGING.replace("\\\\n", "\\n"))
    log = tmp_path / "stderr"
    launched = released(launch, f"{sys.executable} {tmp_path}/hang.py 2> {log}")
    assert launched.line() == "ready"
    for _ in range(2):
        launched.sidecar.say(order(1, Phase.RELEASE, dump_stacks=True))
    until(lambda: "stuck_in_a_collective" in log.read_text(), "the stack is in the log")
    launched.sidecar.say(order(2, Phase.HOLD))
    launched.sidecar.hears("idle", 2)
    assert log.read_text().count("in stuck_in_a_collective") == 1
    assert not [event for event in launched.sidecar.events if event.event == "exited"]


def test_process_that_does_not_know_the_question_is_not_asked(launch: Launch) -> None:
    launched = released(launch, "echo here; exec sleep 600")
    launched.line()
    launched.sidecar.say(order(1, Phase.RELEASE, dump_stacks=True))
    launched.sidecar.say(order(2, Phase.HOLD))
    launched.sidecar.hears("idle", 2)
    assert not [event for event in launched.sidecar.events if event.event == "exited"], (
        "the signal would have ended it"
    )


# As a process stuck in a driver: while the file is there, it does not end by SIGKILL.
_UNKILLABLE = """
import os, signal, sys
real = os.kill
unkillable = os.environ["UNKILLABLE"]
os.kill = lambda pid, number: number == signal.SIGKILL and os.path.exists(unkillable) or real(pid, number)
from tiercheck.launcher.app import main
sys.exit(main(sys.argv[1:]))
"""


def launch_unkillable(launch: Launch, tmp_path: Path, script: str) -> tuple[Launched, Path]:
    held = tmp_path / "unkillable"
    held.touch()
    return launch(
        shell(script), program=("-c", _UNKILLABLE), UNKILLABLE=str(held), TIERCHECK_UNKILLABLE_SECONDS="0.2"
    ), held


def test_process_that_survives_sigkill_is_told_and_the_next_attempt_waits_for_its_end(
    launch: Launch, tmp_path: Path
) -> None:
    launched, held = launch_unkillable(launch, tmp_path, SLEEP)
    launched.sidecar.say(order(1, Phase.RELEASE))
    pid = int(launched.line().split()[0])
    launched.sidecar.say(order(2, Phase.HOLD))
    stuck = launched.sidecar.hears("stuck", 1)
    assert f"{pid} (sleep)" in stuck.message
    launched.sidecar.say(order(2, Phase.RELEASE))  # of an operator that knows nothing of it
    launched.sidecar.say(order(3, Phase.HOLD))
    until(lambda: launched.sidecar.events.count(stuck) == 1 and alive(pid), "told once")
    held.unlink()
    launched.sidecar.hears("idle", 3)
    assert not alive(pid)
    assert not any(event.event == "idle" and event.attempt == 2 for event in launched.sidecar.events)
    launched.sidecar.say(order(3, Phase.RELEASE))
    launched.sidecar.hears("started", 3)
    assert launched.line().endswith("attempt 3")


def test_what_a_failed_command_leaves_behind_and_cannot_be_killed_is_told_as_well(
    launch: Launch, tmp_path: Path
) -> None:
    """Otherwise the command would look as if it still ran."""
    launched, held = launch_unkillable(launch, tmp_path, "setsid sleep 600 & echo $!; exit 3")
    launched.sidecar.say(order(1, Phase.RELEASE))
    left = launched.line()
    assert left in launched.sidecar.hears("stuck", 1).message
    held.unlink()
    assert launched.sidecar.hears("exited", 1).exit_code == 3


def test_command_that_succeeded_has_succeeded_whatever_it_left_behind(launch: Launch, tmp_path: Path) -> None:
    launched, held = launch_unkillable(launch, tmp_path, "setsid sleep 600 & exit 0")
    launched.sidecar.say(order(1, Phase.RELEASE))
    assert launched.sidecar.hears("exited", 1).exit_code == 0
    launched.sidecar.say(
        order(2, Phase.HOLD)
    )  # another worker failed, and this one has to come back after all
    launched.sidecar.hears("stuck", 1)
    held.unlink()
    launched.sidecar.hears("idle", 2)
