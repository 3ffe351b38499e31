"""Saves what is frozen or evaluates, and checks that frozen weights left out are unchanged.

Checkpoints leave out the base of QLoRA, for example.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.backends.backend import RestoreError, log, rank_and_world
from tiercheck.trainer.tensors.samples import Sampler
from tiercheck.trainer.tensors.tensor_parts import (
    NotCapturable,
    is_wrapper,
    parameters_of,
    parts,
    shard_or_self,
)

_NAMED = 3
"""The most names in a message."""
_trained, _training = attrgetter("requires_grad"), attrgetter("training")


class Modes:
    """Caches the modes of one model. Its parameters and modules are listed once."""

    def __init__(self, model: nn.Module, loose: Iterable[tuple[str, Tensor]] = ()) -> None:
        """`loose`: the named parameters that only optimizers have."""
        self._model, self._loose = model, list(loose)
        self._parameters = [each for _, each in (*model.named_parameters(), *self._loose)]
        self._modules = [module for _, module in model.named_modules()]
        self._seen: tuple[list[bool], list[bool]] = [], []
        self._facts: dict[str, Any] = {}

    def facts(self, evaluating: bool) -> dict[str, Any]:
        """Returns what `modes_of` does, and the same lists as long as nothing changes."""
        seen = list(map(_trained, self._parameters)), [evaluating, *map(_training, self._modules)]
        if not self._facts or seen != self._seen:
            self._facts, self._seen = modes_of(self._model, evaluating, self._loose), seen
        return self._facts


def modes_of(
    model: nn.Module, evaluating: bool = False, loose: Iterable[tuple[str, Tensor]] = ()
) -> dict[str, Any]:
    """Returns the names of frozen parameters, the `loose` ones too, and of evaluating modules.

    The latter are None if the model evaluates as a whole, as it may at the end of a step. But if it did so
    when the step was made (`evaluating`), the script trains it that way, and they are listed.
    """
    return {
        "frozen": [name for name, each in (*model.named_parameters(), *loose) if not each.requires_grad],
        "evaluating": [name for name, module in model.named_modules() if not module.training]
        if model.training or evaluating
        else None,
    }


def put_back_modes(
    model: nn.Module, facts: Mapping[str, Any], loose: Iterable[tuple[str, Tensor]] = ()
) -> None:
    """Restores what `modes_of` returned, as far as the facts hold it."""
    if (frozen := facts.get("frozen")) is not None:
        freeze_as_saved(model, {*frozen}.__contains__, loose)
    evaluate_as_saved(model, facts)


def freeze_as_saved(
    model: nn.Module, was_frozen: Callable[[str], bool | None], loose: Iterable[tuple[str, Tensor]] = ()
) -> None:
    """Freezes or thaws parameters as when saved; else they would be trained wrongly, or not at all.

    `was_frozen`: None where that is not known, as for what was imported.
    """
    changed: dict[str, list[str]] = {}
    for name, parameter in (*model.named_parameters(), *loose):
        frozen = was_frozen(name)
        if parameter.requires_grad is frozen:
            parameter.requires_grad_(not frozen)
            changed.setdefault("frozen" if frozen else "trained", []).append(name)
    for mode, names in changed.items():
        log.warning(
            "%s: %s, as when saved; to change that, call `requires_grad_` after `restore`",
            *(count_names("parameter", names), mode),
        )


def evaluate_as_saved(model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Restores which modules evaluate while others train, as frozen batch norms do, and which train."""
    names: Collection[str] | None = facts.get("evaluating")
    if names is None:
        return
    found, changed = {*names}, dict[bool, list[str]]()
    for name, module in model.named_modules():
        if module.training is (name in found):
            module.training = not module.training  # not by `train`, which would change its children too
            changed.setdefault(module.training, []).append(name or "the model")
    for training, names in changed.items():
        log.warning(
            "%s: %s, as when saved; to change that, call `%s` after `restore`",
            count_names("module", names),
            *(("training", "eval") if training else ("evaluating", "train")),
        )


def count_names(kind: str, names: Sequence[str]) -> str:
    """Returns how many of a kind there are, and the first names: "12 modules (0, 1, 2, ...)"."""
    more = ", ..." if names[_NAMED:] else ""
    return f"{len(names)} {kind}{'s' if names[1:] else ''} ({', '.join(names[:_NAMED])}{more})"


_omitted: WeakKeyDictionary[nn.Module, tuple[frozenset[str], frozenset[str]]] = WeakKeyDictionary()
"""The names of a model's parameters and buffers that are left out, and those of the others."""


def is_omitted(model: nn.Module, key: str) -> bool:
    """Returns whether a state_dict key is left out, or belongs to what is, such as a module's scales."""
    omitted, others = _omitted.get(model, ((), ()))
    if key in omitted or key in others or key.endswith("_extra_state"):
        return key in omitted
    owner = key.rpartition(".")[0]
    return any(name.rpartition(".")[0] == owner or key.startswith(f"{name}.") for name in omitted)


class OmittedWeights:
    """Holds the checksums of what one model leaves out, as an object of the script's state."""

    def __init__(self, model: nn.Module, patterns: Sequence[str], optimizers: Iterable[Optimizer]) -> None:
        """Raises NotCapturable for what is trained, ValueError for a pattern that no name matches.

        `patterns`: fnmatch patterns of the names to leave out.
        """
        held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        held |= dict(model.named_buffers(remove_duplicate=False))
        self._model, self._sums = model, dict[str, int]()
        self._frozen = {
            name: held[name] for name in held if any(fnmatchcase(name, each) for each in patterns)
        }
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in held):
                raise ValueError(f"leave_out: no parameter or buffer of the model matches {pattern!r}")
        updated = {*map(id, parameters_of(*optimizers))}
        for name, tensor in self._frozen.items():
            if id(tensor) in updated:
                raise NotCapturable(f"{name} is left out, and is updated by an optimizer")
        self._refuse_trained()
        _omitted[model] = frozenset(self._frozen), frozenset(held.keys() - self._frozen.keys())

    def state_dict(self) -> dict[str, int]:
        """Returns the checksums by name, computed once. Raises NotCapturable."""
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
        """Raises RestoreError if other weights were left out, or if they had other content."""
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
    local = shard_or_self(tensor)
    path = "" if local is tensor else "@{}/{}".format(*rank_and_world())  # other ranks have other parts
    with torch._C.DisableTorchFunctionSubclass():  # of a class that gives the bytes their meaning
        return [(path, local.detach().as_subclass(Tensor))]
