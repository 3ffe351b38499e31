"""An image without torch deserves a sentence, not a stack trace per restart: this looks before the first start."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

_PROBE = "import importlib.util, sys; sys.exit(3 if importlib.util.find_spec('torch') is None else 0)"


def torch_missing(command: Sequence[str]) -> str:
    """A sentence if `command` is python or torchrun and its interpreter has no torch; empty if all is well or unknown."""
    name = Path(command[0]).name
    if name == "torchrun":
        script = shutil.which(command[0])
        if script is None:
            return "The image has no torchrun, so torch is not installed in it: use an image with torch 2.6 or newer."
        interpreter = interpreter_of(Path(script))
    elif name.startswith("python"):
        interpreter = command[0]
    else:
        return ""
    if not interpreter:
        return ""
    try:
        probe = subprocess.run([interpreter, "-c", _PROBE], timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""  # the start itself will tell
    if probe.returncode != 3:
        return ""
    return f"{interpreter} of the image cannot import torch: use an image with torch 2.6 or newer, or install it there."


def interpreter_of(script: Path) -> str:
    """The interpreter in the script's first line, or nothing."""
    with open(script, "rb") as file:
        first = os.fsdecode(file.readline(4096)).strip()
    return first[2:].split()[0] if first.startswith("#!") and "python" in first else ""
