"""Adds what a script had added during training, and what a new start of it does not have yet."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.backends.backend import log
from tiercheck.trainer.state.capture import BESIDE, named_parameters_of, names_by_group
from tiercheck.trainer.state.frozen import count_names
from tiercheck.trainer.tensors.buffers import MASK, MASKED

_CALLS = {
    ".parametrizations.": "the script must call torch.nn.utils.parametrize.register_parametrization",
    "lora_": "the script must add the adapter",
}
"""The calls by which a script gets a tensor, by a part of the tensor's name."""


def add_tensors(
    model: nn.Module, beside: Mapping[str, nn.Module], stored: Mapping[str, Tensor], grown: Collection[str]
) -> None:
    """Adds the `stored` pruning masks and buffers that the model and modules `beside` it do not have yet.

    `grown`: names of buffers that were registered in training.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    owners = {
        f"{begin}{name}{'.' if name else ''}": module
        for begin, each in (("model/", model), *((f"{BESIDE}{key}/", each) for key, each in beside.items()))
        for name, module in each.named_modules()
    }
    pruned: list[str] = []
    for name in sorted(stored):
        path = name[: max(name.rfind("."), name.rfind("/")) + 1]
        key, owner = name.removeprefix(path), owners.get(path)
        if owner is None:
            continue
        masked = key.removesuffix(MASK)
        if owner._parameters.get(masked) is not None and f"{path}{masked}{MASKED}" in stored:
            from torch.nn.utils import prune

            prune.identity(owner, masked)  # type: ignore[no-untyped-call]
            pruned.append(f"{path}{masked}")
        elif owner._buffers.get(key, owner) is None or (name in grown and not hasattr(owner, key)):
            owner.register_buffer(key, torch.empty_like(stored[name], device=device))
    if pruned:
        log.warning(
            "%s: pruned, as when saved; a script that prunes once more at this step prunes further: ask "
            "torch.nn.utils.prune.is_pruned before",
            count_names("parameter", pruned),
        )


def describe_difference(stored: Collection[str], here: Collection[str]) -> str:
    """Names the tensors that only the checkpoint or the script has, and what to do; empty: there are none."""
    more, fewer = sorted({*stored} - {*here}), sorted({*here} - {*stored})
    if not more and fewer:
        return (
            f"{fewer[0]} is only in the model: the script must remove it before `restore`, or tie it to "
            "another, as when that step was saved"
        )
    if not more:
        return ""
    instead = f", which has {', '.join(fewer[:3])} instead" if fewer else ""
    others = f", like {len(more) - 1} more" if more[1:] else ""
    call = next((call for mark, call in _CALLS.items() if mark in more[0]), "the script must add it")
    return (
        f"{more[0]} is only in the checkpoint{others}, and not in the model{instead}: "
        f"{call} before `restore`, as it had done at that step (`tiercheck.trainer.checkpointer.find().step`)"
    )


def add_groups(outer: Optimizer, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Adds the parameter groups that the script added during training, as when layers are thawed.

    `outer`: the optimizer that the script adds groups to, which for ZeRO is not the one that was saved.
    """
    known = dict(model.named_parameters())
    here = names_by_group(outer, model)
    names = iter(saved["states"])
    there = saved.get("whole") or [list(islice(names, count)) for count in saved.get("counts", ())]
    added = there[len(here) :]
    if there[: len(here)] != here or not known.keys() >= {*chain.from_iterable(added)}:
        return  # `_check_optimizer` raises for what does not fit
    for group, its in zip(saved["groups"][len(here) :], added, strict=True):
        outer.add_param_group({**group, "params": [known[name] for name in its]})
    if added:
        _accept_again(outer, len(here))


def _accept_again(optimizer: Optimizer, first: int) -> None:
    """Lets a script add the groups from number `first` on again: it gets the restored ones, once each.

    Otherwise torch would raise ValueError.
    """
    waiting = list(range(first, len(optimizer.param_groups)))
    add = optimizer.add_param_group

    def add_param_group(param_group: dict[str, Any]) -> None:
        params = param_group.get("params")
        if isinstance(params, Iterator):  # it can be read once
            params = param_group["params"] = list(params)
        listed = [params] if isinstance(params, Tensor) else params or ()
        given = {id(each[1] if isinstance(each, tuple) else each) for each in listed}
        for number in waiting:
            restored = optimizer.param_groups[number]
            if given and {*map(id, restored["params"])} == given:
                param_group.update(restored)
                optimizer.param_groups[number] = param_group  # the script may keep a reference to it
                waiting.remove(number)
                log.warning("parameter group %d was restored already: its state and rates stay", number)
                break
        else:
            add(param_group)
        if not waiting:
            vars(optimizer).pop("add_param_group", None)

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def group_as_saved(optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Moves parameters back to the groups and places they were saved in, if they are the same ones.

    Scripts move them to groups of other rates, and list them from sets, in another order in each process."""
    counts, names = saved.get("counts", []), list(saved["states"])
    here = dict(named_parameters_of(optimizer, model))
    if len(counts) != len(optimizer.param_groups) or here.keys() != saved["states"].keys():
        return
    # Numbered ones are the same only in the same places.
    if list(here) == names or not any(name.startswith("#") for name in names):
        parameters = iter([here[name] for name in names])
        for group, count in zip(optimizer.param_groups, counts, strict=True):
            group["params"][:] = islice(parameters, count)


def more_groups(optimizer: Optimizer, saved: Mapping[str, Any]) -> Sequence[int]:
    """Returns the sizes of the groups saved after those that are here; empty if these differ."""
    counts, here = saved.get("counts", []), [len(group["params"]) for group in optimizer.param_groups]
    return counts[len(here) :] if counts[: len(here)] == here else []
