"""Defines the layout of a delta in its slot, which only this module writes and reads.

Items: `gradient<e>/<parameter>[/index|/values|/indices]` is an input of event e, in a form of `encoding`;
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
from tiercheck.trainer.deltas.watch import Mark
from tiercheck.trainer.replicas.replicas import Replicas, cut, share_of
from tiercheck.trainer.state.slot_file import USER_BLOB, SlotReader, plan_slot
from tiercheck.trainer.state.user_state import Packed
from tiercheck.trainer.tensors.accelerator import Pending

REPLAY_BLOB = "replay"
REPLAY_BYTES = "replay_bytes"
_BLOB_UNIT = 4096
_LOOK_AGAIN = 16  # steps after which a gradient that was dense is examined again


@dataclass(kw_only=True)
class Delta(Pending):
    """The data of one step to be written to a slot.

    Gradients are mostly the training loop's own tensors; the rest are copies."""

    events: list[Event]
    buffers: list[tuple[str, Tensor]]
    blob: Packed
    threads: int
    """The number of torch's threads in the training thread."""
    seen: Mark
    """The result of `Watch.read` at the end of the step."""
    only_measure: bool = False
    """True if only its size is needed, to reserve slots; there is no chain yet that it could continue."""


@dataclass
class Item:
    """A tensor to store. `event` and `index` identify the gradient that it is a part of, if any."""

    name: str
    tensor: Tensor
    event: Event | None = None
    index: int = -1
    must_be_finite: bool = False

    def hand_over(self) -> tuple[str, Tensor]:
        """Returns name and tensor, and drops the reference to the tensor."""
        tensor, self.tensor = self.tensor, _GONE
        return self.name, tensor

    def copied(self) -> None:
        """Releases the gradient that this is a part of, because it has been copied."""
        if self.event is not None:
            self.event.release(self.index)


_GONE = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class DeltaPlan:
    """The items of one delta and their description."""

    items: list[Item]
    about: list[dict[str, Any]]
    """The optimizer of each event, and the forms of its gradients that are not simply dense."""


class Planner:
    """Chooses forms and layouts. It caches both, because they rarely change from step to step."""

    def __init__(self, names: Sequence[Sequence[str]], replicas: Sequence[Sequence[Replicas | None]]) -> None:
        """`names`, `replicas`: of each optimizer's parameters, in order. Replicas have equal gradients."""
        self._names, self._replicas = names, replicas
        self._dense_at: dict[tuple[int, int], int] = {}
        self._layout: SlotLayout | None = None
        self._signature: tuple[Any, ...] = ()
        self._capacity = {REPLAY_BLOB: 0, USER_BLOB: 0}

    def plan(self, delta: Delta) -> DeltaPlan:
        """Chooses the items to store. Raises NotCapturable."""
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
        """Returns the slot layout, with room for blobs of these lengths. Raises NotCapturable."""
        for name, length in ((REPLAY_BLOB, replay), (USER_BLOB, user)):
            if length > self._capacity[name]:
                self._capacity[name] = -(-(length + length // 8) // _BLOB_UNIT) * _BLOB_UNIT
        signature = (
            *self._capacity.values(),
            *((item.name, item.tensor.dtype, item.tensor.shape) for item in items),
        )
        if self._layout is None or signature != self._signature:
            self._layout = plan_slot({}, [(item.name, item.tensor) for item in items], self._capacity)
            self._signature = signature
        return self._layout

    def dense_bytes(self, delta: Delta) -> int:
        """Returns the bytes of its tensors if none were sparse."""
        size = sum(tensor.nbytes for _, tensor in delta.buffers)
        for event in delta.events:
            for index, gradient in enumerate(event.gradients):
                if gradient is not None:
                    span = self._share(event, index, gradient)
                    count = gradient.numel() if span is None else span[1] - span[0]
                    size += count * gradient.element_size()
        return size

    def _share(self, event: Event, index: int, gradient: Tensor) -> tuple[int, int] | None:
        """Returns the range of elements that this rank stores of a gradient; None: all."""
        replicas = self._replicas[event.optimizer][index]
        return None if replicas is None else share_of(gradient, replicas)

    def _look(self, delta: Delta) -> set[tuple[int, int]]:
        """Returns the gradients that may be sparse, by event and parameter.

        One that was dense is not examined again for `_LOOK_AGAIN` steps."""
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
    """Returns the `replay` blob. `threads`: torch's on the CPU, which may affect how kernels round."""
    return json.dumps(
        {"events": plan.about, "hashes": hashes, "threads": threads}, separators=(",", ":")
    ).encode()


@dataclass(frozen=True)
class StoredEvent:
    """An update as stored in a delta."""

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
        """Returns the gradient of the parameter at `index`, on `device`.

        If it is shared (`is_shared`), only this rank's share is filled in."""
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
        """Returns whether every replica stored a part of the gradient."""
        form = self.forms.get(str(index))
        return form is not None and form["form"] == "share"


@dataclass(frozen=True)
class StoredDelta:
    """A delta read back. `step` is the step that its replay gives."""

    step: int
    tensors: Mapping[str, Tensor]
    events: tuple[StoredEvent, ...]
    hashes: tuple[str, ...]
    threads: int

    @staticmethod
    def read(slot: SlotReader) -> StoredDelta:
        """Reads a delta. Raises ValueError or KeyError if the slot is not a valid delta."""
        about = parse_json(slot.blob(REPLAY_BLOB, REPLAY_BYTES))
        events = tuple(
            StoredEvent(event["optimizer"], event["forms"], number)
            for number, event in enumerate(about["events"])
        )
        return StoredDelta(
            slot.header.version.step, slot.tensors(), events, tuple(about["hashes"]), int(about["threads"])
        )

    def buffers(self) -> dict[str, Tensor]:
        """Returns the stored buffers by name in the model."""
        prefix = "buffer/"
        return {name[len(prefix) :]: value for name, value in self.tensors.items() if name.startswith(prefix)}
