"""Keeps which parameters are frozen and which modules evaluate, which no tensor tells."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any

from torch import nn

log = logging.getLogger("tiercheck")

_trained, _training = attrgetter("requires_grad"), attrgetter("training")


class Modes:
    """Of one model, whose parameters and modules are listed once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._parameters = [parameter for _, parameter in model.named_parameters()]
        self._modules = [module for _, module in model.named_modules()]
        self._seen: tuple[list[bool], list[bool]] = [], []
        self._facts: dict[str, Any] = {}

    def facts(self, evaluating: bool) -> dict[str, Any]:
        """As `modes_of`. The same lists as long as nothing changes."""
        seen = list(map(_trained, self._parameters)), [evaluating, *map(_training, self._modules)]
        if not self._facts or seen != self._seen:
            self._facts, self._seen = modes_of(self._model, evaluating), seen
        return self._facts


def modes_of(model: nn.Module, evaluating: bool = False) -> dict[str, Any]:
    """`frozen`: names of the parameters that are; `evaluating`: names of the modules that do, None if the
    model does as a whole, as at the end of a step it may. But if it did when the step was made, the script
    trains it so.

    `evaluating`: whether it did.
    """
    return {
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "evaluating": [name for name, module in model.named_modules() if not module.training]
        if model.training or evaluating
        else None,
    }


def put_back_modes(model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Inverse of `modes_of`, where the facts hold it: of older versions they do not."""
    if (frozen := facts.get("frozen")) is not None:
        freeze_as_saved(model, {*frozen}.__contains__)
    evaluate_as_saved(model, facts)


def freeze_as_saved(model: nn.Module, was_frozen: Callable[[str], bool | None]) -> None:
    """Parameters that the script froze, or thawed, on its way are so again: they would be trained otherwise,
    or not at all.

    `was_frozen`: None where nobody can tell, as of what was imported.
    """
    for name, parameter in model.named_parameters():
        frozen = was_frozen(name)
        if parameter.requires_grad is frozen:
            parameter.requires_grad_(not frozen)
            log.warning("%s is %s, as when it was saved", name, "frozen" if frozen else "trained")


def evaluate_as_saved(model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Modules that evaluated while the others trained, as frozen batch norms do, evaluate again; and the
    other way round."""
    names: Collection[str] | None = facts.get("evaluating")
    if names is None:
        return
    found = {*names}
    for name, module in model.named_modules():
        if module.training is (name in found):
            module.training = not module.training  # not by `train`, which would tell its children too
            log.warning(
                "%s %s, as when it was saved",
                name or "the model",
                "trains" if module.training else "evaluates",
            )
