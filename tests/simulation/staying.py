"""Plays ranks that outlive their attempt, by the launcher's real rules and the real listener.

Modelled are the operating system and the rank's second connection to its sidecar. What is sent over that
comes in order, but late, twice, or not at all; then the connection is over, and the next one begins with the
newest order, and with what the rank said last.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.simulation.trainer import Launcher
from tiercheck.launcher import app
from tiercheck.launcher.command import signal_of
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.local import LauncherEvent, Order, StepLeft
from tiercheck.trainer.inprocess import listener as listening
from tiercheck.trainer.inprocess.listener import OrderListener

if TYPE_CHECKING:
    from tests.simulation.process import Process
    from tests.simulation.whole import Pod, Simulation

_SIGTERM, _KILLED = 15, 137
_DECISION = 10.0
"""Seconds, as in `StepLoop`: a rank whose collective failed waits for so long for a newer attempt."""


class StillWaiting(BaseException):
    """A thread would wait here."""


class _OneThread:
    """A condition in the only thread there is."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait(self) -> None:
        raise StillWaiting

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """With `seconds`, when those have passed."""
        if seconds is None and not condition():
            raise StillWaiting
        return condition()


class _Processes:
    """The operating system, to the launcher whose turn it is."""

    here: StayingLauncher
    signal_of = staticmethod(signal_of)

    def reap(self) -> dict[int, int]:
        ended, self.here.ended = self.here.ended, {}
        return ended

    def kill_descendants(self, spared: Collection[int]) -> set[int]:
        for pid in set(self.here.rules._running.values()) - set(spared) - set(self.here.ended):
            self.here.end(pid, _KILLED, by_order=True)
        return set()

    def send_signal(self, pid: int, number: int) -> None:
        self.here.end(pid, 128 + number)


def _make_command(*_: object) -> Any:
    """What is asked of a `TrainingCommand` of one process."""
    nothing = SimpleNamespace(ended=lambda pid: False, check=lambda: None, waiting=frozenset())
    return SimpleNamespace(
        warm=nothing,
        errors=SimpleNamespace(forget=lambda: None, last_lines=lambda: ""),
        running={},
        environment={},
        places=lambda order: range(1),
        ranks_of=lambda local, order: [order.worker],
    )


REPLACED = (
    (app, "processes", _Processes()),
    (app, "TrainingCommand", _make_command),
    (listening, "begin", lambda *_: None),
)
"""While a simulation runs."""


class _SidecarLine:
    """The launcher's connection, which is as reliable as the sidecar."""

    connected = True

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self.coming: list[Order] = []

    def orders(self) -> list[Order]:
        coming, self.coming = self.coming, []
        return coming

    def send(self, event: LauncherEvent) -> None:
        process = self._pod.process
        if process is not None and not process.dead:
            process.state.trainer.event(event, process.state.clock())
            process._bump()


class Wire:
    """The rank's second connection."""

    def __init__(self, world: Simulation, launcher: StayingLauncher, process: Process) -> None:
        self._world, self._launcher, self.process = world, launcher, process
        self._last: Order | None = None
        self._busy_until = world.now
        self.open = True
        assert launcher.listener is not None
        self._listener, self._rank = launcher.listener, launcher.rank
        process.state.trainer.listener_connected(self._rank, self, "")
        process._bump()
        self._listener._socket = self  # type: ignore[assignment]
        self._listener._tell()

    def order(self, order: Order) -> None:
        """The sidecar sends what is new."""
        if order != self._last:
            self._last = order
            self._send(lambda: self._launcher.receive(from_json(to_json(order), Order)))

    def sendall(self, line: bytes) -> None:
        left = from_json(line, StepLeft)

        def arrive() -> None:
            self.process.state.trainer.step_left(self._rank, self, left.attempt, left.failed)
            self.process._bump()

        self._send(arrive)

    def _send(self, arrive: Callable[[], None]) -> None:
        world, bad = self._world, self._world.plan.notices or 0.0
        late = world.rng.uniform(0.0, 4.0) if world.rng.random() < bad else 0.01
        self._busy_until = max(self._busy_until, world.now + late)
        luck = world.rng.random()
        copies = 0 if luck < bad / 2 else 2 if luck < bad else 1

        def come() -> None:
            for _ in range(copies):
                if self.open and not self.process.dead:
                    arrive()
            if not copies:
                self.close()

        world.later(self._busy_until - world.now, come)

    def close(self) -> None:
        self.open = False
        if not self.process.dead:
            self.process.state.trainer.listener_gone(self._rank, self)
            self.process._bump()


class StayingLauncher(Launcher):
    """One pod's launcher and rank."""

    def __init__(self, world: Simulation, pod: Pod) -> None:
        super().__init__(world, pod)
        self._line = _SidecarLine(pod)
        self.rules: Any = app.Launcher((), Path("/run"), {}, 5.0)
        self.rules._line, self.rules._checked = self._line, True
        self.rules._marker = SimpleNamespace(read_text=lambda: "0", write_text=lambda text: None)
        self.rules._out_of_memory = SimpleNamespace(begin=lambda: None, verdict=lambda: "")
        self.rules._command.start_missing = self._begin
        self._pids = itertools.count(1)
        self.ended: dict[int, int] = {}
        """Exit codes of processes that the launcher has not reaped yet, by pid."""
        self.listener: OrderListener | None = None
        self._wire: Wire | None = None
        self._waits = self._cut = False

    @property
    def leaves(self) -> bool:
        """Whether its rank makes no step of its attempt any more, so that nobody's collectives end."""
        return self._cut or self._waits or (self.listener is not None and self.listener.is_interrupted)

    # Launcher

    def connect(self, process: Process) -> None:
        process.state.trainer.launcher_connected()
        self._line.send(self.rules._state)

    def follow(self) -> None:
        process = self.pod.process
        if self.gone:
            return
        if process is not None and not process.dead and not self.world.frozen(self.pod.uid):
            order = process.order()
            if order is not None and order != self.order:
                self.order = order
                self._line.coming = [order]
                if self.running and not self._waits and order.attempt > self.attempt:
                    self.world.record("superseded", pod=self.pod.uid, within=order.interrupt_seconds)
            self._reach_listener(process)
        self._turn()

    def _turn(self) -> None:
        _Processes.here, rules = self, self.rules
        rules._on_orders()
        rules._collect()
        rules._collect()  # whom the first one killed
        if not rules._busy:
            rules._next()

    def _begin(self, order: Order) -> None:
        if self.rules._running:
            return  # it stays
        self.rules._running[0] = next(self._pids)
        self._enter(order.attempt, order.worker)
        self.failed = False

    def _enter(self, attempt: int, rank: int) -> None:
        self.attempt, self.rank, self._life = attempt, rank, self._life + 1
        self.running, self.loaded, self._waits, self._cut = True, False, False, False
        life = self._life
        self.world.later(self.world.rng.uniform(0.1, 1.0), lambda: self._load(life, 30))

    def crash(self, code: int = 1) -> bool:
        if not self.running or self.gone:
            return False
        self._exit(code)
        return True

    def _exit(self, code: int) -> None:
        _Processes.here = self
        self.end(self.rules._running[0], code)
        self._turn()

    def stop(self) -> None:
        if self.running and not self.gone:
            _Processes.here = self
            self.rules._on_signals(bytes([_SIGTERM]))
            self._turn()

    def vanish(self) -> None:
        self._leave_wire()
        super().vanish()

    def end(self, pid: int, code: int, by_order: bool = False) -> None:
        """The process ends."""
        self.ended[pid] = code
        self._leave_wire()
        self._hang_up()
        self.running, self.listener, self.failed = False, None, not by_order
        self._life += 1
        told = None if by_order else code
        self.world.record("ended", pod=self.pod.uid, attempt=self.attempt, code=told)

    def _end(self, life: int, code: int | None) -> None:
        """It cannot load."""
        if life == self._life and self.running and not self.gone:
            self._exit(code or 1)

    # Rank

    def _reach_listener(self, process: Process) -> None:
        wire = self._wire
        if self.listener is None:
            return
        if wire is None or not wire.open or wire.process is not process:
            if self.world.rng.random() < (self.world.plan.notices or 0.0):
                return  # its hello is lost
            self._wire = wire = Wire(self.world, self, process)
        if self.order is not None:
            wire.order(self.order)

    def _leave_wire(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire = None

    def step(self) -> None:
        super().step()
        if self.listener is None and self.order is not None:
            self.listener = OrderListener(
                Path("/run"), self.rank, self.order.workers, self.attempt, self._interrupted
            )
            self.listener._changed = _OneThread()  # type: ignore[assignment]

    def receive(self, order: Order) -> None:
        """The listener's thread gets an order."""
        if self.listener is not None:
            self.listener._follow(order)
            self._wait()

    def _interrupted(self) -> None:
        """Its connections are closed, and some time its training thread gets there, or never."""
        assert self.listener is not None
        by = self.listener._order.attempt if self.listener._order is not None else 0
        self.world.record("interrupted", pod=self.pod.uid, rank=self.rank, attempt=self.attempt, by=by)
        pause = self.world.rng.choice((0.01, 0.01, 0.5, 3.0, 60.0))
        life = self._life
        self.world.later(pause, lambda: self._leave_step(life))

    def _leave_step(self, life: int) -> None:
        if life == self._life and self.running and not self.gone and not self._waits:
            self._hang_up()
            self._life += 1  # whatever was under way in it
            self._waits, self.loaded = True, False
            self.world.record("left", pod=self.pod.uid, rank=self.rank)
            self._wait()

    def _wait(self) -> None:
        """As it waits for the release, it looks again at each order."""
        if not self._waits or self.listener is None:
            return
        try:
            order = self.listener.wait_released(lambda: None)
        except StillWaiting:
            return
        self.world.record("joined", pod=self.pod.uid, rank=self.rank, attempt=order.attempt)
        self._enter(order.attempt, order.worker)

    def lose_peer(self, attempt: int) -> None:
        """A collective has failed. It waits for a newer attempt, and says so if none begins."""
        if self.listener is None:
            self.crash()
        elif attempt == self.attempt and not self._cut:
            self._cut, life = True, self._life
            self.world.later(_DECISION, lambda: self._give_up(life))

    def _give_up(self, life: int) -> None:
        if life == self._life and self.listener is not None and not self.gone:
            with contextlib.suppress(StillWaiting):
                self.listener.wait_interrupted(_DECISION)
