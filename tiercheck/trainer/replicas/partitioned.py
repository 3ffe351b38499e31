"""Saves and replays a rank's own part of a ZeRO stage 1 optimizer.

ZeroRedundancyOptimizer wraps an ordinary optimizer of the parameters that this rank updates, and sends the
results to the other ranks after each step. So the one inside is captured, each rank's state is nobody else's,
and after a restore the results are sent once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class Partitions:
    """The optimizers of a script, and those that do the work."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises TypeError for one whose steps are not its own."""
        self._whole: dict[int, Any] = {}
        self.outer = list(optimizers)
        self.inner: list[Optimizer] = []
        for index, optimizer in enumerate(optimizers):
            if not _is_zero(optimizer):
                self.inner.append(optimizer)
                continue
            whole: Any = optimizer
            if getattr(whole, "_overlap_with_ddp", False):
                raise TypeError(
                    "ZeroRedundancyOptimizer(overlap_with_ddp=True) updates parameters inside of "
                    "backward, where no step is "
                    "complete; use overlap_with_ddp=False"
                )
            self._whole[index] = whole
            self.inner.append(whole.optim)

    @property
    def sent(self) -> list[Tensor]:
        """Parameters that some rank updates, and sends to the others."""
        return [
            parameter
            for whole in self._whole.values()
            for group in whole.param_groups
            for parameter in group["params"]
        ]

    def __contains__(self, index: int) -> bool:
        """Whether the optimizer with this number keeps its state for some parameters only."""
        return index in self._whole

    def stepped(self) -> None:
        """Tell the inner optimizers what a scheduler has changed since their last step: it knows the wrappers
        only, which pass it on when the next step begins."""
        for whole in self._whole.values():
            whole._sync_param_groups(whole.param_groups, whole.optim.param_groups)

    def loaded(self) -> None:
        """The inner optimizers were restored, and their parameters with them: tell the wrappers and the other
        ranks. A collective call."""
        for whole in self._whole.values():
            whole._sync_param_groups(whole.optim.param_groups, whole.param_groups)
            whole._sync_params()


def _is_zero(optimizer: Optimizer) -> bool:
    # By name: importing its module takes time, and without torch.distributed it does not exist.
    return any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)
