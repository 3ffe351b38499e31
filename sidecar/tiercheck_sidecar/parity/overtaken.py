"""When a block that is still being made is given up: a rule, so that memory is bounded without a clock."""

from __future__ import annotations

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.version import History, Version
from tiercheck_sidecar.watermark import TierVerdict


def overtaken(version: Version, kind: Kind, history: History, verdict: TierVerdict | None) -> bool:
    """Whether an incomplete block of `version` can be given up in attempt `history.attempt`.

    One snapshot is copied at a time, so one older than the named one will get no more chunks. The named one is wanted even when
    deltas have carried the floor past it: later versions will be rebuilt from it. What else is older than the floor will not be
    restored, or its block would be complete.
    """
    if not history.accepts(version):
        return True
    if verdict is None or verdict.attempt != history.attempt:
        return False
    if kind is Kind.SNAPSHOT:
        if version == verdict.copy:
            return False
        if version in verdict.abandoned or (verdict.copy is not None and version < verdict.copy):
            return True
    return verdict.floor is not None and version < verdict.floor
