"""Copies the trainer's library into any training image, in an init container.

`python3 -m tiercheck_sidecar.install_library DEST`: the copy appears at DEST/tiercheck by one rename, so a
container that is restarted half-way never leaves half a library behind.
"""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":  # PID 1 ignores a signal that it does not handle
    signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

import shutil
import tempfile
from pathlib import Path

from tiercheck import about


def install(destination: Path) -> Path:
    """Copies the `tiercheck` package to `destination`/tiercheck, replacing an older copy. Raises OSError."""
    source = Path(about.__file__).parent
    target = destination / "tiercheck"
    destination.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".tiercheck-", dir=destination))
    try:
        fresh = staging / "tiercheck"
        shutil.copytree(source, fresh, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        _readable_by_all(fresh)
        if target.exists():
            target.rename(staging / "previous")
        fresh.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _readable_by_all(root: Path) -> None:
    """Makes the copy readable by all, because the trainer may run as another user."""
    for folder, _, files in os.walk(root):
        os.chmod(folder, 0o755)
        for name in files:
            os.chmod(Path(folder) / name, 0o644)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python3 -m tiercheck_sidecar.install_library DEST", file=sys.stderr)
        return 2
    print(f"installed {install(Path(arguments[0]))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
