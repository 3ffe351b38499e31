"""Batch statistics and counters change in forward, not in the optimizer: a delta carries those that may have.

torch's in-place counters do not tell for all of them: batch norm writes its running statistics behind their back. So small
buffers are always carried; a large one if its counter moved, or that of another buffer of its module, or, in host memory, if a sample
of its bytes is another one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import compress
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from tiercheck.trainer.leaves import PLAIN, NotCapturable, local_shard, write
from tiercheck.trainer.samples import Sampler

log = logging.getLogger("tiercheck")

ALWAYS = 64 * 1024
"""Bytes of a buffer that is carried without asking."""
PASSING = "buffers/"
"""Before the names of buffers that are not persistent."""


class Buffers:
    """The model's persistent buffers and extra states, listed once: walking all modules at every step would cost more."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[str, dict[str, Tensor | None], str]] = []
        self._extra: dict[str, nn.Module] = {}
        self._passing = Passing(model)
        for prefix, module in model.named_modules():
            path = f"{prefix}." if prefix else ""
            for key in module._buffers:
                if key not in module._non_persistent_buffers_set:
                    self._places.append((f"{path}{key}", module._buffers, key))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self._extra[f"{path}_extra_state"] = module
        self._marks: list[tuple[int, int]] = []
        self._sampler, self._sums = Sampler(), list[int]()
        self.changed()

    def changed(self) -> list[tuple[str, Tensor]]:
        """Those that may have changed since the last call, by name: the buffers themselves, not copies."""
        found: list[tuple[str, Tensor]] = []
        large: list[tuple[str, Tensor, int]] = []
        marks: list[tuple[int, int]] = []
        moved: set[int] = set()  # modules
        for number, (name, owner, key) in enumerate(self._places):
            buffer = owner.get(key)
            mark = _mark(buffer)
            marks.append(mark)
            if not self._marks or self._marks[number] != mark:
                moved.add(id(owner))
            if buffer is None:
                continue
            if buffer.layout is not torch.strided:
                found.append((name, buffer))  # whoever stores it says that it cannot
            elif buffer.nbytes <= ALWAYS:
                found.append((name, local_shard(buffer)))
            else:
                large.append((name, buffer, id(owner)))
        self._marks = marks
        moved |= self._written(large)
        found += self._passing.changed()
        return found + [(name, local_shard(buffer)) for name, buffer, owner in large if owner in moved]

    def _written(self, large: Sequence[tuple[str, Tensor, int]]) -> set[int]:
        """Modules of those whose bytes have changed, where a look at them costs no wait for a device."""
        seen = [(buffer, owner) for _, buffer, owner in large if type(buffer) in PLAIN and buffer.device.type == "cpu"]
        sums = self._sampler.take([buffer for buffer, _ in seen]).sums if seen else []
        before, self._sums = self._sums, sums
        if len(before) != len(sums):
            return {owner for _, owner in seen}
        return {owner for (_, owner), old, new in zip(seen, before, sums, strict=True) if old != new}

    def named(self) -> list[tuple[str, Tensor]]:
        """All of them, by name in the model."""
        return [(name, buffer) for name, owner, key in self._places if (buffer := owner.get(key)) is not None]

    def extra(self) -> dict[str, Any]:
        """What modules add to the state_dict by `get_extra_state`, by its key there."""
        return {name: module.get_extra_state() for name, module in self._extra.items()}

    @torch.no_grad()
    def put_back(self, name: str, value: Tensor) -> None:
        """Write a buffer. Raises NotCapturable if the model has none of that name and shape."""
        if self._passing.put_back(name, value):
            return
        owner, key = _place_of(name, self._places)
        buffer = owner.get(key)
        if buffer is None or local_shard(buffer).shape != value.shape:
            raise NotCapturable(f"the model has no buffer {name} of shape {tuple(value.shape)}")
        write(local_shard(buffer), value)

    def put_back_extra(self, extra: dict[str, Any]) -> None:
        for name, value in extra.items():
            self._extra[name].set_extra_state(value)


class Passing:
    """Buffers that are not persistent, so that no state_dict holds them, but that training writes to: the next step depends on them.

    Most others are tables that the script makes anew, perhaps on purpose with other values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._warned = False
        self.begin()

    def begin(self) -> None:
        """Training, or a restore, begins: what was done before, the script will do again."""
        self._places = _not_persistent(self._model)
        self._written = [False] * len(self._places)
        self._marks = self._read()

    def looked_for(self) -> list[tuple[str, Tensor]]:
        """As `written`, with those that a module has made on its way, as some do in their first forward."""
        self.changed()
        known = {(id(owner), key): done for (_, owner, key), done in zip(self._places, self._written, strict=True)}
        self._places = _not_persistent(self._model)
        self._written = [known.get((id(owner), key), _is_small(owner.get(key))) for _, owner, key in self._places]
        self._marks = self._read()
        return self._listed(self._written)

    def written(self) -> list[tuple[str, Tensor]]:
        """Those that were written since then, by name: the buffers themselves, not copies."""
        self.changed()
        return self._listed(self._written)

    def changed(self) -> list[tuple[str, Tensor]]:
        """Those that were written since the last call of either."""
        marks = self._read()
        changed = [new != old for new, old in zip(marks, self._marks, strict=True)]
        self._marks, self._written = marks, list(map(or_, self._written, changed))
        return self._listed(changed)

    def _listed(self, chosen: Sequence[bool]) -> list[tuple[str, Tensor]]:
        found: list[tuple[str, Tensor]] = []
        for name, owner, key in compress(self._places, chosen):
            buffer = owner.get(key)
            if buffer is None or type(buffer) not in PLAIN or buffer.layout is not torch.strided or buffer.is_meta:
                continue
            if _is_small(buffer):
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
        """Write it if it is one of these. One that has another shape here is left: its module keeps account of that elsewhere."""
        owner, key = _place_of(name, self._places)
        buffer = owner.get(key)
        if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype) and not buffer.is_meta:
            write(local_shard(buffer), value)
        return bool(key)

    @torch.no_grad()
    def make(self, name: str, value: Tensor) -> None:
        """One that no module has yet: the script would make it in its first forward, with another value."""
        path, _, key = name.rpartition(".")
        owner = dict(self._model.named_modules()).get(path)
        if owner is not None and not hasattr(owner, key):
            like = next(self._model.parameters(), value)
            owner.register_buffer(key, value.to(like.device, copy=True), persistent=False)

    def _read(self) -> list[tuple[int, int]]:
        return [_mark(owner.get(key)) for _, owner, key in self._places]


def _is_small(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.layout is torch.strided and buffer.nbytes <= ALWAYS


def _not_persistent(model: nn.Module) -> list[tuple[str, dict[str, Tensor | None], str]]:
    """Name, owner and key of each such buffer."""
    return [
        (f"{prefix}.{key}" if prefix else key, module._buffers, key)
        for prefix, module in model.named_modules()
        for key in module._buffers
        if key in module._non_persistent_buffers_set
    ]


def _place_of(
    name: str, places: Sequence[tuple[str, dict[str, Tensor | None], str]]
) -> tuple[dict[str, Tensor | None], str]:
    """Who keeps the buffer of that name, and under which key; empty: nobody does."""
    return next(((owner, key) for known, owner, key in places if known == name), ({}, ""))


def _mark(buffer: Tensor | None) -> tuple[int, int]:
    """Another one as soon as it is replaced, or written in place."""
    return (0, 0) if buffer is None else (id(buffer), 0 if buffer.is_inference() else buffer._version)
