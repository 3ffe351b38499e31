"""Promise: only a command line that is fully understood starts warm."""

from __future__ import annotations

import pytest

from tiercheck.launcher.recipe import Recipe, recipe_of


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
        ("python -m torch.distributed.run t.py", Recipe("python", (), "torch.distributed.run", ("t.py",), True, True)),
    ],
)
def test_understood(command: str, recipe: Recipe) -> None:
    assert recipe_of(command.split(), shebang) == recipe


@pytest.mark.parametrize(
    "command",
    [
        "sh -c x", "python", "python -c pass", "python -i t.py", "python -I t.py", "python -S t.py", "python -E t.py",
        "python -uO t.py", "python - x", "python -x t.py", "python -W", "python -m", "pypy3 t.py", "accelerate launch t.py",
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
