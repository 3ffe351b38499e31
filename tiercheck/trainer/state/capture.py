"""Lists everything that the next step depends on, for a snapshot, without copying anything.

Tensors are named so that a person can read the slot with any safetensors tool: `model/<key of state_dict>`
and `optimizer<i>/<parameter>/<key>`. Sharded tensors (DTensor) are listed as this rank's local shard. Values
that are not tensors go into `Inventory.facts`, which is stored in the user blob.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor, nn, strided
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tiercheck.trainer.state import optimizer_state
from tiercheck.trainer.state.frozen import is_omitted, modes_of
from tiercheck.trainer.state.readable import in_words
from tiercheck.trainer.state.user_state import keys_of_metrics
from tiercheck.trainer.tensors.buffers import NON_PERSISTENT_PREFIX
from tiercheck.trainer.tensors.tensor_parts import (
    Entry,
    NotCapturable,
    exact_memory,
    held_by,
    is_wrapper,
    list_tensor,
    local_shard,
    named,
    parameters_of,
)

OWN = "param"
"""The key of a parameter that only an optimizer has: `optimizer<i>/#<number>/param`."""
BESIDE = "state/"
"""The prefix of tensors of modules in the script's `state`: `state/<name>/<key of state_dict>`."""


@dataclass(frozen=True)
class Inventory:
    """Every tensor of a rank's state, in a stable order, and the plain facts beside them."""

    entries: tuple[Entry, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    fixed: tuple[Any, ...] = ()
    """The parts of the facts that never change."""
    alike: object | None = None
    """A token: inventories with the same one have entries that differ only in their bytes and addresses."""


def take_inventory(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    beside: Mapping[str, nn.Module] | None = None,
    passing: Sequence[tuple[str, Tensor]] = (),
    *,
    cleared: Sequence[str] = (),
    evaluating: bool = False,
    outer: Sequence[Optimizer] = (),
) -> Inventory:
    """Lists the state of `model`, `optimizers` and the modules `beside` them. Raises NotCapturable.

    `passing`, `cleared`: buffers that no state_dict holds (`NonPersistentBuffers.written`). `evaluating`: see
    `modes_of`. `outer`: the optimizers that the script adds parameter groups to, if they are others (ZeRO).
    """
    beside = beside or {}
    entries: list[Entry] = []
    facts: dict[str, Any] = {
        "model_extra": {},
        "optimizers": [],
        "parameters": names_of(model),
        "cleared": list(cleared),
        "beside_modes": {name: modes_of(module) for name, module in beside.items()},
        **modes_of(model, evaluating, loose_parameters(optimizers, model)),
    }
    for module, prefix, extra in modules_beside(beside, facts):
        _list_module(module, prefix, entries, extra)
    _list_module(model, "model/", entries, facts["model_extra"])
    facts["strides"] = {
        entry.name: list(entry.tensor.stride())
        for entry in entries
        if not entry.lazy and entry.tensor.layout is strided and not entry.tensor.is_contiguous()
    }
    entries += (Entry(f"{NON_PERSISTENT_PREFIX}{name}", buffer, lazy=False) for name, buffer in passing)
    held = held_by(entry.tensor for entry in entries)
    for index, (optimizer, whole) in enumerate(zip(optimizers, outer or optimizers, strict=True)):
        states: dict[str, dict[str, Any]] = {}
        for name, parameter in named_parameters_of(optimizer, model):
            prefix = f"optimizer{index}/{name}/"
            own = own_entries(prefix, name, parameter)
            if not all(held(entry.tensor) for entry in own):  # no module has it
                entries += own
            states[name] = {
                key: optimizer_state.describe(
                    value, parameter, f"{prefix}{in_words(key)}", entries, optimizer
                )
                for key, value in optimizer.state.get(parameter, {}).items()
            }
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        counts = [len(group["params"]) for group in optimizer.param_groups]
        facts["optimizers"].append(
            {
                "class": type(optimizer).__name__,
                "groups": groups,
                "states": states,
                "counts": counts,
                "order": _order_of_states(optimizer),
                "whole": [] if whole is optimizer else names_by_group(whole, model),
                "attributes": optimizer_state.attributes_of(optimizer),
                "ties": optimizer_state.ties_of(optimizer, named_parameters_of(optimizer, model), model),
                "others": optimizer_state.describe_others(optimizer, f"optimizer{index}/", entries),
            }
        )
    return Inventory(tuple(entries), facts)


def _list_module(module: nn.Module, prefix: str, entries: list[Entry], extra: dict[str, Any]) -> None:
    for key, value, lazy in model_items(module):
        if isinstance(value, Tensor) and not is_extra(key):
            list_tensor(f"{prefix}{key}", value, lazy, entries)
        else:
            extra[key] = value


def modules_beside(
    beside: Mapping[str, nn.Module], facts: dict[str, Any]
) -> Iterator[tuple[nn.Module, str, dict[str, Any]]]:
    """Yields each module, the prefix of its tensors' names in a slot, and its part of the facts."""
    for name, module in beside.items():
        yield module, f"{BESIDE}{name}/", facts.setdefault("beside_extra", {}).setdefault(name, {})


def is_extra(key: str) -> bool:
    """Returns whether a state_dict key is of `get_extra_state`, to be restored by `set_extra_state`."""
    return key.rpartition(".")[2] == "_extra_state"


def model_items(model: nn.Module) -> Iterator[tuple[str, Any, bool]]:
    """Yields (key, value, lazy) of the model's state_dict; a tensor under several keys (tied) comes once."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    metrics = keys_of_metrics(model)
    seen: set[tuple[Any, ...]] = set()
    for key, value in model.state_dict().items():
        if key in metrics or is_omitted(model, key):
            continue
        if is_lazy(value):
            raise NotCapturable(f"{key} has no shape yet: give the model a batch before `restore`")
        if isinstance(value, Tensor) and not is_extra(key) and value.numel() and not is_wrapper(value):
            with named(f"model/{key}"):
                local = local_shard(value)
            if local.numel() and exact_memory(local) in seen:
                continue
            seen.add(exact_memory(local))
        yield key, value, key in parameters


def named_parameters_of(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the optimizer's parameters by their names in the model (`#<index>` if they are not in it)."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for index, parameter in enumerate(parameters_of(optimizer)):
        yield names.get(id(parameter), f"#{index}"), parameter


def loose_parameters(optimizers: Sequence[Optimizer], model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters that only an optimizer has, as `optimizer<i>/#<number>`."""
    for index, optimizer in enumerate(optimizers):
        for name, parameter in named_parameters_of(optimizer, model):
            if name.startswith("#"):
                yield f"optimizer{index}/{name}", parameter


def _order_of_states(optimizer: Optimizer) -> list[int]:
    """Returns the numbers of the parameters in the order of `optimizer.state`; empty if it is their own.

    That is the order of their first gradients, in which a script may sum over the state."""
    numbers = {id(each): at for at, each in enumerate(parameters_of(optimizer))}
    # A look at the state of a parameter that has none leaves an empty one, which no version has.
    order = [numbers[id(key)] for key, state in optimizer.state.items() if state and id(key) in numbers]
    return [] if order == sorted(order) else order


def names_by_group(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """Returns the names of the parameters of each group, as `named_parameters_of` gives them."""
    names = (name for name, _ in named_parameters_of(optimizer, model))
    return [list(islice(names, len(group["params"]))) for group in optimizer.param_groups]


def names_of(model: nn.Module) -> int:
    """Returns a checksum of the parameters' names. If it is equal, `#<number>` means the same parameter."""
    return zlib.crc32("\n".join(name for name, _ in model.named_parameters()).encode())


def own_entries(prefix: str, name: str, parameter: Tensor) -> list[Entry]:
    """Lists a parameter that only the optimizer has, such as master weights. Raises NotCapturable."""
    entries: list[Entry] = []
    if name.startswith("#"):
        list_tensor(f"{prefix}{OWN}", parameter, True, entries)
    return entries
