"""`make demo` and `make test` say what they install, how far they are, and why it failed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.dockerfile import shipped_python

SCRIPT = Path(__file__).parents[2] / "tools" / "set_up.py"


@pytest.fixture
def environment_whose_pip(tmp_path: Path) -> Path:
    """A virtual environment whose pip only says that it collects two packages, and ends as `PIP_ENDS`
    says.
    """
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        '#!/bin/sh\necho "$@" >> "$PIP_LOG"\necho "Collecting torch"\necho "Collecting numpy"\n'
        'echo "Installing collected packages: numpy, torch"\nexit ${PIP_ENDS:-0}\n'
    )
    python.chmod(0o755)
    return python.parents[1]


def set_up(venv: Path, extra: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PIP_LOG": str(venv / "log"), **variables}
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(venv), extra],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("extra", "words"), [("demo", "make demo"), ("dev", "tests")])
def test_set_up_says_what_it_installs_and_how_far_it_is(
    environment_whose_pip: Path, extra: str, words: str
) -> None:
    done = set_up(environment_whose_pip, extra)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout.splitlines()[0]
    assert "2 packages found; installing" in done.stdout
    assert f"--editable .[{extra}]" in (environment_whose_pip / "log").read_text()


def test_torch_comes_from_the_index_that_is_named_and_the_rest_from_the_usual_one(
    environment_whose_pip: Path,
) -> None:
    set_up(environment_whose_pip, "demo", TORCH_INDEX="https://wheels.example/cpu")
    first, second = (environment_whose_pip / "log").read_text().splitlines()
    assert "--index-url https://wheels.example/cpu --no-deps torch" in first
    assert "wheels.example" not in second


def test_failed_set_up_ends_with_what_pip_said(environment_whose_pip: Path) -> None:
    done = set_up(environment_whose_pip, "dev", PIP_ENDS="1")
    assert done.returncode
    assert "Its last lines" in done.stderr
    assert "Collecting numpy" in done.stderr


@pytest.mark.parametrize("usable", [True, False])
def test_tests_run_by_the_python_of_the_images_where_the_machine_has_it(tmp_path: Path, usable: bool) -> None:
    """What is there and cannot make a virtual environment is as good as not there."""
    named = f"python{shipped_python()}"
    for name, status in ((named, 0 if usable else 127), ("python3", 0)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "MAKEFLAGS")}
    environ["PATH"] = f"{tmp_path}:{environ['PATH']}"
    told = subprocess.run(
        ["make", "-n", "setup", f"VENV={tmp_path}/venv"],
        cwd=SCRIPT.parents[1],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{named if usable else 'python3'} tools/set_up.py" in told.stdout
