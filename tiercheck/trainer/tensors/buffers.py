"""Finds the buffers that a delta must carry: statistics and counters that forward changed.

torch's in-place counters do not cover all of them: batch norm writes its running statistics without
them. So small buffers are always carried; a large one if its counter moved, or that of another buffer of its
module, or, in host memory, if a sample of its bytes has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from tiercheck.trainer.backends.backend import log
from tiercheck.trainer.tensors.samples import Sampler
from tiercheck.trainer.tensors.tensor_parts import PLAIN, NotCapturable, local_shard, writable, write

ALWAYS = 64 * 1024
"""Bytes. The largest buffer that is always carried."""
_NOTHING = 0, 0
NON_PERSISTENT_PREFIX = "buffers/"
"""The prefix of the names of buffers that are not persistent."""
MASK, MASKED = "_mask", "_orig"
"""The suffixes that torch.nn.utils.prune gives to a mask, and to the parameter under it."""
_Place = tuple[str, dict[str, Any], str]


class _TrackedBuffers:
    """Tracks which buffers of modules were written since `begin`.

    They are listed once: walking all modules at every step would cost more.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, persistent: bool) -> None:
        """`modules`: each by the prefix of the names of its buffers."""
        self._modules, self._persistent = modules, persistent
        self.begin()

    def begin(self) -> None:
        """Restarts tracking as training or a restore begins: the script will repeat what was done before."""
        self._places = self._list_places()
        self._touched = [False] * len(self._places)
        self._marks = self._read()

    def cleared(self) -> list[str]:
        """Returns the names of buffers that have changed, and were None at the last look."""
        gone = [done and mark == _NOTHING for done, mark in zip(self._touched, self._marks, strict=True)]
        return [name for name, _, _ in compress(self._places, gone)]

    def clear(self, name: str) -> None:
        owner, key = self._place_of(name)
        if key:
            owner[key] = None

    def _look(self) -> list[bool]:
        """Returns, for each buffer, whether it was written since the last look."""
        marks = self._read()
        changed = [new != old for new, old in zip(marks, self._marks, strict=True)]
        self._marks, self._touched = marks, list(map(or_, self._touched, changed))
        return changed

    def _read(self) -> list[Any]:
        return [_mark(owner.get(key)) for _, owner, key in self._places]

    def _list_places(self) -> list[_Place]:
        """Returns name, owner and key of each buffer."""
        return [
            (f"{before}{prefix}.{key}" if prefix else f"{before}{key}", module._buffers, key)
            for before, model in self._modules.items()
            for prefix, module in model.named_modules()
            for key in module._buffers
            if (key not in module._non_persistent_buffers_set) is self._persistent
        ]

    def _place_of(self, name: str) -> tuple[dict[str, Any], str]:
        """Returns the dict and key that hold the buffer of that name; empty: none does."""
        return next(((owner, key) for known, owner, key in self._places if known == name), ({}, ""))


class Buffers(_TrackedBuffers):
    """The model's persistent buffers and extra states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__({"": model}, persistent=True)
        self._passing = NonPersistentBuffers({"": model})
        self._extra = {
            f"{prefix}._extra_state" if prefix else "_extra_state": module
            for prefix, module in model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        self._sampler, self._sums = Sampler(), list[int]()
        self.changed()

    def changed(self) -> list[tuple[str, Tensor]]:
        """Returns the buffers that may have changed since the last call, by name; they are not copies."""
        found: list[tuple[str, Tensor]] = []
        large: list[tuple[str, Tensor, int]] = []
        moved = {id(owner) for _, owner, _ in compress(self._places, self._look())}  # modules
        for name, owner, key in self._places:
            buffer = owner.get(key)
            if buffer is None:
                continue
            if buffer.layout is not torch.strided:
                found.append((name, buffer))  # storing it will raise
            elif buffer.nbytes <= ALWAYS:
                found.append((name, local_shard(buffer)))
            else:
                large.append((name, buffer, id(owner)))
        moved |= self._written(large)
        found += self._passing.changed()
        return found + [(name, local_shard(buffer)) for name, buffer, owner in large if owner in moved]

    def _written(self, large: Sequence[tuple[str, Tensor, int]]) -> set[int]:
        """Returns the modules of buffers with changed bytes, as far as a look needs no wait for a device."""
        seen = [
            (buffer, owner)
            for _, buffer, owner in large
            if type(buffer) in PLAIN and buffer.device.type == "cpu"
        ]
        sums = self._sampler.take([buffer for buffer, _ in seen]).sums if seen else []
        before, self._sums = self._sums, sums
        if len(before) != len(sums):
            return {owner for _, owner in seen}
        return {owner for (_, owner), old, new in zip(seen, before, sums, strict=True) if old != new}

    def large(self) -> list[tuple[str, Tensor]]:
        """Returns the buffers that are not always carried, by name in the model."""
        held = ((name, owner.get(key)) for name, owner, key in self._places)
        return [
            (name, each)
            for name, each in held
            if each is not None and each.layout is torch.strided and each.nbytes > ALWAYS
        ]

    def extra(self) -> dict[str, Any]:
        """Returns what modules add to the state_dict by `get_extra_state`, by its key there."""
        return {name: module.get_extra_state() for name, module in self._extra.items()}

    @torch.no_grad()
    def put_back(self, name: str, value: Tensor) -> None:
        """Writes a buffer. Raises NotCapturable if the model has none of that name, shape and dtype."""
        if self._passing.put_back(name, value):
            return
        owner, key = self._place_of(name)
        buffer = owner.get(key)
        if key and buffer is None:
            owner[key] = _copy_beside(value, *self._modules.values())
        elif buffer is None:
            raise NotCapturable(f"the model has no buffer {name} of shape {tuple(value.shape)}")
        elif buffer.dtype != value.dtype:
            raise NotCapturable(f"the buffer {name} was {value.dtype}, and is {buffer.dtype} in the model")
        else:
            shard = local_shard(buffer)
            write(shard if shard.shape == value.shape else take_shape(buffer, value.shape), value)

    def cleared(self) -> list[str]:
        return super().cleared() + self._passing.cleared()

    def clear(self, name: str) -> None:
        self._passing.clear(name)
        super().clear(name)


class NonPersistentBuffers(_TrackedBuffers):
    """Tracks buffers that are in no state_dict (not persistent), but that training writes to.

    The next step depends on them. Most others are tables that the script makes anew, perhaps on purpose with
    other values.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__(modules, persistent=False)
        self._warned = False

    def _list_places(self) -> list[_Place]:
        """Returns pruned weights, too: of them torch computes what it prunes next."""
        pruned: list[_Place] = [
            (f"{before}{prefix}.{key}" if prefix else f"{before}{key}", vars(module), key)
            for before, model in self._modules.items()
            for prefix, module in model.named_modules()
            for key in (name.removesuffix(MASK) for name in module._buffers if name.endswith(MASK))
            if f"{key}{MASKED}" in module._parameters and key in vars(module)
        ]
        return super()._list_places() + pruned

    def _read(self) -> list[Any]:
        # A pruned weight may be computed several times in a step, and then at the address of the last one.
        return [object() if _is_pruned(owner) else _mark(owner.get(key)) for _, owner, key in self._places]

    def looked_for(self) -> list[tuple[str, Tensor]]:
        """Returns what `written` does, with those that a module made later, as in its first forward."""
        self._look()
        known = {
            (id(owner), key): done for (_, owner, key), done in zip(self._places, self._touched, strict=True)
        }
        self._places = self._list_places()
        self._touched = [
            known.get((id(owner), key), _is_pruned(owner) or _is_small(owner.get(key)))
            for _, owner, key in self._places
        ]
        self._marks = self._read()
        return self._listed(self._touched)

    def written(self) -> list[tuple[str, Tensor]]:
        """Returns the buffers that were written since `begin`, by name; they are not copies."""
        self._look()
        return self._listed(self._touched)

    def changed(self) -> list[tuple[str, Tensor]]:
        """Returns the buffers that were written since the last call of this or of `written`."""
        return self._listed(self._look())

    def _listed(self, chosen: Sequence[bool]) -> list[tuple[str, Tensor]]:
        found: list[tuple[str, Tensor]] = []
        for name, owner, key in compress(self._places, chosen):
            buffer = owner.get(key)
            if (
                buffer is None
                or type(buffer) not in PLAIN
                or buffer.layout is not torch.strided
                or buffer.is_meta
            ):
                continue
            if _is_small(buffer) or _is_pruned(owner):
                found.append((name, local_shard(buffer)))
            elif not self._warned:
                self._warned = True
                log.warning(
                    "the buffer %s changes, and is in no version: it is not persistent, and has %d bytes",
                    name,
                    buffer.nbytes,
                )
        return found

    @torch.no_grad()
    def put_back(self, name: str, value: Tensor) -> bool:
        """Writes a buffer in its saved shape, if it is one of these. Returns whether it is."""
        owner, key = self._place_of(name)
        buffer = owner.get(key)
        if (
            buffer is not None
            and (buffer.shape, buffer.dtype) == (value.shape, value.dtype)
            and not buffer.is_meta
        ):
            write(local_shard(buffer), value)
        elif key:
            owner[key] = _copy_beside(value, *self._modules.values())
        return bool(key)

    @torch.no_grad()
    def make(self, name: str, value: Tensor) -> None:
        """Adds a buffer that no module has yet: the script's first forward would give it another value."""
        prefix = max((each for each in self._modules if name.startswith(each)), key=len)
        path, _, key = name.removeprefix(prefix).rpartition(".")
        owner = dict(self._modules[prefix].named_modules()).get(path)
        if owner is not None and not hasattr(owner, key):
            owner.register_buffer(
                key, _copy_beside(value, self._modules[prefix], *self._modules.values()), persistent=False
            )


def take_shape(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """Gives a buffer memory of that shape, and returns it. Raises NotCapturable if sharded or wrapped."""
    if type(buffer) not in PLAIN:
        raise NotCapturable(f"a buffer of {type(buffer).__name__} cannot take the shape {tuple(shape)}")
    fresh = torch.empty(shape, dtype=buffer.dtype, device=buffer.device)
    take_memory(buffer, fresh)
    return fresh


def take_memory(buffer: Tensor, fresh: Tensor) -> None:
    """Gives a buffer the memory and the shape of a fresh tensor."""
    with writable(buffer):
        buffer.set_(fresh)  # type: ignore[call-overload]


def _is_small(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.layout is torch.strided and buffer.nbytes <= ALWAYS


def _is_pruned(owner: Mapping[str, Any]) -> bool:
    """Returns whether the owner of a tensor is a module, as that of a pruned weight is, not its buffers."""
    return "_buffers" in owner


def _copy_beside(value: Tensor, *modules: nn.Module) -> Tensor:
    """Returns a copy on the device of the first of `modules` that has one."""
    like = next(chain.from_iterable(module.parameters() for module in modules), value)
    return value.to(like.device, copy=True)


def _mark(buffer: Tensor | None) -> tuple[int, int]:
    """Returns a mark that changes when the buffer is replaced, or written in place."""
    if buffer is None or not buffer.is_inference():
        return _NOTHING if buffer is None else (id(buffer), buffer._version)
    # It has no counter.
    is_seen = type(buffer) in PLAIN and buffer.is_cpu and _is_small(buffer)
    return id(buffer), Sampler().take([buffer]).sums[0] if is_seen else 0
