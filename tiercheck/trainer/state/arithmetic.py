"""Keeps how a training is computed, and warns of what decides the next step but is in no version."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sized
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from tiercheck.trainer.replicas.bucket_layout import BucketLayouts
from tiercheck.trainer.state.leaves import local_shard

log = logging.getLogger("tiercheck")

_SHOWN = {
    "": ("__version__", "get_float32_matmul_precision", "are_deterministic_algorithms_enabled"),
    "cpu": ("get_num_threads", "backends.cpu.get_cpu_capability", "backends.mkldnn.enabled"),
    "cuda": (
        "cuda.get_device_name", "backends.cudnn.version", "backends.cuda.matmul.allow_tf32",
        "backends.cudnn.allow_tf32", "backends.cudnn.benchmark", "backends.cudnn.deterministic",
    ),
}  # fmt: skip
"""What torch shows of how results round, by the kind of device."""


class Arithmetic:
    """Knows what decides the order and rounding of one rank's sums."""

    def __init__(self, model: nn.Module, buckets: BucketLayouts, stored: Iterable[object]) -> None:
        """`stored`: the objects whose state versions hold."""
        self._model, self.buckets, self._stored = model, buckets, list(stored)
        self._saved: Mapping[str, str] = {}
        self._first = True
        self._hooks: dict[int, Any] = {}
        self._watch: Any = None
        self._kept = ""

    def facts(self) -> dict[str, Any]:
        """What versions hold of it."""
        return {"buckets": self.buckets.facts(), "computed": self._computed()}

    def put_back(self, facts: Mapping[str, Any]) -> None:
        """Before the first backward pass. A collective call."""
        self.buckets.put_back(facts["buckets"])
        self._saved = facts["computed"]

    def end_step(self) -> None:
        """Reads what the step has shown, and warns once of each thing that a resume would do otherwise."""
        self.buckets.follow()
        for module in self.buckets.modules:
            for hook, state in module._comm_hooks:
                self._follow_hook(hook, state)
        if self._watch is not None:
            self._watch = self._watch.remove()
            if self._kept:
                log.warning(
                    "Gradients: the gradient of %s is kept from one step to the next, and no version holds it. "
                    "Zero it at least once in each step",
                    self._kept,
                )
        if self._first:  # by now the script has made its settings
            self._first = False
            self._compare()
            self._watch = self._watch_gradient()

    def _computed(self) -> dict[str, str]:
        kinds = {"", *(parameter.device.type for parameter in self._model.parameters())}
        found = {}
        for name in (name for kind in sorted(kinds) for name in _SHOWN.get(kind, ())):
            try:
                value = attrgetter(name)(torch)
                found[name] = str(value() if callable(value) else value)
            except (AttributeError, RuntimeError):
                pass  # another torch, or set under another name
        inductor = sys.modules.get("torch._inductor.config")
        return {**found, "_inductor.config.max_autotune": str(getattr(inductor, "max_autotune", False))}

    def _compare(self) -> None:
        now = self._computed()
        saved = {name: was for name, was in self._saved.items() if now.get(name) != was}
        if other := [f"torch.{name} is {now.get(name)} and was {was}" for name, was in saved.items()]:
            log.warning("Arithmetic: since the version was saved, %s. Losses may round otherwise", "; ".join(other))
        for name in ("backends.cudnn.benchmark", "_inductor.config.max_autotune"):
            if now.get(name) == "True":
                log.warning("Arithmetic: torch.%s chooses kernels by their speed. Switch it off to resume exactly", name)

    def _follow_hook(self, hook: Any, state: object) -> None:
        items = state if isinstance(state, dict) else getattr(state, "__dict__", {})
        seen = {key: _mark(value) for key, value in items.items()}
        if self._hooks.setdefault(id(state), seen) not in (None, seen):
            self._hooks[id(state)] = None
            if not any(each is state or state in getattr(each, "__dict__", {}).values() for each in self._stored):
                log.warning(
                    "CommHook: the state of %s changes and is in no version. Hand an object that gives and "
                    "loads it over in `state`, or a resume differs",
                    getattr(hook, "__qualname__", hook),
                )

    def _watch_gradient(self) -> Any:
        """A hook on one parameter that finds out whether the next step adds to this step's gradient."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None and parameter.grad.layout is torch.strided:
                before = [parameter]

                def look(_: Tensor, name: str = name) -> None:
                    kept = before.pop().grad if before else None
                    if kept is not None and not torch.cuda.is_current_stream_capturing():
                        self._kept = name if local_shard(kept).count_nonzero() else ""

                return parameter.register_hook(look)
        return None


def _mark(value: object) -> object:
    if isinstance(value, Tensor):
        return value._version
    return len(value) if isinstance(value, Sized) else value if isinstance(value, (int, float)) else None
