"""A delta is exact only if nothing but the optimizer changed the state: torch's in-place counters tell."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer


class Watch:
    """Counters of every parameter of the model and of everything the optimizers keep."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        known: dict[int, Tensor] = {}
        for parameter in (*model.parameters(), *(p for o in optimizers for g in o.param_groups for p in g["params"])):
            if not parameter.is_inference():
                known[id(parameter)] = parameter
        self._parameters = list(known.values())

    def read(self) -> list[int]:
        """Two readings are equal if nothing was changed in place, or replaced, between them."""
        found = [parameter._version for parameter in self._parameters]
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        found += (id(value), value._version)
        return found
