"""Promise: only a command line that is fully understood starts warm."""

from __future__ import annotations

import pytest

from tests.launcher.launcher_harness import order
from tiercheck.launcher.environment import command_environment
from tiercheck.launcher.recipe import Recipe, recipe_of, without_rendezvous
from tiercheck.launcher.training_command import TrainingCommand
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.names import ENV_PROCS_PER_WORKER
from tiercheck.warm.in_place_exec import cannot_be_applied


def locate(name: str) -> tuple[str, str]:
    return f"/bin/{name}", "/bin/python3" if name == "torchrun" else ""


@pytest.mark.parametrize(
    ("command", "recipe"),
    [
        ("python3 train.py --steps 3", Recipe("python3", (), "train.py", ("--steps", "3"))),
        ("/opt/venv/bin/python train.py", Recipe("/opt/venv/bin/python", (), "train.py", ())),
        (
            "python3.12 -u -X dev -Wignore t.py -u",
            Recipe("python3.12", ("-u", "-X", "dev", "-Wignore"), "t.py", ("-u",)),
        ),
        ("python -m pkg.train -m x", Recipe("python", (), "pkg.train", ("-m", "x"), module=True)),
        ("torchrun t.py -m", Recipe("/bin/python3", ("-u",), "t.py", ("-m",), each_rank=True)),
        (
            "python -X dev -m torch.distributed.run --nproc-per-node 2 --module pkg.train --x",
            Recipe("/bin/python", ("-u",), "pkg.train", ("--x",), True, True),
        ),
        (
            "python bin/torchrun --nproc_per_node=2 t.py",
            Recipe("/bin/python", ("-u",), "t.py", (), False, True),
        ),
        ("torchrun --standalone t.py", Recipe("/bin/python3", ("-u",), "t.py", (), each_rank=True)),
        ("torchrun --max-restarts=3 t.py", Recipe("/bin/python3", ("-u",), "t.py", (), each_rank=True)),
    ],
)
def test_understood(command: str, recipe: Recipe) -> None:
    assert recipe_of(without_rendezvous(command.split())[0], {ENV_PROCS_PER_WORKER: "2"}, locate) == recipe


@pytest.mark.parametrize(
    "command",
    [
        "sh -c x", "python", "python -c pass", "python -i t.py", "python -I t.py", "python -S t.py",
        "python -E t.py",
        "python -uO t.py", "python - x", "python -x t.py", "python -W", "python -m", "pypy3 t.py",
        "accelerate launch t.py",
        "python2.7 t.py", "python3-dbg t.py",
        "torchrun", "torchrun --nproc-per-node 8 t.py", "torchrun --nproc-per-node",
        "torchrun --tee 3 --standalone t.py", "torchrun --tee 3 t.py",
    ],
)  # fmt: skip
def test_not_understood(command: str) -> None:
    assert recipe_of(without_rendezvous(command.split())[0], {ENV_PROCS_PER_WORKER: "2"}, locate) is None


@pytest.mark.parametrize(
    ("command", "kept", "taken"),
    [
        (
            "torchrun --nnodes=4 --node_rank 1 --nproc-per-node=8 --rdzv-backend=c10d --rdzv_id 7 t.py",
            "torchrun --nproc-per-node=8 t.py",
            ["--nnodes", "--node_rank", "--rdzv-backend", "--rdzv_id"],
        ),
        (
            "/bin/torchrun --standalone --tee 3 -m pkg.train",
            "/bin/torchrun --tee 3 -m pkg.train",
            ["--standalone"],
        ),
        (
            "python3 -u -m torch.distributed.run --max-restarts 3 --no-python t.sh",
            "python3 -u -m torch.distributed.run --no-python t.sh",
            ["--max-restarts"],
        ),
        (
            "python -X dev bin/torchrun --master-addr=a t.py",
            "python -X dev bin/torchrun t.py",
            ["--master-addr"],
        ),
        ("torchrun t.py --nnodes 4", "torchrun t.py --nnodes 4", []),
        ("torchrun -m pkg.train --standalone", "torchrun -m pkg.train --standalone", []),
        ("python t.py torchrun --nnodes 4", "python t.py torchrun --nnodes 4", []),
        ("sh -c torchrun --nnodes 4", "sh -c torchrun --nnodes 4", []),
    ],
)
def test_torchruns_own_rendezvous_is_left_out(command: str, kept: str, taken: list[str]) -> None:
    assert without_rendezvous(command.split()) == (kept.split(), taken)


def test_torchrun_that_does_more_than_to_start_ranks_is_not_understood() -> None:
    assert recipe_of(["torchrun", "t.py"], {"PET_MASTER_ADDR": "host", "PET_RDZV_ID": "7"}, locate)
    assert recipe_of(["torchrun", "t.py"], {"PET_LOG_DIR": "/logs"}, locate) is None
    assert recipe_of(["torchrun", "t.py"], {}, lambda name: ("", "")) is None


def test_what_python_will_call_its_original_arguments() -> None:
    for command in ("python3 -u train.py a", "python -m x y"):
        recipe = recipe_of(command.split(), {}, locate)
        assert recipe is not None
        assert recipe.command == command.split()


def test_whatever_an_attempt_sets_may_still_be_set_when_torch_is_there() -> None:
    base = {"TIERCHECK_POD_IP": "127.0.0.1", "PATH": "/bin"}
    made = order(3, Phase.RELEASE, procs_per_worker=1)
    changed = command_environment(base, made)
    assert not cannot_be_applied(base, changed)
    assert cannot_be_applied(base, {**changed, "OMP_NUM_THREADS": "1"}) == "OMP_NUM_THREADS"
    assert cannot_be_applied(base, {"TIERCHECK_POD_IP": "127.0.0.1"}) == "PATH"


def test_torchruns_options_that_are_left_out_are_named_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    command = TrainingCommand(["torchrun", "--standalone", "--tee", "3", "t.py"], {})
    assert command.given == ["torchrun", "--tee", "3", "t.py"]
    assert "torchrun's --standalone is not used" in capfd.readouterr().err
    TrainingCommand(["torchrun", "--tee", "3", "t.py"], {})
    assert not capfd.readouterr().err
