"""Runs what torch's own load would run, once after a restore: hooks and methods of modules and optimizers.

A restore fills memory, and so goes past them, but a module may derive something from its tensors when it is
loaded. They get copies of what was restored. Whatever they write to the state itself is undone: what comes
back is what was saved.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.deltas.buffers import PASSING
from tiercheck.trainer.deltas.gradients import hyper_parameters, set_hyper_parameters
from tiercheck.trainer.proof.samples import Sampler
from tiercheck.trainer.state import kept
from tiercheck.trainer.state.capture import BESIDE
from tiercheck.trainer.state.inventories import FSDP2
from tiercheck.trainer.state.leaves import Entry, write
from tiercheck.trainer.state.live import Wrapped
from tiercheck.trainer.state.trained_state import TrainedState

_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")


@torch.no_grad()
def run_load_hooks(trained: TrainedState, facts: Mapping[str, Any]) -> None:
    """Run them, with the extra states that `facts` hold. Raises RestoreError if one of them raises, or
    changes what cannot be put back."""
    models = {
        name: (given, facts.get("beside_extra", {}).get(name, {}))
        for name, given in trained.given_modules.items()
    }
    models[""] = (trained.given_model, facts["model_extra"] | facts.get("extra", {}))
    prefixes = [
        f"{begin}{path}{'.' if path else ''}"
        for name, (given, _) in models.items()
        for path, module in Wrapped.look(given).model.named_modules()
        if has_load_hooks(module) or has_load_hooks(given)
        for begin in ((f"{BESIDE}{name}/", f"{PASSING}{BESIDE}{name}/") if name else ("model/", PASSING))
    ]
    hooked = [each for each in enumerate(trained.optimizers) if _has_own_load(each[1])]
    if not (prefixes or hooked or any(extra for _, extra in models.values())):
        return
    prefixes += [f"optimizer{index}/" for index, _ in hooked]
    before = trained.inventories.take().entries
    sums = Sampler().take([entry.tensor for entry in before]).sums
    saved = {
        entry.name: entry.tensor.to("cpu", copy=True)
        for entry in before
        if entry.name.startswith(tuple(prefixes))
    }
    parameters = [
        (module._parameters, dict(module._parameters))
        for given, _ in models.values()
        for module in given.modules()
    ]
    for given, extra in models.values():
        _load(given, extra)
    for owner, its in parameters:
        owner.update({key: its[key] for key in owner.keys() & its.keys()})
    for _, optimizer in hooked:
        _load_optimizer(optimizer)
    _undo(trained.inventories.take().entries, saved, [entry.name for entry in before], sums)


def has_load_hooks(module: nn.Module) -> bool:
    """Whether torch's load does more to the module than copying."""
    hooks = module._load_state_dict_pre_hooks.values()
    return (
        any(
            getattr(type(module), method) is not getattr(nn.Module, method) or method in vars(module)
            for method in _METHODS
        )
        or bool(module._load_state_dict_post_hooks)
        or any(getattr(hook, "__module__", "") != FSDP2 for hook in hooks)
    )


def _has_own_load(optimizer: Optimizer) -> bool:
    kind: Any = type(optimizer)
    return bool(
        kind.load_state_dict is not Optimizer.load_state_dict
        or optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
        or not kind.__setstate__.__module__.startswith("torch.optim.")
    )


def _load(given: nn.Module, extra: Mapping[str, Any]) -> None:
    """Have a module as the script made it load its own state. Raises RestoreError."""
    inner = Wrapped.look(given).model
    if not extra and not any(map(has_load_hooks, given.modules())):
        return
    path = next(name for name, module in given.named_modules() if module is inner)
    ends = {
        f"{name}{'.' if name else ''}" for name, module in given.named_modules() if has_load_hooks(module)
    }
    with _naming(given):
        state = given.state_dict()
        for key, value in state.items():
            if isinstance(value, Tensor) and key.startswith(tuple(ends)):
                state[key] = value.clone()  # a hook may write the module's tensor before it reads this one
        state.update({f"{path}{'.' if path else ''}{key}": value for key, value in extra.items()})
        takes = inspect.signature(given.load_state_dict).parameters
        given.load_state_dict(state, **({"strict": False} if "strict" in takes else {}))


def _load_optimizer(optimizer: Optimizer) -> None:
    """Have an optimizer load its own state, and leave all that is saved of it as it was. Raises
    RestoreError."""
    kept_state, kept_groups = optimizer.state, optimizer.param_groups
    state = {key: dict(each) if isinstance(each, dict) else each for key, each in kept_state.items()}
    groups, parameters = hyper_parameters(optimizer), [group["params"] for group in kept_groups]
    attributes = copy.deepcopy(kept.attributes_of(optimizer))
    hooks: Any = optimizer
    with _naming(optimizer):
        shown = optimizer.state_dict()
        if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
            optimizer.load_state_dict(shown)
        else:  # not by torch's own method, which casts the state to the parameter's dtype
            for hook in hooks._optimizer_load_state_dict_pre_hooks.values():
                shown = hook(optimizer, shown) or shown
            hooks.__setstate__({"state": kept_state, "param_groups": kept_groups})
            for hook in hooks._optimizer_load_state_dict_post_hooks.values():
                hook(optimizer)
    kept_state.clear()
    kept_state.update(state)
    optimizer.state, optimizer.param_groups = kept_state, kept_groups
    set_hyper_parameters(optimizer, groups)
    for group, its in zip(kept_groups, parameters, strict=True):
        group["params"] = its
    kept.put_attributes(optimizer, attributes)


class _naming:
    """Turns what somebody's own load raises into a RestoreError that names it."""

    def __init__(self, owner: object) -> None:
        self._owner = type(owner).__name__

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            raise RestoreError(
                f"{self._owner} was restored, but its own load raises {type(error).__name__}: {error}; a "
                "restore runs load_state_dict and its hooks once, as torch does: mend them, or remove them"
            ) from error


def _undo(
    entries: Sequence[Entry], saved: Mapping[str, Tensor], names: Sequence[str], sums: Sequence[int]
) -> None:
    """Put back what hooks have changed of the state. Raises RestoreError if that cannot be."""
    here = {entry.name: entry for entry in entries}
    for name in saved.keys() & here.keys():
        target = here[name].tensor
        if (target.shape, target.dtype) == (saved[name].shape, saved[name].dtype):
            write(target, saved[name])
    found = [here[name].tensor for name in names if name in here]
    now = dict(zip([name for name in names if name in here], Sampler().take(found).sums, strict=True))
    if changed := [name for name, was in zip(names, sums, strict=True) if now.get(name) != was]:
        raise RestoreError(
            f"{changed[0]} was restored, but a load hook of the script changes it: what comes back would not "
            "be what was saved; have the hook change only what it derives"
        )
