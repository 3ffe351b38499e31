"""Rules of completeness, asked with plain reports: each time of a tally that begins anew."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from tiercheck.protocol.version import History, Version
from tiercheck_sidecar.versions import watermark
from tiercheck_sidecar.versions.tally import RankShape, Tally
from tiercheck_sidecar.versions.watermark import Copy, RankTiers, TierReport, TierStanding, TierVerdict
from tiercheck_sidecar.versions.words import Vocabulary


def tally_of(ranks: Mapping[int, RankTiers], copies: Collection[Copy] = ()) -> Tally:
    """One worker has all ranks, and keeps all copies."""
    tally = Tally()
    tally.put(Vocabulary().word_of(TierReport("job", 1, 0, "host", tuple(ranks.values()), tuple(copies))))
    return tally


def shapes_of(ranks: Mapping[int, RankTiers]) -> list[RankShape]:
    return tally_of(ranks).shapes


def judge(
    world_size: int,
    ranks: Mapping[int, RankTiers],
    history: History,
    before: TierStanding,
    copies: Collection[Copy] = (),
) -> tuple[TierStanding, TierVerdict]:
    return watermark.judge(world_size, tally_of(ranks, copies), history, before)


def next_upload(
    standing: TierStanding, history: History, ranks: Mapping[int, RankTiers], **more: Any
) -> Version | None:
    return watermark.next_upload(standing, history, shapes_of(ranks), **more)
