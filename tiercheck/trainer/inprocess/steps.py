"""Makes a loop that outlives the loss of another rank: it leaves the step, and makes it again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from tiercheck.launcher.environment import command_environment
from tiercheck.protocol.names import COLLECTIVE_FAILED, ENV_ATTEMPT, ENV_RUN_DIR
from tiercheck.trainer.backends.backend import log
from tiercheck.trainer.inprocess.groups import groups
from tiercheck.trainer.inprocess.half_step import collect_half_step, free_graph
from tiercheck.trainer.inprocess.listener import OrderListener
from tiercheck.trainer.process import describe_error, reason_of

_DECISION_SECONDS = 10.0
"""How long a rank whose collective failed waits for a newer attempt before it reports that."""


class StepInterrupted(BaseException):
    """The attempt is over. Raised where nothing is half done, in a step of `StepLoop`, which catches it."""


class RepeatableStep(int):
    """The number of a step. `with step:` around its work lets the process outlive the loss of another
    rank."""

    _loop: StepLoop

    def __enter__(self) -> RepeatableStep:
        self._loop.enter()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        return self._loop.leave(error, trace)


class StepLoop:
    """Of one Checkpointer in a cluster, in the training thread."""

    def __init__(
        self, rank: int, world_size: int, pause: Callable[[], None], go_on: Callable[[], int]
    ) -> None:
        """`pause`: lets go of all that belongs to the ended attempt; raises CannotForget if the model cannot
        be trained any more. `go_on`: restores the new one, and returns its step."""
        self._rank, self._world_size = rank, world_size
        self._pause, self._go_on = pause, go_on
        self._listener: OrderListener | None = None
        self._inside = False
        self.rewinds = 0
        """How often a step was left and made again."""
        self._rewound: int | None = None
        """The step that was restored since the last one was yielded; None: training goes on."""

    def steps(self, first: int, total: int) -> Iterator[RepeatableStep]:
        """Yield each step from `first`, and those again that were trained after what was restored."""
        number = first
        try:
            while number < total:
                step = RepeatableStep(number)
                step._loop = self
                yield step
                if self._listener is not None and self._listener.is_interrupted and self._rewound is None:
                    self._rewind()
                rewound, self._rewound = self._rewound, None
                number = number + 1 if rewound is None else rewound
        finally:
            if self._listener is not None:
                self._listener.close()

    def interruption_point(self) -> None:
        """Raises StepInterrupted within a step whose attempt is over."""
        if self._inside and self._listener is not None and self._listener.is_interrupted:
            raise StepInterrupted("a newer attempt of the job has begun")

    def enter(self) -> None:
        """A step begins."""
        if self._listener is None and (run_dir := os.environ.get(ENV_RUN_DIR)):
            self._listen(Path(run_dir))
        self._inside = True

    def _listen(self, run_dir: Path) -> None:
        refusal = groups().refusal()
        if refusal:
            self._warn(f"processes are started anew after each failure: {refusal}")
        attempt = int(os.environ.get(ENV_ATTEMPT, "0"))
        self._listener = OrderListener(
            run_dir, self._rank, self._world_size, attempt, groups().disconnect, refusal=refusal
        )

    def leave(self, error: BaseException | None, trace: TracebackType | None) -> bool:
        """The step has ended, or was left by `error`. Returns whether it is made again."""
        self._inside = False
        listener = self._listener
        if error is None or listener is None or listener.refusal:
            return False
        interrupted = isinstance(error, StepInterrupted) or (
            isinstance(error, Exception) and listener.is_interrupted
        )
        if not interrupted and reason_of(error) == COLLECTIVE_FAILED:
            groups().disconnect()  # so that those who have no connection to the lost rank get out as well
            interrupted = listener.wait_interrupted(_DECISION_SECONDS)
        if not interrupted or groups().refusal():
            return False
        self._warn(f"attempt {os.environ[ENV_ATTEMPT]} is over: leaves the step ({describe_error(error)})")
        error.__traceback__ = error.__context__ = error.__cause__ = None
        free_graph(trace)
        self._rewind()
        return True

    def _warn(self, message: str) -> None:
        if self._rank == 0:  # of the others it is as true
            log.warning("InProcess: %s (docs/use/in-process.md)", message)

    def _rewind(self) -> None:
        listener = self._listener
        assert listener is not None
        self._pause()
        listener.leave_step()
        collect_half_step()  # while the others get there
        order = listener.wait_released(groups().reopen)
        local = int(os.environ["LOCAL_RANK"]) if dist.is_torchelastic_launched() else None
        os.environ.update(command_environment(os.environ, order, local))  # as a new process would have it
        groups().reconnect(order.master_host, order.master_port, self._rank, self._world_size)
        self._rewound = self._go_on()
        self.rewinds += 1
        if groups().refusal():
            listener.close()
            self._listen(Path(os.environ[ENV_RUN_DIR]))
