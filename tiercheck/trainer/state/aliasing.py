"""Checks that what a state_dict shows is the state itself, under the names that it keeps.

FSDP1, quantised modules and hooks that rename, merge or clone return tensors of their own. A restore would
write into those, and the model would keep what its script began with.

DistributedDataParallel and torch.compile add a prefix to every name. It is not part of the state, so a run
may be wrapped in another way than the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tiercheck.trainer.backends.backend import log
from tiercheck.trainer.state import optimizer_state
from tiercheck.trainer.state.capture import BESIDE, is_extra
from tiercheck.trainer.state.frozen import is_omitted
from tiercheck.trainer.tensors.tensor_parts import Entry, NotCapturable, held_by, memory, named, parts


def refuse_unfit_modules(model: nn.Module) -> None:
    """Raises NotCapturable if FullyShardedDataParallel wraps a part, or a part is compiled to TorchScript.

    The state_dict of the former is never its memory; the latter has no Python modules to look into."""
    for name, module in model.named_modules():
        where = f" ({name})" if name else ""
        if isinstance(module, torch.jit.ScriptModule):
            raise NotCapturable(
                f"a part of the model{where} is a TorchScript module, whose state cannot be followed; give "
                "the Checkpointer the module that torch.jit.script or torch.jit.trace was given, which has "
                "the same tensors"
            )
        # By name: importing its module takes time, and without torch.distributed it does not exist.
        if any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__):
            raise NotCapturable(
                f"the model is wrapped by FullyShardedDataParallel{where} (FSDP1), whose state_dict gives "
                "copies that nothing could be restored into; use torch.distributed.fsdp.fully_shard (FSDP2)"
            )


def refuse_copies(model: nn.Module, beside: Mapping[str, nn.Module], entries: Sequence[Entry]) -> None:
    """Raises NotCapturable if `entries`, made from state_dicts, have a copy, or miss a trained tensor."""
    shown = held_by(entry.tensor for entry in entries)
    held: set[tuple[torch.device, int]] = set()
    for prefix, module in _modules(model, beside):
        for name, tensor, trained in _held(module):
            with named(f"{prefix}{name}"):
                leaves = list(parts(tensor))
            for path, leaf in leaves:
                held.add(memory(leaf))
                if trained and leaf.numel() and not shown(leaf):
                    raise NotCapturable(
                        f"{prefix}{name}{path} is trained, and state_dict gives a copy of it, or a part, "
                        "or leaves it out"
                    )
    for prefix, module in _modules(model, beside):
        doubted = {
            entry.name.removeprefix(prefix): memory(entry.tensor)
            for entry in entries
            if entry.name.startswith(prefix) and entry.tensor.numel() and memory(entry.tensor) not in held
        }
        # A module may keep tensors that it has not registered. Those stay at the same address.
        for key, value in module.state_dict().items() if doubted else ():
            if not isinstance(value, Tensor) or is_extra(key) or is_omitted(module, key):
                continue
            for path, leaf in parts(value):
                if memory(leaf) != doubted.get(f"{key}{path}", memory(leaf)):
                    raise NotCapturable(
                        f"{prefix}{key}{path} is a copy that state_dict makes: what is restored into it "
                        "would be lost"
                    )


def is_final(model: nn.Module) -> bool:
    """Returns whether every parameter has memory by now."""
    return not any(is_lazy(parameter) or parameter.is_meta for parameter in model.parameters())


def _modules(model: nn.Module, beside: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    yield "model/", model
    for name, module in beside.items():
        yield f"{BESIDE}{name}/", module


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yields (name, tensor, whether it is trained) of every parameter and buffer."""
    for name, parameter in module.named_parameters():
        if not is_omitted(module, name):
            yield name, parameter, parameter.requires_grad
    for name, buffer in module.named_buffers():
        if not is_omitted(module, name):
            yield name, buffer, False


_FRAMEWORKS = {"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"}
"""Lightning gives each object a class of its own below these, named after the optimizer inside."""


@dataclass(frozen=True)
class Wrapped:
    """A model as a script trains it."""

    model: nn.Module
    """The model without the wrappers around it as a whole."""
    replicated: tuple[tuple[str, DistributedDataParallel], ...]
    """The modules with parameters that are equal in a process group, and the prefixes of their names."""

    @staticmethod
    def look(model: nn.Module) -> Wrapped:
        around: list[tuple[str, DistributedDataParallel]] = []
        inner = model
        while True:
            if isinstance(inner, DistributedDataParallel):
                around.append(("", inner))
                inner = inner.module
            elif isinstance(compiled := getattr(inner, "_orig_mod", None), nn.Module):
                inner = compiled
            else:
                break
        for path, module in inner.named_modules():
            if isinstance(module, DistributedDataParallel):
                around.append((f"{path}.module.", module))
        return Wrapped(inner, tuple(around))


def unwrap(optimizer: Any) -> tuple[Optimizer, Optimizer | None]:
    """Returns the optimizer that does the work, and a wrapper that skips `Optimizer.__init__`, if any.

    Only the former calls its hooks. Raises TypeError, NotCapturable.
    """
    while not _FRAMEWORKS.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{type(optimizer).__name__} is no torch.optim.Optimizer: give the Checkpointer the one inside; "
            "what a wrapper keeps of its own, such as a count of steps, belongs into `state`"
        )
    outer = None
    while "_optimizer_step_pre_hooks" not in vars(optimizer):
        outer, kind = outer or optimizer, type(optimizer).__name__
        inner = [each for each in vars(optimizer).items() if isinstance(each[1], Optimizer)]
        shown = [each for _, each in inner if getattr(optimizer, "state", each.state) is each.state]
        if not shown:
            line = f"give the Checkpointer [optimizer.{inner[0][0]}]" if inner else "have it call that one"
            raise NotCapturable(
                f"{kind} does not call Optimizer.__init__, so that its updates cannot be seen: {line}"
            )
        optimizer = shown[0]
    return optimizer, outer


class WrapperState:
    """Saves what a wrapper has beside its inner optimizer, as its state_dict and attributes show it."""

    def __init__(self, outer: Optimizer, inner: Optimizer) -> None:
        self._outer, self._inner = outer, inner
        if not self.state_dict()["shown"]:
            for name, value in optimizer_state.odd_attributes(outer):
                if not isinstance(value, Optimizer):
                    log.warning(
                        "%s.%s (%s) is in no version: if it changes in training, give the Checkpointer "
                        "state={%r: an object with state_dict and load_state_dict of it}",
                        *(type(outer).__name__, name, type(value).__name__, name),
                    )

    def state_dict(self) -> dict[str, Any]:
        shown = self._outer.state_dict()
        more = {key: value for key, value in shown.items() if key not in ("state", "param_groups")}
        return {"shown": more, "attributes": optimizer_state.attributes_of(self._outer)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        if saved["shown"]:
            with optimizer_state.unchanged(self._inner):
                self._outer.load_state_dict({**self._outer.state_dict(), **saved["shown"]})
        optimizer_state.put_attributes(self._outer, saved["attributes"])
