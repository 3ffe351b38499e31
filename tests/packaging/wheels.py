"""Builds the wheel as pip does."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path


def build_wheel(source: Path, folder: Path) -> Path:
    """The wheel, in `folder`."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(source),
    ]
    if importlib.util.find_spec("hatchling") is not None:  # else pip fetches it for this build
        build.insert(4, "--no-build-isolation")
    subprocess.run(build, check=True)
    (built,) = folder.glob("*.whl")
    return built
