"""Proves that frozen weights that checkpoints leave out, as QLoRA's base, are the same at a restore."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.backends.ranks import rank_and_world
from tiercheck.trainer.tensors.leaves import NotCapturable, is_wrapper, parts
from tiercheck.trainer.tensors.samples import Sampler

_omitted: WeakKeyDictionary[nn.Module, tuple[frozenset[str], frozenset[str]]] = WeakKeyDictionary()
"""Of a model the names of parameters and buffers that are left out, and of the others."""


def is_omitted(model: nn.Module, key: str) -> bool:
    """Whether a key of its state_dict is that of one, or of what a module adds to one, such as scales."""
    omitted, others = _omitted.get(model, ((), ()))
    if key in omitted or key in others or key.endswith("_extra_state"):
        return key in omitted
    owner = key.rpartition(".")[0]
    return any(name.rpartition(".")[0] == owner or key.startswith(f"{name}.") for name in omitted)


class OmittedWeights:
    """An object of the script's state that has the checksums of what one model leaves out."""

    def __init__(self, model: nn.Module, patterns: Sequence[str], optimizers: Iterable[Optimizer]) -> None:
        """`patterns`: of names (fnmatch). Raises NotCapturable for what is trained, ValueError for a pattern
        that no name matches."""
        held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        held |= dict(model.named_buffers(remove_duplicate=False))
        self._model, self._sums = model, dict[str, int]()
        self._frozen = {
            name: held[name] for name in held if any(fnmatchcase(name, each) for each in patterns)
        }
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in held):
                raise ValueError(f"leave_out: no parameter or buffer of the model matches {pattern!r}")
        updated = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
        for name, tensor in self._frozen.items():
            if id(tensor) in updated:
                raise NotCapturable(f"{name} is left out, and is updated by an optimizer")
        self._refuse_trained()
        _omitted[model] = frozenset(self._frozen), frozenset(held.keys() - self._frozen.keys())

    def state_dict(self) -> dict[str, int]:
        """Checksums by name, made once. Raises NotCapturable."""
        self._refuse_trained()
        if not self._sums:
            shown = self._model.state_dict().items()
            named = [
                (f"{key}{path}", leaf)
                for key, value in shown
                if isinstance(value, Tensor) and is_omitted(self._model, key)
                for path, leaf in _plain_parts(value)
            ]
            seen = Sampler().take([leaf for _, leaf in named])
            self._sums = dict(zip([name for name, _ in named], seen.sums, strict=True))
        return dict(self._sums)

    def load_state_dict(self, there: dict[str, Any]) -> None:
        """Raises RestoreError if others were left out, or those had another content."""
        here = self.state_dict()
        for name in sorted(there.keys() | here.keys()):
            other_ranks = "@" in name and not (name in there and name in here)
            if there.get(name) != here.get(name) and not other_ranks:
                raise RestoreError(
                    f"{name} is left out of the checkpoint, and is another one here: load the weights that "
                    "it was made with"
                )

    def _refuse_trained(self) -> None:
        for name, tensor in self._frozen.items():
            if tensor.requires_grad:
                raise NotCapturable(f"{name} is left out, and requires a gradient: freeze it, or store it")


def _plain_parts(tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    if is_wrapper(tensor):
        return parts(tensor)
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    path = "" if local is tensor else "@{}/{}".format(*rank_and_world())  # other ranks have other parts
    with torch._C.DisableTorchFunctionSubclass():  # of a class whose bytes mean nothing without it
        return [(path, local.detach().as_subclass(Tensor))]
