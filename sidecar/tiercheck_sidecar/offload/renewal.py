"""Ends the process when the remote tier's Secret was changed: an environment never follows it.

The kubelet starts it again with the new values, and everything it holds is found again on the memory volume.
It ends only while the remote tier cannot be reached: changed credentials are no reason to disturb what works.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

_LOOK_EVERY = 2.0


async def wait_for_renewal(folder: Path | None, reachable: Callable[[], bool | None]) -> None:
    """Returns when the Secret mounted at `folder` differs from what it was and the remote tier is not
    reachable. May never."""
    if folder is None:
        await asyncio.Event().wait()
        return
    before = fingerprint(folder)
    while True:
        await asyncio.sleep(_LOOK_EVERY)
        if reachable() is False and fingerprint(folder) != before:
            log.warning(
                "the remote tier's credentials have changed; the sidecar ends to be started with them"
            )
            return


def fingerprint(folder: Path) -> str:
    """Of names and contents; a Secret that does not exist is an empty folder."""
    seen = hashlib.sha256()
    # The kubelet's own links and time-stamped folders begin with two dots.
    for file in sorted(path for path in _entries(folder) if not path.name.startswith("..")):
        with contextlib.suppress(OSError):
            content = file.read_bytes()
            seen.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return seen.hexdigest()


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
