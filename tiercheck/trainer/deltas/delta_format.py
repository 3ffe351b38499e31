"""Defines the layout of a delta in its slot, which is written and read here alone.

Items: `gradient<e>/<parameter>[/index|/values|/indices]` is what event e consumed, in a form of `encoding`;
`buffer/<name>` are buffers that changed; `replay` is JSON (forms, fingerprints, threads, hyper-parameters);
`user` is the users' small state, as in a snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.plain_json import parse_json
from tiercheck.trainer.deltas.encoding import decode, encode, look_sparse, may_be_sparse
from tiercheck.trainer.deltas.gradients import Event
from tiercheck.trainer.replicas.replicas import Replicas, cut, share_of
from tiercheck.trainer.state.slot_file import USER_BLOB, SlotReader
from tiercheck.trainer.state.user_state import Packed
from tiercheck.trainer.tensors.accelerator import Pending
from tiercheck.trainer.tensors.leaves import NotCapturable, dtype_name

REPLAY_BLOB = "replay"
REPLAY_BYTES = "replay_bytes"
_BLOB_UNIT = 4096
_LOOK_AGAIN = 16  # steps after which a gradient that was dense is looked at again


@dataclass(kw_only=True)
class Delta(Pending):
    """One step on its way into a slot. Gradients are mostly those of the training loop itself; the rest is
    copies."""

    events: list[Event]
    buffers: list[tuple[str, Tensor]]
    blob: Packed
    threads: int
    """Of torch in the training thread."""
    seen: list[int]
    """What `Watch.read` gave when the step ended."""
    only_measure: bool = False
    """Find out its size, so that slots can be made; there is no chain yet that it could continue."""


@dataclass
class Item:
    """One tensor to store. `event` and `index` say which gradient it is a part of, if it is one."""

    name: str
    tensor: Tensor
    event: Event | None = None
    index: int = -1
    must_be_finite: bool = False

    def hand_over(self) -> tuple[str, Tensor]:
        """Name and tensor; from now on somebody else keeps it alive."""
        tensor, self.tensor = self.tensor, _GONE
        return self.name, tensor

    def copied(self) -> None:
        """Let go of the gradient that this is a part of."""
        if self.event is not None:
            self.event.release(self.index)


_GONE = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class DeltaPlan:
    """How one delta will lie in its slot."""

    items: list[Item]
    about: list[dict[str, Any]]
    """Per event: optimizer, and the form of each parameter's gradient that is not simply dense."""


class Planner:
    """Chooses forms and layouts; both rarely change from step to step, so it remembers them."""

    def __init__(
        self,
        names: Sequence[Sequence[str]],
        replicas: Sequence[Sequence[Replicas | None]],
    ) -> None:
        """Of each optimizer's parameters, in its order: their names, and who else consumes the same
        gradient.
        """
        self._names, self._replicas = names, replicas
        self._dense_at: dict[tuple[int, int], int] = {}
        self._layout: SlotLayout | None = None
        self._signature: tuple[Any, ...] = ()
        self._capacity = {REPLAY_BLOB: 0, USER_BLOB: 0}

    def plan(self, delta: Delta) -> DeltaPlan:
        """Raises NotCapturable."""
        sparse = self._look(delta)
        items: list[Item] = []
        about: list[dict[str, Any]] = []
        for number, event in enumerate(delta.events):
            names = self._names[event.optimizer]
            forms: dict[str, Any] = {}
            for index, gradient in enumerate(event.gradients):
                if gradient is None:
                    continue
                span = self._share(event, index, gradient)
                stored = gradient if span is None else cut(gradient, span)
                encoded = encode(stored, (number, index) in sparse)
                if span is not None:
                    forms[str(index)] = {"form": "share", "shape": list(gradient.shape), "of": encoded.about}
                elif encoded.about is not None:
                    forms[str(index)] = encoded.about
                if encoded.about is not None:
                    self._dense_at.pop((number, index), None)
                items += (
                    Item(f"gradient{number}/{names[index]}{suffix}", part, event, index, True)
                    for suffix, part in encoded.parts.items()
                )
            about.append({"optimizer": event.optimizer, "forms": forms})
        items += (Item(f"buffer/{name}", tensor) for name, tensor in delta.buffers)
        return DeltaPlan(items, about)

    def layout(self, items: Sequence[Item], replay: int, user: int) -> SlotLayout:
        """Where everything goes, with room for blobs of these lengths. Raises NotCapturable."""
        for name, length in ((REPLAY_BLOB, replay), (USER_BLOB, user)):
            if length > self._capacity[name]:
                self._capacity[name] = -(-(length + length // 8) // _BLOB_UNIT) * _BLOB_UNIT
        signature = (
            *self._capacity.values(),
            *((item.name, item.tensor.dtype, item.tensor.shape) for item in items),
        )
        if self._layout is None or signature != self._signature:
            try:
                self._layout = SlotLayout.plan(
                    [
                        (
                            item.name,
                            dtype_name(item.tensor.dtype),
                            tuple(item.tensor.shape),
                            item.tensor.nbytes,
                        )
                        for item in items
                    ]
                    + [(name, "U8", (room,), room) for name, room in self._capacity.items()]
                )
            except (TypeError, ValueError) as error:
                raise NotCapturable(str(error)) from error
            self._signature = signature
        return self._layout

    def dense_bytes(self, delta: Delta) -> int:
        """Bytes of its tensors if none were sparse."""
        size = sum(tensor.nbytes for _, tensor in delta.buffers)
        for event in delta.events:
            for index, gradient in enumerate(event.gradients):
                if gradient is not None:
                    span = self._share(event, index, gradient)
                    count = gradient.numel() if span is None else span[1] - span[0]
                    size += count * gradient.element_size()
        return size

    def _share(self, event: Event, index: int, gradient: Tensor) -> tuple[int, int] | None:
        """The elements that this rank stores of it; None: all."""
        replicas = self._replicas[event.optimizer][index]
        return None if replicas is None else share_of(gradient, replicas)

    def _look(self, delta: Delta) -> set[tuple[int, int]]:
        """Which gradients are worth a closer look, by event and parameter. One that was dense is left alone
        for a while."""
        asked: dict[torch.device, list[tuple[int, int]]] = {}
        for number, event in enumerate(delta.events):
            for index, gradient in enumerate(event.gradients):
                if (
                    gradient is not None
                    and delta.step >= self._dense_at.get((number, index), -_LOOK_AGAIN) + _LOOK_AGAIN
                    and may_be_sparse(gradient)
                ):
                    asked.setdefault(gradient.device, []).append((number, index))
        sparse: set[tuple[int, int]] = set()
        for keys in asked.values():
            gradients = [delta.events[number].gradients[index] for number, index in keys]
            for key, looks in zip(keys, look_sparse([g for g in gradients if g is not None]), strict=True):
                self._dense_at[key] = delta.step
                if looks:
                    sparse.add(key)
        return sparse


def replay_blob(plan: DeltaPlan, hashes: Sequence[str], threads: int) -> bytes:
    """`threads`: of torch on the CPU; kernels may round differently at the edges of each thread's part."""
    return json.dumps(
        {"events": plan.about, "hashes": hashes, "threads": threads}, separators=(",", ":")
    ).encode()


@dataclass(frozen=True)
class StoredEvent:
    """One update as a delta tells it."""

    optimizer: int
    forms: Mapping[str, Any]
    number: int

    def gradient(
        self,
        tensors: Mapping[str, Tensor],
        index: int,
        name: str,
        device: torch.device,
        replicas: Replicas | None = None,
    ) -> Tensor | None:
        """The gradient of the parameter at `index`, on `device`; of one that is shared (`is_shared`) the own
        share is in place."""
        prefix, form = f"gradient{self.number}/{name}", self.forms.get(str(index))
        shared = self.is_shared(index)
        stored = decode(
            lambda suffix: tensors.get(prefix + suffix), form["of"] if shared and form else form, device
        )
        if stored is None or not shared or form is None:
            return stored
        whole = torch.empty(form["shape"], dtype=stored.dtype, device=device)
        assert replicas is not None, f"{name} was saved in shares"
        own = share_of(whole, replicas)
        assert own is not None
        whole.view(-1)[own[0] : own[1]].copy_(stored.view(-1))
        return whole

    def is_shared(self, index: int) -> bool:
        """Whether every replica stored a part of it."""
        form = self.forms.get(str(index))
        return form is not None and form["form"] == "share"


@dataclass(frozen=True)
class StoredDelta:
    """A delta read back. `step` is the one it leads to."""

    step: int
    tensors: Mapping[str, Tensor]
    events: tuple[StoredEvent, ...]
    hashes: tuple[str, ...]
    threads: int

    @staticmethod
    def read(slot: SlotReader) -> StoredDelta:
        """Raises ValueError or KeyError if the slot is no delta of ours."""
        about = parse_json(slot.blob(REPLAY_BLOB, REPLAY_BYTES))
        events = tuple(
            StoredEvent(event["optimizer"], event["forms"], number)
            for number, event in enumerate(about["events"])
        )
        return StoredDelta(
            slot.header.version.step, slot.tensors(), events, tuple(about["hashes"]), int(about["threads"])
        )

    def buffers(self) -> dict[str, Tensor]:
        """By name in the model."""
        prefix = "buffer/"
        return {name[len(prefix) :]: value for name, value in self.tensors.items() if name.startswith(prefix)}
