"""Promise: only a command line that is fully understood starts warm."""

from __future__ import annotations

import pytest

from tests.launcher.launcher_harness import order
from tiercheck.launcher.environment import command_environment
from tiercheck.launcher.recipe import Recipe, recipe_of
from tiercheck.protocol.directive import Phase
from tiercheck.warm.variables import cannot_be_applied, named_in


def shebang(name: str) -> tuple[str, str]:
    return f"/bin/{name}", "/bin/python3"


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
        (
            "torchrun --nnodes 2 t.py",
            Recipe("/bin/python3", (), "/bin/torchrun", ("--nnodes", "2", "t.py"), torchrun=True),
        ),
        (
            "python -m torch.distributed.run t.py",
            Recipe("python", (), "torch.distributed.run", ("t.py",), True, True),
        ),
    ],
)
def test_understood(command: str, recipe: Recipe) -> None:
    assert recipe_of(command.split(), shebang) == recipe


@pytest.mark.parametrize(
    "command",
    [
        "sh -c x", "python", "python -c pass", "python -i t.py", "python -I t.py", "python -S t.py",
        "python -E t.py",
        "python -uO t.py", "python - x", "python -x t.py", "python -W", "python -m", "pypy3 t.py",
        "accelerate launch t.py",
        "python2.7 t.py", "python3-dbg t.py",
    ],
)  # fmt: skip
def test_not_understood(command: str) -> None:
    assert recipe_of(command.split(), shebang) is None


def test_what_python_will_call_its_original_arguments() -> None:
    for command in ("python3 -u train.py a", "python -m x y"):
        recipe = recipe_of(command.split())
        assert recipe is not None
        assert recipe.command == command.split()


def test_whatever_an_attempt_sets_may_still_be_set_when_torch_is_there() -> None:
    base = {"TIERCHECK_POD_IP": "127.0.0.1", "PATH": "/bin"}
    made = order(3, Phase.RELEASE, procs_per_worker=1)
    changed = command_environment(base, made)
    assert not cannot_be_applied(base, changed)
    assert cannot_be_applied(base, {**changed, "OMP_NUM_THREADS": "1"}) == "OMP_NUM_THREADS"
    assert cannot_be_applied(base, {"TIERCHECK_POD_IP": "127.0.0.1"}) == "PATH"


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '1'", "OMP_NUM_THREADS"),
        ('os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "x")', "PYTORCH_CUDA_ALLOC_CONF"),
        ("os.environ['TORCH_NCCL_BLOCKING_WAIT']; os.environ['CUDA_VISIBLE_DEVICES']", ""),
        ("os.environ['TORCHELASTIC_RUN_ID'], os.environ['LOCAL_RANK']", ""),
        ("print('OMP_NUM_THREADS')", ""),
    ],
)
def test_script_that_names_what_torch_reads_at_import_is_known(source: str, named: str) -> None:
    assert named_in(source) == named
