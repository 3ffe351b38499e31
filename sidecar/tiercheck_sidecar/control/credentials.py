"""Keeps own credentials out of reports, and ends the process when the remote tier's change.

An environment never follows its Secret. The kubelet starts the process again with the new values, and
everything it holds is found again on the memory volume. It ends only while the remote tier cannot be reached:
changed credentials are no reason to disturb what works.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from tiercheck.protocol import names
from tiercheck.protocol.encoding import field_names
from tiercheck.protocol.report import Report
from tiercheck.redaction import known_secrets, redacted

_NO_TEXT = frozenset({int, float, bool, type(None)})
_TOLD = ("restore", "trainer", "remote", "quarantined", "problems")
"""Parts of a report that hold what libraries, scripts and servers said."""


def own_credentials(env: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The job's token, and the values of variables that are named like credentials."""
    folder = Path(env.get(names.ENV_CREDENTIALS_DIR) or names.CREDENTIALS_DIR)
    return known_secrets(env, folder / "token")


class Discretion:
    """Takes credentials out of reports. Not for two threads at once."""

    def __init__(self, known: frozenset[str]) -> None:
        self._hide: Callable[[str], str] = lru_cache(maxsize=512)(lambda text: redacted(text, known))
        self._seen: dict[str, tuple[Any, Any]] = {}
        """By part: how it was last, and that without credentials; None: it has none."""

    def without_credentials(self, report: Report) -> Report:
        """The same, with REDACTED in place of credentials."""
        changes = {}
        for name in _TOLD:
            value = getattr(report, name)
            if name not in self._seen or self._seen[name][0] != value:
                clean = self._without(value)
                self._seen[name] = (value, None if clean == value else clean)
            if self._seen[name][1] is not None:
                changes[name] = self._seen[name][1]
        return dataclasses.replace(report, **changes) if changes else report

    def _without(self, value: Any) -> Any:
        if isinstance(value, str) and not isinstance(value, Enum):
            return self._hide(value) if value else value
        if isinstance(value, tuple):
            return tuple(self._without(entry) for entry in value)
        changes = {}
        for name in field_names(type(value)) or ():
            content = getattr(value, name)
            if type(content) in _NO_TEXT:
                continue
            clean = self._without(content)
            if clean != content:
                changes[name] = clean
        return dataclasses.replace(value, **changes) if changes else value


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
