"""The settings that are compared: the job as it is, and the job with one thing changed at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_operator.planning.wanted import Wanted

_PARITY = re.compile(r"([0-9]+)\+([0-9]+)")
_KEYS = "copies=0,1,2 parity=4+1 spares=0,2 snapshot=10,100 remote=500,none deltas=on,off level=rack,host"


@dataclass(frozen=True)
class Setting:
    """One row."""

    name: str
    wanted: Wanted


def settings(base: Wanted, compare: Sequence[str]) -> tuple[Setting, ...]:
    """The job as it is first. `compare`: "copies=0,1,2 parity=4+1", in one word or several. Raises
    CannotDo."""
    rows = [Setting("as it is", base)]
    for entry in " ".join(compare).split():
        key, equals, values = entry.partition("=")
        if not equals or not values:
            raise CannotDo(f'"{entry}" compares nothing; say what to change, such as {_KEYS}', USAGE)
        for value in values.split(","):
            changed = _changed(base, key, value)
            if changed == base:
                rows[0] = Setting(
                    f"{rows[0].name}, {key}={value}"
                    if rows[0].name != "as it is"
                    else f"as it is: {key}={value}",
                    base,
                )
            else:
                rows.append(Setting(f"{key}={value}", changed))
    return tuple(rows)


def _changed(base: Wanted, key: str, value: str) -> Wanted:
    if key == "parity":
        match = _PARITY.fullmatch(value)
        if match is None or not int(match[1]) or not int(match[2]):
            raise CannotDo(f'"{value}" is no parity: say data+parity, such as 4+1', USAGE)
        return replace(base, copies=0, parity=(int(match[1]), int(match[2])))
    if key == "copies":
        count = _count(key, value)
        if count >= base.workers:
            raise CannotDo(f"copies={value} needs more than {value} workers", USAGE)
        return replace(base, copies=count, parity=None)
    if key == "spares":
        return replace(base, spares=_count(key, value))
    if key == "snapshot":
        return replace(base, snapshot_every=_count(key, value, least=1))
    if key == "remote":
        return replace(base, remote_every=None if value == "none" else _count(key, value, least=1))
    if key == "deltas" and value in ("on", "off"):
        return replace(base, deltas=value == "on")
    if key == "level" and value in {level.name for level in base.levels}:
        return replace(base, level=value)
    raise CannotDo(f'"{key}={value}" cannot be compared; what can be is {_KEYS}', USAGE)


def _count(key: str, value: str, least: int = 0) -> int:
    if not value.isdigit() or int(value) < least:
        raise CannotDo(f'"{key}={value}" must be a whole number, {least} or more', USAGE)
    return int(value)
