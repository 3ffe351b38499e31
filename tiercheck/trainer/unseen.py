"""Updates that no hook sees: compiled optimizers, CUDA graphs, an optimizer that the script made anew.

Hooks tell when the state is about to change. Where none is called, the bytes tell that it has changed; then copies cannot go
on beside training, and what cannot be captured at all is told.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiercheck.trainer.capture import parts
from tiercheck.trainer.samples import Sample, Sampler

COMPILED = "updates happen without a call of the optimizer's hooks (a compiled or captured step)"
FOREIGN = (
    "parameters change although no optimizer that this Checkpointer was given makes a step: the script trains with another one, whose "
    "state is in no version. Give it to a new Checkpointer"
)


class Unseen:
    """Of one Checkpointer, in the training thread."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._hooked = False
        self._before: tuple[Sample, Sample] | None = None
        self._samplers = Sampler(), Sampler()
        self.found = ""
        """COMPILED or FOREIGN; empty: every update so far was seen."""

    def hooked(self) -> bool:
        """A hook is called. False if the update is only being recorded, and will happen later, when none is."""
        self._hooked = True
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.found = self.found or COMPILED
            return False
        return True

    def look(self) -> None:
        """A step ends. Costs nothing as long as hooks are called."""
        hooked, self._hooked = self._hooked, False
        if hooked:
            self._before = None
            return
        before, self._before = (
            self._before,
            (
                self._samplers[0].take(self._parameters()),
                self._samplers[1].take(self._states()),
            ),
        )
        if before is None or before[0].equals(self._before[0]):
            return  # no update either: one whose gradients overflowed is left out
        still = before[1].equals(self._before[1]) and bool(self._states())
        self.found = FOREIGN if still else (self.found or COMPILED)

    def _parameters(self) -> list[Tensor]:
        trained = (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])
        return [leaf for parameter in trained for _, leaf in parts(parameter)]

    def _states(self) -> list[Tensor]:
        kept = (
            value for optimizer in self._optimizers for state in optimizer.state.values() for value in state.values()
        )
        return [leaf for value in kept if isinstance(value, Tensor) for _, leaf in parts(value)]
