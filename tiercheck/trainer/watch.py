"""A delta is exact only if nothing but the optimizer changed the state: torch's in-place counters tell, and for what is written
behind their back, as through `.data`, a sample of the parameters' bytes does, where looking costs no wait for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tiercheck.trainer.capture import counter
from tiercheck.trainer.leaves import PLAIN
from tiercheck.trainer.samples import Sampler

_NUMBERS = {bool, int, float}
_version, _shard_version = attrgetter("_version"), attrgetter("_local_tensor._version")


class Watch:
    """Counters of every parameter of the model and of everything the optimizers keep."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        known: dict[int, Tensor] = {}
        for parameter in (*model.parameters(), *(p for o in optimizers for g in o.param_groups for p in g["params"])):
            if not is_lazy(parameter) and not parameter.is_inference():
                known[id(parameter)] = parameter
        self._sharded = [parameter for parameter in known.values() if hasattr(parameter, "placements")]
        self._plain = [parameter for parameter in known.values() if not hasattr(parameter, "placements")]
        # What other ranks update (ZeRO) is sent here by way of `.data`.
        own = {
            id(parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        watched = [parameter for parameter in known.values() if id(parameter) in own or not parameter.requires_grad]
        shards = [getattr(parameter, "_local_tensor", parameter) for parameter in watched]
        self._seen = [shard for shard in shards if type(shard) in PLAIN and shard.device.type == "cpu"]
        self._sampler = Sampler()

    def read(self) -> list[int]:
        """Two readings are equal if nothing was changed in place, or replaced, between them."""
        found, plain = list(map(_version, self._plain)), list[Any]()
        found += _counters(self._sharded)
        for optimizer in self._optimizers:
            values: list[Any] = list(chain.from_iterable(map(_values, optimizer.state.values())))
            if {*map(type, values)} - {Tensor}:
                plain += [value for value in values if type(value) in _NUMBERS]
                values = [value for value in values if isinstance(value, Tensor)]
                versions: Iterable[int] = _counters(values)
            else:  # no call into Python for any of them: this runs three times in every step
                versions = map(_version, values)
            found += map(id, values)
            found += versions
        found.append(hash(tuple(plain)))
        found.append(self.bytes())
        return found

    def bytes(self) -> int:
        """A checksum of the sample."""
        return self._sampler.take(self._seen).sum()

    def elsewhere(self) -> Callable[[], int]:
        """`bytes`, for another thread."""
        sampler = Sampler()
        return lambda: sampler.take(self._seen).sum()


def _counters(tensors: list[Tensor]) -> list[int]:
    """As `counter` of each, in another order, with little Python for any of them."""
    try:
        found = list(map(_version, tensors))
        return found + [_shard_version(tensor) for tensor in tensors if type(tensor) not in PLAIN]
    except (AttributeError, RuntimeError):  # a subclass without a shard, or one made for inference
        return list(map(counter, tensors))


def _values(state: Any) -> Any:
    return state.values() if isinstance(state, dict) else (state,)
