"""A delta is exact only if nothing but the optimizer changed the state: torch's in-place counters tell."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.capture import counter


class Watch:
    """Counters of every parameter of the model and of everything the optimizers keep."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        known: dict[int, Tensor] = {}
        for parameter in (*model.parameters(), *(p for o in optimizers for g in o.param_groups for p in g["params"])):
            if not parameter.is_inference():
                known[id(parameter)] = parameter
        self._sharded = [parameter for parameter in known.values() if hasattr(parameter, "placements")]
        self._plain = [parameter for parameter in known.values() if not hasattr(parameter, "placements")]

    def read(self) -> list[int]:
        """Two readings are equal if nothing was changed in place, or replaced, between them."""
        found = [parameter._version for parameter in self._plain] + [counter(parameter) for parameter in self._sharded]
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor):
                        found += (id(value), value._version if type(value) is Tensor else counter(value))
        return found
