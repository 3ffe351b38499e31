"""Rebuilds a lost artifact from what its parity group holds and from blocks of parity.

The same chunk is asked of all parts at once and folded piece by piece while it is in the cache; only the
result is digested. Where it is not what it should be, the parts are read again and digested one by one, so
that the bad one can be named, and another block takes its place if there is one.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tiercheck.plain_files import open_plain
from tiercheck.protocol.directive import ParityGroup, Tier
from tiercheck.protocol.report import Quarantined
from tiercheck.protocol.version import Artifact, Share
from tiercheck_sidecar import coding
from tiercheck_sidecar.bounded_calls import SourceCorrupt, SourceFailed
from tiercheck_sidecar.exchange.streams import STREAMS
from tiercheck_sidecar.parity.parts import (
    DescribedPart,
    DialPeer,
    PartFailed,
    PartMissing,
    RebuildPart,
    Unfolding,
)
from tiercheck_sidecar.vault import Seal, Vault

log = logging.getLogger(__name__)

_STRIKES = 2
"""Broken connections after which a part is given up."""


def rebuild(
    vault: Vault,
    artifact: Artifact,
    group: ParityGroup,
    dial: DialPeer,
    on_bad: Callable[[Quarantined], None] = lambda bad: None,
) -> Seal:
    """Rebuild an own artifact into a sealed own slot. `on_bad` as of `Rebuild`. Raises SourceFailed
    (SourceCorrupt if bad parts are the reason), NoFreeSlot, NotASlot, OSError.
    """
    found = Rebuild(artifact, group.coded_with(artifact.rank, len(vault.ranks)), group, dial, on_bad)
    seal = Seal(artifact.rank, artifact.version, found.world_size, Tier.LOCAL, found.digests, artifact.kind)
    with contextlib.ExitStack() as stack:
        draft = vault.draft(seal)
        stack.callback(draft.release)
        file = stack.enter_context(open(open_plain(draft.path, write=True), "r+b"))
        found.unfold(file.fileno(), range(len(found.digests.values)))
        draft.keep()
    return seal


class Rebuild:
    """Of one artifact, coded with those of `ranks`. Made when all parts have said what they have, and these
    are enough.

    `on_bad` hears of each part that proved to be bad, also if another took its place. `tell`: its worker too,
    which then frees it. Raises SourceFailed.
    """

    def __init__(
        self,
        artifact: Artifact,
        ranks: Sequence[int],
        group: ParityGroup,
        dial: DialPeer,
        on_bad: Callable[[Quarantined], None] = lambda bad: None,
        *,
        tell: bool = True,
    ) -> None:
        self._artifact, self._dial, self._on_bad, self._tell = artifact, dial, on_bad, tell
        self._me = ranks.index(artifact.rank)
        self._data = len(ranks)
        self._members = {
            position: RebuildPart(peer, Artifact(rank, artifact.version, artifact.kind))
            for position, (peer, rank) in enumerate(zip(group.members, ranks, strict=True))
            if position != self._me and peer.host
        }
        self._blocks = {
            index: RebuildPart(peer, artifact, Share(index, tuple(ranks)))
            for index, peer in enumerate(group.holders)
            if peer.host
        }
        self._found: dict[RebuildPart, DescribedPart] = {}
        self._failures: list[str] = []
        self._strikes: Counter[RebuildPart] = Counter()
        self._corrupt = False
        block = self._search()
        self.digests, self.world_size = block.members[self._me], block.world_size
        self._recipe()  # before anything is taken for it

    def unfold(self, file: int, chunks: Iterable[int]) -> None:
        """Write these chunks, verified, to their places in an open file. Raises SourceFailed (SourceCorrupt
        if bad parts are the reason), OSError."""
        unfolding = Unfolding(file, self.digests, chunks, self._dial)
        while not unfolding.done:
            try:
                unfolding.go_on(self._recipe(), STREAMS)
            except PartFailed as failed:
                self._give_up(failed)

    def _search(self) -> DescribedPart:
        """Ask everybody at once what they have. Returns what the blocks say. Raises SourceFailed."""
        parts = (*self._blocks.values(), *self._members.values())
        with ThreadPoolExecutor(max(1, len(parts)), thread_name_prefix="rebuild") as pool:
            for part, found in zip(parts, pool.map(self._ask, parts), strict=True):
                if found is not None:
                    self._found[part] = found
        blocks = [self._found[part] for part in self._blocks.values() if part in self._found]
        truth = next((each for each in blocks if len(each.members) == self._data), None)
        if truth is None:
            raise SourceFailed("no parity block of it is left: " + "; ".join(self._failures))
        for position, part in self._members.items():
            if part in self._found and self._found[part].digests != truth.members[position]:
                self._drop(part, "it is not what the parity was made from")
        for part in self._blocks.values():
            if part in self._found and self._found[part].members != truth.members:
                self._drop(part, "it was made from other bytes")
        return truth

    def _ask(self, part: RebuildPart) -> DescribedPart | None:
        try:
            return part.find(self._dial)
        except PartMissing as error:
            self._failures.append(str(error))
            return None

    def _recipe(self) -> dict[RebuildPart, tuple[int, DescribedPart]]:
        """Which parts to read now, with their weights. Raises SourceFailed."""
        lost = set(range(self._data)) - {
            place for place, part in self._members.items() if part in self._found
        }
        left = [index for index, part in self._blocks.items() if part in self._found]
        try:
            recipe = coding.recipe(self._data, self._me, lost, left)
        except (coding.NotRecoverable, coding.LibraryMissing) as error:
            kind = SourceCorrupt if self._corrupt else SourceFailed
            raise kind("; ".join((str(error), *self._failures))) from error
        weights = {self._members[position]: weight for position, weight in recipe.members.items()}
        weights |= {self._blocks[index]: weight for index, weight in recipe.blocks.items()}
        return {part: (weight, self._found[part]) for part, weight in weights.items() if weight}

    def _give_up(self, failed: PartFailed) -> None:
        part = failed.part
        if failed.corrupt or failed.certain:
            reason = part.accuse(self._dial) if self._tell and not failed.certain else str(failed)
            if reason:
                self._corrupt = True
                rank = part.share.ranks[0] if part.share else part.artifact.rank
                version, kind = part.artifact.version, part.artifact.kind
                self._on_bad(Quarantined(rank, version, part.peer.worker, reason, kind))
                self._drop(part, reason)
                return
        self._strikes[part] += 1
        if self._strikes[part] >= _STRIKES:
            self._drop(part, str(failed))

    def _drop(self, part: RebuildPart, reason: str) -> None:
        log.warning("rebuild of %s goes on without %s: %s", self._artifact, part, reason)
        self._failures.append(f"{part}: {reason}")
        self._found.pop(part, None)
