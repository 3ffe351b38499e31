"""Reads a Dockerfile into stages and instructions, as far as the checks need it, and builds the wheel."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        """The arguments of every instruction of this kind, in order."""
        return [argument for instruction, argument in self.instructions if instruction == word]

    def last_json(self, word: str) -> list[str]:
        """The exec form of the last instruction of this kind."""
        found: list[str] = json.loads(self.all(word)[-1])
        return found

    def environment(self) -> dict[str, str]:
        return dict(pair.split("=", 1) for line in self.all("ENV") for pair in line.split())


def shipped_python() -> str:
    """The Python of the images, as 3.12: it is named in this one place."""
    text = (Path(__file__).parents[2] / "Dockerfile").read_text()
    found = re.search(r"(?m)^ARG PYTHON_IMAGE=python:(\d+\.\d+)", text)
    assert found is not None
    return found[1]


def stages(path: Path) -> dict[str, Stage]:
    text = re.sub(r"\\\n", " ", re.sub(r"(?m)^\s*#.*\n", "", path.read_text()))
    found: dict[str, Stage] = {}
    for line in text.splitlines():
        word, _, argument = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = argument.partition(" AS ")
            current = found[name] = Stage(name, base)
        elif word and found:
            current.instructions.append((word, argument.strip()))
    return found


def lineage(all_stages: dict[str, Stage], name: str) -> list[Stage]:
    """The stage, its bases, and every stage it copies from."""
    stage = all_stages[name]
    parents = [stage.base, *re.findall(r"--from=(\S+)", " ".join(stage.all("COPY")))]
    return [
        stage,
        *(found for parent in parents if parent in all_stages for found in lineage(all_stages, parent)),
    ]


def let_through(root: Path, file: str) -> bool:
    """Whether .dockerignore lets `file`, a path in `root`, into the build: the last line that matches
    decides."""
    ignored = False
    for line in (root / ".dockerignore").read_text().splitlines():
        pattern = line.strip().lstrip("!").strip("/")
        if pattern and not line.startswith("#") and _matches(pattern, file):
            ignored = not line.startswith("!")
    return not ignored


def _matches(pattern: str, file: str) -> bool:
    expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    return re.fullmatch(f"{expression}(/.*)?", file) is not None


def copied(stage: Stage, root: Path) -> dict[str, Path]:
    """What its COPYs bring from `root`: path in its working directory -> file."""
    found: dict[str, Path] = {}
    for copy in stage.all("COPY"):
        if "--from=" in copy:
            continue
        *sources, target = copy.split()
        for source in sources:
            files = [root / source, *(root / source).rglob("*")]
            place = Path(target, source) if target == "./" else Path(target)
            for file in files:
                if file.is_file() and let_through(root, str(file.relative_to(root))):
                    found[str(place / file.relative_to(root / source))] = file
    return found


def build_wheel(source: Path, folder: Path) -> Path:
    """The wheel, in `folder`."""
    build = f"{sys.executable} -m pip wheel --quiet --no-deps --wheel-dir {folder} {source}".split()
    if importlib.util.find_spec("hatchling") is not None:  # else pip fetches it for this build
        build.insert(4, "--no-build-isolation")
    subprocess.run(build, check=True)
    (built,) = folder.glob("*.whl")
    return built
