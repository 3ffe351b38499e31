"""Promise: a warm start is the command started anew, only sooner; the unsure starts cold."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.launcher_harness import Launched, alive, order
from tests.scripted_sidecar import until
from tiercheck.launcher.recipe import Recipe
from tiercheck.launcher.warm import WarmInterpreter
from tiercheck.protocol.directive import Phase
from tiercheck.warm import in_place_exec
from tiercheck_local.markers import free_ports

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]

Launch = Callable[..., Launched]

EVERYTHING = """
import sys
visible = sorted(name for name in sys.modules
    if name.partition(".")[0] not in {*sys.stdlib_module_names, "__mp_main__"})
import atexit, builtins, json, multiprocessing, os, signal, threading, warnings
main = sys.modules["__main__"]
def plain(names):
    return {name: str(value) for name, value in sorted(names.items())
        if name.startswith("__") and name != "__builtins__"}
said = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "flags": str(sys.flags), "path": sys.path,
    "executable": sys.executable,
    "warnoptions": sys.warnoptions, "xoptions": str(sys._xoptions), "main": plain(vars(main)),
    "visible": visible,
    "globals are main's": globals() is vars(main), "builtins": __builtins__ is builtins,
    "environ": {k: v for k, v in os.environ.items()}, "cwd": os.getcwd(), "umask": os.umask(0o22),
    "leader": os.getsid(0) == os.getpid() == os.getpgid(0), "group": os.getpgid(0) == os.getpid(),
    "handlers": {s.name: str(signal.getsignal(s)) for s in sorted(signal.valid_signals()) if hasattr(s,
    "name")},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "main thread": threading.current_thread().name,
    "threads": threading.active_count(), "debug": __debug__, "start": multiprocessing.get_all_start_methods(),
    "method": multiprocessing.get_start_method(allow_none=True), "filters": str(warnings.filters),
    "stdout": [sys.stdout.encoding, sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.isatty()],
    "stdin": sys.stdin is not None and sys.stdin.fileno(), "comm": open("/proc/self/comm").read(),
    "policy": os.sched_getscheduler(0), "nice": os.nice(0),
    "open": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
    "meta_path": [getattr(each, "__name__",
    type(each).__name__) for each in sys.meta_path if type(each).__name__ != "PreloadedModuleHider"],
}
import importlib.util
said["found"] = importlib.util.find_spec("torch").origin
import torch
said |= {
    "torch": [torch.__name__, torch.__spec__.name, type(torch.__spec__.loader).__name__,
    torch.__spec__.origin],
    "random": torch.manual_seed(1) and torch.rand(3).tolist(), "omp": torch.get_num_threads(),
    "interop": torch.get_num_interop_threads(), "sub": sys.modules["torch.nn"] is torch.nn,
}
sys.stdout.write(json.dumps(said) + "\\n")
"""


WITHOUT_TORCH = """
tiercheck_warm = True
from tiercheck.warm import in_place_exec
in_place_exec._PREIMPORTED, in_place_exec._LATER = (), "json"
"""
"""A `sitecustomize` for tests of which processes there are: what these import says nothing there."""


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    running: list[Launched] = []
    (tmp_path / "light").mkdir()
    (tmp_path / "light" / "sitecustomize.py").write_text(WITHOUT_TORCH)

    def start(command: Sequence[str], *, warm: bool = True, light: bool = False, **options: Any) -> Launched:
        folder = tmp_path / f"run-{len(running)}"
        folder.mkdir()
        path = f"{ROOT}:{tmp_path / 'light'}" if light else str(ROOT)
        options = {"PYTHONPATH": path, "TIERCHECK_WARM": str(int(warm)), **options}
        running.append(Launched(folder, command, **options))
        return running[-1]

    yield start
    for launched in running:
        launched.end()


def waiting(launched: Launched) -> int:
    """The interpreter that is ready beside this launcher: it sleeps until it is told what to become."""
    tasks = Path(f"/proc/{launched.process.pid}/task")
    found: list[int] = []

    def ready() -> bool:
        children = " ".join(each.read_text() for each in tasks.glob("*/children"))
        found[:] = [int(child) for child in children.split() if _waits(Path("/proc", child))]
        return bool(found)

    until(ready, "an interpreter is ready")
    return found[0]


def _waits(process: Path) -> bool:
    try:
        return (
            (process / "stat").read_text().rpartition(")")[2].split()[0] == "S"
            and b"warm/entry.py" in (process / "cmdline").read_bytes()
            and "unix_stream" in (process / "wchan").read_text()
        )
    except OSError:
        return False


def both(launch: Launch, command: Sequence[str], **options: Any) -> tuple[list[str], list[str], list[int]]:
    """What the command says when started warm and when started cold, and its exit codes."""
    said, codes = [], []
    for warm in (True, False):
        launched = launch(command, warm=warm, **options)
        if warm:
            ready = waiting(launched)
        launched.sidecar.say(order(1, Phase.RELEASE))
        ended = launched.sidecar.hears("exited", 1)
        assert not warm or not alive(ready)
        launched.sidecar.say(order(1, Phase.FINISH))
        assert launched.exit_code() == 0
        said.append(list(launched.process.stdout or []))
        codes.append(int(ended.exit_code or 0))
    return said[0], said[1], codes


@pytest.mark.parametrize(
    "how",
    [
        "script",
        *(pytest.param(how, marks=pytest.mark.extended) for how in ("relative", "linked")),
        "module",
        "flags",
    ],
)
def test_script_sees_the_same_world_warm_and_cold(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (tmp_path / "code").mkdir()
    script = tmp_path / "code" / "train.py"
    script.write_text(EVERYTHING)
    (tmp_path / "link.py").symlink_to(script)
    monkeypatch.chdir(tmp_path)
    command = {
        "script": [str(script), "--steps", "3", "a b", ""],
        "relative": ["code/train.py"],
        "linked": ["./link.py", "-u"],
        "module": ["-m", "code.train", "x"],
        "flags": ["-u", "-O", "-W", "error::UserWarning", "-X", "utf8", "code/train.py"],
    }[how]
    (tmp_path / "code" / "__init__.py").touch()
    if how == "module":
        (tmp_path / "code").rename(tmp_path / "mine")
        command[1] = "mine.train"
    warm, cold, codes = both(launch, [sys.executable, *command])
    assert codes == [0, 0]
    left, right = json.loads(warm[-1]), json.loads(cold[-1])
    for world in (left, right):
        world["environ"].pop("TIERCHECK_WARM")
        world["environ"].pop("TIERCHECK_RUN_DIR")
        world["main"].pop("__loader__")  # an address is in it
        world["main"].pop("__spec__")
    assert left == right


@pytest.mark.extended
@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('words')", 1),
        ("raise ValueError('wrong')", 1),
        ("raise KeyboardInterrupt", 130),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("import os; os.abort()", 134),
        ("import atexit; atexit.register(print, 'at exit'); print('now')", 0),
        ("import threading, time; threading.Timer(0.1, print, ['thread']).start(); print('now')", 0),
        ("this is no python", 1),
        ("import warnings; warnings.warn('look'); import nosuchmodule", 1),
        (
            "def f():\n return 1/0\nimport torch\nprint(__file__)\nclass A: pass\nimport pickle\n"
            "print(type(pickle.loads(pickle.dumps(A()))) is A)\nf()",
            1,
        ),
    ],
)
def test_end_of_a_script_is_the_same_warm_and_cold(
    launch: Launch, tmp_path: Path, script: str, code: int
) -> None:
    path = tmp_path / "train.py"
    path.write_text(script)
    wrapped = [sys.executable, str(path)]
    warm, cold, codes = both(launch, wrapped, merge_errors=True)
    assert codes == [code, code]
    assert [line for line in warm if not line.startswith("tiercheck: started cold")] == cold


def test_signals_reach_a_warm_command_and_end_it(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import time; print('up', flush=True); time.sleep(600)")
    launched = launch([sys.executable, str(path)], light=True)
    pid = waiting(launched)
    launched.sidecar.say(order(1, Phase.RELEASE))
    assert launched.line() == "up"
    launched.signal(signal.SIGTERM)
    assert launched.exit_code() == 128 + signal.SIGTERM
    assert not alive(pid)


def test_warm_command_dies_with_a_killed_launcher_as_does_the_one_that_waits(
    launch: Launch, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text("import time; print('up', flush=True); time.sleep(600)")
    launched = launch([sys.executable, str(path)], light=True, TIERCHECK_WARM_AFTER_SECONDS="0")
    first = waiting(launched)
    launched.sidecar.say(order(1, Phase.RELEASE))
    assert launched.line() == "up"
    second = waiting(launched)
    assert first != second
    launched.signal(signal.SIGKILL)
    until(lambda: not alive(first) and not alive(second), "both die with their launcher")


def test_next_attempt_runs_in_the_interpreter_that_was_made_ready_beside_the_first(
    launch: Launch, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import os, time; print(os.getpid(), os.environ['TIERCHECK_ATTEMPT'], flush=True); time.sleep(600)"
    )
    launched = launch([sys.executable, str(path)], light=True, TIERCHECK_WARM_AFTER_SECONDS="0")
    first = waiting(launched)
    launched.sidecar.say(order(1, Phase.RELEASE))
    assert launched.line() == f"{first} 1"
    second = waiting(launched)
    launched.sidecar.say(order(2, Phase.HOLD))
    launched.sidecar.hears("idle", 2)
    assert not alive(first)
    assert alive(second)  # what sweeps up after the command spares it
    launched.sidecar.say(order(2, Phase.RELEASE))
    assert launched.line() == f"{second} 2"


def test_it_is_no_batch_work_any_more_when_it_is_told_to_become_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a moment later: threads that the command begins stay as its first one is then."""
    path = tmp_path / "train.py"
    path.write_text("")
    told: list[set[int]] = []

    class Watched(socket.socket):
        def sendall(self, *order: Any) -> None:
            tasks = os.listdir(f"/proc/{interpreter.pid}/task")
            told.append({os.sched_getscheduler(int(task)) for task in tasks})
            super().sendall(*order)

    ours, theirs = socket.socketpair()
    watched = Watched(fileno=ours.detach())
    monkeypatch.setattr("tiercheck.launcher.warm.socket.socketpair", lambda: (watched, theirs))
    command = Recipe(sys.executable, (), str(path), ())
    interpreter = WarmInterpreter(command.command, command, {"PYTHONPATH": str(ROOT)})
    interpreter.prepare()
    pid = interpreter.pid
    assert pid is not None
    try:
        assert os.sched_getscheduler(pid) == os.SCHED_BATCH
        assert interpreter.release({}) == pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        watched.close()
    assert told == [{os.SCHED_OTHER}]


def test_killed_warm_interpreter_is_replaced_and_costs_nothing(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('ran')")
    launched = launch([sys.executable, str(path)], light=True)
    first = waiting(launched)
    os.kill(first, signal.SIGKILL)
    until(lambda: not alive(first), "it is dead")
    launched.sidecar.say(order(1, Phase.RELEASE))
    assert launched.line() == "ran"
    assert launched.sidecar.hears("exited", 1).exit_code == 0


def test_warm_interpreter_that_dies_after_release_is_followed_by_a_cold_start(
    launch: Launch, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('ran')")
    launched = launch([sys.executable, str(path)], light=True)
    pid = waiting(launched)
    os.kill(pid, signal.SIGSTOP)
    launched.sidecar.say(order(1, Phase.RELEASE))
    launched.sidecar.hears("started", 1)
    os.kill(pid, signal.SIGKILL)
    assert launched.line() == "ran"
    assert launched.sidecar.hears("exited", 1).exit_code == 0
    assert [event.event for event in launched.sidecar.events].count("started") == 1


RANK = """
import json, os, sys, multiprocessing
import numpy, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
model = torch.nn.Linear(4, 4)
torch.optim.AdamW(model.parameters()).step()
seen = {
    "rank": dist.get_rank(), "local": os.environ["LOCAL_RANK"], "sum": total.item(), "argv": sys.argv,
    "path": sys.path,
    "orig": sys.orig_argv, "omp": torch.get_num_threads(), "OMP": os.environ["OMP_" + "NUM_THREADS"],
    "name": __name__,
    "leader": os.getsid(0) == os.getpid(), "through": sys.stdout.write_through, "file": __file__,
    "visible": "torch._dynamo" in sys.modules,
    "environ": {k: v for k, v in sorted(os.environ.items()) if k not in
        ("MASTER_PORT", "PET_MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE")
        and not k.startswith("TIERCHECK_")},
}
secret = [multiprocessing.current_process().authkey.hex(), numpy.random.random(), torch.initial_seed()]
os.write(1, (json.dumps([seen, [os.getppid(), os.getpid(), secret]]) + "\\n").encode())
dist.destroy_process_group()
if "fail" in sys.argv:
    os._exit(3 + dist_rank) if (dist_rank := int(os.environ["RANK"])) else __import__("time").sleep(600)
"""


def ranks_of(launched: Launched, count: int) -> list[Any]:
    return sorted((json.loads(launched.line()) for _ in range(count)), key=lambda each: int(each[0]["rank"]))


def test_ranks_of_torchrun_are_as_torchrun_itself_starts_them(launch: Launch, tmp_path: Path) -> None:
    """With `--role default`, which says what holds anyway, the user's torchrun runs as it is."""
    path = tmp_path / "train.py"
    path.write_text(RANK)
    found = []
    for command, warm in (
        ([*TORCHRUN], True),
        ([*TORCHRUN], False),
        ([*TORCHRUN, "--role", "default"], True),
    ):
        launched = launch(
            [*command, str(path), "x"], warm=warm, TIERCHECK_PROCS_PER_WORKER="2", cleared="OMP_NUM_THREADS"
        )
        ready = waiting(launched) if warm and command == TORCHRUN else 0
        launched.sidecar.say(torchrun_order(1))
        ranks = ranks_of(launched, 2)
        if command == TORCHRUN:
            assert {own[0] for _, own in ranks} == {launched.process.pid}
        if ready:
            assert ready in {own[1] for _, own in ranks}
        secrets = [own[2] for _, own in ranks]
        assert all(left != right for left, right in zip(*secrets, strict=True))
        assert launched.sidecar.hears("exited", 1).exit_code == 0
        found.append([seen for seen, _ in ranks])
    assert found[0] == found[1] == found[2]
    assert [seen["sum"] for seen in found[0]] == [3, 3]
    assert [seen["omp"] for seen in found[0]] == [1, 1]


def test_rank_that_fails_is_reported_while_the_others_wait(launch: Launch, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(RANK)
    launched = launch([*TORCHRUN, str(path), "fail"], TIERCHECK_PROCS_PER_WORKER="2", OMP_NUM_THREADS="1")
    launched.sidecar.say(torchrun_order(1))
    (_, (_, waits, _)), _ = ranks_of(launched, 2)
    assert launched.sidecar.hears("exited", 1).exit_code == 4
    assert alive(waits)
    launched.sidecar.say(order(2, Phase.HOLD))
    launched.sidecar.hears("idle", 2)
    assert not alive(waits)


def torchrun_order(attempt: int) -> Any:
    (port,) = free_ports(1)
    return order(
        attempt,
        Phase.RELEASE,
        worker=0,
        workers=1,
        procs_per_worker=2,
        master_host="127.0.0.1",
        master_port=port,
    )


def test_variable_that_torch_reads_at_import_and_the_script_sets_has_its_effect(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "settings.py").write_text("import os; os.environ['OMP_NUM_THREADS'] = '2'")
    for name, first in (
        ("hidden", "import settings"),
        ("plain", "import os; os.environ['OMP_NUM_THREADS'] = '2'"),
    ):
        path = tmp_path / f"{name}.py"
        path.write_text(f"{first}\nimport torch\nprint(torch.get_num_threads())")
        launched = launch([sys.executable, str(path)], OMP_NUM_THREADS="1")
        if name == "hidden":
            waiting(launched)
        launched.sidecar.say(order(1, Phase.RELEASE))
        assert launched.line() == "2"
        assert launched.sidecar.hears("exited", 1).exit_code == 0


def test_switched_off_nothing_waits(launch: Launch, tmp_path: Path) -> None:
    launched = launch([sys.executable, "-c", "pass"], warm=False)
    launched.sidecar.hears("idle", 0)
    assert not subprocess.run(
        ["pgrep", "-P", str(launched.process.pid)], capture_output=True, check=False
    ).stdout


@pytest.mark.parametrize(
    ("place", "fit"),
    [("{library}", True), ("/etc/python3.11", True), ("{library}/site-packages", False), ("/home/me", False)],
)
def test_only_pythons_own_start_up_module_is_taken_for_harmless(
    monkeypatch: pytest.MonkeyPatch, place: str, fit: bool
) -> None:
    """One that was installed runs before the variables of an attempt are there, and may read them. Without a
    virtual environment it lies below the standard library."""
    module = types.ModuleType("sitecustomize")
    module.__file__ = f"{place.format(library=os.path.dirname(os.__file__))}/sitecustomize.py"
    monkeypatch.setitem(sys.modules, "sitecustomize", module)
    monkeypatch.setattr(os.path, "realpath", lambda path: path)
    if fit:
        return in_place_exec.refuse_users_start_up()
    with pytest.raises(in_place_exec.NotReusable, match="sitecustomize"):
        in_place_exec.refuse_users_start_up()
