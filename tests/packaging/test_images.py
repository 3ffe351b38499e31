"""Images keep their promises, as far as that is seen unbuilt, and first processes hear SIGTERM."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.dockerfile import Stage, build_wheel, copied, let_through, lineage, stages
from tiercheck.about import __version__
from tiercheck.protocol import names
from tiercheck_operator.config import Config
from tiercheck_operator.manifests.pod import build_pod
from tiercheck_operator.model.parsing import parse_job

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


# As PID 1, nothing would end a process before it has a handler of SIGTERM.

PLACES = {"tiercheck": ROOT, "tiercheck_operator": ROOT / "operator", "tiercheck_sidecar": ROOT / "sidecar"}
CHECK = ROOT / "charts" / "tiercheck" / "files" / "check.py"
"""What `helm test` runs, by `python3 -c`."""
DEADLINE = 90.0


def runnable() -> list[str]:
    """Every module of what is in the images that can be run with `python3 -m`."""
    return [
        ".".join(path.relative_to(place).with_suffix("").parts).removesuffix(".__main__")
        for package, place in PLACES.items()
        for path in sorted((place / package).rglob("*.py"))
        if re.search(r'(?m)^if __name__ == "__main__"', path.read_text())
    ]


def commands() -> Iterator[list[str]]:
    """Of every container of ours: by the images, the operator's manifests, and the chart."""
    for stage in stages(ROOT / "Dockerfile").values():
        if stage.all("ENTRYPOINT"):
            yield stage.last_json("ENTRYPOINT")
    container = {"name": "trainer", "image": "i", "command": ["torchrun", "train.py"]}
    spec = {
        "workers": 1,
        "template": {"spec": {"containers": [container]}},
        "tiers": {"local": {"medium": "NodeMemory"}},
    }
    metadata = {"name": "gpt", "namespace": "ml", "uid": "u-1", "generation": 1, "resourceVersion": "7"}
    manifests = [build_pod(parse_job({"metadata": metadata, "spec": spec}), 0, 0, [], "sidecar:1")]
    snapshot = (ROOT / "tests" / "chart" / "snapshot.yaml").read_text()
    manifests += [document for document in yaml.safe_load_all(snapshot) if document]
    for manifest in manifests:
        yield from _commands_in(manifest)


def _commands_in(value: Any) -> Iterator[list[str]]:
    if isinstance(value, list):
        for entry in value:
            yield from _commands_in(entry)
    elif isinstance(value, dict):
        if "image" in value and isinstance(value.get("command"), list):
            yield [str(word) for word in value["command"]]
        for entry in value.values():
            yield from _commands_in(entry)


def test_containers_start_nothing_else_than_what_is_tested_here() -> None:
    """Another script or module might ignore SIGTERM."""
    modules = {names.LAUNCHER, "tiercheck_operator", "tiercheck_sidecar"}
    modules |= {"tiercheck_sidecar.install_library", "tiercheck_sidecar.node_memory"}
    started = set()
    for program, option, *rest in commands():
        if program == "sh":  # stays the first process, with a trap that is set before it starts another one
            assert rest[0].startswith("trap 'exit 143' TERM; ")
        elif option == "-c":
            assert rest[0] == "as in files/check.py"  # which is `CHECK`, and abridged in the snapshot
        else:
            assert program == "python3"
            started.add(rest[0] if option == "-m" else option)
    assert started == modules
    assert {each.removeprefix(f"{names.LIBRARY_DIR}/").removesuffix("/__main__.py").replace("/", ".")
        for each in started} < set(runnable())  # fmt: skip


@pytest.mark.parametrize("module", runnable())
def test_sigterm_is_heard_before_anything_is_imported(module: str) -> None:
    """Imports take seconds on a busy node, and a signal that comes meanwhile is lost for good."""
    parents = {module.rpartition(".")[0] or module, module.partition(".")[0]}
    unavoidable = f"import __future__, os, runpy, signal, sys, {', '.join(sorted(parents))}"
    before = said(f"{unavoidable}; print(*sys.modules)")
    number, *then = said(
        f"{unavoidable}\n"
        "def first(number, handler):\n"
        "    print(int(number), *sys.modules, flush=True)\n"
        "    os._exit(0)\n"
        "signal.signal = first\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    assert int(number) == signal.SIGTERM
    assert set(then) - set(before) <= {module, f"{module}.__main__"}


def said(code: str) -> list[str]:
    """The words that it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("module", [*runnable(), ""], ids=lambda module: module or CHECK.name)
def test_sigterm_ends_what_is_still_starting(module: str, tmp_path: Path) -> None:
    """Its imports never end here, so that nothing but the signal can end it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import signal, sys, time\n"
        "class Endless:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        while signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL: time.sleep(0.01)\n"
        "sys.meta_path.insert(0, Endless())\n"
    )
    program = ["-m", module] if module else ["-c", CHECK.read_text()]
    process = subprocess.Popen(
        [sys.executable, *program], env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path
    )
    try:
        _wait_until_caught(process, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 128 + signal.SIGTERM, (
            "by its own handler, not by the kernel's default"
        )
    finally:
        process.kill()
        process.wait()


def _wait_until_caught(process: subprocess.Popen[bytes], number: int) -> None:
    end = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < end:
        status = Path(f"/proc/{process.pid}/status").read_text()
        found = re.search(r"(?m)^SigCgt:\s*(\w+)", status)
        if found and int(found[1], 16) >> (number - 1) & 1:
            return
        time.sleep(0.001)
    raise AssertionError(f"it never caught {signal.Signals(number).name}; exit code {process.poll()}")
