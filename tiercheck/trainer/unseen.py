"""Updates that no hook sees: compiled optimizers, CUDA graphs, an optimizer that the script made anew.

Hooks tell when the state is about to change. Where none is called, the bytes tell that it has changed; then copies cannot go
on beside training, and what cannot be captured at all is told.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiercheck.trainer.leaves import parts
from tiercheck.trainer.samples import Sample, Sampler

COMPILED = "updates happen without a call of the optimizer's hooks (a compiled or captured step)"
FOREIGN = (
    "parameters change although no optimizer that this Checkpointer was given makes a step: the script trains with another one, whose "
    "state is in no version. Give it to a new Checkpointer"
)
_PATIENCE = 2
"""Steps in a row that somebody else must have made."""


class Unseen:
    """Of one Checkpointer, in the training thread."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._hooked = False
        self._foreign = 0
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
            self._before, self._foreign = None, 0
            if self.found == FOREIGN:
                self.found = ""
            return
        if self.found == COMPILED and not all(parameter.is_cpu for parameter in self._parameters()):
            return  # to look again would wait for the device at each step
        before, self._before = (
            self._before,
            (
                self._samplers[0].take(self._parameters()),
                self._samplers[1].take(self._states()),
            ),
        )
        if before is None or before[0].equals(self._before[0]):
            return  # no update either: one whose gradients overflowed is left out
        if not (before[1].equals(self._before[1]) and self._states()):
            self.found = self.found or COMPILED
            return
        self._foreign += (
            1  # once may be an update left out, and something that the script does to its weights all the same
        )
        if self._foreign >= _PATIENCE:
            self.found = FOREIGN

    def _parameters(self) -> list[Tensor]:
        trained = (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])
        return [leaf for parameter in trained for _, leaf in parts(parameter)]

    def _states(self) -> list[Tensor]:
        kept = (
            value
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in (state.values() if isinstance(state, Mapping) else [state])
        )
        return [leaf for value in kept if isinstance(value, Tensor) for _, leaf in parts(value)]
