"""Batch statistics and counters change in forward, not in the optimizer: a delta carries those that may have.

torch's in-place counters do not tell for all of them: batch norm writes its running statistics behind their back. So small
buffers are always carried; a large one if its counter moved, or that of another buffer of its module.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tiercheck.trainer.leaves import NotCapturable, local_shard

ALWAYS = 64 * 1024
"""Bytes of a buffer that is carried without asking."""


class Buffers:
    """The model's persistent buffers and extra states, listed once: walking all modules at every step would cost more."""

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[str, dict[str, Tensor | None], str]] = []
        self._extra: dict[str, nn.Module] = {}
        for prefix, module in model.named_modules():
            path = f"{prefix}." if prefix else ""
            for key in module._buffers:
                if key not in module._non_persistent_buffers_set:
                    self._places.append((f"{path}{key}", module._buffers, key))
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                self._extra[f"{path}_extra_state"] = module
        self._marks: list[tuple[int, int]] = []
        self.changed()

    def changed(self) -> list[tuple[str, Tensor]]:
        """Those that may have changed since the last call, by name: the buffers themselves, not copies."""
        found: list[tuple[str, Tensor]] = []
        large: list[tuple[str, Tensor, int]] = []
        marks: list[tuple[int, int]] = []
        moved: set[int] = set()  # modules
        for number, (name, owner, key) in enumerate(self._places):
            buffer = owner.get(key)
            mark = (0, 0) if buffer is None else (id(buffer), 0 if buffer.is_inference() else buffer._version)
            marks.append(mark)
            if not self._marks or self._marks[number] != mark:
                moved.add(id(owner))
            if buffer is None:
                continue
            if buffer.nbytes <= ALWAYS:
                found.append((name, local_shard(buffer)))
            else:
                large.append((name, buffer, id(owner)))
        self._marks = marks
        return found + [(name, local_shard(buffer)) for name, buffer, owner in large if owner in moved]

    def named(self) -> list[tuple[str, Tensor]]:
        """All of them, by name in the model."""
        return [(name, buffer) for name, owner, key in self._places if (buffer := owner.get(key)) is not None]

    def extra(self) -> dict[str, Any]:
        """What modules add to the state_dict by `get_extra_state`, by its key there."""
        return {name: module.get_extra_state() for name, module in self._extra.items()}

    @torch.no_grad()
    def put_back(self, name: str, value: Tensor) -> None:
        """Write a buffer. Raises NotCapturable if the model has none of that name and shape."""
        owner, key = next(((owner, key) for known, owner, key in self._places if known == name), ({}, ""))
        buffer = owner.get(key)
        if buffer is None or local_shard(buffer).shape != value.shape:
            raise NotCapturable(f"the model has no buffer {name} of shape {tuple(value.shape)}")
        local_shard(buffer).copy_(value)

    def put_back_extra(self, extra: dict[str, Any]) -> None:
        for name, value in extra.items():
            self._extra[name].set_extra_state(value)
