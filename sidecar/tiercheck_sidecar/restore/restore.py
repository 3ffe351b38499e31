"""Restores every own rank to the wanted version from the nearest places that prove to be good.

Own memory comes first, then the named sources, each missing artifact from the nearest ones. Every byte is
verified on the way in; what fails is reported by name, so that the controller can decide again without it.
Each failure removes an offer, so that a rank's loop ends: with the whole chain in own memory, or with a
sentence that names what is missing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from itertools import groupby

from tiercheck.failpoints import failpoint
from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.directive import Directive, Phase, Restore, Source, Tier
from tiercheck.protocol.report import Quarantined, RankRestore, RestoreReport, RestoreState
from tiercheck.protocol.version import Artifact
from tiercheck.supervised import describe
from tiercheck_sidecar.artifact_source import FetchFailed, FilledSlot, SourceFailed
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.restore.restore_plan import Need, OutOfReach, RestorePlan, SourceOffer, name_of, plan
from tiercheck_sidecar.restore.sources import RestoreSources
from tiercheck_sidecar.vault import MemoryTooSmall, NoFreeSlot, NotHeld, Vault

log = logging.getLogger(__name__)

_PARALLEL_ARTIFACTS = 4
_FARNESS = list(Tier)


class RankRestorer:
    """Brings `rank` to the version that `directive` names. Used once."""

    def __init__(
        self,
        state: SidecarState,
        vault: Vault,
        reach: RestoreSources,
        verifiers: Executor,
        *,
        directive: Directive,
        rank: int,
        sources: Sequence[Source],
    ) -> None:
        assert directive.restore is not None
        self._state, self._vault, self._reach, self._verifiers = state, vault, reach, verifiers
        self._directive, self._rank, self._version = directive, rank, directive.restore.version
        self._base = directive.restore.base
        self._sources = [source for source in sources if source.tier is not Tier.LOCAL]
        self._places: list[SourceOffer] | None = None
        self._sound: set[Artifact] = set()
        self._brought: dict[Artifact, Source] = {}
        """The source of each artifact; of several peers, the one named first that supplied a part."""
        self._failures: list[str] = []
        self._making_room = threading.Lock()

    def run(self) -> RankRestore:
        began = time.monotonic()
        failpoint("before-restore-load")
        done = self._complete()
        seconds, failures = time.monotonic() - began, tuple(self._failures)
        if done is None:
            return RankRestore(self._rank, None, None, 0, seconds, failures)
        chain = done.artifacts(self._rank)
        used = [self._brought[each] for each in chain if each in self._brought]  # the snapshot first
        tier = max((each.tier for each in used), key=_FARNESS.index, default=Tier.LOCAL)
        rebuilt = chain[0] in self._brought and used[0].parity is not None
        worker = next((each.peer.worker for each in used if each.peer), None)
        return RankRestore(
            rank=self._rank,
            tier=tier,
            worker=worker if tier is Tier.PEER and not rebuilt else None,
            bytes=sum(size for artifact, size in self._own().items() if artifact in chain),
            seconds=seconds,
            failures=failures,
            deltas=len(chain) - 1,
            rebuilt=rebuilt,
        )

    def _complete(self) -> RestorePlan | None:
        """Returns the chain, once all of it lies verified in own memory; None if it cannot."""
        while True:
            if self._state.attempt != self._directive.attempt or self._state.stopping:
                self._failures.append("a newer attempt began")
                return None
            found = plan(
                self._rank,
                self._version,
                self._directive.history,
                self._own(),
                self._places or (),
                base=self._base,
            )
            if isinstance(found, OutOfReach):
                if self._places is None:
                    self._places, failures = self._reach.ask(self._rank, self._version, self._sources)
                    self._failures += failures
                    continue
                self._failures.append(
                    str(found) + ("" if self._sources else ", and no other source is known")
                )
                return None
            self._measure(found)
            unsure = [
                each
                for each in found.artifacts(self._rank)
                if each in self._own() and each not in self._sound
            ]
            if not found.needs and not unsure:
                return found
            with ThreadPoolExecutor(_PARALLEL_ARTIFACTS, thread_name_prefix="artifact") as pool:
                fetching = [pool.submit(self._fetch, need, found) for need in found.needs]
                for artifact in unsure:
                    self._verify(artifact)
                for fetched in fetching:
                    fetched.result()

    def _measure(self, found: RestorePlan) -> None:
        """Records how many bytes the plan needs, and how many of them are done."""
        own, chain = self._own(), found.artifacts(self._rank)
        wanted = sum(own[each] for each in chain if each in own) + sum(need.size for need in found.needs)
        done = sum(own[each] for each in chain if each in own and each in self._sound)
        self._state.meter.plan(self._rank, wanted, done)

    def _own(self) -> dict[Artifact, int]:
        return self._vault.own_artifacts(self._rank)

    def _verify(self, artifact: Artifact) -> None:
        meter = self._state.meter
        try:
            with meter.waiting("own memory"):
                reason = self._vault.fault(
                    artifact, Tier.LOCAL, threads=self._verifiers, read=partial(meter.arrived, artifact.rank)
                )
        except NotHeld:
            return
        except OSError as error:
            reason = str(error)
        if not reason:
            self._sound.add(artifact)
            return
        message = f"the {artifact}, in own memory is bad: {reason}"
        self._failures.append(message)
        self._free(artifact)
        self._distrust(
            Quarantined(artifact.rank, artifact.version, self._state.config.worker, message, artifact.kind)
        )

    def _fetch(self, need: Need, chosen: RestorePlan) -> None:
        for group in _at_once(need.places):
            try:
                filled = self._bring(need.artifact, group, chosen)
            except SourceFailed as error:
                named = f"{', '.join(map(name_of, group))}: {error}"
                self._failures += error.reasons if isinstance(error, FetchFailed) else [named]
                for bad in error.bad:
                    self._distrust(bad)
            except (NoFreeSlot, NotASlot, OSError) as error:
                self._failures.append(f"{', '.join(map(name_of, group))}: {error}")
            except Exception as error:  # of this place: the next one may have it
                log.exception("the %s cannot be brought", need.artifact)
                self._failures.append(f"{', '.join(map(name_of, group))}: {describe(error)}")
            else:
                givers = set(filled.workers) - {bad.worker for bad in filled.bad}
                named_first = (each for each in group if each.peer and each.peer.worker in givers)
                self._brought[need.artifact] = next(named_first, group[0])
                self._sound.add(need.artifact)
                for bad in filled.bad:
                    self._failures.append(bad.reason)
                    self._distrust(bad)
                return
            self._forget(need.artifact, group)

    def _bring(self, artifact: Artifact, group: Sequence[Source], chosen: RestorePlan) -> FilledSlot:
        while True:
            try:
                return self._reach.bring(artifact, group)
            except NoFreeSlot:
                if not self._make_room(artifact, chosen):
                    raise

    def _make_room(self, artifact: Artifact, chosen: RestorePlan) -> bool:
        """Frees one own artifact that the plan does not need, and returns whether it did.
        What the history has cut off goes first, because it can never be read again."""
        with self._making_room:
            accepts = self._directive.history.accepts
            others = [each for each in self._own() if each not in chosen.artifacts(self._rank)]
            if not others:
                return False
            victim = min(
                others, key=lambda each: (accepts(each.version), each.kind is not artifact.kind, each.version)
            )
            return self._free(victim)

    def _free(self, artifact: Artifact) -> bool:
        return bool(self._vault.evict(lambda seal: (seal.artifact, seal.tier) == (artifact, Tier.LOCAL)))

    def _forget(self, artifact: Artifact, group: Sequence[Source]) -> None:
        self._places = [
            SourceOffer(place.source, {each: size for each, size in place.offers.items() if each != artifact})
            if place.source in group
            else place
            for place in self._places or ()
        ]

    def _distrust(self, bad: Quarantined) -> None:
        log.warning("quarantined: %s", bad)
        self._state.quarantine(bad)


def _at_once(places: Sequence[Source]) -> Iterator[list[Source]]:
    """Yields the sources that are asked together: adjacent peers are, as each can bring a part."""
    for _, group in groupby(enumerate(places), lambda pair: -1 if pair[1].peer else pair[0]):
        yield [source for _, source in group]


_PARALLEL_RANKS = 8
_TRIES = 3
"""The number of tries of one restore, before it is reported as failed."""
_VERIFIERS = max(2, min(8, os.cpu_count() or 2))
"""The number of threads that read own memory again, for all ranks together."""


class Restorer:
    """Restores each attempt once, and again with new sources if that failed. One thread."""

    def __init__(self, state: SidecarState, vault: Vault, reach: RestoreSources) -> None:
        self._state, self._vault, self._reach = state, vault, reach
        self._done: tuple[int, str] = (0, "")
        self._tried: tuple[tuple[int, str], int] = ((0, ""), 0)
        """The last restore that was begun, and how often."""

    def run(self) -> None:
        for _ in self._state.looks(timeout=5.0):
            with self._state.lock:
                directive = self._state.directive
                ready = self._state.restore.state is RestoreState.READY
            if directive is None or (ready and self._done[0] == directive.attempt):
                continue
            wanted = (directive.attempt, directive.revision)
            if self._done != wanted:
                self._tried = (wanted, self._tried[1] + 1 if self._tried[0] == wanted else 1)
                try:
                    self.carry_out(directive)
                except BaseException as error:
                    if self._tried[1] < _TRIES:
                        raise  # it may not occur at the next try
                    log.exception("the restore of attempt %d is given up", directive.attempt)
                    why = f"the restore failed {_TRIES} times unexpectedly: {describe(error)}"
                    version = directive.restore.version if directive.restore else None
                    ranks = tuple(RankRestore(rank, None, None, 0, 0.0, (why,)) for rank in self._vault.ranks)
                    # The controller waits for an answer.
                    self._publish(directive, RestoreReport(RestoreState.FAILED, version, ranks))
                self._done = wanted

    def carry_out(self, directive: Directive) -> None:
        """Restores as `directive` demands, and reports the result."""
        state, restore = self._state, directive.restore
        if restore is None or directive.phase is Phase.FINISH or not state.saw_hold:
            # Not seen from its beginning: this process was restarted while the attempt ran, with trainers
            # long past this version. What it holds is what its inventory verified.
            self._publish(directive, RestoreReport(RestoreState.READY, restore.version if restore else None))
            return
        began = time.monotonic()
        self._publish(directive, RestoreReport(RestoreState.RUNNING, restore.version))
        if restore.world_size:
            self._publish(directive, self._check_other_ranks(directive, restore, began))
            return
        with (
            ThreadPoolExecutor(_VERIFIERS, thread_name_prefix="verify") as verifiers,
            ThreadPoolExecutor(_PARALLEL_RANKS, thread_name_prefix="restore") as pool,
        ):
            restorers = [
                RankRestorer(
                    state,
                    self._vault,
                    self._reach,
                    verifiers,
                    directive=directive,
                    rank=rank,
                    sources=restore.table.of_rank(rank),
                )
                for rank in self._vault.ranks
            ]
            ranks = tuple(pool.map(RankRestorer.run, restorers))
        failpoint("after-restore")
        outcome = RestoreState.FAILED if any(rank.tier is None for rank in ranks) else RestoreState.READY
        seconds, stalled = time.monotonic() - began, state.meter.stalled
        self._publish(directive, RestoreReport(outcome, restore.version, ranks, seconds, stalled=stalled))

    def _check_other_ranks(self, directive: Directive, restore: Restore, began: float) -> RestoreReport:
        """Reports whether this worker's share of other ranks' slots can be read.
        All workers together check the slots of all ranks at once."""
        failures: list[str] = []
        with contextlib.closing(self._reach.lender()) as lender:
            for rank in range(directive.worker, restore.world_size, directive.workers):
                artifact = Artifact(rank, restore.version)
                try:
                    lender.lend(directive, artifact, ())
                except (SourceFailed, MemoryTooSmall, OSError) as error:
                    failures.append(f"{artifact}, of {restore.world_size} ranks: {error}")
        tier = None if failures else Tier.PEER
        ranks = tuple(RankRestore(rank, tier, None, 0, 0.0, tuple(failures)) for rank in self._vault.ranks)
        outcome = RestoreState.FAILED if failures else RestoreState.READY
        stalled = self._state.meter.stalled
        return RestoreReport(outcome, restore.version, ranks, time.monotonic() - began, stalled=stalled)

    def _publish(self, directive: Directive, report: RestoreReport) -> None:
        if self._state.report_restore(directive.attempt, report):
            log.info("restore of attempt %d: %s", directive.attempt, report)
