"""Notes by hooks what each update consumed, without a change to the training loop.

A step is replayed from that. Gradients are noted by reference and copied while the next step computes. That
is safe as long as their memory is not used again; where it is (`zero_grad(set_to_none=False)`, the buckets of
DistributedDataParallel), or may be, they are copied at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tiercheck.trainer.state.replayable import SCALING
from tiercheck.trainer.tensors.leaves import NotCapturable, local_shard, read_each

_FRESH_STEPS = 4
"""A gradient inside of larger memory is copied at once until it was seen in fresh memory this many times in a
row. DistributedDataParallel moves its buckets once, after the first step."""

_WHOLE = {Tensor, type(None)}
_grad, _local = attrgetter("grad"), attrgetter("_local_tensor")
_kind = attrgetter("__class__", "layout", "requires_grad")
_spec = attrgetter("_spec")
_placements = attrgetter("_spec.placements")  # not the property of that name, which is Python


@dataclass
class Event:
    """One call of an optimizer's `step`: everything that it was a function of, beside the state."""

    optimizer: int
    gradients: list[Tensor | None]
    """Per parameter, in the optimizer's order: this rank's shard; None if it has no gradient."""
    groups: list[dict[str, Any]]
    """The hyper-parameters of each parameter group."""
    scaling: dict[str, Tensor]
    lazy: list[int]
    """Which gradients are those of the training loop itself, not copies."""
    seen: list[int] = field(default_factory=list)
    """torch's in-place counters of the lazy gradients; if one has moved, the gradient is no more what was
    consumed."""
    torn: list[int] = field(default_factory=list)
    """Gradients that were changed before they were copied."""

    def changed(self) -> list[int]:
        """Gradients that were changed since `note`."""
        return [
            index
            for index, old, new in zip(self.lazy, self.seen, self._counters(), strict=True)
            if old != new
        ]

    def release(self, index: int) -> None:
        """Let go of a gradient: it has been copied."""
        gradient, self.gradients[index] = self.gradients[index], None
        seen = self._seen_at.get(index)
        if gradient is not None and seen is not None and gradient._version != seen:
            self.torn.append(index)

    def left_out(self) -> bool:
        """Whether the kernel found that a gradient overflowed, and did nothing. Waits for the device."""
        return "found_inf" in self.scaling and bool(self.scaling["found_inf"].any())

    def note(self) -> None:
        """From now on the gradients must stay as they are."""
        self.seen = self._counters()

    @cached_property
    def _seen_at(self) -> dict[int, int]:
        return dict(zip(self.lazy, self.seen, strict=True))

    def _counters(self) -> list[int]:
        return [gradient._version for index in self.lazy if (gradient := self.gradients[index]) is not None]


def hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """A copy of each parameter group without its parameters; what a schedule may write in place (a rate on
    the device, a list) is copied."""
    return [
        {key: _own(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _own(value: Any) -> Any:
    """A copy of a list or dict, and of tensors in there, which may be written in place; other things are as
    they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (list, tuple):
        return type(value)([_own(each) for each in value])
    return {key: _own(each) for key, each in value.items()} if type(value) is dict else value


class Recorder:
    """Lists the events of the step under way. One thread may use it: the one that trains."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._events: list[Event] = []
        self._open: Event | None = None
        self._inexact = ""
        self._eager: set[tuple[int, int]] = set()
        self._staging: dict[tuple[int, int, int], Tensor] = {}
        self._last: list[dict[int, weakref.ref[Tensor | torch.UntypedStorage]]] = [{} for _ in optimizers]
        self._shared: dict[tuple[int, int], tuple[StorageWeakRef, int]] = {}

    @property
    def open(self) -> Event | None:
        """The update under way."""
        return self._open

    def before(self, index: int) -> None:
        """The update begins: every gradient is final."""
        if self._open is not None:
            self._inexact = "an update began before the one under way had ended"
        try:
            self._open = self._event(index)
        except NotCapturable as error:
            self._open = Event(index, [], [], {}, [])
            self._inexact = str(error)
        self._open.note()

    def after(self, index: int) -> None:
        """The update has ended."""
        event, self._open = self._open, None
        if event is None or event.optimizer != index:
            self._inexact = "an update began before the one under way had ended"
            return
        if not any(
            group.get("fused") for group in event.groups
        ):  # fused kernels announce a change that they do not make
            changed = event.changed()
            if changed:
                self._eager.update((index, number) for number in changed)
                self._inexact = "the optimizer changed gradients; they are copied at once from now on"
                event.note()
        else:
            event.note()
        self._events.append(event)

    def take(self) -> tuple[list[Event], str]:
        """The events of the step that ends here, and why they do not describe it exactly (empty if they
        do).
        """
        if self._open is not None:
            self._inexact, self._open = "an update did not end", None
        taken = self._events, self._inexact
        self._events, self._inexact = [], ""
        return taken

    def forget(self) -> None:
        """Let go of all gradients and copies of them."""
        self._events, self._open, self._inexact = [], None, "the update was not recorded"
        self._staging.clear()

    def copy_at_once(self, optimizer: int, gradients: Sequence[int]) -> None:
        """From now on: the memory of these gradients was used again while they were read."""
        self._eager |= {(optimizer, number) for number in gradients}

    @torch.no_grad()
    def _event(self, index: int) -> Event:
        optimizer = self._optimizers[index]
        scaling = {
            name: value.detach().clone()
            for name in SCALING
            if isinstance(value := getattr(optimizer, name, None), Tensor)
        }
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        given: list[Tensor | None] = read_each(_grad, parameters)
        gradients = _shards(given, parameters)
        at_once = self._used_again(index, given, gradients)
        if "grad_scale" in scaling:
            at_once |= _unscaled_in_place(optimizer)
        if self._staging or at_once:
            for number, shard in enumerate(gradients):
                if shard is None:
                    continue
                if number in at_once:
                    gradients[number] = self._staged(index, number, shard)
                else:
                    self._staging.pop((len(self._events), index, number), None)
        lazy = [
            number for number, shard in enumerate(gradients) if shard is not None and number not in at_once
        ]
        return Event(index, gradients, hyper_parameters(optimizer), scaling, lazy)

    def _used_again(
        self, index: int, given: Sequence[Tensor | None], shards: Sequence[Tensor | None]
    ) -> set[int]:
        """Gradients, by number, whose memory may be written again before it was copied: all that was not seen
        to be new each time."""
        eager = {number for optimizer, number in self._eager if optimizer == index}
        last = self._last[index]
        known: dict[int, bool] = {}
        found = set()
        for number, (gradient, shard) in enumerate(zip(given, shards, strict=True)):
            if gradient is None or shard is None:
                continue
            # Not which tensor it is: `.data` makes another one of the same memory, with a counter of its own.
            storage = shard.untyped_storage() if shard.layout is torch.strided else None
            before, last[number] = last.get(number), weakref.ref(gradient if storage is None else storage)
            fresh = before is not None and before() is not (gradient if storage is None else storage)
            if storage is not None:
                if shard.is_cuda and not torch._C._has_Standard_Deleter(storage._cdata):
                    fresh = False  # of a CUDA graph, whose next run writes here without a trace
                elif not storage.resizable():
                    fresh = False  # none of torch's own memory, but an array of numpy's, say
                elif (
                    storage.nbytes() != shard.nbytes
                ):  # others may write it without a trace in this tensor's counter
                    if storage._cdata not in known:  # gradients of FSDP2 share one in their dozens
                        known[storage._cdata] = self._is_fresh((index, number), storage)
                    fresh = known[storage._cdata]
            if not fresh or number in eager:
                found.add(number)
        return found

    def _is_fresh(self, key: tuple[int, int], storage: torch.UntypedStorage) -> bool:
        identity = StorageWeakRef(storage)  # type: ignore[no-untyped-call]  # keeps the identity, not the memory
        before, times = self._shared.get(key, (None, -1))
        times = 0 if before is not None and before.cdata == identity.cdata else times + 1
        self._shared[key] = identity, times
        return times >= _FRESH_STEPS

    def _staged(self, index: int, number: int, shard: Tensor) -> Tensor:
        """A copy, in memory kept for it: the delta before has been copied when the next update begins."""
        if shard.layout is not torch.strided:
            return shard.clone()
        key = (len(self._events), index, number)
        kept = self._staging.get(key)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (shard.shape, shard.dtype, shard.device):
            kept = self._staging[key] = torch.empty_like(shard)
        return kept.copy_(shard)


def _shards(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """The plain tensors that this rank has of them. Raises NotCapturable."""
    if {*map(type, gradients)} <= _WHOLE:
        return list(gradients)
    try:
        if all(map(is_, map(_spec, gradients), map(_spec, parameters))) or (
            list(map(_placements, gradients)) == list(map(_placements, parameters))
        ):
            shards = list(map(_local, gradients))
            if {*map(_kind, shards)} == {(Tensor, torch.strided, False)}:
                return shards  # as `local_shard`, which makes another tensor of each
    except AttributeError:
        pass  # not all of them are sharded
    return [
        None if gradient is None else _shard(gradient, parameter)
        for gradient, parameter in zip(gradients, parameters, strict=True)
    ]


def _shard(gradient: Tensor, parameter: Tensor) -> Tensor:
    if type(gradient) is Tensor:
        return gradient
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        raise NotCapturable("a gradient is sharded differently from its parameter")
    return local_shard(gradient)


def _unscaled_in_place(optimizer: Optimizer) -> set[int]:
    """Gradients, by number, that a fused kernel divides by the scale where they lie."""
    fused = [bool(group.get("fused")) for group in optimizer.param_groups for _ in group["params"]]
    return {number for number, in_place in enumerate(fused) if in_place}


def set_hyper_parameters(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Inverse of `hyper_parameters`. Tensors are written in place: schedulers, modules and CUDA graphs hold
    on to them."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        for key, value in values.items():
            group[key] = _put_back(group.get(key), value)


def _put_back(present: Any, value: Any) -> Any:
    """`value`, in the place of `present`."""
    if isinstance(value, Tensor):
        return present.copy_(value) if _fits(present, value) else value
    if type(value) in (list, tuple) and type(present) is type(value) and len(present) == len(value):
        return type(value)(map(_put_back, present, value))
    if type(value) is dict and type(present) is dict:
        return {key: _put_back(present.get(key), each) for key, each in value.items()}
    return value


def _fits(present: Any, value: Tensor) -> bool:
    return isinstance(present, Tensor) and (present.shape, present.dtype) == (value.shape, value.dtype)


class UpdateHooks:
    """Until they are removed."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        before: Callable[[int, Optimizer, Any, Any], None],
        after: Callable[[int, Optimizer, Any, Any], None],
        after_any: Callable[..., None],
    ) -> None:
        """`before` and `after` are told the optimizer's index, and what hooks are told; `after_any` hears of
        every optimizer of the process."""
        self._optimizers = optimizers
        self._before = [
            optimizer.register_step_pre_hook(partial(before, index))
            for index, optimizer in enumerate(optimizers)
        ]
        self._after = [
            optimizer.register_step_post_hook(partial(after, index))
            for index, optimizer in enumerate(optimizers)
        ]
        self._after_any = register_optimizer_step_post_hook(after_any)

    def move_inside(self) -> None:
        """Make them the last before and the first after the update.

        Then what other hooks change - clipping before, averaging after - is seen as what it is.
        """
        for optimizer, before, after in zip(self._optimizers, self._before, self._after, strict=True):
            hooks: Any = getattr(optimizer, "_optimizer_step_pre_hooks", {})
            if before.id in hooks and next(reversed(hooks)) != before.id:
                hooks.move_to_end(before.id)
            hooks = getattr(optimizer, "_optimizer_step_post_hooks", {})
            if after.id in hooks and next(iter(hooks)) != after.id:
                hooks.move_to_end(after.id, last=False)

    def remove(self) -> None:
        for hook in (*self._before, *self._after, self._after_any):
            hook.remove()
