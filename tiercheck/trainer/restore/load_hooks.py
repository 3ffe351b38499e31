"""Runs what torch's own load would run, after a restore: hooks and methods of modules and optimizers.

A restore fills memory, and so goes past them, but a module may derive something from its tensors when it is
loaded. They get copies of what was restored. Whatever they write to the state itself is undone.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.proof.proof import first_difference
from tiercheck.trainer.replicas.trained_state import TrainedState
from tiercheck.trainer.state import kept
from tiercheck.trainer.state.capture import BESIDE
from tiercheck.trainer.state.inventories import FSDP2
from tiercheck.trainer.state.live import Wrapped
from tiercheck.trainer.tensors.buffers import PASSING
from tiercheck.trainer.tensors.leaves import PLAIN, write
from tiercheck.trainer.tensors.samples import Sampler

_METHODS = ("load_state_dict", "_load_from_state_dict", "set_extra_state")


@torch.no_grad()
def run_load_hooks(trained: TrainedState, facts: Mapping[str, Any]) -> None:
    """Run them, with the extra states that `facts` hold. Raises what they raise, and RestoreError if one
    changes what cannot be put back."""
    models = [("model/", trained.given_model, facts["model_extra"] | facts.get("extra", {}))]
    for name, module in trained.given_modules.items():
        models.append((f"{BESIDE}{name}/", module, facts.get("beside_extra", {}).get(name, {})))
    hooked = [f"optimizer{n}/" for n, each in enumerate(trained.optimizers) if has_own_load(each)]
    for begin, given, _ in models:
        for path, module in Wrapped.look(given).model.named_modules():
            if has_load_hooks(module) or has_load_hooks(given):
                place = f"{begin}{path}{'.' if path else ''}"
                hooked += [place, f"{PASSING}{place.removeprefix('model/')}"]
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
        with kept.unchanged(optimizer):
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
    """Whether torch's load does more to the module than copying."""
    hooks = module._load_state_dict_pre_hooks.values()
    return bool(
        any(getattr(type(module), name) is not getattr(nn.Module, name) for name in _METHODS)
        or {*_METHODS} & vars(module).keys()
        or module._load_state_dict_post_hooks
        or any(getattr(hook, "__module__", "") != FSDP2 for hook in hooks)
    )


def has_own_load(optimizer: Optimizer) -> bool:
    """Whether torch's load does more to the optimizer than copying."""
    kind: Any = type(optimizer)
    return bool(
        kind.load_state_dict is not Optimizer.load_state_dict
        or optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
        or not kind.__setstate__.__module__.startswith("torch.optim.")
    )


def _load(given: nn.Module, extra: Mapping[str, Any], copies: Mapping[str, Tensor]) -> None:
    """Have a module, as the script made it, load its own state, with the `copies` that hooks may write."""
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
