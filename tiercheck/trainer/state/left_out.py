"""Leaves frozen weights out of checkpoints that a script loads itself at each start, such as QLoRA's base.

A checksum of them is kept, so that a restore onto other base weights is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.proof.samples import Sampler
from tiercheck.trainer.replicas.ranks import rank_and_world
from tiercheck.trainer.state.leaves import NotCapturable, is_wrapper, parts

STATE = "tiercheck.left_out"
"""Name in the script's state of the checksums."""
_of_model: WeakKeyDictionary[nn.Module, _Names] = WeakKeyDictionary()


@dataclass(frozen=True)
class _Names:
    """Of parameters and buffers."""

    left_out: frozenset[str]
    stored: frozenset[str]

    def have(self, key: str) -> bool:
        """Whether it is the state_dict's key of one that is left out, or of what its module adds to that,
        such as scales."""
        if key in self.left_out or key in self.stored or key.endswith("_extra_state"):
            return key in self.left_out
        owner = key.rpartition(".")[0]
        return any(name.rpartition(".")[0] == owner or key.startswith(f"{name}.") for name in self.left_out)


class LeftOut:
    """What of one model is in no checkpoint. An object of the script's state, which has the checksums."""

    def __init__(self, model: nn.Module, patterns: Sequence[str], optimizers: Iterable[Optimizer]) -> None:
        """`patterns`: of names of parameters and buffers (fnmatch). Raises NotCapturable for what is trained,
        ValueError for a pattern that none matches."""
        self._model, self._sums = model, dict[str, int]()
        held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        held |= dict(model.named_buffers(remove_duplicate=False))
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in held):
                raise ValueError(f"leave_out: no parameter or buffer of the model matches {pattern!r}")
        names = {name for name in held if any(fnmatchcase(name, pattern) for pattern in patterns)}
        updated = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
        if updating := sorted(name for name in names if id(held[name]) in updated):
            raise NotCapturable(f"{updating[0]} is left out, and is updated by an optimizer")
        self._left_out = {name: held[name] for name in names}
        self._refuse_trained()
        _of_model[model] = _Names(frozenset(names), frozenset(held.keys() - names))

    def state_dict(self) -> dict[str, int]:
        """Checksums by name. They are frozen, so they are looked at once. Raises NotCapturable."""
        self._refuse_trained()
        if not self._sums:
            named = [
                (f"{key}{path}", leaf)
                for key, value in self._model.state_dict().items()
                if isinstance(value, Tensor) and is_left_out(self._model, key)
                for path, leaf in _plain_parts(value)
            ]
            self._sums = dict(
                zip((name for name, _ in named), Sampler().take([t for _, t in named]).sums, strict=True)
            )
        return dict(self._sums)

    def load_state_dict(self, sums: dict[str, int]) -> None:
        """Raises RestoreError if others were left out, or those had another content."""
        here = self.state_dict()
        shard = "@" in "".join({**sums, **here})  # other ranks hold other parts
        for name in sorted(sums.keys() & here.keys() if shard else sums.keys() | here.keys()):
            if sums.get(name) != here.get(name):
                raise RestoreError(
                    f"{name} is left out of the checkpoint, and is another one here: load the weights "
                    "that the checkpoint was made with"
                )

    def _refuse_trained(self) -> None:
        for name, tensor in self._left_out.items():
            if tensor.requires_grad:
                raise NotCapturable(f"{name} is left out, and requires a gradient: freeze it, or store it")


def is_left_out(model: nn.Module, key: str) -> bool:
    """Whether `leave_out` has it, or its parameter."""
    names = _of_model.get(model)
    return names is not None and names.have(key)


def _plain_parts(tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    if hasattr(tensor, "placements"):
        rank, world = rank_and_world()
        return [(f"@{rank}/{world}", tensor.to_local().detach())]  # type: ignore[attr-defined]
    if is_wrapper(tensor):
        return parts(tensor)
    with torch._C.DisableTorchFunctionSubclass():
        return [("", tensor.detach().as_subclass(Tensor))]
