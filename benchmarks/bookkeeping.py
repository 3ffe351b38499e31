"""Measures what the sidecar's loops cost per wake, fresh and after many restarts.

A worker of eight ranks trains. The loops are the real ones, each called as it is and left where it would wait
for news, so that nothing counts but the processor time of their threads. A wake is one look of all of them:
it comes after each artifact that is sealed here, arrives from another worker, or was acknowledged. Artifacts
are small and what is sent is not: bytes are measured elsewhere."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.harness import Figure, Outcome, Scale, scratch, seconds_text
from tiercheck.protocol.artifacts.sizing import Room
from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.directive import DeltaMode, Directive, Peer, Phase, Policy, Tier
from tiercheck.protocol.report import RestoreReport, RestoreState, Watermarks
from tiercheck.protocol.version import Branch, History, Kind, Version
from tiercheck_sidecar.control.report import Reporter
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.model.config import SidecarConfig
from tiercheck_sidecar.model.state import SidecarState
from tiercheck_sidecar.model.tier_verdict import Cadence, TierVerdict
from tiercheck_sidecar.replicate import replicate
from tiercheck_sidecar.replicate.replicate import Replicator
from tiercheck_sidecar.vault import Seal, Vault
from tiercheck_sidecar.versions.reclaim import Reclaimer
from tiercheck_sidecar.versions.tiers import TierClient

RANKS, WORKERS, CADENCE = 8, 512, 3
"""Ranks of a worker, workers, and steps between snapshots (fp32 gradients and AdamW)."""
RESTARTS = {"fresh": (0, 0.001), "after 400 restarts": (400, 0.0015)}
"""How many there were, and the seconds that are promised per wake."""
_BETWEEN = 100
"""Steps between restarts."""
_SNAPSHOT, _DELTA = (SlotLayout.plan([("state", "U8", (size,), size)]) for size in (48 << 10, 16 << 10))


def run(scale: Scale) -> Outcome:
    """The same steps with each history."""
    steps = 6 if scale.quick else 30
    found = {name: measure(restarts, steps) for name, (restarts, _) in RESTARTS.items()}
    return Outcome(figures(found), found)


def measure(restarts: int, steps: int) -> dict[str, Any]:
    """Seconds of the processor per wake, and by loop, in the later half of so many steps."""
    with scratch() as folder, mock.patch.object(replicate, "push", _kept):
        worker, artifacts = _Worker(folder, restarts), 0
        for number in range(steps):
            if number == steps // 2:  # until then slots fill up
                worker.spent.clear()
            worker.train()
            artifacts = max(artifacts, len(worker.vault.held()))
    wakes = [sum(wake.values()) for wake in worker.spent]
    return {
        "wake": statistics.median(wakes),
        "mean": statistics.fmean(wakes),
        "wakes": len(wakes) / (steps - steps // 2),
        "artifacts": artifacts,
        "by loop": {name: statistics.median(wake[name] for wake in worker.spent) for name in worker.spent[0]},
    }


class _Over(BaseException):
    """A loop has nothing more to do until something changes."""


class _Worker:
    """The second of the job's: what it holds, and the loops that look after it."""

    def __init__(self, folder: Path, restarts: int) -> None:
        config = SidecarConfig(
            job="default/benchmark", job_uid="benchmark", worker=1, procs_per_worker=RANKS, pod_uid="pod",
            pod_ip="127.0.0.1", memory_dir=folder, memory_limit=1 << 30, run_dir=folder,
            credentials_dir=folder, remote=None, token="token",
        )  # fmt: skip
        self.spent: list[dict[str, float]] = []
        self._state = state = SidecarState(config)
        self.vault = vault = Vault(config.vault_dir, config.memory_limit, config.ranks, state.bump)
        vault.open()
        every = [Branch(n + 1, n * _BETWEEN, WORKERS * RANKS) for n in range(restarts + 1)]
        self._step, self._attempt = restarts * _BETWEEN, restarts + 1
        self._hosted = range(2 * RANKS, 3 * RANKS)
        state.directive = self._directive(History(tuple(every)))
        state.restore = RestoreReport(RestoreState.READY, None)
        state.wait = self._wait  # type: ignore[method-assign]
        self._looks, self._loops = 0, list(self._all_loops(Replicator(state, vault, None, 0)))  # type: ignore[arg-type]
        for rank in config.ranks:
            vault.reserve(rank, _SNAPSHOT.size, _DELTA.size)
        vault.expect(CADENCE, Room(_SNAPSHOT.size, _DELTA.size))
        vault.prepare()

    def train(self) -> None:
        """One step of all ranks: their deltas, a snapshot if it is due, what other workers send, and the
        coordinator's word."""
        self._step += 1
        kinds = [Kind.DELTA]
        if self._step % CADENCE == 1:
            kinds.insert(0, Kind.SNAPSHOT)
        for kind in kinds:
            for rank in self.vault.ranks:
                self._save(rank, kind)
                self._wake()
        self._judge()
        self._wake()
        for kind in kinds:
            for rank in self._hosted:
                self._receive(rank, kind)
                self._wake()

    def _save(self, rank: int, kind: Kind) -> None:
        version = Version(self._step, self._attempt)
        path = self.vault.begin(rank, version, kind)
        path.write_bytes(_content(rank, version, kind))
        self.vault.complete(path, WORKERS * RANKS)
        assert self.vault.seal(path) is not None

    def _receive(self, rank: int, kind: Kind) -> None:
        version = Version(self._step, self._attempt)
        content = _content(rank, version, kind)
        draft = self.vault.draft(
            Seal(rank, version, WORKERS * RANKS, Tier.PEER, digest(memoryview(content)), kind)
        )
        draft.view[:] = content
        draft.keep()

    def _judge(self) -> None:
        """Everything of this step is sealed everywhere; holders are as late as there are slots for."""
        newest = self._step - (self._step - 1) % CADENCE
        late = max(1, self._step - CADENCE)
        now, held, named, whole = (
            Version(step, self._attempt) for step in (self._step, late, newest, max(1, newest - CADENCE))
        )
        cadence = Cadence(CADENCE, CADENCE, True, _SNAPSHOT.size, _DELTA.size)
        marks = Watermarks(now, held, None, named)
        self._state.follow(
            TierVerdict(self._attempt, marks, held, whole, copy=named, cadence=cadence, placement="x")
        )

    def _wake(self) -> None:
        """Until nothing is news any more."""
        seen = -1
        while seen != self._state._generation:
            seen = self._state._generation
            self.spent.append({name: self._timed(loop, waits) for name, loop, waits in self._loops})

    def _timed(self, loop: Callable[[], object], waits: int) -> float:
        self._looks = waits
        begin = time.thread_time()
        with contextlib.suppress(_Over):
            loop()
        return time.thread_time() - begin

    def _wait(self, seen: int, timeout: float) -> int:
        if not self._looks:
            raise _Over
        self._looks -= 1
        return self._state._generation

    def _all_loops(self, replicator: Replicator) -> Iterator[tuple[str, Callable[[], object], int]]:
        """Name, loop, and how often it waits before it looks."""
        state, vault = self._state, self.vault
        reclaimer, reporter = Reclaimer(state, vault), Reporter(state, vault)
        lanes: list[Callable[[], None]] = []
        with mock.patch.object(state.threads, "loop", lambda _, lane: lanes.append(lane)):
            self._timed(replicator.run, 1)
        tiers = TierClient(state, vault, replicator.acknowledged, lambda *_: ())
        tiers._report = lambda *_: True  # type: ignore[method-assign]
        yield "reclaim", reclaimer.run, 1
        yield "prepare", reclaimer.prepare, 1
        yield "replicate", replicator.run, 1
        for kind, lane in zip(Kind, lanes, strict=True):
            yield f"{kind.value}s", lane, 0
        yield "tiers", tiers.run, 0
        yield "report", reporter.report, 0

    def _directive(self, history: History) -> Directive:
        holder, coordinator = Peer(0, "127.0.0.2"), Peer(5, "127.0.0.6")
        policy = Policy(None, 500, 5, delta=DeltaMode.AUTO)
        return Directive(
            job_uid="benchmark", worker=1, workers=WORKERS, procs_per_worker=RANKS, attempt=self._attempt,
            phase=Phase.RELEASE, history=history, policy=policy, restore=None, holders=(holder,),
            hosted=(Peer(2, "127.0.0.3"),), coordinator=coordinator, master_host="127.0.0.6",
            master_port=29500, placement="x",
        )  # fmt: skip


def _kept(*_: object) -> bool:
    return True


def _content(rank: int, version: Version, kind: Kind) -> bytes:
    layout = _SNAPSHOT if kind is Kind.SNAPSHOT else _DELTA
    head = layout.state_word + layout.header(rank, version, WORKERS * RANKS, {}, kind)
    return head + bytes(layout.size - len(head))


def figures(found: dict[str, Any]) -> list[Figure]:
    return [
        Figure(
            f"sidecar's bookkeeping per wake, {RANKS} ranks, {name}",
            seconds_text(found[name]["wake"]),
            f"promised {seconds_text(promised)}",
            found[name]["wake"] / promised,
            1.0,
            note=f"processor time, median; {found[name]['artifacts']} artifacts",
        )
        for name, (_, promised) in RESTARTS.items()
    ]
