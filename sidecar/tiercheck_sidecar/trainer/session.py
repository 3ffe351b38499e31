"""Serves one rank's connection: its restore, slots for what it saves, and the faults that it found.

Every request but that for another rank's artifact is answered without waiting for the network or for bytes to
be digested. What a rank found wrong is quarantined, so that no version that needs it is restored again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.directive import DeltaMode, Directive, Phase, Tier
from tiercheck.protocol.encoding import to_json
from tiercheck.protocol.local import (
    NOT_RELEASED,
    AbandonSlot,
    BeginSlot,
    BorrowArtifact,
    CompleteSlot,
    DeclineDeltas,
    Hello,
    NamedRequest,
    Reply,
    ReportCannotSave,
    ReportFailing,
    ReportMismatch,
    ReportProgress,
    ReportRestored,
    ReportResume,
    Request,
    ReserveSlots,
    Welcome,
)
from tiercheck.protocol.report import Quarantined, RankFailure, RankRestore, RestoreState, ResumeProof
from tiercheck.protocol.version import Artifact, Chain, Kind, Version, chain_to
from tiercheck_sidecar.artifact_source import SourceFailed
from tiercheck_sidecar.decoding import decode_request
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.restore.sources import ShardReader
from tiercheck_sidecar.vault import MemoryTooSmall, NoDeltas, NoFreeSlot, NotHeld, Vault
from tiercheck_sidecar.vault.stock import MemoryStock

log = logging.getLogger(__name__)


class Quarantine:
    """Quarantines artifacts of one rank in one attempt."""

    def __init__(self, state: SidecarState, vault: Vault, rank: int, attempt: int) -> None:
        self._state, self._vault, self._rank, self._attempt = state, vault, rank, attempt

    def distrust_taken(self, declined: DeclineDeltas) -> None:
        """Quarantines this attempt's deltas from the step at which updates proved not repeatable.
        Nothing is freed: what others rest on is decided elsewhere."""
        rank, why = self._rank, declined.message
        log.error("rank %d: %s", rank, why)
        deltas = [each for each in self._vault.own(rank) if each.kind is Kind.DELTA]
        taken = [each for each in deltas if each.version.attempt == self._attempt]
        self._quarantine([each for each in taken if each.version.step >= declined.step], why)

    def distrust_replay(self, found: ReportMismatch) -> None:
        """Quarantines all deltas of the chain after a replay that did not give the recorded state.
        The state before it may have been wrong already, so no delta counts, wherever a copy of it lies."""
        state, rank = self._state, self._rank
        directive = state.directive
        assert directive is not None
        own, history = self._vault.own_stock(rank), directive.history
        chain = restored_chain(own, directive)
        bad = {each for each in own.deltas if history.accepts(each) and each.step >= found.step}
        bad |= set(chain.deltas) if chain else set()
        reason = (
            f"replaying the delta of step {found.step} did not give the state that it was taken "
            f"from: {found.message}"
        )
        log.error("rank %d: %s", rank, reason)
        state.count(replay_mismatches=1)
        state.distrust_deltas(reason)
        self._quarantine([Artifact(rank, version, Kind.DELTA) for version in sorted(bad)], reason)
        self._vault.evict(
            lambda s: s.kind is Kind.DELTA and s.tier is Tier.LOCAL and s.rank == rank and s.version in bad
        )
        state.bump()

    def distrust_snapshot(self, found: ReportMismatch) -> None:
        """Quarantines a snapshot of which replicas stored contradicting parts, wherever a copy of it lies.
        The replicas had diverged before it, so nothing counts that leads to it or on from it."""
        rank, directive = self._rank, self._state.directive
        owner = None if directive is None else directive.history.owner(found.step)
        if directive is None or owner is None:
            return
        log.error("rank %d: %s", rank, found.message)
        restore = directive.restore
        if restore is not None and restore.world_size:
            self._quarantine([Artifact(rank % restore.world_size, restore.version)], found.message)
            return
        own = self._vault.own_stock(rank)
        bad = [Artifact(rank, Version(found.step, owner))]
        bad += [
            Artifact(rank, each, Kind.DELTA)
            for each in sorted(own.deltas)
            if directive.history.accepts(each) and each.step >= found.step
        ]
        self._quarantine(bad, found.message)
        self._vault.evict(lambda s: s.tier is Tier.LOCAL and Artifact(s.rank, s.version, s.kind) in bad)

    def _quarantine(self, bad: Sequence[Artifact], why: str) -> None:
        worker = self._state.config.worker
        for each in bad:
            self._state.quarantine(
                Quarantined(each.rank, each.version, worker, why, each.kind, everywhere=True)
            )


def restored_chain(own: MemoryStock, directive: Directive) -> Chain | None:
    """Returns the chain in a rank's `own` memory that the directive restores; None: there is none.
    It begins at the snapshot that the directive names, or where that has been freed meanwhile, at another."""
    restore = directive.restore
    if restore is None:
        return None
    version, deltas, history = restore.version, own.deltas, directive.history
    named = {each for each in own.snapshots if each == restore.base}
    return chain_to(version, named, deltas, history) or chain_to(version, own.snapshots, deltas, history)


LONGEST_LINE = 1024 * 1024
_OTHER_RANKS = (
    ": procsPerWorker must be the number of processes in each pod, and the command must not choose ranks or "
    "a rendezvous of its own"
)
_SOURCES = {Tier.LOCAL: "own memory", Tier.PEER: "peer memory", Tier.REMOTE: "the remote store"}


def describe_source(restored: RankRestore | None) -> str:
    """Returns where a rank's version came from, for users; empty if that is not known."""
    if restored is None or restored.tier is None:
        return ""
    return "peer memory (rebuilt from parity)" if restored.rebuilt else _SOURCES[restored.tier]


class RankSession:
    """Serves one rank's connection.
    When it breaks, the slots being written are lost, because their writer may be alive."""

    def __init__(
        self,
        state: SidecarState,
        vault: Vault,
        submit: Callable[[Kind, Callable[[], None]], None],
        connection: socket.socket,
        hello: Hello,
        *,
        lender: ShardReader,
    ) -> None:
        self._state, self._vault, self._submit = state, vault, submit
        self._connection, self._hello = connection, hello
        self._writing: set[Path] = set()
        self._restored = contextlib.ExitStack()
        self._quarantine = Quarantine(state, vault, hello.rank, hello.attempt)
        self._lender = lender
        self._restored.callback(lender.close)

    def serve(self, lines: BinaryIO) -> None:
        """Serves requests until the rank closes the connection. Raises OSError, Malformed."""
        with self._restored:
            welcome = self._welcome()
            self._send(welcome)
            if welcome.error:
                return
            try:
                while line := lines.readline(LONGEST_LINE):
                    reply = self._answer(decode_request(line))
                    if reply is not None:
                        self._send(dataclasses.replace(reply, snapshot_every=self._state.every))
            finally:
                for path in self._writing:
                    self._vault.discard(path)
                with self._state.lock:
                    self._state.trainer.rank_left(self._hello.rank, self._hello.attempt)
                self._state.bump()

    def _send(self, message: Welcome | Reply) -> None:
        self._connection.sendall(to_json(message) + b"\n")

    # Restoring

    def _welcome(self) -> Welcome:
        state, hello = self._state, self._hello
        with state.lock:
            directive, trainer, restored = state.directive, state.trainer, state.restore
            error = self._objection(directive, trainer.lost_container, restored.state)
            if error or directive is None:
                return Welcome(state.attempt, 0, error=error)
            policy = directive.policy
            delta = DeltaMode.NONE if state.deltas_off(hello.rank) else policy.delta
            plain = Welcome(
                directive.attempt,
                state.every,
                delta=delta,
                sanity_gate=policy.sanity_gate,
                verify_all=policy.verify_all,
            )
        if directive.restore is None:
            return plain
        world = directive.restore.world_size or directive.workers * directive.procs_per_worker
        own = next((each for each in restored.ranks if each.rank == hello.rank), None)
        resharded = f"the snapshots of {world} ranks" if directive.restore.world_size else ""
        plain = dataclasses.replace(
            plain,
            restore_version=directive.restore.version,
            restore_world_size=world,
            restore_source=resharded or describe_source(own),
        )
        if directive.restore.world_size:
            return plain
        try:
            snapshot, *deltas = self._pinned(directive)
        except NotHeld:
            # Only after a restart of this sidecar: a rank that already trains needs no paths.
            return plain
        return dataclasses.replace(plain, restore_path=snapshot, restore_deltas=tuple(deltas))

    def _pinned(self, directive: Directive) -> list[str]:
        """Returns the paths of the snapshot and the deltas to restore, kept until the rank has restored.
        Raises NotHeld."""
        rank = self._hello.rank
        chain = restored_chain(self._vault.own_stock(rank), directive)
        if chain is None:
            raise NotHeld(f"what rank {rank} is to restore is not here")
        with contextlib.ExitStack() as stack:
            whole = Artifact(rank, chain.base), *(Artifact(rank, each, Kind.DELTA) for each in chain.deltas)
            paths = [stack.enter_context(self._vault.pin(each, Tier.LOCAL)).path for each in whole]
            self._restored.push(stack.pop_all())
        return [str(path) for path in paths]

    def _objection(self, directive: Directive | None, lost: bool, state: RestoreState) -> str:
        hello = self._hello
        if directive is None:
            return "the operator has not sent this sidecar a directive yet"
        if hello.rank not in self._vault.ranks:
            return f"rank {hello.rank} does not belong to worker {self._state.config.worker}{_OTHER_RANKS}"
        other = self._state.fence.refuse_other(hello.attempt, directive)
        if other:
            return other
        world = directive.workers * directive.procs_per_worker
        if hello.world_size != world:
            return f"the job has {world} ranks, not {hello.world_size}{_OTHER_RANKS}"
        if directive.phase is Phase.HOLD or state is not RestoreState.READY:
            return NOT_RELEASED
        if lost:
            return f"attempt {directive.attempt} ended here when the trainer container was restarted"
        return ""

    # Requests

    def _answer(self, request: Request | NamedRequest) -> Reply | None:
        if isinstance(request, ReportProgress):
            self._progress(request)
            return None
        try:
            if not isinstance(request, AbandonSlot):
                other = self._state.fence.refuse_other(self._hello.attempt, self._state.directive)
                if other:
                    return Reply(False, error=other)
            return self._act(request)
        except MemoryTooSmall as reason:
            self._state.problem("MemoryTooSmall", str(reason))
            return Reply(False, error=str(reason))
        except (NoFreeSlot, NotASlot, SourceFailed, ValueError, OSError) as error:
            return Reply(False, error=str(error))

    def _lent(self, request: BorrowArtifact) -> Path:
        """Returns the requested file. Raises SourceFailed, MemoryTooSmall, OSError."""
        directive = self._state.directive
        if directive is None or directive.restore is None or directive.attempt != self._hello.attempt:
            raise SourceFailed("there is nothing to restore")
        version = directive.restore.version
        if (request.kind, request.step) != (Kind.SNAPSHOT, version.step):
            wanted = f"no {request.kind.value} of step {request.step}"
            raise SourceFailed(f"the version to restore is {version}, which needs {wanted}")
        return self._lender.lend(directive, Artifact(request.rank, version), request.ranges)

    def _progress(self, request: ReportProgress) -> None:
        state = self._state
        if state.attempt != self._hello.attempt:
            return
        with state.lock:
            before = state.trainer.report
            state.trainer.progress(self._hello.rank, request.step, request.step_seconds, state.clock())
            refused = state.trainer.not_finite(self._hello.rank, request.not_finite)
            after = state.trainer.report
        if refused:
            state.count(not_finite=refused)
        known = (before.first_step_at is not None, before.not_finite, before.stalled_since)
        if known != (True, after.not_finite, after.stalled_since):
            state.bump()

    def _act(self, request: Request | NamedRequest) -> Reply:
        """Raises MemoryTooSmall, NoFreeSlot, NotASlot, SourceFailed, ValueError, OSError."""
        vault, state, rank = self._vault, self._state, self._hello.rank
        match request:
            case ReserveSlots():
                vault.reserve(rank, request.bytes, request.delta_bytes, request.numa)
                state.problem("MemoryTooSmall", "")
                state.bump()
            case BeginSlot():
                return self._begin(request)
            case CompleteSlot():
                path = Path(request.path)
                self._writing.discard(path)
                kind = vault.complete(path, self._hello.world_size)
                self._submit(kind, lambda: self._seal(path))
            case AbandonSlot():
                self._writing.discard(Path(request.path))
                vault.release(Path(request.path))
            case DeclineDeltas():
                state.decline_deltas(rank, request.message)
                if request.step:
                    self._quarantine.distrust_taken(request)
                state.bump()
            case ReportCannotSave():
                state.cannot_save(rank, request.message[:1000])
            case ReportFailing():
                failure = RankFailure(rank, request.reason[:64], request.message[:1000], request.exit_code)
                with state.lock:
                    state.trainer.failing(failure)
                state.bump()
            case ReportMismatch():
                self._restored.close()
                if request.kind is Kind.SNAPSHOT:
                    self._quarantine.distrust_snapshot(request)
                else:
                    self._quarantine.distrust_replay(request)
            case BorrowArtifact():
                return Reply(True, str(self._lent(request)))
            case ReportRestored():
                self._restored.close()
            case ReportResume():
                said = request.message[:1000]
                proof = ResumeProof(rank, request.step, request.exact, request.steps, said, request.suspected)
                with state.lock:
                    state.trainer.resumed(proof, len(vault.ranks))
                state.bump()
            case _:
                return Reply(False, error=f"unknown request {request.op!r}")
        return Reply(True)

    def _begin(self, request: BeginSlot) -> Reply:
        version = Version(request.step, self._hello.attempt)
        try:
            if request.kind is Kind.DELTA:
                self._check_delta(version)
            path = self._vault.begin(self._hello.rank, version, request.kind, request.bytes)
        except NoDeltas as reason:
            return Reply(True, skip=str(reason))
        except NoFreeSlot as reason:
            return self._skip(version, request.kind, str(reason))
        except MemoryTooSmall as reason:
            self._state.problem("MemoryTooSmall", str(reason))
            return self._skip(version, request.kind, str(reason))
        self._writing.add(path)
        if request.kind is Kind.SNAPSHOT:
            self._state.reach(self._hello.rank, version)
        return Reply(True, path=str(path))

    def _check_delta(self, version: Version) -> None:
        """Raises NoDeltas if none is due, NoFreeSlot if a missing one before it makes this one worthless."""
        with self._state.lock:
            directive, verdict = self._state.directive, self._state.verdict
        reason = self._state.deltas_off(self._hello.rank)
        if reason:
            raise NoDeltas(reason)
        if directive is None or not directive.policy.deltas:
            raise NoDeltas("the job takes no deltas")
        if verdict is not None and not verdict.cadence.deltas:
            raise NoDeltas("some rank of the job takes no deltas, so those of this one would lead nowhere")
        here = self._vault.own(self._hello.rank)
        if not any(each.kind is Kind.SNAPSHOT and directive.history.continues(each.version) for each in here):
            raise NoDeltas("there is no snapshot yet that it could follow")
        owner = directive.history.owner(version.step - 1)
        before = None if owner is None else Version(version.step - 1, owner)
        if (
            before is None
            or not directive.history.continues(before)
            or before not in {each.version for each in here}
        ):
            raise NoFreeSlot("an earlier delta is missing: the next snapshot begins a new chain")

    def _skip(self, version: Version, kind: Kind, reason: str) -> Reply:
        if kind is Kind.DELTA:
            self._state.count(deltas_skipped=1)
        else:
            self._state.count(skipped=1)
            self._state.reach(self._hello.rank, version)
        return Reply(True, skip=reason)

    def _seal(self, path: Path) -> None:
        seal = self._vault.seal(path)
        if seal is not None:
            self._state.count(**{"captured" if seal.kind is Kind.SNAPSHOT else "deltas": 1})
        self._state.bump()
