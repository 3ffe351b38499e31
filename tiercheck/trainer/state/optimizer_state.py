"""Takes an optimizer's state apart into tensors and a plain description, and puts it together.

It handles tensors, quantised ones (`__tensor_flatten__`, torch.utils._python_dispatch), lists and dicts.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.state.readable import (
    UNCHANGEABLE,
    Apart,
    check_readable,
    find_class,
    in_words,
    is_readable,
    is_record,
    object_to_record,
    rebuilt,
    to_record,
)
from tiercheck.trainer.state.replayable import closed_over, is_function, is_value, own_attributes
from tiercheck.trainer.state.user_state import generator_state, set_generator
from tiercheck.trainer.state.values import put_back_value
from tiercheck.trainer.tensors.tensor_parts import (
    PLAIN,
    Entry,
    NotCapturable,
    exact_memory,
    first_part,
    held_by,
    is_wrapper,
    list_tensor,
    parameters_of,
)

_ATTRIBUTE, _GENERATOR = "tiercheck.attribute", "tiercheck.generator"
"""The first element of the key of what is kept as an attribute; the second is its name."""
_DEEP = 4
"""The depth to which objects that an optimizer keeps are searched for tensors."""

Make = Callable[[str, Mapping[str, Any]], Tensor]
"""A function that returns an empty tensor for a stored name and its description, to be filled later."""


def describe(
    value: Any, parameter: Tensor, name: str, entries: list[Entry], owner: Optimizer | None = None
) -> dict[str, Any]:
    """Describes how to rebuild `value`, and adds its tensors to `entries`, under `name`.

    Objects of classes from the `owner`'s own package are described, too. Raises NotCapturable.
    """
    if isinstance(value, Tensor):
        return _describe_tensor(value, parameter, name, entries)
    if is_readable(value) and not _has_tensors(value):
        return {"value": value}

    def members(of: Iterable[Any]) -> list[dict[str, Any]]:
        return [
            describe(each, parameter, f"{name}/{path}", entries, owner)
            for path, each in (of.items() if isinstance(of, dict) else enumerate(of))
        ]

    if type(value) in (list, tuple):
        return {type(value).__name__: members(value)}
    if type(value) is dict and _taken_apart(value) is None and all(map(is_readable, value)):
        return {"dict": [[*pair] for pair in zip(value, members(value), strict=True)]}
    if (apart := _object_apart(value, owner) or _taken_apart(value)) is None:
        check_readable(value, name)
        raise NotCapturable(f"{name}: a {type(value).__name__} cannot be taken apart")
    # As pairs, because a record is rebuilt as soon as it is read.
    return {"record": [*apart[0].items()], "of": members(apart[1])}


def _taken_apart(value: Any) -> Apart | None:
    try:
        return to_record(value)
    except NotCapturable:
        return None


def _object_apart(value: Any, owner: Optimizer | None) -> Apart | None:
    """Takes apart an object of plain attributes, such as a projector, if its package is the optimizer's."""
    kind, packages = type(value), [type(each).__module__.partition(".")[0] for each in (value, owner)]
    plain = (
        owner is not None and packages[0] == packages[1] and is_record(kind) and hasattr(value, "__dict__")
    )
    try:
        return object_to_record(value) if plain and not isinstance(value, (type, FunctionType)) else None
    except NotCapturable:
        return None


def stored_names(described: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yields the names under which the tensors of a described value are stored."""
    for path, member in _members(described):
        yield from stored_names(member, f"{name}/{path}")
    if "device" in described and "parts" not in described:
        yield name


def put_together(described: Mapping[str, Any], name: str, make: Make) -> Any:
    """Rebuilds what `describe` described. Raises NotCapturable."""
    if "value" in described:
        return described["value"]
    members = [(path, put_together(member, f"{name}/{path}", make)) for path, member in _members(described)]
    if "list" in described or "tuple" in described:
        return (list if "list" in described else tuple)(each for _, each in members)
    if "dict" in described:
        return {key: each for (key, _), (_, each) in zip(described["dict"], members, strict=True)}
    if "record" in described:
        try:
            return rebuilt(dict(described["record"]), [each for _, each in members], any_class=True)
        except NotCapturable as error:
            raise NotCapturable(f"{name}: {error}") from None
    if "parts" in described:
        kind = _wrapper_class(described["class"], name)
        shape, stride = torch.Size(described["shape"]), tuple(described["stride"])
        return kind.__tensor_unflatten__(dict(members), described["context"], shape, stride)
    return make(name, described)


Others = Sequence[tuple[Any, Mapping[str, Any]]]
"""The entries of an optimizer under other keys than parameters: key, and how to rebuild the value."""


def describe_others(optimizer: Optimizer, prefix: str, entries: list[Entry]) -> Others:
    """Describes what is kept by no parameter, such as a count under `state["k"]` or a list of averages.

    The tensors are added to `entries`, which hold what models have. Raises NotCapturable.
    """
    found: list[tuple[Any, Mapping[str, Any]]] = []
    attributes = list(_attributes_to_describe(optimizer, prefix, entries))
    for key, value in optimizer.state.items():
        if not isinstance(key, Tensor):
            _refuse_identity(key, optimizer, prefix)
            check_readable(key, f"{prefix}{in_words(key)}")
            found.append((key, describe(value, NO_PARAMETER, _place(prefix, len(found)), entries, optimizer)))
    listed = len(entries)
    for place, value in attributes:
        # The position of a generator must be read at once, and not when tensors are filled.
        drawn = place[0] == _GENERATOR
        found.append(
            (
                place,
                {"value": value}
                if drawn
                else describe(value, NO_PARAMETER, _place(prefix, len(found)), entries, optimizer),
            )
        )
    entries[listed:] = [entry._replace(must_be_finite=False) for entry in entries[listed:]]
    return found


def odd_attributes(optimizer: Optimizer) -> list[tuple[str, Any]]:
    """Returns the attributes of a class outside torch that are neither plain values nor code."""
    if _is_torchs(optimizer):
        return []
    return [
        (name, value)
        for name, value in own_attributes(optimizer)
        if not (_is_plain_value(value) or is_function(value)) or _by_parameter(optimizer, value)
    ]


def _attributes_to_describe(
    optimizer: Optimizer, prefix: str, entries: Sequence[Entry]
) -> Iterator[tuple[tuple[str, str], Any]]:
    """Yields attributes with data held nowhere else. Raises NotCapturable if they could not be restored."""
    held = held_by([entry.tensor for entry in entries])
    trained = {*map(id, parameters_of(optimizer))}
    for name, value in odd_attributes(optimizer):
        if (placed := _by_parameter(optimizer, value)) and _is_tree(placed[1], optimizer):
            if not all(
                isinstance(each, Tensor) and _is_dense(each) and held(each) for each in placed[1].values()
            ):
                yield (placed[0], name), placed[1]
            continue
        found = list(_found_in(value, _DEEP))
        data = is_value(value) or isinstance(value, deque)
        data = data or (_object_apart(value, optimizer) is not None and _is_tree(value, optimizer))
        if not data and all(
            id(each) in trained or (_is_dense(each) and held(each.detach())) for each in found
        ):
            continue  # a logger, the script's model
        if (state := generator_state(value)) is not None:
            yield (_GENERATOR, name), state
        elif _is_tree(value, optimizer) and not any(isinstance(each, nn.Parameter) for each in found):
            yield (_ATTRIBUTE, name), value
        else:
            raise NotCapturable(
                f"{prefix}{name}: {type(optimizer).__name__} keeps data in a {type(value).__name__} of its "
                "own, which could not be put back: keep it in optimizer.state"
            )


def _is_dense(value: Any) -> bool:
    return type(value) in PLAIN and value.layout is torch.strided and not value.is_meta


def _found_in(value: Any, deep: int) -> Iterator[Any]:
    """Yields the tensors and generators in it, and in objects up to `deep` levels further."""
    if isinstance(value, Tensor) or generator_state(value) is not None:
        yield value
    elif deep and not isinstance(value, (nn.Module, Optimizer, type)) and not is_function(value):
        members: Iterable[Any]
        if isinstance(value, Mapping):
            members = [*value, *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            members = list(value)
        elif isinstance(value, FunctionType):
            members = closed_over(value)
        else:
            members = list(getattr(value, "__dict__", {}).values())
        for each in members:
            yield from _found_in(each, deep - 1)


def _is_tree(value: Any, owner: Optimizer) -> bool:
    """Returns whether `describe` can take a value apart."""
    if isinstance(value, Tensor) or is_readable(value):
        return not isinstance(value, nn.Parameter)
    if (apart := _object_apart(value, owner) or _taken_apart(value)) is not None:
        return all(_is_tree(each, owner) for each in apart[1])
    if type(value) is dict:
        return all(map(is_readable, value)) and all(_is_tree(each, owner) for each in value.values())
    return type(value) in (list, tuple) and all(_is_tree(each, owner) for each in value)


_BY_PARAMETER, _BY_IDENTITY = "tiercheck.parameter", "tiercheck.identity"
"""The first element of the key of what is kept under parameters, or under their id()."""


def _by_parameter(optimizer: Optimizer, value: Any) -> tuple[str, dict[int, Any]] | None:
    """Returns a dict's values by parameter number if its keys are parameters, or their id(); else None.

    In another process the keys are others.
    """
    if (
        not isinstance(value, dict)
        or not value
        or not all(type(key) is int or isinstance(key, Tensor) for key in value)
    ):
        return None
    numbers = {id(each): number for number, each in enumerate(parameters_of(optimizer))}
    placed = {numbers.get(key if type(key) is int else id(key)): each for key, each in value.items()}
    kind = _BY_IDENTITY if type(next(iter(value))) is int else _BY_PARAMETER
    return None if None in placed or len(placed) < len(value) else (kind, placed)  # type: ignore[return-value]


def _refuse_identity(key: Any, optimizer: Optimizer, prefix: str) -> None:
    """Raises NotCapturable for a key that is the id() of a parameter, which differs in another process."""
    if type(key) is int and key in map(id, parameters_of(optimizer)):
        raise NotCapturable(
            f"{prefix}{key} is kept under the id() of a parameter: keep it under the parameter itself"
        )


def stored_names_of_others(others: Others, prefix: str) -> Iterator[str]:
    for number, (_, described) in enumerate(others):
        yield from stored_names(described, _place(prefix, number))


def put_back_others(optimizer: Optimizer, others: Others, prefix: str, make: Make) -> None:
    """Restores what `describe_others` described. Raises NotCapturable."""
    for number, (key, described) in enumerate(others):
        value = put_together(described, _place(prefix, number), make)
        kind, name = key if type(key) is tuple and len(key) == 2 else ("", "")
        if kind in (_BY_PARAMETER, _BY_IDENTITY):
            parameters = parameters_of(optimizer)
            keys = (parameters[at] if kind == _BY_PARAMETER else id(parameters[at]) for at in value)
            present = vars(optimizer).setdefault(name, {})  # may be a defaultdict with a factory of its own
            present.clear()
            present.update(zip(keys, value.values(), strict=True))
        elif kind == _ATTRIBUTE:
            present = vars(optimizer).get(name)
            if type(present) is type(value) and is_record(type(value)) and hasattr(value, "__dict__"):
                vars(present).clear()  # a hook, for example, may refer to the object
                vars(present).update(vars(value))
            else:
                setattr(optimizer, name, value)
        elif kind != _GENERATOR:
            optimizer.state[key] = value
        elif not set_generator(vars(optimizer).get(name), value):
            raise NotCapturable(f"{prefix}{name} was a generator of random numbers, and is none here")


def _place(prefix: str, number: int) -> str:
    return f"{prefix}others/{number}"


NO_PARAMETER = torch.empty(0, device="cpu")
"""A placeholder where a value belongs to no parameter."""


Ties = Sequence[Sequence[tuple[str, Any]]]
"""Groups of one tensor's names: parameter and key (None: the parameter), or buffer and `_BUFFER`."""
_BUFFER = False


def ties_of(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]], model: nn.Module) -> Ties:
    """Finds tensors kept under several names, such as a count for all parameters, or a mask of `model`."""
    found: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
    for name, parameter in named:
        for key, value in ((None, parameter), *optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor) and type(value) in PLAIN and value.numel():
                found.setdefault(exact_memory(value), []).append((name, key))
    for name, buffer in model.named_buffers() if found else ():
        if type(buffer) in PLAIN and buffer.layout is torch.strided and exact_memory(buffer) in found:
            found[exact_memory(buffer)].append((name, _BUFFER))
    return [group for group in found.values() if len(group) > 1]


def tie(optimizer: Optimizer, named: Iterable[tuple[str, Tensor]], ties: Ties, model: nn.Module) -> None:
    """Makes the tensors shared again that `ties_of` found, as far as they are here."""
    parameters = dict(named)
    buffers = dict(model.named_buffers()) if ties else {}
    for group in ties:
        here = [(parameters[name], key) for name, key in group if key is not _BUFFER and name in parameters]
        shared = next((buffers[name] for name, key in group if key is _BUFFER and name in buffers), None)
        if shared is None and here:
            first, first_key = here[0]
            shared = first.detach() if first_key is None else optimizer.state[first].get(first_key)
        for parameter, key in here:
            if shared is not None and key is not None and key in optimizer.state[parameter]:
                optimizer.state[parameter][key] = shared


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns plain values that an optimizer keeps beside its state, such as a step count."""
    # Torch's classes make anew what they keep so, under such names; others are of the script.
    torchs = _is_torchs(optimizer)
    return {
        name: value
        for name, value in own_attributes(optimizer)
        if not (torchs and name.startswith("_"))
        and _is_plain_value(value)
        and not _by_parameter(optimizer, value)
    }


def attributes_of_script(optimizer: Optimizer) -> dict[str, Any]:
    """Returns the plain values that a script keeps on an optimizer of torch's, which no step of it sets."""
    return attributes_of(optimizer) if _is_torchs(optimizer) else {}


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _is_plain_value(value: Any) -> bool:
    return is_value(value) and is_readable(value) and (isinstance(value, Tensor) or not _has_tensors(value))


def put_attributes(optimizer: Optimizer, attributes: Mapping[str, Any]) -> None:
    """Restores what `attributes_of` returned, in place where that is possible."""
    for name, value in attributes.items():
        setattr(optimizer, name, put_back_value(vars(optimizer).get(name), value))


@contextmanager
def unchanged(optimizer: Optimizer) -> Iterator[None]:
    """Keeps state, groups and attributes in a load: torch would cast the state to the parameter's dtype."""
    state, groups = optimizer.state, optimizer.param_groups
    attributes = copy.deepcopy(attributes_of(optimizer))
    yield
    optimizer.state, optimizer.param_groups = state, groups
    put_attributes(optimizer, attributes)


def refuse_inner(optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Raises NotCapturable for an optimizer with an inner one, if its separate state would be lost."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for path, all_of_them, inner in _inner(optimizer, names):
            if inner.state is not optimizer.state and not any(inner is given for given in optimizers):
                kind = type(optimizer).__name__
                raise NotCapturable(
                    f"{kind}.{path} is a {type(inner).__name__} with a state that {kind} does not show: "
                    f"give the Checkpointer that one, as [{all_of_them}] or beside it"
                )


def _inner(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, str, Optimizer]]:
    """Yields each inner optimizer, after its path and an expression for all in the same place."""
    for name, value in vars(optimizer).items():
        if isinstance(value, Mapping):
            words = (names.get(id(key), in_words(key)) for key in value)
            members = [(f"{name}[{word!r}]", each) for word, each in zip(words, value.values(), strict=True)]
            reached = f"*optimizer.{name}.values()"
        elif isinstance(value, (list, tuple)):
            members = [(f"{name}[{number}]", each) for number, each in enumerate(value)]
            reached = f"*optimizer.{name}"
        else:
            members, reached = [(name, value)], f"optimizer.{name}"
        yield from ((path, reached, each) for path, each in members if isinstance(each, Optimizer))


def is_plain(described: Mapping[str, Any]) -> bool:
    """Returns whether a description is of one tensor or one value, and not of several."""
    return not any(True for _ in _members(described))


def _members(described: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("list", "tuple"):
        yield from ((str(number), member) for number, member in enumerate(described.get(kind, ())))
    yield from ((str(key), member) for key, member in described.get("dict", ()))
    yield from ((str(number), member) for number, member in enumerate(described.get("of", ())))
    yield from described.get("parts", {}).items()


def _describe_tensor(value: Tensor, parameter: Tensor, name: str, entries: list[Entry]) -> dict[str, Any]:
    """Describes a tensor: device, sharding, and order in memory if it is neither the parameter's nor usual.

    Of a wrapper also its class and what is no tensor in it."""
    if not is_wrapper(value):
        list_tensor(name, value, True, entries)
        described: dict[str, Any] = {"device": value.device.type}
        local, shard = entries[-1].tensor, first_part(parameter)
        # What `eigh` returns, for example, is transposed; sums over it round by its order.
        if not (local.stride() == shard.stride() if local.shape == shard.shape else local.is_contiguous()):
            described["strides"] = list(torch.empty_like(local, device="meta").stride())
        if hasattr(value, "placements"):
            if getattr(parameter, "placements", None) != value.placements:
                raise NotCapturable(f"{name} is sharded differently from its parameter")
            described["sharded"] = {"shape": list(value.shape), "stride": list(value.stride())}
        return described
    if hasattr(value, "placements"):
        raise NotCapturable(f"{name}: a sharded {type(value.to_local()).__name__} cannot be stored")  # type: ignore[attr-defined]
    flat: Any = value
    names, context = flat.__tensor_flatten__()
    check_readable(context, name)
    return {
        "device": value.device.type,
        "class": f"{type(value).__module__}:{type(value).__qualname__}",
        "context": context,
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "parts": {
            each: _describe_tensor(getattr(value, each), parameter, f"{name}/{each}", entries)
            for each in names
        },
    }


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Tensor) or type(value) in UNCHANGEABLE:
        return isinstance(value, Tensor)
    if type(value) in (list, tuple, dict):
        return any(map(_has_tensors, value.values() if type(value) is dict else value))
    return any(map(_has_tensors, (_taken_apart(value) or (None, ()))[1]))


def _wrapper_class(path: str, name: str) -> Any:
    found = find_class(path, name)
    if not (issubclass(found, Tensor) and hasattr(found, "__tensor_unflatten__")):
        raise NotCapturable(f"{name} is a {path.replace(':', '.')}, which is no wrapper of tensors here")
    return found
