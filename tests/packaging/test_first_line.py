"""A container's first process hears SIGTERM from its first line.

As PID 1, nothing would end it before.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.dockerfile import stages
from tiercheck.protocol import names
from tiercheck_operator.manifests.pod import build_pod
from tiercheck_operator.model.parsing import parse_job

ROOT = Path(__file__).parents[2]
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
    for snapshot in sorted((ROOT / "tests" / "chart" / "snapshots").glob("*.yaml")):
        manifests += [document for document in yaml.safe_load_all(snapshot.read_text()) if document]
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
            assert rest[0].strip() == CHECK.read_text().strip()
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
