"""Steps that other ranks recorded are made again on this mesh, so that what was trained after their snapshot is not lost.

What an elementwise optimizer does to an element depends on no other one. So the recorded gradients may be cut like the state: each rank
reads the parts that it now holds, and makes the update itself, by the code that replays at home (`replay.py`). What comes out must
have the fingerprints that the old ranks took of theirs (`old_fingerprints.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.pieces import Box, Piece, Take, cover
from tiercheck.protocol.slot import PIECES
from tiercheck.protocol.slot import Tensor as Stored
from tiercheck.trainer import user_state
from tiercheck.trainer.backend import RestoreError
from tiercheck.trainer.buffers import Buffers
from tiercheck.trainer.capture import names_of
from tiercheck.trainer.delta import REPLAY_BLOB, StoredDelta, StoredEvent
from tiercheck.trainer.dtypes import dtype_of
from tiercheck.trainer.encoding import decode, same
from tiercheck.trainer.leaves import NotCapturable, local_shard
from tiercheck.trainer.modes import changed_since, evaluate_as_saved, freeze_as_saved
from tiercheck.trainer.old_fingerprints import OldFingerprints, first_difference
from tiercheck.trainer.ranks import everyones
from tiercheck.trainer.replay import Mismatch, Replay
from tiercheck.trainer.replayable import inseparable
from tiercheck.trainer.replicas import owner_of
from tiercheck.trainer.resharding import Borrow, Here, OtherRanks, merged_ranges
from tiercheck.trainer.slot_file import USER_BLOB, SlotReader


class CannotReplay(Exception):
    """What was recorded cannot be cut to these ranks, and why."""


@dataclass(frozen=True)
class _Recorded:
    """One old rank's delta: its beginning, and what it tells beside the gradients."""

    slot: SlotReader
    delta: StoredDelta
    content: dict[str, Any]
    pieces: Mapping[str, Piece]
    borrow: Callable[[Sequence[tuple[int, int]]], SlotReader]

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self.content["facts"]
        return facts

    @cached_property
    def stored(self) -> dict[str, Stored]:
        """Where its tensors lie."""
        return {each.name: each for each in self.slot.header.tensors}


@dataclass(frozen=True)
class _Source:
    """Who recorded which part of one gradient or buffer, and in which form."""

    rank: int
    name: str
    form: Mapping[str, Any] | None = None
    """None: as it is, in row-major order."""


@dataclass
class _Target:
    """One tensor that is put together from parts."""

    tensor: Tensor
    box: Box
    takes: list[Take[_Source]]


@torch.no_grad()
def replay_resharded(here: Here, others: OtherRanks, steps: Sequence[tuple[int, Borrow]]) -> dict[str, Any]:
    """Bring what `load_resharded` has loaded to the last of `steps`, the deltas that follow in order. The user blob that belongs to this
    rank now. A collective call. Raises RestoreError if something cannot be read, CannotReplay (on every rank) if the result cannot be had
    or is not what the old ranks had.
    """
    content: dict[str, Any] = {}
    failure, sums = "", []
    try:
        replay = _ReshardedReplay(here, others)
        for step, borrow in steps:
            content = replay.apply(step, borrow)
        replay.put_back_modes()
        sums = replay.fingerprints.sums
    except (CannotReplay, Mismatch) as error:
        failure = str(error)
    except (KeyError, TypeError, ValueError, NotCapturable) as error:  # of slots that are not as ours are
        failure = f"{type(error).__name__}: {error}"
    said = everyones((failure, sums))
    for number, (why, _) in enumerate(said):
        if why:
            raise CannotReplay(f"rank {number}: {why}" if here.world_size > 1 else why)
    if differs := first_difference([step for step, _ in steps], [each for _, each in said]):
        raise CannotReplay(differs)
    return content


class _ReshardedReplay:
    def __init__(self, here: Here, others: OtherRanks) -> None:
        for optimizer in here.optimizers:
            if why := inseparable(optimizer):
                raise CannotReplay(why)
        self._here, self._others = here, others
        self._replay = Replay(here.model, here.optimizers, here.shares)
        self._buffers = Buffers(here.model)
        self._namesake = here.rank % others.world_size
        self._sources = self._look_for_sources()
        self.fingerprints = OldFingerprints(here, others, self._sources)
        facts = {number: others.facts(number) for number in self._sources}
        self._index = {
            number: [{name: index for index, name in enumerate(each["states"])} for each in saved["optimizers"]]
            for number, saved in facts.items()
        }
        self._kept = self._state_keys()
        self._last: dict[int, _Recorded] = {}

    def apply(self, step: int, borrow: Borrow) -> dict[str, Any]:
        recorded = {
            number: self._open(number, step, borrow) for number in sorted({*self._sources, *self.fingerprints.told})
        }
        own, self._last = recorded[self._namesake], recorded
        for number in self._sources:
            self._must_agree(number, recorded[number], own, step)
        consumed: list[tuple[int, list[_Target | None]]] = []
        sources = {number: recorded[number] for number in self._sources}
        for number, event in enumerate(own.delta.events):
            wanted = [
                self._gradient(sources, number, event.optimizer, *each) for each in self._here.named[event.optimizer]
            ]
            consumed.append((event.optimizer, wanted))
        buffers = {
            name: target
            for name, value in self._buffers.named()
            if (target := self._buffer(sources, name, value)) is not None
        }
        _fill([each for _, row in consumed for each in row if each is not None] + [*buffers.values()], sources)
        extra: dict[str, Any] = {}
        for each in (own, *sources.values()):
            extra = {**each.facts["extra"], **extra}
        facts = {**own.facts, "extra": {name: extra[name] for name in self._buffers.extra() if name in extra}}
        self._replay.redo(
            own.delta.threads,
            [(optimizer, [None if each is None else each.tensor for each in row]) for optimizer, row in consumed],
            {name: target.tensor for name, target in buffers.items()},
            facts,
        )
        if self._state_keys() != self._kept:
            raise CannotReplay(f"an optimizer began to keep state of a parameter at step {step}, after the snapshot")
        self.fingerprints.add(step, {number: recorded[number].delta.hashes for number in self.fingerprints.told})
        return {**own.content, "random": own.content["random"] if self._here.rank < self._others.world_size else None}

    def put_back_modes(self) -> None:
        """What was frozen, thawed, or made to evaluate since the snapshot."""
        model, changed = self._here.model, dict[str, bool]()
        for number, recorded in self._last.items():
            changed |= changed_since(self._others.facts(number), recorded.facts)
        freeze_as_saved(model, changed.get)
        if self._last and self._others.facts(self._namesake).get("parameters") == names_of(model):
            evaluate_as_saved(model, self._last[self._namesake].facts)

    def _state_keys(self) -> list[list[str]]:
        return [
            sorted(key for key, value in optimizer.state.get(parameter, {}).items() if isinstance(value, Tensor))
            for optimizer, named in zip(self._here.optimizers, self._here.named, strict=True)
            for _, parameter in named
        ]

    def _look_for_sources(self) -> list[int]:
        """The old ranks that may have recorded anything of what this rank has now."""
        states: dict[tuple[int, str], list[str]] = {}
        for stored in self._others.holders:
            states.setdefault(owner_of(stored), []).append(stored)
        found = {self._namesake}
        for index, named in enumerate(self._here.named):
            for name, parameter in named:
                found |= self._holders(f"model/{name}", f"model/{name}", parameter)
                for stored in states.get((index, name), ()):
                    if len(self._others.shape(stored)) == parameter.dim():
                        found |= self._holders(stored, f"model/{name}", parameter)
        for name, buffer in self._buffers.named():
            found |= self._holders(f"model/{name}", f"model/{name}", buffer)
        return sorted(found)

    def _holders(self, stored: str, name: str, value: Tensor) -> set[int]:
        """Who had a part of it that is here now; if nothing of it is, one of those who had any."""
        box = self._here.box(name, value)
        held = self._others.sources(stored, self._here.rank)
        if not held:
            raise CannotReplay(f"{stored} is not in the snapshot")
        shared = {
            number for number, piece in held if len(piece.shape) == len(box.shape) and box.cut(piece.box) is not None
        }
        return shared or {held[0][0]}

    def _open(self, number: int, step: int, borrow: Borrow) -> _Recorded:
        """Raises RestoreError if it cannot be read, CannotReplay if it is not of use."""

        def read(ranges: Sequence[tuple[int, int]]) -> SlotReader:
            return SlotReader.open(borrow(number, merged_ranges(ranges)))

        slot = read(())
        header = slot.header
        if header.kind is not Kind.DELTA or (header.rank, header.version.step) != (number, step):
            raise RestoreError(
                f"{header.version} of rank {header.rank} was given for the delta of step {step} of rank {number}"
            )
        if not any(each.name == PIECES for each in header.tensors):
            raise CannotReplay(
                "the deltas are of a version of TierCheck that did not record which part of the whole they are"
            )
        blobs = read([(each.begin, each.end) for each in header.tensors if each.name in (REPLAY_BLOB, USER_BLOB)])
        return _Recorded(slot, StoredDelta.read(blobs), user_state.unpack(blobs.user_blob()), slot.pieces(), read)

    def _must_agree(self, number: int, one: _Recorded, own: _Recorded, step: int) -> None:
        updates = [[event.optimizer for event in each.delta.events] for each in (one, own)]
        settings = [
            [
                _without_names(groups)
                for groups in (*(event["groups"] for event in each.facts["events"]), *each.facts["groups"])
            ]
            for each in (one, own)
        ]
        scaling = [[event["scaling"] for event in each.facts["events"]] for each in (one, own)]
        if updates[0] != updates[1] or not same(settings[0], settings[1]) or not same(scaling[0], scaling[1]):
            raise CannotReplay(
                f"ranks {self._namesake} and {number} updated with different hyper-parameters at step {step}"
            )

    def _gradient(
        self, recorded: Mapping[int, _Recorded], event: int, optimizer: int, name: str, parameter: Tensor
    ) -> _Target | None:
        entry, stored = f"gradient{event}/{name}", f"model/{name}"
        sources: list[tuple[_Source, Piece]] = []
        for number, each in recorded.items():
            if entry in each.pieces:
                sources.append(
                    (
                        _Source(number, entry, self._form(number, each.delta.events[event], optimizer, name)),
                        each.pieces[entry],
                    )
                )
        if not sources:
            number = self._others.sources(stored, self._here.rank)[0][0]
            form = self._form(number, recorded[number].delta.events[event], optimizer, name)
            shape = form["shape"] if form else _shape(recorded[number], entry)
            if shape is None:
                return None
            sources = [(_Source(number, entry, form), Piece.whole(shape))]
        sources.sort(key=lambda source: source[0].rank != self._here.rank)
        return self._target(sources, stored, parameter, _dtype(recorded[sources[0][0].rank], sources[0][0]))

    def _form(self, number: int, event: StoredEvent, optimizer: int, name: str) -> Mapping[str, Any] | None:
        """Of a share: that of the share."""
        index = self._index[number][optimizer].get(name)
        form = event.forms.get(str(index))
        return form["of"] if form is not None and form["form"] == "share" else form

    def _buffer(self, recorded: Mapping[int, _Recorded], name: str, value: Tensor) -> _Target | None:
        """None: it did not change."""
        entry, stored = f"buffer/{name}", f"model/{name}"
        sources = [
            (_Source(number, entry), Piece(piece.shape, piece.box))
            for number, piece in self._others.sources(stored, self._here.rank)
            if number in recorded and entry in recorded[number].stored
        ]
        return self._target(sources, stored, value, value.dtype) if sources else None

    def _target(
        self, sources: Sequence[tuple[_Source, Piece]], stored: str, value: Tensor, dtype: torch.dtype
    ) -> _Target:
        local, box = local_shard(value), self._here.box(stored, value)
        if sources[0][1].shape != tuple(value.shape):
            raise CannotReplay(f"{sources[0][0].name} is {sources[0][1].shape}, here it is {tuple(value.shape)}")
        takes = cover(box, sources)
        if any((take.source.form or {}).get("form") == "coo" for take in takes):
            raise CannotReplay(
                f"the gradient of {stored.removeprefix('model/')} is a torch.sparse one, which is not cut"
            )
        return _Target(torch.empty_like(local, dtype=dtype), box, takes)


def _without_names(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Hyper-parameters alone: which parameters a group has differs from rank to rank."""
    return [{key: value for key, value in group.items() if key != "param_names"} for group in groups]


def _shape(recorded: _Recorded, entry: str) -> tuple[int, ...] | None:
    return recorded.stored[entry].shape if entry in recorded.stored else None


def _dtype(recorded: _Recorded, source: _Source) -> torch.dtype:
    if source.form is not None and source.form["form"] == "zero":
        return dtype_of(source.form["dtype"])
    name = source.name if source.name in recorded.stored else f"{source.name}/values"
    return dtype_of(recorded.stored[name].dtype)


def _fill(targets: Sequence[_Target], recorded: Mapping[int, _Recorded]) -> None:
    """Read what they need of each old rank at once."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    for target in targets:
        for take in target.takes:
            ranges.setdefault(take.source.rank, []).extend(_ranges(take, recorded[take.source.rank]))
    slots = {number: recorded[number].borrow(wanted).tensors() for number, wanted in sorted(ranges.items())}
    decoded: dict[_Source, Tensor] = {}

    def flat(source: _Source) -> Tensor:
        tensors = slots[source.rank]
        if source.form is None:
            return tensors[source.name].view(-1)
        key = _Source(source.rank, source.name)
        if key not in decoded:
            whole = decode(lambda suffix: tensors.get(source.name + suffix), source.form, torch.device("cpu"))
            assert whole is not None
            decoded[key] = whole.reshape(-1)
        return decoded[key]

    for target in targets:
        for take in target.takes:
            part = take.part
            there = flat(take.source)[part.at : part.at + part.box.count].view(part.box.shape)
            target.tensor[take.box.within(target.box)].copy_(there[take.box.within(part.box)])


def _ranges(take: Take[_Source], recorded: _Recorded) -> list[tuple[int, int]]:
    """Of a form other than the plain one all that is stored."""
    source = take.source
    if source.form is None:
        stored = recorded.stored[source.name]
        size = dtype_of(stored.dtype).itemsize
        return [(stored.begin + first * size, stored.begin + last * size) for first, last in take.part.ranges(take.box)]
    names = (source.name + suffix for suffix in ("", "/index", "/values"))
    found = (recorded.stored[name] for name in names if name in recorded.stored)
    return [(each.begin, each.end) for each in found]
