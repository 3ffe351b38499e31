"""Runs the training command in response to the sidecar's orders, signals and the exits of processes.

One thread with one selector. The launcher sends its state to the sidecar at each change and after each new
connection, so that nothing is lost when the sidecar restarts.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tiercheck.failpoints import failpoint
from tiercheck.launcher import command as processes
from tiercheck.launcher.command import CGROUP, OutOfMemory, RelayedOutput, dump_stacks
from tiercheck.launcher.environment import RunningCheck, command_environment, seconds_of, torch_missing
from tiercheck.launcher.sidecar_connection import SidecarConnection
from tiercheck.launcher.training_command import CannotExecute, TrainingCommand
from tiercheck.launcher.warm import ENV_WARM_AFTER_SECONDS
from tiercheck.protocol import names
from tiercheck.protocol.directive import HealthCheck, Phase
from tiercheck.protocol.local import LauncherEvent, Order
from tiercheck.protocol.names import ENV_RUN_DIR, RUN_DIR, SOCKET_NAME
from tiercheck.supervised import describe

ENV_STOP_SECONDS = "TIERCHECK_STOP_SECONDS"
"""Seconds from SIGTERM until the command is killed; 5 if not set. A new attempt kills it at once."""

ENV_UNKILLABLE_SECONDS = "TIERCHECK_UNKILLABLE_SECONDS"
"""Seconds until a killed process that still exists is reported to the sidecar as stuck; 30 if not set."""

ENV_CGROUP_DIR = "TIERCHECK_CGROUP_DIR"
"""The folder of the container's cgroup; /sys/fs/cgroup if not set."""

_CONNECT_EVERY = 0.2
_SWEEP_EVERY = 0.05
_SWEEP_STUCK_EVERY = 1.0
_CHECK_AGAIN_AFTER = 60.0


class Launcher:
    """Runs `command` as the sidecar orders. `run` returns the exit code of the container."""

    def __init__(
        self, command: Sequence[str], run_dir: Path, environment: Mapping[str, str], stop_seconds: float
    ) -> None:
        self._command = TrainingCommand(command, environment)
        self._warm, self._errors = self._command.warm, self._command.errors
        self._running = self._command.running
        self._stop_seconds = stop_seconds
        self._line = SidecarConnection(run_dir / SOCKET_NAME)
        self._marker = run_dir / "launcher.attempt"
        self._order: Order | None = None
        self._attempt = 0
        """The attempt of the command that runs or ran last."""
        self._ahead: Order | None = None
        """The order that started a command that waits in `restore` for its attempt's release."""
        self._state = LauncherEvent("idle", 0)
        self._sweeping = False
        """True while processes that the ended command left behind are being killed."""
        self._exit_code = 0
        self._stop_deadline: float | None = None
        self._killing_since: float | None = None
        """The monotonic time at which killed processes were first seen to still exist."""
        self._stuck_after = seconds_of(environment, ENV_UNKILLABLE_SECONDS, 30.0)
        self._signalled: int | None = None
        self._checked = False
        self._out_of_memory = OutOfMemory(Path(environment.get(ENV_CGROUP_DIR, CGROUP)))
        self._dumped = 0
        self._warm_after = seconds_of(environment, ENV_WARM_AFTER_SECONDS, 10.0)
        self._warm_at = 0.0
        """The monotonic time from which the next interpreter may be prepared beside the running command."""
        self._watched: dict[str, Any] = {}
        self._check: RunningCheck | None = None
        self._check_passed = 0
        self._check_failed: tuple[HealthCheck, float] | None = None
        self._fault = ""

    def run(self) -> int:
        """Runs until an order to finish, or until the command has ended after a stop signal."""
        processes.adopt_orphans()
        with selectors.DefaultSelector() as selector, _signals() as wakeups:
            selector.register(wakeups, selectors.EVENT_READ, "signal")
            while (code := self._turn(selector, wakeups)) is None:
                pass
        self._warm.close()
        self._line.close()
        self._errors.relay()
        return code

    def _turn(self, selector: selectors.BaseSelector, wakeups: socket.socket) -> int | None:
        """Waits for events and handles them. Returns the container's exit code when its work is over."""
        try:
            for output in self._outputs:  # first: an error below must not block the command
                output.relay()
            self._connect()
            self._prepare()
            self._watch(selector)
            for key, _ in selector.select(self._pause()):
                if key.data == "signal":
                    self._on_signals(wakeups.recv(4096))
                elif key.data == "warm":
                    self._warm.listen()
                elif key.data == "sidecar":
                    self._on_orders()
            self._collect()
            return None if self._busy or self._check is not None else self._next()
        except Exception as error:
            if not self._busy:
                raise
            self._state = replace(self._state, fault=describe(error))  # sent with the next connection
            fault, before = traceback.format_exc(), self._fault
            self._fault = fault
            if fault != before:  # a launcher error must not end a training or fill its log
                print(fault, file=sys.stderr, flush=True)
            self._line.close()
            time.sleep(_CONNECT_EVERY)
            return None

    # Events.

    def _connect(self) -> None:
        if not self._line.connected and self._line.connect():
            self._line.send(self._state)
            if self._line.connected:
                self._state = replace(self._state, fault="")

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Registers the open channels with the selector.

        Closed channels are unregistered first, because their descriptor numbers may be reused."""
        check = None if self._check is None else self._check.output.channel
        now = {
            "sidecar": self._line.channel,
            "warm": self._warm.channel,
            "check": check,
            "errors": self._errors.channel,
        }
        for name, channel in list(self._watched.items()):
            if channel is not now[name]:
                selector.unregister(self._watched.pop(name))
        for name, found in now.items():
            if found is not None and name not in self._watched:
                selector.register(found, selectors.EVENT_READ, name)
                self._watched[name] = found

    def _on_orders(self) -> None:
        for order in self._line.orders():
            known = self._order
            if known is None or (order.attempt, order.phase.order) >= (known.attempt, known.phase.order):
                self._order = order
                self._follow(order)

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in (signal.SIGTERM, signal.SIGINT):
                self._signalled = number
                self._stop(number)

    def _collect(self) -> None:
        ended = processes.reap()
        unborn = {pid for pid in ended if self._warm.ended(pid)}
        for local, pid in list(self._running.items()):
            if pid in unborn and self._order is not None and self._stop_deadline is None:
                self._execute(partial(self._command.start, self._order, local), self._order)
            elif pid in ended:
                self._rank_ended(local, ended[pid])
        self._warm.check()
        if self._sweeping or self._overdue or self._superseded:
            self._kill_rest()
        if self._check is not None:
            if self._check.pid in ended:
                self._check.ended(ended[self._check.pid])
            self._judge(self._check)

    def _rank_ended(self, local: int, code: int) -> None:
        """Records the first failure as the command's exit code, and reports it at once.

        The other ranks may be waiting for the failed one."""
        del self._running[local]
        self._sweeping = not self._running
        first = code != 0 and self._exit_code == 0
        if first:
            self._exit_code = code
        if first and self._running and self._stop_deadline is None and self._signalled is None:
            self._report_exit()

    def _judge(self, check: RunningCheck) -> None:
        """Reports the result of a finished health check, or discards one that is not needed any more."""
        order = self._order
        wanted = order is not None and (order.attempt, order.health_check) == (check.attempt, check.wanted)
        wanted = wanted and order is not None and order.phase is not Phase.FINISH and self._signalled is None
        if (wanted and not check.over) or not check.kill(self._warm.waiting):
            return
        if wanted and (failure := check.failure()):
            self._check_failed = (check.wanted, time.monotonic() + _CHECK_AGAIN_AFTER)
            self._report(LauncherEvent("unhealthy", check.attempt, check.code, message=failure))
        elif wanted:
            self._check_passed = check.attempt
        self._check = None
        check.close()

    def _kill_rest(self) -> None:
        """Kills the command's processes except those that stay; reports any that SIGKILL does not end.

        Such a process keeps its memory, including GPU memory."""
        may = "stays" if self._overdue or self._sweeping else "listens"
        spared = {pid for local, pid in self._running.items() if self._may(local, may)}
        left = processes.kill_descendants(self._warm.waiting | spared)
        if not left:
            self._killing_since = None
            if self._sweeping:
                self._ended()
            elif self._stays:
                self._keep()
            return
        now = time.monotonic()
        if self._killing_since is None:
            self._killing_since = now
        if not self._stuck(now):
            return
        if self._sweeping and self._stop_deadline is None and not self._exit_code:
            event = _exited(self._attempt, 0, "", "")  # the command succeeded
        else:
            event = LauncherEvent("stuck", self._attempt, message=processes.describe_stuck(left))
        if event.event != self._state.event:
            self._report(event)

    def _stuck(self, now: float) -> bool:
        return self._killing_since is not None and now - self._killing_since >= self._stuck_after

    # Reactions.

    @property
    def _busy(self) -> bool:
        return bool(self._running) or self._sweeping

    @property
    def _overdue(self) -> bool:
        return self._stop_deadline is not None and time.monotonic() >= self._stop_deadline

    @property
    def _superseded(self) -> bool:
        order = self._order
        newer = order is not None and order.attempt > self._attempt and order.phase is not Phase.FINISH
        return newer and self._busy

    def _may(self, local: int, what: str) -> bool:
        """Returns whether a running process may outlive its attempt.

        All of its ranks must be in the order's field `what`: "listens" or "stays"."""
        order = self._order
        if order is None or not self._superseded or self._signalled is not None:
            return False
        if order.health_check is not None and len(self._running) < len(self._command.places(order)):
            return False  # the check must run while nothing else runs here
        return set(self._command.ranks_of(local, order)) <= set(getattr(order, what))

    @property
    def _stays(self) -> bool:
        """Returns whether all running processes have left their step and wait for a newer attempt."""
        return bool(self._running) and all(self._may(local, "stays") for local in self._running)

    def _keep(self) -> None:
        """Reports the processes that stay; at the release, adds them to the attempt and starts the others."""
        order = self._order
        assert order is not None
        self._stop_deadline = None
        staying = sum(len(self._command.ranks_of(local, order)) for local in self._running)
        if order.phase is Phase.RELEASE:
            self._start_ranks(order)
        elif self._state != (idle := LauncherEvent("idle", order.attempt, stays=staying)):
            self._report(idle)

    def _follow(self, order: Order) -> None:
        """Stops a command of an older attempt or a finished job; requests stacks of one that hangs."""
        if self._busy and order.dump_stacks and order.attempt == self._attempt > self._dumped:
            self._dumped = order.attempt
            dump_stacks()
        if self._busy and order.phase is Phase.FINISH:
            self._stop(signal.SIGTERM)
        elif (
            self._ahead is not None
            and self._state.event == "idle"
            and (order.attempt, order.phase) == (self._attempt, Phase.RELEASE)
        ):
            if command_environment({}, self._ahead) == command_environment({}, order):
                self._start_ranks(order)
            else:  # for example if no other rank stayed: the command ends, and another one is started
                self._stop_deadline = time.monotonic()
        elif self._busy and order.attempt > self._attempt and not self._stays:
            # The new attempt's first step is decided, so a later save of this one would be of no use, and all
            # other workers wait for its end.
            waits = any(self._may(local, "listens") for local in self._running)
            deadline = time.monotonic() + (order.interrupt_seconds if waits else 0.0)
            self._stop_deadline = min(self._stop_deadline or deadline, deadline)

    def _stop(self, number: int) -> None:
        if not self._busy or self._stop_deadline is not None:
            return
        self._stop_deadline = time.monotonic() + self._stop_seconds
        for pid in self._running.values():
            processes.send_signal(pid, number)

    def _ended(self) -> None:
        """Reports the exit, unless an order stopped the command. Called once all its descendants are gone."""
        stopped = self._stop_deadline is not None
        self._sweeping = False
        self._stop_deadline = self._ahead = None
        if not stopped or self._signalled is not None:
            self._report_exit()

    def _report_exit(self) -> None:
        if (self._state.event, self._state.attempt) != ("exited", self._attempt):
            out_of_memory, said = self._out_of_memory.verdict(), self._errors.last_lines()
            self._report(_exited(self._attempt, self._exit_code, out_of_memory, said))

    def _next(self) -> int | None:
        """Decides what to do while nothing runs. Returns the container's exit code when its work is over."""
        if self._signalled is not None:
            return self._exit_code if self._attempt else 128 + self._signalled
        order = self._order
        if order is None:
            return None
        if order.phase is Phase.FINISH:
            return order.exit_code
        if order.attempt > self._state.attempt or self._state.event in ("checking", "unhealthy"):
            if not self._place_is_well(order):
                return None
            if order.phase is Phase.HOLD:
                failpoint("before-idle")
                self._report(LauncherEvent("idle", order.attempt))
            if order.phase is Phase.RELEASE or order.joins:
                self._start(order)
        elif order.phase is Phase.RELEASE and self._state.event == "idle":
            self._start(order)
        return None

    def _place_is_well(self, order: Order) -> bool:
        """Returns whether the attempt may begin here; starts its health check if that is not known."""
        wanted = order.health_check
        if wanted is None or self._check_passed == order.attempt:
            return True
        if (
            self._state.event == "unhealthy"
            and self._state.attempt == order.attempt
            and self._check_failed is not None
        ):
            failed, again = self._check_failed
            if failed == wanted and time.monotonic() < again:
                return False
        try:
            self._check = RunningCheck(
                wanted, order.attempt, command_environment(self._command.environment, order)
            )
        except OSError as error:
            self._report(_cannot_start(order.attempt, "failurePolicy.healthCheck", wanted.command[0], error))
            return False
        failed_here = (self._state.event, self._state.attempt) == ("unhealthy", order.attempt)
        if not failed_here:  # it counts as failed until it has passed
            self._report(LauncherEvent("checking", order.attempt))
        return False

    def _start(self, order: Order) -> None:
        self._attempt = order.attempt
        if self._started_before(order.attempt):
            message = "The trainer container was restarted, so its ranks of this attempt are gone."
            self._report(LauncherEvent("exited", order.attempt, 137, names.CONTAINER_RESTARTED, message))
            return
        if not self._checked:
            if message := torch_missing(self._command.given):
                self._report(LauncherEvent("exited", order.attempt, 1, names.TORCH_MISSING, message))
                return
            self._checked = True
        self._start_ranks(order)
        failpoint("after-spawn")

    def _start_ranks(self, order: Order) -> None:
        self._attempt, self._exit_code = order.attempt, 0
        self._out_of_memory.begin()
        self._errors.forget()
        self._warm_at = time.monotonic() + self._warm_after
        self._ahead = order if order.phase is Phase.HOLD else None
        if self._ahead is None and not self._mark(order.attempt):
            return
        if self._execute(partial(self._command.start_missing, order), order) and self._ahead is None:
            self._report(LauncherEvent("started", order.attempt))

    def _execute(self, start: Callable[[], None], order: Order) -> bool:
        try:
            start()
        except CannotExecute as cannot:
            self._report(_cannot_start(order.attempt, "the trainer container", cannot.program, cannot.error))
            return False
        return True

    def _prepare(self) -> None:
        """Prepares the next interpreter while nothing runs, or once the command has had time to begin."""
        if not self._warm.wanted or (self._busy and time.monotonic() < self._warm_at):
            return
        over = self._state.event == "exited" and self._state.exit_code == 0
        if self._signalled is not None or over or self._stop_deadline is not None:
            return
        self._warm.prepare()

    def _started_before(self, attempt: int) -> bool:
        """Returns whether an earlier container of this pod has run this attempt.

        Starting it again would mix two runs of a rank."""
        try:
            return int(self._marker.read_text()) >= attempt
        except (OSError, ValueError):
            return False

    def _mark(self, attempt: int) -> bool:
        """Notes for the next container that this attempt runs; returns False, and reports, if it cannot."""
        try:
            self._marker.write_text(str(attempt))
        except OSError as error:
            message = f"{self._marker} cannot be written: {error.strerror}. Look at the disk of the node."
            self._report(LauncherEvent("exited", attempt, 1, names.CRASHED, message))
            return False
        return True

    def _report(self, event: LauncherEvent) -> None:
        self._state = event
        self._line.send(event)

    @property
    def _outputs(self) -> list[RelayedOutput]:
        return [self._errors] if self._check is None else [self._errors, self._check.output]

    def _pause(self) -> float | None:
        """Returns the seconds that the loop may sleep; None: until the next event."""
        pauses = []
        if any(output.blocked for output in self._outputs):
            pauses.append(_SWEEP_EVERY)
        if not self._line.connected:
            pauses.append(_CONNECT_EVERY)
        if self._sweeping or self._killing_since is not None:
            pauses.append(_SWEEP_EVERY)
        if self._stuck(time.monotonic()):
            return _SWEEP_STUCK_EVERY
        if self._check is not None:
            pauses.append(_SWEEP_EVERY if self._check.over else self._check.due)
        elif self._state.event == "unhealthy" and self._check_failed is not None:
            pauses.append(max(_SWEEP_EVERY, self._check_failed[1] - time.monotonic()))
        if self._busy and self._warm.wanted:
            pauses.append(max(_SWEEP_EVERY, self._warm_at - time.monotonic()))
        if self._warm.released is not None:
            pauses.append(1.0)
        if self._stop_deadline is not None:
            pauses.append(max(_SWEEP_EVERY, self._stop_deadline - time.monotonic()))
        return min(pauses, default=None)


def _cannot_start(attempt: int, whose: str, program: str, error: OSError) -> LauncherEvent:
    advice = f"Check the command of {whose}."
    if isinstance(error, FileNotFoundError) and Path(program).is_file():
        advice = "The interpreter that its first line names does not exist in the image."
    elif " " in program:
        advice = f"Write each word as an item of its own in the command of {whose}."
    message = f"{program} cannot be started: {error.strerror}. {advice}"
    code = 127 if isinstance(error, FileNotFoundError) else 126
    return LauncherEvent("exited", attempt, code, names.CANNOT_START, message)


def _exited(attempt: int, code: int, out_of_memory: str, said: str) -> LauncherEvent:
    if code == 0:
        return LauncherEvent("exited", attempt, 0)
    if out_of_memory:  # torchrun exits with 1 when a rank was killed, so the code alone is ambiguous
        return LauncherEvent("exited", attempt, code, names.OOM_KILLED, out_of_memory)
    if name := processes.signal_of(code):
        if name == "SIGKILL":
            said = ""  # it gives no notice, so the last words are about something else
        return LauncherEvent("exited", attempt, code, names.SIGNALLED, f"{name}{': ' + said if said else ''}")
    return LauncherEvent("exited", attempt, code, names.CRASHED, said)


class _signals:  # noqa: N801  (used as a context manager)
    """A context manager that turns signals into bytes on a socket, for the selector."""

    _CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)

    def __enter__(self) -> socket.socket:
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        # First the socket: a signal in between goes to the previous handler, and is not lost.
        signal.set_wakeup_fd(self._writing.fileno())
        for number in self._CAUGHT:
            signal.signal(number, lambda *_: None)
        return self._reading

    def __exit__(self, *_: object) -> None:
        """Keeps the handlers: the exit code is known, and no signal may change it."""
        signal.set_wakeup_fd(-1)
        self._reading.close()
        self._writing.close()


_USAGE = """usage: tiercheck launch -- COMMAND [ARGUMENT...]

Runs COMMAND as the first process of a trainer container, and starts it anew as the sidecar orders.
Elsewhere run COMMAND itself."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command line `[--] COMMAND [ARGUMENT...]`, and returns the exit code."""
    command = list(arguments[1:] if arguments[:1] == ["--"] else arguments)
    if not command or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if command else sys.stderr)
        return 0 if command else 2
    run_dir = Path(os.environ.get(ENV_RUN_DIR, RUN_DIR))
    if not run_dir.is_dir():
        print(
            f"There is no folder {run_dir}: `tiercheck launch` is for pods of a TierCheckJob; "
            "elsewhere run the command itself.",
            file=sys.stderr,
        )
        return 2
    stop_seconds = seconds_of(os.environ, ENV_STOP_SECONDS, 5.0)
    return Launcher(command, run_dir, os.environ, stop_seconds).run()
