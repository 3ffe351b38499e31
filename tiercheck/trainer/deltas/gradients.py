"""Records the inputs of each update by hooks, without a change to the training loop.

A step is replayed from these. Gradients are recorded by reference and copied while the next step computes.
This is safe unless their memory is reused; if it is (`zero_grad(set_to_none=False)`, the buckets of
DistributedDataParallel), or may be, they are copied at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, compress, count
from operator import attrgetter, is_, not_
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tiercheck.trainer.state.replayable import SCALING
from tiercheck.trainer.state.values import own_copy, put_back_value
from tiercheck.trainer.tensors.tensor_parts import NotCapturable, local_shard, parameters_of, read_each

_FRESH_STEPS = 4
"""The number of times in a row that a gradient in larger memory must be in new memory.

Before that it is copied at once. DistributedDataParallel moves its buckets once, after the first step."""

_WHOLE = {Tensor, type(None)}
_grad, _local = attrgetter("grad"), attrgetter("_local_tensor")
_kind = attrgetter("__class__", "layout", "requires_grad")
_spec = attrgetter("_spec")
_placements = attrgetter("_spec.placements")  # faster than the Python property of that name


@dataclass
class Event:
    """The inputs of one call of an optimizer's `step`, except the state."""

    optimizer: int
    gradients: list[Tensor | None]
    """This rank's shard of each parameter's gradient, in the optimizer's order; None: no gradient."""
    groups: list[dict[str, Any]]
    """The hyper-parameters of each parameter group."""
    scaling: dict[str, Tensor]
    lazy: list[int]
    """The indices of gradients that are the training loop's own tensors, not copies."""
    seen: list[int] = field(default_factory=list)
    """torch's in-place counters of the lazy gradients. If one has changed, so has its gradient."""
    torn: list[int] = field(default_factory=list)
    """The indices of gradients that were changed before they were copied."""

    def changed(self) -> list[int]:
        """Returns the indices of gradients that were changed since `note`."""
        return [
            index
            for index, old, new in zip(self.lazy, self.seen, self._counters(), strict=True)
            if old != new
        ]

    def release(self, index: int) -> None:
        """Drops a gradient that has been copied; notes it in `torn` if it has changed."""
        gradient, self.gradients[index] = self.gradients[index], None
        seen = self._seen_at.get(index)
        if gradient is not None and seen is not None and gradient._version != seen:
            self.torn.append(index)

    def left_out(self) -> bool:
        """Returns whether the update was skipped because a gradient overflowed. Waits for the device."""
        return "found_inf" in self.scaling and bool(self.scaling["found_inf"].any())

    def note(self) -> None:
        """Records the counters; the gradients must not change from here on."""
        self.seen = self._counters()

    @cached_property
    def _seen_at(self) -> dict[int, int]:
        return dict(zip(self.lazy, self.seen, strict=True))

    def _counters(self) -> list[int]:
        return [gradient._version for index in self.lazy if (gradient := self.gradients[index]) is not None]


def hyper_parameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns a copy of each parameter group without its parameters.

    Values that a schedule may write in place (a rate on the device, a list) are copied."""
    return [
        {key: own_copy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


class Recorder:
    """Records the events of the running step. Only for the training thread."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._events: list[Event] = []
        self.open: Event | None = None
        self._inexact = ""
        self._eager: set[tuple[int, int]] = set()
        self._staging: dict[tuple[int, int, int], Tensor] = {}
        self._last: list[dict[int, weakref.ref[Tensor | torch.UntypedStorage]]] = [{} for _ in optimizers]
        self._shared: dict[tuple[int, int], tuple[StorageWeakRef, int]] = {}

    def before(self, index: int) -> None:
        """Handles the start of an update, when every gradient is final."""
        if self.open is not None:
            self._inexact = "an update began before the one under way had ended"
        try:
            self.open = self._event(index)
        except NotCapturable as error:
            self.open = Event(index, [], [], {}, [])
            self._inexact = str(error)
        self.open.note()

    def after(self, index: int) -> None:
        event, self.open = self.open, None
        if event is None or event.optimizer != index:
            self._inexact = "an update began before the one under way had ended"
            return
        # Fused kernels advance counters without a change.
        if not any(group.get("fused") for group in event.groups):
            changed = event.changed()
            if changed:
                self._eager.update((index, number) for number in changed)
                self._inexact = "the optimizer changed gradients; they are copied at once from now on"
                event.note()
        else:
            event.note()
        self._events.append(event)

    def take(self) -> tuple[list[Event], str]:
        """Ends the step. Returns its events, and the reason why they are not exact (empty if they are)."""
        if self.open is not None:
            self._inexact, self.open = "an update did not end", None
        taken = self._events, self._inexact
        self._events, self._inexact = [], ""
        return taken

    def forget(self) -> None:
        self._events, self.open, self._inexact = [], None, "the update was not recorded"
        self._staging.clear()

    def copy_at_once(self, optimizer: int, gradients: Sequence[int]) -> None:
        """Sets gradients to be copied at once, because their memory was reused while they were read."""
        self._eager |= {(optimizer, number) for number in gradients}

    @torch.no_grad()
    def _event(self, index: int) -> Event:
        optimizer = self._optimizers[index]
        scaling = {
            name: value.detach().clone()
            for name in SCALING
            if isinstance(value := getattr(optimizer, name, None), Tensor)
        }
        parameters = parameters_of(optimizer)
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
        """Returns the indices of gradients with memory that may be overwritten before it is copied.

        These are all that were not seen in new memory each time."""
        found = {number for optimizer, number in self._eager if optimizer == index}
        here = [number for number, shard in enumerate(shards) if shard is not None]
        held = [shard for shard in shards if shard is not None]
        # The storage, not the tensor: `.data` makes a tensor of the same memory with its own counter.
        dense = [shard.layout is torch.strided for shard in held]
        memories: list[Any] = [
            shard.untyped_storage() if is_dense else given[number]
            for number, shard, is_dense in zip(here, held, dense, strict=True)
        ]
        identities = list(map(id, memories))
        first = dict(zip(reversed(identities), reversed(range(len(held))), strict=True))
        sizes = {identity: _own_bytes(memories[at], held[at]) for identity, at in first.items()}
        whole = [
            not is_dense or sizes[identity] == shard.nbytes
            for identity, shard, is_dense in zip(identities, held, dense, strict=True)
        ]
        last, self._last[index] = self._last[index], {}
        for at in compress(count(), whole):
            number, memory = here[at], memories[at]
            self._last[index][number] = weakref.ref(memory)
            before = last.get(number)
            if before is None or before() is memory:
                found.add(number)
        # Of shared memory: writes through other tensors do not change the gradient's counter.
        shared = {*compress(identities, map(not_, whole))}
        used = {
            each for each in shared if not self._is_fresh(index, here[first[each]], memories[first[each]])
        }
        if used or -1 in sizes.values():
            found.update(
                number
                for number, identity in zip(here, identities, strict=True)
                if identity in used or sizes[identity] < 0
            )
        return found

    def _is_fresh(self, index: int, number: int, storage: torch.UntypedStorage) -> bool:
        # This keeps the identity, not the memory.
        identity = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        before, times = self._shared.get((index, number), (None, -1))
        times = 0 if before is not None and before.cdata == identity.cdata else times + 1
        self._shared[index, number] = identity, times
        return times >= _FRESH_STEPS

    def _staged(self, index: int, number: int, shard: Tensor) -> Tensor:
        """Returns a copy in reused memory: the previous delta is copied before the next update begins."""
        if shard.layout is not torch.strided:
            return shard.clone()
        key = (len(self._events), index, number)
        kept = self._staging.get(key)
        if kept is None or (kept.shape, kept.dtype, kept.device) != (shard.shape, shard.dtype, shard.device):
            kept = self._staging[key] = torch.empty_like(shard)
        return kept.copy_(shard)


def _own_bytes(memory: Any, shard: Tensor) -> int:
    """Returns the size of a gradient's memory; -1 if it is reused though torch may show another one."""
    if not isinstance(memory, torch.UntypedStorage):
        return 0  # of a sparse one
    if shard.is_cuda and not torch._C._has_Standard_Deleter(memory._cdata):
        return -1  # of a CUDA graph, and its next run changes no counter
    return memory.nbytes() if memory.resizable() else -1  # not torch's own, but for example a numpy array


def _shards(gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the plain local tensors of gradients. Raises NotCapturable."""
    if {*map(type, gradients)} <= _WHOLE:
        return list(gradients)
    try:
        if all(map(is_, map(_spec, gradients), map(_spec, parameters))) or (
            list(map(_placements, gradients)) == list(map(_placements, parameters))
        ):
            shards = list(map(_local, gradients))
            if {*map(_kind, shards)} == {(Tensor, torch.strided, False)}:
                return shards  # equal to `local_shard`, which would create tensors
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
    """Returns the indices of gradients that a fused kernel divides by the scale in place."""
    fused = [bool(group.get("fused")) for group in optimizer.param_groups for _ in group["params"]]
    return {number for number, in_place in enumerate(fused) if in_place}


def set_hyper_parameters(
    optimizer: Optimizer, groups: Sequence[Mapping[str, Any]], before: Sequence[Collection[str]] = ()
) -> None:
    """Restores the result of `hyper_parameters`.

    Tensors are written in place, because schedulers, modules and CUDA graphs refer to them.
    `before`: the keys that each group had earlier in that run. It has deleted those that `groups` lack."""
    for number, (group, values) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for key in {*chain.from_iterable(before[number : number + 1])} - values.keys():
            group.pop(key, None)
        for key, value in values.items():
            group[key] = put_back_value(group.get(key), value)


class UpdateHooks:
    """The hooks on optimizer steps, registered until `remove`."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        before: Callable[[int, Optimizer, Any, Any], None],
        after: Callable[[int, Optimizer, Any, Any], None],
        after_any: Callable[..., None],
    ) -> None:
        """Calls `before` and `after` with the optimizer's index and the hook's arguments.

        `after_any` is called for every optimizer of the process."""
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
        """Makes them the last hooks before and the first after the update.

        Changes by other hooks are then attributed correctly: clipping before, averaging after.
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
