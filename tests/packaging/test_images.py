"""What the images promise, as far as it can be checked without building them."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tests.packaging.dockerfile import Stage, build_wheel, copied, let_through, lineage, stages
from tiercheck.about import __version__
from tiercheck_operator.config import Config

ROOT = Path(__file__).parents[2]
IMAGES = ["operator", "sidecar", "example-trainer"]


@pytest.fixture(scope="module")
def built() -> dict[str, Stage]:
    return stages(ROOT / "Dockerfile")


@pytest.mark.parametrize("image", IMAGES)
def test_image_runs_as_a_numeric_user_who_is_not_root(built: dict[str, Stage], image: str) -> None:
    """Kubernetes can check runAsNonRoot only if the number is in the image."""
    user, _, group = built[image].all("USER")[-1].partition(":")
    assert int(user) > 0
    assert int(group) > 0


@pytest.mark.parametrize("image", IMAGES)
def test_image_writes_no_bytecode_at_run_time_and_logs_at_once(built: dict[str, Stage], image: str) -> None:
    environment = built[image].environment()
    assert environment["PYTHONDONTWRITEBYTECODE"] == "1"
    assert environment["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize(
    ("image", "module"),
    [("operator", "operator/tiercheck_operator"), ("sidecar", "sidecar/tiercheck_sidecar")],
)
def test_image_starts_a_module_that_can_be_run(built: dict[str, Stage], image: str, module: str) -> None:
    assert built[image].last_json("ENTRYPOINT") == ["python3", "-m", module.rpartition("/")[2]]
    assert (ROOT / module / "__main__.py").is_file()


def test_example_trainer_starts_the_example(built: dict[str, Stage]) -> None:
    (script,) = (copy.split()[-1] for copy in built["example-trainer"].all("COPY") if "--from=" not in copy)
    assert f"python3 {script} " in built["example-trainer"].last_json("ENTRYPOINT")[2]


def test_every_base_is_pinned_to_a_slim_python(built: dict[str, Stage]) -> None:
    pinned = re.search(r"(?m)^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text())
    assert pinned is not None
    assert re.fullmatch(r"python:3\.\d+(\.\d+)?-slim-\w+(@sha256:[0-9a-f]{64})?", pinned[1])
    assert {stage.base for stage in built.values()} <= {"${PYTHON_IMAGE}", *built}


def test_everything_installed_is_pinned(built: dict[str, Stage]) -> None:
    installs = [
        command
        for stage in built.values()
        for line in stage.all("RUN")
        for command in line.split("&&")
        if re.search(r"\bpip\b.*\binstall\b", command)
    ]
    assert len(installs) >= 4
    assert all("--constraint constraints.txt" in command for command in installs)


def test_everything_copied_is_there_and_not_ignored(built: dict[str, Stage]) -> None:
    for stage in built.values():
        for copy in stage.all("COPY"):
            if "--from=" not in copy:
                for source in copy.split()[:-1]:
                    one = Stage("", "", [("COPY", f"{source} ./")])
                    assert copied(one, ROOT), (
                        f"{source} is not there, or kept out of the build by .dockerignore"
                    )


def test_images_install_the_whole_wheel(built: dict[str, Stage], wheel: Path, tmp_path: Path) -> None:
    """Built from nothing but what the Dockerfile copies, it is the one that everybody else installs."""
    for name, file in (copied(built["tools"], ROOT) | copied(built["builder"], ROOT)).items():
        (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, tmp_path / "src" / name)
    assert names_in(build_wheel(tmp_path / "src", tmp_path)) == names_in(wheel)


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_environments_and_history_stay_out_of_the_build() -> None:
    for path in (
        ".git/HEAD",
        ".venv/bin/python",
        ".images/base.tar",
        "tests/conftest.py",
        "tiercheck/__pycache__/about.cpython-311.pyc",
    ):
        assert not let_through(ROOT, path)


def test_manifests_and_examples_name_our_images_with_their_version() -> None:
    """Without a tag Kubernetes pulls at every start, also what was put onto the node by hand."""
    places = [
        ROOT / "charts" / "tiercheck" / "Chart.yaml",
        *(ROOT / "deploy").glob("*.yaml"),
        *(ROOT / "examples").rglob("*.yaml"),
    ]
    lines = [
        line for path in places for line in path.read_text().splitlines() if re.search("image:|# IMAGE", line)
    ]
    named = [name for line in lines for name in re.findall(r"tiercheck-[\w.:-]+", line)]
    assert len(named) >= 8
    assert {name.partition(":")[2] for name in named} == {__version__}, named
    assert Config().sidecar_image == f"tiercheck-sidecar:{__version__}"


@pytest.mark.parametrize("image", ["operator", "sidecar"])
def test_operator_and_sidecar_images_install_no_torch(built: dict[str, Stage], image: str) -> None:
    commands = [line for stage in lineage(built, image) for line in stage.all("RUN")]
    assert any(f"--requirement /{image}.txt" in command for command in commands)
    assert not any("torch" in command for command in commands)
