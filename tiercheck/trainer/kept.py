"""What an optimizer keeps of a parameter, taken apart into tensors to store and a plain description, and put together again.

Tensors, quantised ones (`__tensor_flatten__`, torch.utils._python_dispatch), and lists and dicts of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tiercheck.trainer.attributes import is_value, own_attributes
from tiercheck.trainer.leaves import PLAIN, Entry, NotCapturable, is_wrapper, list_tensor
from tiercheck.trainer.readable import comes_back, must_come_back

Make = Callable[[str, Mapping[str, Any]], Tensor]
"""Gives an empty tensor for a stored name and its description, to be filled later."""


def describe(value: Any, parameter: Tensor, name: str, entries: list[Entry]) -> dict[str, Any]:
    """How to put `value` together again; its tensors are added to `entries`, under `name`. Raises NotCapturable."""
    if isinstance(value, Tensor):
        return _describe_tensor(value, parameter, name, entries)
    if isinstance(value, (list, tuple)) and _has_tensors(value):
        members = [describe(each, parameter, f"{name}/{number}", entries) for number, each in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": members}
    if isinstance(value, dict) and _has_tensors(value):
        return {"dict": [[key, describe(each, parameter, f"{name}/{key}", entries)] for key, each in value.items()]}
    must_come_back(value, name)
    return {"value": value}


def stored_names(described: Mapping[str, Any], name: str) -> Iterator[str]:
    """Of the tensors that belong to it."""
    for path, member in _members(described):
        yield from stored_names(member, f"{name}/{path}")
    if "device" in described and "parts" not in described:
        yield name


def put_together(described: Mapping[str, Any], name: str, make: Make) -> Any:
    """Inverse of `describe`. Raises NotCapturable."""
    if "value" in described:
        return described["value"]
    members = [(path, put_together(member, f"{name}/{path}", make)) for path, member in _members(described)]
    if "list" in described or "tuple" in described:
        return (list if "list" in described else tuple)(each for _, each in members)
    if "dict" in described:
        return {key: each for (key, _), (_, each) in zip(described["dict"], members, strict=True)}
    if "parts" in described:
        kind = _class(described["class"], name)
        shape, stride = torch.Size(described["shape"]), tuple(described["stride"])
        return kind.__tensor_unflatten__(dict(members), described["context"], shape, stride)
    return make(name, described)


Others = Sequence[tuple[Any, Mapping[str, Any]]]
"""What an optimizer keeps under keys that are no parameters: each key, and how to put its value together."""


def describe_others(optimizer: Optimizer, prefix: str, entries: list[Entry]) -> Others:
    """Such as a count of all updates under `state["k"]`. Their tensors are added to `entries`. Raises NotCapturable."""
    found: list[tuple[Any, Mapping[str, Any]]] = []
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            must_come_back(key, f"{prefix}{key}")
            found.append((key, describe(value, NOBODYS, _place(prefix, len(found)), entries)))
    return found


def stored_names_of_others(others: Others, prefix: str) -> Iterator[str]:
    """Of the tensors that belong to them."""
    for number, (_, described) in enumerate(others):
        yield from stored_names(described, _place(prefix, number))


def put_back_others(optimizer: Optimizer, others: Others, prefix: str, make: Make) -> None:
    """Inverse of `describe_others`. Raises NotCapturable."""
    for number, (key, described) in enumerate(others):
        optimizer.state[key] = put_together(described, _place(prefix, number), make)


def _place(prefix: str, number: int) -> str:
    return f"{prefix}others/{number}"


NOBODYS = torch.empty(0, device="cpu")
"""In place of the parameter that something is kept of."""


Ties = Sequence[Sequence[tuple[str, Any]]]
"""Groups of one tensor under several names: parameter and key of its state, None for the parameter itself."""


def ties_of(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]]) -> Ties:
    """What an optimizer keeps more than once, such as one count for all parameters. `named`: its parameters."""
    found: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
    for name, parameter in named:
        for key, value in ((None, parameter), *optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor) and type(value) in PLAIN and value.numel():
                memory = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
                found.setdefault(memory, []).append((name, key))
    return [group for group in found.values() if len(group) > 1]


def tie(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]], ties: Ties) -> None:
    """Inverse of `ties_of`, of what is here."""
    parameters = dict(named)
    for group in ties:
        here = [(parameters[name], key) for name, key in group if name in parameters]
        first, first_key = here[0] if here else (None, None)
        for parameter, key in here[1:]:
            if first is not None and key is not None and key in optimizer.state[parameter]:
                optimizer.state[parameter][key] = (
                    first.detach() if first_key is None else optimizer.state[first][first_key]
                )


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Plain values that a class of somebody's own keeps beside its state, such as a count of its steps."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return {}  # what they keep beside it, they make anew
    return {name: value for name, value in own_attributes(optimizer) if is_value(value) and comes_back(value)}


def put_attributes(optimizer: Optimizer, attributes: Mapping[str, Any]) -> None:
    """Inverse of `attributes_of`. Tensors are written in place."""
    for name, value in attributes.items():
        present = vars(optimizer).get(name)
        if isinstance(present, Tensor) and isinstance(value, Tensor) and present.shape == value.shape:
            present.copy_(value)
        elif name in vars(optimizer):
            setattr(optimizer, name, value)


def refuse_inner(optimizers: Sequence[Optimizer]) -> None:
    """Raises NotCapturable for an optimizer with another one inside, whose state is not its own and would be lost."""
    for optimizer in optimizers:
        for name, inner in vars(optimizer).items():
            lost = isinstance(inner, Optimizer) and inner.state is not optimizer.state
            if lost and not any(inner is given for given in optimizers):
                kind = type(optimizer).__name__
                raise NotCapturable(
                    f"{kind}.{name} is a {type(inner).__name__} with a state that {kind} does not show: give the Checkpointer "
                    f"that one, as [optimizer.{name}] or beside it"
                )


def is_plain(described: Mapping[str, Any]) -> bool:
    """Whether it is one tensor or one value, and not made of several."""
    return not any(True for _ in _members(described))


def _members(described: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("list", "tuple"):
        yield from ((str(number), member) for number, member in enumerate(described.get(kind, ())))
    yield from ((str(key), member) for key, member in described.get("dict", ()))
    yield from described.get("parts", {}).items()


def _describe_tensor(value: Tensor, parameter: Tensor, name: str, entries: list[Entry]) -> dict[str, Any]:
    """On which device, and sharded like its parameter or not; of a wrapper also its class and what is no tensor in it."""
    if not is_wrapper(value):
        list_tensor(name, value, True, entries)
        described: dict[str, Any] = {"device": value.device.type}
        if hasattr(value, "placements"):
            if getattr(parameter, "placements", None) != value.placements:
                raise NotCapturable(f"{name} is sharded differently from its parameter")
            described["sharded"] = {"shape": list(value.shape), "stride": list(value.stride())}
        return described
    if hasattr(value, "placements"):
        raise NotCapturable(f"{name}: a sharded {type(value.to_local()).__name__} cannot be stored")  # type: ignore[attr-defined]
    flat: Any = value
    names, context = flat.__tensor_flatten__()
    must_come_back(context, name)
    return {
        "device": value.device.type,
        "class": f"{type(value).__module__}:{type(value).__qualname__}",
        "context": context,
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "parts": {each: _describe_tensor(getattr(value, each), parameter, f"{name}/{each}", entries) for each in names},
    }


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return any(map(_has_tensors, members))


def _class(path: str, name: str) -> Any:
    """Of a wrapper. Only what the script has imported: to read a checkpoint never imports, and so never runs, anything."""
    module, _, qualified = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise NotCapturable(f"{name} is a {path.replace(':', '.')}; import {module} before `restore`")
    return found
