"""Provides loops and functions that outlive the loss of another rank, and repeat what was left."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from tiercheck.launcher.environment import command_environment
from tiercheck.protocol.local import Order
from tiercheck.protocol.names import COLLECTIVE_FAILED, ENV_ATTEMPT, ENV_RUN_DIR, STEP_SUSPECTED
from tiercheck.trainer.backends.backend import RestoreError, log
from tiercheck.trainer.inprocess.groups import groups
from tiercheck.trainer.inprocess.half_step import collect_half_step, free_graph
from tiercheck.trainer.inprocess.listener import OrderListener
from tiercheck.trainer.process import describe_error, reason_of

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_DECISION_SECONDS = 10.0
"""Seconds. A rank with a failed collective waits so long for a newer attempt before it reports that."""


class StepInterrupted(BaseException):
    """The attempt is over. Raised where nothing is half done, in a step of `StepLoop`, which catches it."""


class RepeatableStep(int):
    """The number of a step. `with step:` around its work lets the process outlive a lost rank."""

    _loop: StepLoop

    def __enter__(self) -> RepeatableStep:
        self._loop.enter(int(self))
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        return self._loop.leave(error, trace)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)  # copied, written or sent to another process it is a number


class StepLoop:
    """Runs the steps of one Checkpointer in a cluster, in the training thread."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        pause: Callable[[], None],
        go_on: Callable[[], int],
        enter_again: Callable[[bool], None] = lambda _: None,
        *,
        ended: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Takes what a process does between two attempts.

        `pause`: ends all that belongs to the ended one; raises CannotForget if the model cannot be trained
        any more. `go_on`: restores the new one, and returns its step. `enter_again`: prepares for a function
        that restores it; given whether that function makes its Checkpointer anew. `ended`: is given the
        number of each step of `steps` that is not made again.
        """
        self._rank, self._world_size = rank, world_size
        self._pause, self._go_on, self._enter_again, self._ended = pause, go_on, enter_again, ended
        self._made_in = _entered
        self._listener: OrderListener | None = None
        self._unsaved = ""
        self._inside = False
        self._with_gradients = True
        """True if the step that was entered last began with gradients enabled."""
        self.number: int | None = None
        """The number of the step that was entered last; None: the loop has no `with step`."""
        self.rewinds = 0
        """The number of times that a step was left and made again."""
        self._rewound: int | None = None
        """The step that was restored since the last one was yielded; None: training goes on."""

    def steps(self, first: int, total: int) -> Iterator[RepeatableStep]:
        """Yields each step from `first`, and those again that were trained after what was restored."""
        number = first
        try:
            while number < total:
                step = RepeatableStep(number)
                step._loop = self
                yield step
                if self._listener is not None and self._listener.is_interrupted and self._rewound is None:
                    self._rewind()
                rewound, self._rewound = self._rewound, None
                if rewound is None:
                    self._ended(number)
                number = number + 1 if rewound is None else rewound
        finally:
            if self._listener is not None and _entered is None:
                self._listener.close()
                self._listener = None  # a later loop listens anew

    def interruption_point(self) -> None:
        """Raises StepInterrupted within a step of an ended attempt.

        Raises RestoreError within one of a function that was entered again and has not restored.
        """
        if _entered is not None and _entered.loop is not self:
            if groups().is_detached:
                raise RestoreError("the function that is entered again trains without restore()")
            self.join_entered_function()
        if self._inside and self._listener is not None and self._listener.is_interrupted:
            raise StepInterrupted("a newer attempt of the job has begun")

    def enter(self, number: int | None = None) -> None:
        """Begins a step; None: a function that was entered makes it, and gives no number."""
        self.number, self._with_gradients = number, torch.is_grad_enabled()
        if self._listener is None and (run_dir := os.environ.get(ENV_RUN_DIR)):
            self._listen(Path(run_dir))
        self._inside = True

    def join_entered_function(self) -> None:
        """Makes what is trained next a step of the function that may be entered again, if there is one."""
        if _entered is not None:
            _entered.loop, self._listener = self, _entered.listener
            if self._listener is not None:
                self._look_for_refusal()
            self.enter()

    def _listen(self, run_dir: Path) -> None:
        refusal = self._refusal()
        if refusal:
            self._warn(f"processes are started anew after each failure: {refusal}")
        attempt = int(os.environ.get(ENV_ATTEMPT, "0"))
        self._listener = OrderListener(
            run_dir, self._rank, self._world_size, attempt, groups().disconnect, refusal=refusal
        )
        if _entered is not None:
            _entered.listener = self._listener

    def _refusal(self) -> str:
        return (_entered.refusal if _entered is not None else "") or self._unsaved or groups().refusal()

    def refuse(self, unsaved: str) -> None:
        """Makes this process end with its attempt, because of `unsaved`, if there is any.

        A process that stays would train on with it, and a replacement begins it anew: updates would differ.
        """
        if unsaved and not self._unsaved:
            self._unsaved = unsaved
            self._look_for_refusal()

    def _look_for_refusal(self) -> None:
        """Looks for a new refusal, after the groups were made anew."""
        if self._refusal() and self._listener is not None:
            self._listener.close()
            self._listen(Path(os.environ[ENV_RUN_DIR]))

    def leave(self, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Ends a step, perhaps one that was left by `error`. Returns whether it is made again."""
        if not self._is_over(error, trace):
            return False
        self._rewind()
        return True

    def _is_over(self, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Returns whether `error` ends only the attempt. If so, frees what the error held of the step."""
        self._inside = False
        listener = self._listener
        if error is None or listener is None or listener.refusal:
            return False
        interrupted = isinstance(error, StepInterrupted) or (
            isinstance(error, Exception) and listener.is_interrupted
        )
        if not interrupted and (reason := reason_of(error)) in (COLLECTIVE_FAILED, STEP_SUSPECTED):
            if reason == COLLECTIVE_FAILED:
                groups().disconnect()  # so that ranks without a connection to the lost one get out as well
            interrupted = listener.wait_interrupted(_DECISION_SECONDS)
        if not interrupted or groups().refusal():
            return False
        self._warn(f"attempt {os.environ[ENV_ATTEMPT]} is over: leaves the step ({describe_error(error)})")
        error.__traceback__ = error.__context__ = error.__cause__ = None
        free_graph(trace)
        return True

    def _warn(self, message: str) -> None:
        if self._rank == 0:  # it is the same on the others
            log.warning("InProcess: %s (docs/use/in-process.md)", message)

    def _wait_for_release(self) -> Order:
        """Releases the ended attempt, and returns the order of the next once it may begin."""
        assert self._listener is not None
        self._pause()
        self._listener.leave_step()
        collect_half_step()  # while the others get there
        order = self._listener.wait_released(groups().reopen)
        local = int(os.environ["LOCAL_RANK"]) if dist.is_torchelastic_launched() else None
        os.environ.update(command_environment(os.environ, order, local))  # as a new process would have it
        return order

    def _rewind(self) -> None:
        """Goes back with the others. If another rank is lost meanwhile, begins once more."""
        while True:
            order = self._wait_for_release()
            torch.set_grad_enabled(self._with_gradients)  # an evaluation may have switched them off
            try:
                groups().reconnect(order.master_host, order.master_port, self._rank, self._world_size)
                self._rewound = self._go_on()
                break
            except Exception as error:
                if not self._is_over(error, error.__traceback__):
                    raise
        self.rewinds += 1
        self._look_for_refusal()

    def enter_again(self) -> None:
        """Prepares the next call of the function, which goes on as a process that joins the next attempt."""
        self._wait_for_release()
        groups().detach()
        self._enter_again(self._made_in is not None)


class _EnteredFunction:
    """The function that is called again, while it runs."""

    loop: StepLoop | None = None
    """The loop of the Checkpointer that trains; None: it has yet to restore."""
    listener: OrderListener | None = None
    refusal = ""
    is_again = False
    """True for a repeated call, in which training cannot begin at step 0."""


_entered: _EnteredFunction | None = None


def reenter(
    function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> _Result:
    """Calls `function`, and again in the same process each time that another rank of the job is lost:

        tiercheck.reenter(trainer.train)

    It calls `Checkpointer.restore` before its first step, or makes a Checkpointer and calls its `restore`.
    What it makes is made again, alone, as a process that is started anew would make it; what was there before
    the call stays, and what of it has to go back belongs in `state`. The error by which it is left goes
    through its `except` and `finally` blocks. Outside a cluster, and within such a function, it is a plain
    call.

    Returns:
        What `function` returns.
    """
    global _entered
    if _entered is not None or ENV_RUN_DIR not in os.environ:
        return function(*arguments, **named)
    now = _entered = _EnteredFunction()
    with_gradients = torch.is_grad_enabled()
    groups().enter_function()
    try:
        while True:
            try:
                return function(*arguments, **named)
            except BaseException as error:
                if now.loop is None or not now.loop._is_over(error, error.__traceback__):
                    raise
            now.loop.enter_again()
            torch.set_grad_enabled(with_gradients)
            now.loop, now.is_again = None, True
            gc.collect()  # frees what the last call made, or there would be two of each on the device
    finally:
        _entered = None
        if now.listener is not None:
            now.listener.close()


def entered() -> _EnteredFunction | None:
    return _entered


def refuse_reentry(why: str) -> None:
    """Makes this job start its processes anew after a failure, and logs why at the first step."""
    if _entered is not None:
        _entered.refusal = why
