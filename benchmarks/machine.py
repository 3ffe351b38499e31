"""Which machine, which versions: a figure without them means nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.scale import ROOT

_PACKAGES = ("torch", "numpy", "xxhash", "obstore", "boto3", "pyeclib", "moto", "msgspec")


def describe() -> dict[str, Any]:
    """Hardware, system and versions, and the commit that was measured."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "gpu": _gpu(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "commit": _commit(),
    }


def load() -> float:
    """Processes that want a core, averaged over a minute: what else goes on here."""
    return os.getloadavg()[0]


def shared_memory() -> Path:
    """Where slots lie: a folder in memory, as in a pod."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(": ", 1)[1] for line in lines if line.startswith("model name")), platform.machine()
    )


def _gpu() -> str:
    import torch

    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else "none"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # many images have no git
        return "unknown"
    return found.stdout.strip() or "unknown"
