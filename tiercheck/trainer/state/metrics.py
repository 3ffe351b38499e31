"""Captures metrics as torchmetrics has them: modules whose state no state_dict shows.

Their states are attributes that `persistent` keeps out of state_dict, and so are counts beside them.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from operator import methodcaller
from typing import Any

from torch import Tensor, nn

log = logging.getLogger("tiercheck")

STATE = "tiercheck.metrics"
"""Name in the script's state."""
_NO_STATE = {"_computed", "_forward_cache", "_cache", "training"}


def is_metric(module: nn.Module) -> bool:
    """By what torchmetrics' base class has."""
    named = (getattr(module, name, None) for name in ("_defaults", "_persistent"))
    return all(isinstance(each, dict) for each in named) and callable(getattr(module, "persistent", None))


class Metrics:
    """All metrics in some modules, as an object of the script's state."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules

    def found(self) -> Iterator[tuple[str, nn.Module]]:
        """Each, by where it is."""
        for name, module in self._modules.items():
            yield from ((f"{name}.{path}", each) for path, each in module.named_modules() if is_metric(each))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Of each metric its attributes that are numbers and tensors, or lists of them."""
        return {
            path: {
                name: _each(value, Tensor.detach)
                for name, value in vars(metric).items()
                if name in metric._defaults or (name not in _NO_STATE and _is_data(value))  # type: ignore[operator]
            }
            for path, metric in self.found()
        }

    def load_state_dict(self, state: dict[str, dict[str, Any]]) -> None:
        """Raises KeyError for metrics that only one side has."""
        found = dict(self.found())
        if different := sorted(found.keys() ^ state.keys()):
            where = "the checkpoint" if different[0] in state else "the script"
            raise KeyError(f"metric {different[0]} is only in {where}")
        for path, metric in found.items():
            device = getattr(metric, "device", None)
            for name, value in state[path].items():
                setattr(metric, name, _each(value, methodcaller("to", device)))
            if hasattr(metric, "_computed"):
                metric._computed = None  # type: ignore[assignment]


def keys_of_metrics(model: nn.Module) -> set[str]:
    """Keys of its state_dict that `Metrics` keeps."""
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        if is_metric(module)
        for name in module._defaults
    }


def is_all_metrics(module: nn.Module) -> bool:
    """Whether `Metrics` keeps all that it shows."""
    others = [
        *module.parameters(),
        *module.buffers(),
        *(module.state_dict().keys() - keys_of_metrics(module)),
    ]
    return not others and any(map(is_metric, module.modules()))


def warn_of_empty(name: str, module: nn.Module) -> None:
    """Logs that nothing of a module in the script's state will be kept."""
    if not module.state_dict() and not any(True for _ in module.buffers()):
        log.warning(
            "state[%r] is a module whose state_dict is empty: nothing of it is saved; register its tensors as"
            " buffers, or give an object with state_dict and load_state_dict",
            name,
        )


def _is_data(value: Any) -> bool:
    if isinstance(value, (list, tuple, deque)):
        return all(map(_is_data, value))
    return isinstance(value, Tensor) or type(value) in (bool, int, float)


def _each(value: Any, of: Callable[[Tensor], Tensor]) -> Any:
    """A copy with other tensors."""
    if isinstance(value, deque):
        return deque((_each(each, of) for each in value), value.maxlen)
    if type(value) in (list, tuple):
        return type(value)(_each(each, of) for each in value)
    return of(value) if isinstance(value, Tensor) else value
