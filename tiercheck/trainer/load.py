"""Putting a snapshot back, bit for bit: no dtype is cast, nothing is computed, and nothing missing goes unnoticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.capture import is_extra, local_shard, model_items, named_parameters_of
from tiercheck.trainer.gradients import set_hyper_parameters
from tiercheck.trainer.stored import StoredTensors


class DifferentState(ValueError):
    """The checkpoint does not fit the model or the optimizer; the message names the first difference."""


@torch.no_grad()
def load_all(
    model: nn.Module, optimizers: Sequence[Optimizer], tensors: StoredTensors, facts: Mapping[str, Any]
) -> None:
    """Write `tensors` into the model's own storage and rebuild the optimizers' state. Raises DifferentState, RestoreError.

    Everything is checked before anything is written, so a refused checkpoint leaves the state as it was.
    """
    if len(optimizers) != len(facts["optimizers"]):
        raise DifferentState(f"the checkpoint has {len(facts['optimizers'])} optimizers, here are {len(optimizers)}")
    targets = _model_targets(model, tensors)
    for index, (optimizer, saved) in enumerate(zip(optimizers, facts["optimizers"], strict=True)):
        _check_optimizer(index, optimizer, model, saved, tensors)
    tensors.read_into(list(targets.items()))
    if facts["model_extra"]:
        model.load_state_dict(facts["model_extra"], strict=False)
    for index, (optimizer, saved) in enumerate(zip(optimizers, facts["optimizers"], strict=True)):
        _load_optimizer(index, optimizer, model, saved, tensors)


def _model_targets(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    targets = {
        f"model/{key}": local_shard(value)
        for key, value, _ in model_items(model)
        if isinstance(value, Tensor) and not is_extra(key)
    }
    saved = {name for name in tensors if name.startswith("model/")}
    if different := saved.symmetric_difference(targets):
        name = min(different)
        where = "the checkpoint" if name in saved else "the model"
        raise DifferentState(f"{name} is only in {where}")
    for name, target in targets.items():
        _check_same(name, tensors[name], target)
    return targets


def _check_same(name: str, saved: Tensor, target: Tensor) -> None:
    if saved.shape != target.shape or saved.dtype != target.dtype:
        raise DifferentState(
            f"{name} is {tuple(saved.shape)} {saved.dtype} in the checkpoint, "
            f"here it is {tuple(target.shape)} {target.dtype}"
        )


def _check_optimizer(
    index: int, optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    if saved["class"] != type(optimizer).__name__:
        raise DifferentState(
            f"optimizer {index} is {saved['class']} in the checkpoint, here {type(optimizer).__name__}"
        )
    names = [name for name, _ in named_parameters_of(optimizer, model)]
    if names != list(saved["states"]) or len(optimizer.param_groups) != len(saved["groups"]):
        raise DifferentState(f"optimizer {index} has other parameters or groups than in the checkpoint")
    for name, state in saved["states"].items():
        for key, described in state.items():
            if "value" not in described and f"optimizer{index}/{name}/{key}" not in tensors:
                raise DifferentState(f"optimizer{index}/{name}/{key} is missing in the checkpoint")


def _load_optimizer(
    index: int, optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any], tensors: StoredTensors
) -> None:
    set_hyper_parameters(optimizer, saved["groups"])
    optimizer.state.clear()
    wanted: list[tuple[str, Tensor]] = []

    def rebuilt(name: str, described: Mapping[str, Any], parameter: Tensor) -> Tensor:
        local, value = room_for(tensors[name], described, parameter)
        wanted.append((name, local))
        return value

    for name, parameter in named_parameters_of(optimizer, model):
        state = {
            key: described["value"]
            if "value" in described
            else rebuilt(f"optimizer{index}/{name}/{key}", described, parameter)
            for key, described in saved["states"][name].items()
        }
        if state:
            optimizer.state[parameter] = state
    tensors.read_into(wanted)


def room_for(saved: Tensor, described: Mapping[str, Any], parameter: Tensor) -> tuple[Tensor, Tensor]:
    """The optimizer's tensor as `capture.describe` found it: same device kind, memory order, and sharding.

    What is to be filled with `saved`, and the tensor that it is the local shard of (or itself).
    """
    shard = local_shard(parameter)
    device = shard.device if described["device"] == shard.device.type else torch.device(described["device"])
    if saved.shape == shard.shape:
        local = torch.empty_like(shard, dtype=saved.dtype, device=device)
    else:
        local = torch.empty(saved.shape, dtype=saved.dtype, device=device)
    sharded = described.get("sharded")
    if sharded is None:
        return local, local
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        raise DifferentState("the optimizer's state was sharded, its parameter is not")
    return local, DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(sharded["shape"]),
        stride=tuple(sharded["stride"]),
    )
