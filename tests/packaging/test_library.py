"""Installing says how far it is, and an installed library imports in a training script."""

from __future__ import annotations

import inspect
import os
import site
import subprocess
import sys
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest

from tests.packaging.dockerfile import shipped_python
from tiercheck import Checkpointer


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment in which the wheel is installed, and after it what is installed here."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder)
    packages = folder / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    beside = "; ".join(f"site.addsitedir({path!r})" for path in site.getsitepackages())
    (packages / "beside.pth").write_text(f"import site; {beside}\n")
    return folder / "bin" / "python"


def run(python: Path, code: str, *options: str) -> str:
    command = [python, "-I", *options, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_type_checker_of_a_script_reads_our_annotations(python: Path, tmp_path: Path) -> None:
    script = """
        from typing import assert_type

        import torch

        from tiercheck import Checkpointer, DifferentState, Found, NotCapturable, RestoreError, State, find

        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        found = assert_type(find("folder"), Found)
        state: State = {"scheduler": scheduler, "progress": {"epoch": 0}}
        try:
            with Checkpointer(model, [optimizer], state=state, found=found) as checkpointer:
                assert_type(checkpointer.restore(), int)
                assert_type(checkpointer.step(torch.ones(())), None)
                checkpointer.step("no loss")  # type: ignore[arg-type]
        except (NotCapturable, RestoreError, DifferentState) as error:
            raise SystemExit(str(error)) from None
        """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", "cache", "--config-file", ""]
    command += ["--python-executable", str(python), "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_public_name_is_importable_from_the_top(python: Path) -> None:
    run(python, "import tiercheck; [getattr(tiercheck, name) for name in tiercheck.__all__]")


@pytest.mark.parametrize("name", ["Checkpointer", "find"])
def test_without_torch_the_import_says_what_to_install(unpacked: Path, name: str) -> None:
    code = f"""
        import sys
        sys.path.insert(0, {str(unpacked)!r})
        try:
            from tiercheck import {name}
        except ImportError as error:
            print(error)
        """
    assert "needs torch, which is not installed" in run(Path(sys.executable), code, "-S")


def test_torchs_compiler_is_imported_no_sooner_than_by_the_script(python: Path) -> None:
    """It takes seconds, and a script that only evaluates, or prints its help, has no use for it."""
    code = """
        import sys, tempfile
        import torch
        from tiercheck import Checkpointer, ResumableSampler, find
        model = torch.nn.Linear(2, 2)
        assert "torch._dynamo" not in sys.modules, "imported"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = "torch._dynamo" in sys.modules
        Checkpointer(model, optimizer, folder=tempfile.mkdtemp()).restore()
        assert ("torch._dynamo" in sys.modules) == before, "made"
        """
    run(python, code)


@pytest.mark.parametrize("method", ["__init__", "restore", "step"])
def test_help_describes_every_argument(method: str) -> None:
    function = getattr(Checkpointer, method)
    words = inspect.getdoc(Checkpointer if method == "__init__" else function) or ""
    _, _, described = words.partition("Args:\n")
    arguments = list(inspect.signature(function).parameters)[1:]
    assert [name for name in arguments if f"\n    {name}: " not in f"\n{described}"] == []


def test_help_of_the_checkpointer_begins_with_a_loop_and_names_what_is_raised() -> None:
    words = inspect.getdoc(Checkpointer) or ""
    assert words.index("checkpointer.restore()") < words.index("checkpointer.step(") < words.index("Args:")
    raised = words + (inspect.getdoc(Checkpointer.restore) or "")
    assert [name for name in ("NotCapturable", "RestoreError", "DifferentState") if name not in raised] == []


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
