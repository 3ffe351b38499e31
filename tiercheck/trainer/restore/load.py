"""Restores a snapshot bit for bit, then runs what torch's own load would run: hooks and methods.

No dtype is cast, and nothing missing goes unnoticed.

A restore fills memory, and so bypasses hooks, but a module may derive something from its tensors when it is
loaded. Hooks get copies of what was restored. Whatever they write to the state itself is undone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.protocol.artifacts.pieces import Piece
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.deltas.gradients import set_hyper_parameters
from tiercheck.trainer.proof.proof import first_difference
from tiercheck.trainer.replicas.replicas import Replicas, Shares, cut, exchange, share_of
from tiercheck.trainer.replicas.trained_state import TrainedState
from tiercheck.trainer.restore.grown import add_groups, describe_difference, group_as_saved
from tiercheck.trainer.state import optimizer_state
from tiercheck.trainer.state.aliasing import Wrapped
from tiercheck.trainer.state.capture import (
    BESIDE,
    is_extra,
    model_items,
    modules_beside,
    named_parameters_of,
    own_entries,
)
from tiercheck.trainer.state.inventories import FSDP2
from tiercheck.trainer.state.slot_file import SlotReader, StoredTensors
from tiercheck.trainer.tensors.buffers import NON_PERSISTENT_PREFIX, take_memory
from tiercheck.trainer.tensors.samples import Sampler
from tiercheck.trainer.tensors.tensor_parts import (
    PLAIN,
    Entry,
    first_part,
    held_by,
    list_tensor,
    local_shard,
    write,
)
from tiercheck.trainer.training import keys_given


class DifferentState(ValueError):
    """The checkpoint does not fit the model or the optimizer; the message names the first difference."""


@torch.no_grad()
def load_all(trained: TrainedState, slot: SlotReader, facts: Mapping[str, Any]) -> None:
    """Writes the slot's tensors into the modules' own storage, and rebuilds the optimizers' state.

    Raises DifferentState, RestoreError. Everything is checked
    before anything is written, so a refused checkpoint leaves the state as it was. Collective if replicas
    have saved it in shares.
    """
    model, optimizers, shares = trained.model, trained.optimizers, trained.shares
    tensors, pieces = slot.tensors(), slot.pieces
    tensors.ensure_whole()
    if len(optimizers) != len(facts["optimizers"]):
        raise DifferentState(
            f"the checkpoint has {len(facts['optimizers'])} optimizers, here are {len(optimizers)}"
        )
    for outer, saved in zip(shares.outer, facts["optimizers"], strict=True):
        add_groups(outer, model, saved)
    strides = facts.get("strides", {})  # what was imported has none
    targets = _model_targets(model, shares, tensors, pieces, strides)
    for module, prefix, _ in modules_beside(trained.beside, dict(facts)):
        targets |= _model_targets(module, shares, tensors, pieces, strides, prefix=prefix)
    held = held_by(local for _, local in targets.values())
    for index, (optimizer, saved) in enumerate(zip(optimizers, facts["optimizers"], strict=True)):
        group_as_saved(optimizer, model, saved)
        _check_optimizer(index, optimizer, model, saved, tensors)
        for name, parameter in named_parameters_of(optimizer, model):
            refuse_lost(own_entries(f"optimizer{index}/{name}/", name, parameter), held, tensors)
    wanted = [(name, value, local) for name, (value, local) in targets.items()]
    for buffer, local in targets.values():
        if (shard := local_shard(buffer)).shape != local.shape or shard.stride() != local.stride():
            take_memory(buffer, local)
    present = _Present(optimizers, held)
    for index, (optimizer, saved) in enumerate(zip(optimizers, facts["optimizers"], strict=True)):
        set_hyper_parameters(optimizer, saved["groups"], keys_given(facts, index))
        wanted += _load_optimizer(index, optimizer, model, saved, slot, present=present)
    _fill(wanted, shares, tensors, pieces)


def refuse_lost(own: Sequence[Entry], held: Callable[[Tensor], bool], stored: Container[str]) -> None:
    """Raises DifferentState for a tensor of an optimizer that neither model (`held`) nor checkpoint has."""
    for entry in own:
        if entry.name not in stored and not held(entry.tensor):
            raise DifferentState(f"{entry.name} is only in the optimizer")


def fits(slot: SlotReader, entries: Sequence[Entry]) -> bool:
    """Returns whether the slot has the model's tensors as the same parts; buffers may have other shapes."""
    pieces = slot.pieces
    names = {name for name in slot.tensors() if name.startswith("model/")}
    return names == {entry.name for entry in entries if entry.name.startswith("model/")} and all(
        pieces.get(entry.name, entry.piece) == entry.piece
        for entry in entries
        if entry.piece is not None and (entry.lazy or type(entry.origin) not in PLAIN)
    )


def _fill(
    wanted: Sequence[tuple[str, Tensor, Tensor]],
    shares: Shares,
    tensors: StoredTensors,
    pieces: Mapping[str, Piece],
) -> None:
    """Reads each tensor (name, itself, local shard); replicas complete what was saved in shares."""
    shared: list[tuple[Replicas, Tensor]] = []
    places: list[tuple[str, Tensor]] = []
    for name, value, local in wanted:
        piece = pieces.get(name)
        if piece is None or piece.span is None:
            places.append((name, local))
            continue
        replicas = shares.replicas_of(name, value)
        if replicas is None or share_of(local, replicas) != piece.span:
            raise DifferentState(f"{name} was saved in shares by other ranks than hold it now")
        places.append((name, cut(local, piece.span)))
        shared.append((replicas, local))
    tensors.read_into(places)
    exchange(shared)


def _model_targets(
    model: nn.Module,
    shares: Shares,
    tensors: Mapping[str, Tensor],
    pieces: Mapping[str, Piece],
    strides: Mapping[str, Sequence[int]],
    *,
    prefix: str = "model/",
) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns each tensor of the model and its local shard; new memory if a buffer lay otherwise.

    `strides`: those of buffers that were not contiguous, by name."""
    listed: list[Entry] = []
    for key, value, lazy in model_items(model):
        if isinstance(value, Tensor) and not is_extra(key):
            list_tensor(f"{prefix}{key}", value, lazy, listed)
    targets = {
        entry.name: (entry.origin if entry.origin is not None else entry.tensor, entry.tensor)
        for entry in listed
    }
    saved = {name for name in tensors if name.startswith(prefix)}
    if difference := describe_difference(saved, targets):
        raise DifferentState(difference)
    # Not those of the state_dict, which are other objects with the same memory.
    buffers = {f"{prefix}{key}": each for key, each in model.named_buffers(remove_duplicate=False)}
    for name, (value, local) in targets.items():
        stored, piece = tensors[name], pieces.get(name)
        shape = tuple(stored.shape) if piece is None else piece.box.shape
        buffer = buffers.get(name)
        if (
            buffer is not None
            and type(buffer) in PLAIN
            and (shape != tuple(local.shape) or _lies_otherwise(local, strides.get(name)))
            and stored.dtype == value.dtype
        ):
            room = torch.empty(shape, dtype=local.dtype, device=local.device)
            if name in strides:
                room = torch.empty_strided(shape, strides[name], dtype=local.dtype, device=local.device)
            targets[name] = buffer, room
            continue
        if shape != tuple(local.shape) or stored.dtype != local.dtype:
            raise DifferentState(
                f"{name} is {shape} {stored.dtype} in the checkpoint, here it is {tuple(local.shape)} "
                f"{local.dtype}"
            )
        now = shares.shard(name, value)
        if piece is not None and now is not None and (piece.shape, piece.box) != (now.shape, now.box):
            raise DifferentState(
                f"{name} is indices {piece.box.offset} and on of {piece.shape} in the checkpoint, "
                f"here {now.box.offset} and on of {now.shape}"
            )
    return targets


def _lies_otherwise(tensor: Tensor, stride: Sequence[int] | None) -> bool:
    """Returns whether a tensor has another order in memory; no `stride`: than a contiguous one."""
    if tensor.layout is not torch.strided:
        return False
    return not tensor.is_contiguous() if stride is None else tensor.stride() != tuple(stride)


def _check_optimizer(
    index: int,
    optimizer: Optimizer,
    model: nn.Module,
    saved: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    if saved["class"] != type(optimizer).__name__:
        raise DifferentState(
            f"optimizer {index} is {saved['class']} in the checkpoint, here {type(optimizer).__name__}"
        )
    names = [name for name, _ in named_parameters_of(optimizer, model)]
    if names != list(saved["states"]) or len(optimizer.param_groups) != len(saved["groups"]):
        other = sorted({*names} ^ {*saved["states"]})
        named = f" ({', '.join(other[:3])})" if other else ""
        raise DifferentState(
            f"optimizer {index} has other parameters or groups than in the checkpoint{named}"
        )
    for name, state in saved["states"].items():
        for key, described in state.items():
            for stored in optimizer_state.stored_names(described, f"optimizer{index}/{name}/{key}"):
                if stored not in tensors:
                    raise DifferentState(f"{stored} is missing in the checkpoint")
    for stored in optimizer_state.stored_names_of_others(saved.get("others", ()), f"optimizer{index}/"):
        if stored not in tensors:
            raise DifferentState(f"{stored} is missing in the checkpoint")


def _load_optimizer(
    index: int,
    optimizer: Optimizer,
    model: nn.Module,
    saved: Mapping[str, Any],
    slot: SlotReader,
    *,
    present: _Present,
) -> list[tuple[str, Tensor, Tensor]]:
    """Rebuilds an optimizer's state, empty. Returns name, tensor and local shard of what is to be filled."""
    optimizer_state.put_attributes(optimizer, saved.get("attributes", {}))
    optimizer.state.clear()
    tensors, pieces = slot.tensors(), slot.pieces
    wanted: list[tuple[str, Tensor, Tensor]] = []

    def rebuilt(stored: str, described: Mapping[str, Any], parameter: Tensor, prefix: str = "") -> Tensor:
        shape = pieces[stored].box.shape if stored in pieces else tuple(tensors[stored].shape)
        local, value = room_for(shape, tensors[stored].dtype, described, parameter)
        local, value = present.take(parameter, stored.removeprefix(prefix), local, value)
        wanted.append((stored, value, local))
        return value

    for name, parameter in named_parameters_of(optimizer, model):
        prefix = f"optimizer{index}/{name}/"
        make = partial(rebuilt, parameter=parameter, prefix=prefix)
        for entry in own_entries(prefix, name, parameter):
            if entry.name in tensors:  # else a module has it
                wanted.append(
                    (entry.name, entry.origin if entry.origin is not None else entry.tensor, entry.tensor)
                )
        state = {
            key: optimizer_state.put_together(described, f"{prefix}{key}", make)
            for key, described in saved["states"][name].items()
        }
        if state:
            optimizer.state[parameter] = state
    parameters = [parameter for _, parameter in named_parameters_of(optimizer, model)]
    for number in saved.get("order", ()):  # the last one is then last
        optimizer.state[parameters[number]] = optimizer.state.pop(parameters[number])
    optimizer_state.tie(optimizer, named_parameters_of(optimizer, model), saved.get("ties", ()), model)
    make = partial(rebuilt, parameter=optimizer_state.NO_PARAMETER)
    optimizer_state.put_back_others(optimizer, saved.get("others", ()), f"optimizer{index}/", make)
    return wanted


class _Present:
    """The tensors that optimizers have already, to be filled where they are if they fit.

    CUDA graphs keep their addresses, and new memory takes longer than the copy.
    """

    def __init__(self, optimizers: Sequence[Optimizer], held: Callable[[Tensor], bool]) -> None:
        """`held`: returns whether a model has a tensor."""
        self._state = {
            parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()
        }
        self._held, self._taken = held, set[int]()

    def take(self, parameter: Tensor, key: str, local: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the present shard and tensor if alike and not shared, else the new `local` and `value`."""
        state = self._state.get(parameter)
        found = state.get(key) if isinstance(state, Mapping) else None
        if not isinstance(found, Tensor) or _form(found) != _form(value):
            return local, value
        shard = local_shard(found)
        memory, place = shard.untyped_storage(), shard.untyped_storage().data_ptr()
        if _form(shard) != _form(local) or memory.nbytes() != local.nbytes:
            return local, value
        if shard.is_inference() or place in self._taken or self._held(shard):
            return local, value
        self._taken.add(place)
        return shard, found


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Returns all of a tensor but its content."""
    mesh, placements = getattr(tensor, "device_mesh", None), getattr(tensor, "placements", None)
    shape, stride = tensor.shape, tensor.stride() if tensor.layout is torch.strided else None
    return type(tensor), tensor.dtype, tensor.device, shape, stride, tensor.requires_grad, mesh, placements


def room_for(
    shape: tuple[int, ...], dtype: torch.dtype, described: Mapping[str, Any], parameter: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns memory for an optimizer's tensor: same device kind, memory order and sharding as saved.

    `described`: by `optimizer_state.describe`. Returns what is to be filled, of local `shape`, and the tensor
    that it is the local shard of (or itself)."""
    shard = first_part(parameter)
    device = shard.device if described["device"] == shard.device.type else torch.device(described["device"])
    if "strides" in described:
        local = torch.empty_strided(shape, described["strides"], dtype=dtype, device=device)
    elif shape == tuple(shard.shape):
        local = torch.empty_like(shard, dtype=dtype, device=device)
    else:
        local = torch.empty(shape, dtype=dtype, device=device)
    sharded = described.get("sharded")
    if sharded is None:
        return local, local
    if not hasattr(parameter, "placements"):
        raise DifferentState("the optimizer's state was sharded, its parameter is not")
    return local, sharded_like(local, parameter, torch.Size(sharded["shape"]), tuple(sharded["stride"]))


def sharded_like(local: Tensor, parameter: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """Returns the DTensor of that shape with shard `local`, on the parameter's mesh; `local` without one."""
    if not hasattr(parameter, "placements"):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")


@torch.no_grad()
def run_load_hooks(trained: TrainedState, facts: Mapping[str, Any]) -> None:
    """Runs load hooks and methods, with the extra states that `facts` hold.

    Raises what they raise, and RestoreError if one changes what cannot be put back.
    """
    models = [("model/", trained.given_model, facts["model_extra"] | facts.get("extra", {}))]
    for name, module in trained.given_modules.items():
        models.append((f"{BESIDE}{name}/", module, facts.get("beside_extra", {}).get(name, {})))
    hooked = [f"optimizer{n}/" for n, each in enumerate(trained.optimizers) if has_own_load(each)]
    for begin, given, _ in models:
        for path, module in Wrapped.look(given).model.named_modules():
            if has_load_hooks(module) or has_load_hooks(given):
                place = f"{begin}{path}{'.' if path else ''}"
                hooked += [place, f"{NON_PERSISTENT_PREFIX}{place.removeprefix('model/')}"]
    if not hooked and not any(extra for _, _, extra in models):
        return
    before = {entry.name: entry.tensor for entry in trained.inventories.take().entries}
    sums = Sampler().take([*before.values()]).sums
    saved = {
        name: value.to("cpu", copy=True) for name, value in before.items() if name.startswith(tuple(hooked))
    }
    for begin, given, extra in models:
        if extra or any(map(has_load_hooks, given.modules())):
            _load(given, extra, {name.removeprefix(begin): value for name, value in saved.items()})
    for optimizer in filter(has_own_load, trained.optimizers):
        with optimizer_state.unchanged(optimizer):
            optimizer.load_state_dict(optimizer.state_dict())
    here = {entry.name: entry.tensor for entry in trained.inventories.take().entries}
    for name in saved.keys() & here.keys():
        if here[name].shape == saved[name].shape:
            write(here[name], saved[name])
    if name := first_difference([*before], sums, here):
        raise RestoreError(
            f"{name} was restored, but a load hook of the script changes it: what comes back would not be "
            "what was saved. Have the hook change only what it derives"
        )


def has_load_hooks(module: nn.Module) -> bool:
    """Returns whether torch's load does more to the module than copying."""
    hooks = module._load_state_dict_pre_hooks.values()
    return bool(
        any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _METHODS)
        or {*_METHODS} & vars(module).keys()
        or module._load_state_dict_post_hooks
        or any(getattr(hook, "__module__", "") != FSDP2 for hook in hooks)
    )


def has_own_load(optimizer: Optimizer) -> bool:
    """Returns whether torch's load does more to the optimizer than copying."""
    kind: Any = type(optimizer)
    return bool(
        kind.load_state_dict is not Optimizer.load_state_dict
        or optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
        or not kind.__setstate__.__module__.startswith("torch.optim.")
    )


def _load(given: nn.Module, extra: Mapping[str, Any], copies: Mapping[str, Tensor]) -> None:
    """Makes a module, as the script made it, load its own state, with `copies` that hooks may write."""
    inner = Wrapped.look(given).model
    if type(inner).load_state_dict is not nn.Module.load_state_dict:
        given = inner  # no wrapper calls it, but a script does
    path = next(f"{name}." if name else "" for name, module in given.named_modules() if module is inner)
    state = given.state_dict()
    for key, value in state.items():
        copied = copies.get(key.removeprefix(path))
        if copied is not None and type(value) in PLAIN:
            state[key] = copied.to(value.device, copy=True)
    state.update({f"{path}{key}": value for key, value in extra.items()})
    strict = {"strict": False} if "strict" in inspect.signature(given.load_state_dict).parameters else {}
    given.load_state_dict(state, **strict)
