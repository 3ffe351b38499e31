"""Models one pod's launcher and rank, which speak through the real `RankSession`.

A state is eight bytes: a digest of the state before, the rank, the step and the attempt. So two attempts that
reach the same step are in different states, and whoever loads something that was never trained is found out.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulation import store
from tiercheck.protocol.artifacts.slot import NotASlot
from tiercheck.protocol.directive import DeltaMode, Phase
from tiercheck.protocol.local import (
    BeginSlot,
    CompleteSlot,
    Hello,
    LauncherEvent,
    Order,
    ReportProgress,
    ReportRestored,
    Request,
    ReserveSlots,
    Welcome,
)
from tiercheck.protocol.report import SPARE
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.trainer.session import RankSession

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.whole import Pod, Simulation

FRESH = bytes(8)


def trained(before: bytes, rank: int, step: int, attempt: int) -> bytes:
    """The state after one more step."""
    return hashlib.blake2b(before + struct.pack("<iii", rank, step, attempt), digest_size=8).digest()


class Launcher:
    """Follows orders; runs one rank. It outlives its sidecar."""

    def __init__(self, world: Simulation, pod: Pod) -> None:
        self.world, self.pod, self.gone = world, pod, False
        self.order: Order | None = None
        self.said: LauncherEvent | None = None
        self.attempt, self.rank = 0, -1
        self.running = self.loaded = self._ending = False
        self.failed = False
        """The command of this attempt ended with an error."""
        self.position, self.state = 0, FRESH
        self._session: RankSession | None = None
        self._served_by: Process | None = None
        self._life = 0
        self._every, self._deltas = 0, False
        self._given_up = False
        """The sidecar gave no answer in time: the connection is closed when it is there again."""

    # Launcher

    def connect(self, process: Process) -> None:
        process.state.trainer.launcher_connected()
        if self.said is None and self.pod.born_as == SPARE:
            self.said = LauncherEvent("idle", 0)
        if self.said is not None:
            process.state.trainer.event(self.said, process.state.clock())

    def follow(self) -> None:
        process = self.pod.process
        if self.gone or process is None or process.dead:
            return
        order, known = process.order(), self.order
        if order is not None and (
            known is None or (order.attempt, order.phase.order) >= (known.attempt, known.phase.order)
        ):
            self.order = order
        self._act()

    def _act(self) -> None:
        order = self.order
        if order is None or self.gone:
            return
        if self.running:
            if not self._ending and (order.phase is Phase.FINISH or order.attempt > self.attempt):
                self._ending = True
                life = self._life
                self.world.later(self.world.rng.uniform(0.05, 1.5), lambda: self._end(life, None))
            return
        last = self.said.attempt if self.said else 0
        if order.phase is Phase.FINISH:
            return
        if order.attempt > last:
            if order.phase is Phase.HOLD:
                self._say(LauncherEvent("idle", order.attempt))
            else:
                self._start(order)
        elif order.phase is Phase.RELEASE and self.said is not None and self.said.event == "idle":
            self._start(order)

    def _say(self, event: LauncherEvent) -> None:
        self.said = event
        process = self.pod.process
        if process is not None and not process.dead:
            process.state.trainer.event(event, process.state.clock())
            process._bump()

    def _start(self, order: Order) -> None:
        self.attempt, self.rank, self._life = order.attempt, order.worker, self._life + 1
        self.running, self.loaded, self._ending, self.failed = True, False, False, False
        self._say(LauncherEvent("started", order.attempt))
        life = self._life
        self.world.later(self.world.rng.uniform(0.1, 1.0), lambda: self._load(life, 30))

    def crash(self, code: int = 1) -> bool:
        """The command ends with an error."""
        if not self.running or self.gone:
            return False
        self._end(self._life, code)
        return True

    def lose_peer(self, attempt: int) -> None:
        """Another rank of the attempt is gone, so a collective fails."""
        self.crash()

    @property
    def leaves(self) -> bool:
        """Whether its rank makes no step of its attempt any more, although it runs."""
        return False

    def stop(self) -> None:
        """The container is asked to end: the command is stopped at once."""
        if self.running and not self.gone:
            self._end(self._life, 143)

    def vanish(self) -> None:
        """The container is gone without a word."""
        self._hang_up()
        self.running, self.gone = False, True

    def _end(self, life: int, code: int | None) -> None:
        """`code`: None if the command was ended by order, of which nothing is said."""
        if life != self._life or not self.running or self.gone:
            return
        self._hang_up()
        self.running, self._ending, self.failed = False, False, code is not None
        self.world.record("ended", pod=self.pod.uid, attempt=self.attempt, code=code)
        if code is not None:
            self._say(LauncherEvent("exited", self.attempt, code, "Crashed"))
        self._act()

    # Rank

    def _hang_up(self) -> None:
        self._given_up = False
        session, process = self._session, self._served_by
        self._session = self._served_by = None
        if session is None or process is None or process.dead:
            return
        session._restored.close()
        for path in session._writing:
            process.vault.discard(path)
        process.state.trainer.rank_left(self.rank, self.attempt)
        process._bump()

    def _greet(self) -> Welcome | None:
        process, order = self.pod.process, self.order
        if process is None or process.dead or order is None or self.world.frozen(self.pod.uid):
            return None
        hello = Hello("rank", 1, self.rank, order.workers, self.attempt)
        lender: Any = SimpleNamespace(close=lambda: None)
        session = RankSession(process.state, process.vault, self._submit, None, hello, lender=lender)  # type: ignore[arg-type]
        welcome = session._welcome()
        if welcome.error:
            return None
        self._session, self._served_by = session, process
        # A sidecar that has just begun may not know it yet.
        self._every = welcome.snapshot_every or self._every
        self._deltas = welcome.delta is not DeltaMode.NONE
        deltas = store.DELTA_BYTES if self._deltas else 0
        self._ask(ReserveSlots(store.SNAPSHOT_BYTES, deltas))
        if self.loaded:
            # A sidecar that was started again keeps what it would load, until it hears this.
            self._ask(ReportRestored())
        return welcome

    def _submit(self, kind: Kind, work: Any) -> None:
        """Digesting takes a moment; it ends with its process."""
        process = self._served_by

        def run() -> None:
            if process is not None and not process.dead:
                work()

        self.world.later(self.world.rng.uniform(0.01, 0.4), run)

    def _load(self, life: int, tries: int) -> None:
        if life != self._life or not self.running or self.gone:
            return
        welcome = self._greet()
        if welcome is None:
            if tries:
                self.world.later(1.0, lambda: self._load(life, tries - 1))
            else:
                self._end(life, 1)
            return
        version = welcome.restore_version
        try:
            self.state = FRESH if version is None else self._read(welcome)
        except (NotASlot, KeyError, OSError):
            self._end(life, 1)
            return
        self.position = version.step if version else 0
        self._ask(ReportRestored())
        self.loaded = True
        self.world.record(
            "started",
            pod=self.pod.uid,
            rank=self.rank,
            attempt=self.attempt,
            version=version,
            first=version.step - len(welcome.restore_deltas) if version else 0,
            state=self.state,
        )

    def _read(self, welcome: Welcome) -> bytes:
        """The snapshot, and each delta applied to what came before. Raises KeyError, NotASlot."""
        files = self.world.volumes.files
        state = store.read_snapshot(files[Path(welcome.restore_path)])
        for path in welcome.restore_deltas:
            before, after = store.read_delta(files[Path(path)])
            # A replay on another state gives neither.
            state = after if before == state else trained(state, -1, 0, 0)
        return state

    def _ask(self, request: Request) -> Any:
        assert self._session is not None
        return self._session._answer(request)

    def step(self) -> None:
        """One optimizer step, and what is saved of it."""
        before, self.position = self.state, self.position + 1
        self.state = trained(before, self.rank, self.position, self.attempt)
        self.world.record("step", rank=self.rank, attempt=self.attempt, step=self.position, state=self.state)
        if self._served_by is not self.pod.process or (self._served_by and self._served_by.dead):
            self._session = self._served_by = None
        if self.world.frozen(self.pod.uid):
            self._given_up = self._session is not None
            return
        if self._given_up:
            self._hang_up()
        if self._session is None and self._greet() is None:
            return
        self._ask(ReportProgress(self.position, step_seconds=1.0))
        if self._deltas:
            self._save(Kind.DELTA, before)
        if self._every and self.position % self._every == 0:
            self._save(Kind.SNAPSHOT, before)

    def _save(self, kind: Kind, before: bytes) -> None:
        size = store.SNAPSHOT_BYTES if kind is Kind.SNAPSHOT else store.DELTA_BYTES
        reply = self._ask(BeginSlot(self.position, size, kind))
        self._every = (
            reply.snapshot_every or self._every or (self._session._state.every if self._session else 0)
        )
        if not reply.path:
            return
        session, state = self._session, self.state
        name = Artifact(self.rank, Version(self.position, self.attempt), kind)
        assert self.order is not None
        world_size = self.order.workers

        def write() -> None:
            """The copy ends before the next step's update."""
            area = self.world.volumes.files.get(Path(reply.path))
            if self._session is not session or session is None or area is None or self.gone:
                return
            if self.world.frozen(self.pod.uid):
                self._given_up = True
                return
            if kind is Kind.SNAPSHOT:
                store.write_snapshot(area, name, world_size, state)
            else:
                store.write_delta(area, name, world_size, before, state)
            session._answer(CompleteSlot(reply.path, bytes=size, kind=kind))

        self.world.later(self.world.rng.uniform(0.05, 0.8), write)
