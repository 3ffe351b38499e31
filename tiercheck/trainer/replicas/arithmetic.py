"""Keeps how a training is computed, and warns of what decides the next step but is in no version."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterable, Mapping, Sized
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from tiercheck.trainer.replicas.bucket_layout import bucket_layouts
from tiercheck.trainer.state.live import Wrapped
from tiercheck.trainer.tensors.leaves import NotCapturable, local_shard

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
_BY_SPEED = ("backends.cudnn.benchmark", "_inductor.config.max_autotune")


class Arithmetic:
    """Knows what decides the order and rounding of one rank's sums."""

    def __init__(self, wrapped: Wrapped, stored: Iterable[object]) -> None:
        """`stored`: the objects whose state versions hold."""
        self._model, self._stored = wrapped.model, list(stored)
        self._layouts = bucket_layouts(wrapped.replicated)
        self._saved: Mapping[str, str] = {}
        self._first, self._failed = True, False
        self._hook_states: dict[int, Any] = {}
        self._watch: Any = None
        self._kept = ""

    def facts(self) -> dict[str, Any]:
        """What versions hold of it."""
        layouts = {path: layout.known for path, layout in self._layouts.items()}
        return {"buckets": layouts, "computed": self._computed()}

    def put_back(self, facts: Mapping[str, Any]) -> None:
        """Before the first backward pass. A collective call."""
        for path, layout in self._layouts.items():
            layout.put_back(facts["buckets"].get(path, ""))
        self._saved = facts["computed"]

    def end_step(self) -> None:
        """Reads what the step has shown, and warns once of each thing that a resume would do otherwise."""
        try:
            for layout in self._layouts.values():
                layout.follow()
                for hook, state in layout.module._comm_hooks:
                    self._follow_hook(hook, state)
            if self._watch is not None:
                self._watch = self._watch.remove()
                if self._kept:
                    log.warning(
                        "Gradients: that of %s is kept from one step to the next, and is in no version. Zero "
                        "it at least once in each step",
                        self._kept,
                    )
            if self._first:  # by now the script has made its settings
                self._first = False
                self._compare()
                self._watch = self._watch_gradient()
        except Exception as error:  # invariant: no failure of ours stops training
            if not self._failed:
                log.warning("Arithmetic: a resume may round otherwise: %r", error)
            self._failed = True

    @functools.cached_property
    def _names(self) -> list[str]:
        kinds = {parameter.device.type for parameter in self._model.parameters()}
        return [name for kind in ("", *sorted(kinds)) for name in _SHOWN.get(kind, ())]

    def _computed(self) -> dict[str, str]:
        found = {}
        for name in self._names:
            try:
                value = attrgetter(name)(torch)
                found[name] = str(value() if callable(value) else value)
            except (AttributeError, RuntimeError):
                pass  # another torch, or set under another name
        inductor = sys.modules.get("torch._inductor.config")
        return {**found, _BY_SPEED[1]: str(getattr(inductor, "max_autotune", False))}

    def _compare(self) -> None:
        now = self._computed()
        other = [
            f"{name} is {now.get(name)}, was {was}"
            for name, was in self._saved.items()
            if now.get(name) != was
        ]
        if other:
            log.warning(
                "Arithmetic: losses may round otherwise since the restart: torch.%s", "; torch.".join(other)
            )
        for name in _BY_SPEED:
            if now.get(name) == "True":
                log.warning(
                    "Arithmetic: torch.%s chooses kernels by their speed. Switch it off to resume exactly",
                    name,
                )

    def _follow_hook(self, hook: Any, state: object) -> None:
        items = state if isinstance(state, dict) else getattr(state, "__dict__", {})
        seen = {key: _mark(value) for key, value in items.items()}
        if self._hook_states.setdefault(id(state), seen) in (None, seen):
            return
        self._hook_states[id(state)] = None
        stored = (part for each in self._stored for part in (each, *getattr(each, "__dict__", {}).values()))
        if not any(part is state for part in stored):
            log.warning(
                "CommHook: the state of %s changes, and is in no version. Give `state` an object with "
                "state_dict and load_state_dict that has it",
                getattr(hook, "__qualname__", hook),
            )

    def _watch_gradient(self) -> Any:
        """Has one parameter find out whether the next step adds to this step's gradient."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                before = [parameter]

                def look(_: Tensor, name: str = name, before: list[nn.Parameter] = before) -> None:
                    kept = before.pop().grad if before else None
                    if kept is None or (kept.is_cuda and torch.cuda.is_current_stream_capturing()):
                        return
                    with contextlib.suppress(NotCapturable, RuntimeError):  # of a kind that cannot be counted
                        self._kept = name if local_shard(kept).count_nonzero() else ""

                return parameter.register_hook(look)  # type: ignore[no-untyped-call,unused-ignore]
        return None


def _mark(value: object) -> object:
    if isinstance(value, Tensor):
        return value._version
    return len(value) if isinstance(value, Sized) else value if isinstance(value, (int, float)) else None
