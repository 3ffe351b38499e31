"""Restores a state on other ranks or another mesh: each rank reads the parts it now holds.

Each rank follows its own sharding: it reads the beginnings of all slots (header and table of pieces), chooses
the slots and bytes that it needs, fetches them, and cuts its shards out of them. No byte that no shard needs
is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.protocol.artifacts.contents import FORMAT, IMPORT, unequal_names
from tiercheck.protocol.artifacts.pieces import Box, NotCovered, Piece, Take, cover
from tiercheck.protocol.artifacts.slot import PROOF
from tiercheck.trainer.backends.backend import Ranges, gather_from_all
from tiercheck.trainer.deltas.gradients import set_hyper_parameters
from tiercheck.trainer.replicas.replicas import Shares
from tiercheck.trainer.replicas.trained_state import TrainedState
from tiercheck.trainer.restore.grown import add_groups, add_tensors, describe_difference, group_as_saved
from tiercheck.trainer.restore.load import DifferentState, refuse_lost, sharded_like
from tiercheck.trainer.state import optimizer_state
from tiercheck.trainer.state.capture import (
    is_extra,
    model_items,
    modules_beside,
    named_parameters_of,
    names_of,
    own_entries,
)
from tiercheck.trainer.state.frozen import evaluate_as_saved, freeze_as_saved
from tiercheck.trainer.state.slot_file import USER_BLOB, SlotReader
from tiercheck.trainer.tensors.buffers import take_shape
from tiercheck.trainer.tensors.samples import Sampler
from tiercheck.trainer.tensors.tensor_parts import PLAIN, held_by, local_shard
from tiercheck.trainer.training import keys_given

SlotFetcher = Callable[[int, Ranges], str]
"""A function of a rank and byte ranges of its slot: the path of a file with them at their places.

The header and the table of pieces are always there. Raises RestoreError.
"""


_NEAR = 64 * 1024
"""Bytes. A gap of at most this size between two ranges is read too, which is cheaper."""
_BUFFER = 64 * 1024 * 1024
"""Bytes. The most that is read at once of a part with gaps."""
_MOST = 4096
"""The most ranges that are requested at once."""


@dataclass(frozen=True)
class _Wanted:
    name: str
    local: Tensor
    piece: Piece | None
    """The part of the whole; without a span: all of the shard. None: a private tensor."""
    trained: bool = False
    """True for a parameter, or what an optimizer keeps of one."""


class SavedRanks:
    """The slots of the `world_size` ranks that saved a version."""

    def __init__(self, world_size: int, borrow: SlotFetcher) -> None:
        self.world_size, self._borrow = world_size, borrow
        self._blobs: dict[int, dict[str, Any]] = {}

    @cached_property
    def beginnings(self) -> list[SlotReader]:
        return [SlotReader.open(self._borrow(rank, ())) for rank in range(self.world_size)]

    @cached_property
    def holders(self) -> dict[str, list[tuple[int, Piece]]]:
        """Returns the ranks that hold each tensor, and what of it."""
        found: dict[str, list[tuple[int, Piece]]] = {}
        for rank, slot in enumerate(self.beginnings):
            for name, piece in slot.pieces.items():
                found.setdefault(name, []).append((rank, piece))
        return found

    @cached_property
    def private(self) -> dict[str, list[int]]:
        """Returns, for each tensor that is private to a rank, the ranks that have one of that name."""
        found: dict[str, list[int]] = {}
        for rank, slot in enumerate(self.beginnings):
            pieces = slot.pieces
            for name in slot.tensors():
                if name not in pieces:
                    found.setdefault(name, []).append(rank)
        return found

    @cached_property
    def unequal(self) -> set[str]:
        """Returns the names of tensors that ranks hold differently (`unequal_names`)."""
        proven = [rank for rank, slot in enumerate(self.beginnings) if slot.header.tensor(PROOF) is not None]
        opened = (self.open(rank, [self.place(rank, PROOF)]) for rank in proven)
        return {*unequal_names((slot.pieces, slot.proof()) for slot in opened)}

    def blob(self, rank: int) -> dict[str, Any]:
        if rank not in self._blobs:
            self._blobs[rank] = self.open(rank, [self.place(rank, USER_BLOB)]).content
        return self._blobs[rank]

    def facts(self, rank: int) -> dict[str, Any]:
        facts: dict[str, Any] = self.blob(rank)["facts"]
        return facts

    def open(self, rank: int, ranges: Ranges) -> SlotReader:
        return SlotReader.open(self._borrow(rank, ranges))

    def sources(self, name: str, rank: int) -> list[tuple[int, Piece]]:
        """Returns the ranks that hold a tensor, and what of it: the one with number `rank` first."""
        held = self.holders.get(name)
        if held is None:  # without a piece it is private: each rank has its own
            ranks = self.private.get(name, [])
            numbers = [number for number in (rank, rank % self.world_size) if number in ranks] or ranks
            held = [(number, Piece.whole(self._stored(number, name).shape)) for number in numbers[:1]]
        return sorted(held, key=lambda source: source[0] != rank)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the whole tensor. Raises DifferentState if no rank has one of that name."""
        sources = self.sources(name, 0)
        if not sources:
            raise DifferentState(f"{name} is missing in the checkpoint")
        return sources[0][1].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._stored(self.sources(name, 0)[0][0], name).dtype

    def _stored(self, rank: int, name: str) -> Tensor:
        return self.beginnings[rank].tensors()[name]

    def place(self, rank: int, name: str) -> tuple[int, int]:
        """Returns where a tensor's bytes are in the slot of `rank`."""
        return next((t.begin, t.end) for t in self.beginnings[rank].header.tensors if t.name == name)


@torch.no_grad()
def load_resharded(here: TrainedState, others: SavedRanks) -> tuple[dict[str, Any], dict[str, int]]:
    """Fills modules and optimizers. Raises DifferentState, RestoreError, NotCapturable.

    Returns the user blob that belongs to this rank, and of each tensor a checksum of what was read
    (`Sample.sums`). A rank that did not exist takes the blob of rank `rank % world_size`, without its random
    numbers: two ranks with the same ones would see the same data.
    """
    model, shares, rank = here.model, here.shares, here.rank
    blob_rank = rank % others.world_size
    blobs = {blob_rank: others.blob(blob_rank)}
    facts = blobs[blob_rank]["facts"]
    imported = others.beginnings[blob_rank].header.metadata.get(FORMAT) == IMPORT
    for slot in others.beginnings:
        add_tensors(model, here.beside, slot.tensors(), facts.get("grown", ()))
    if not imported:
        _refuse_left_over(model, others)
    targets = list(_model(here, others, facts["model_extra"], model))
    held = held_by(each.local for each in targets)
    takes = _plan(targets, others, rank)
    for module, prefix, extra in modules_beside(here.beside, facts):
        takes += _plan(list(_model(here, others, extra, module, prefix)), others, rank)
    for index, optimizer in enumerate(here.optimizers):
        if imported and index >= len(facts["optimizers"]):
            continue  # weights only: the optimizer begins anew
        # Any rank that had a parameter describes what the optimizer keeps of it.
        for source in _having(index, optimizer, model, others) - blobs.keys():
            blobs[source] = others.blob(source)
        more = _optimizer(
            index, optimizer, model, shares, others, blobs=blobs, blob_rank=blob_rank, held=held
        )
        takes += _plan(more, others, rank)
    _refuse_rank_own((each for each, _ in takes), others, here.world_size)
    _read(takes, others)
    filled = {each.name: each.local for each, _ in takes}
    proof = dict(zip(filled, Sampler().take([*filled.values()]).sums, strict=True))
    content = blobs[blob_rank]
    freeze_as_saved(model, lambda name: _was_frozen(name, others, rank))
    if facts.get("parameters") == names_of(model):
        evaluate_as_saved(model, facts)
    return {**content, "random": content["random"] if rank < others.world_size else None}, proof


def _refuse_rank_own(wanted: Iterable[_Wanted], others: SavedRanks, world_size: int) -> None:
    """Raises DifferentState for a trained tensor that differs between ranks, if their number changed.

    Another number of ranks would have some of them twice, or not at all.
    """
    if world_size == others.world_size:
        return
    for each in wanted:
        if each.trained and each.name in others.unequal:
            raise DifferentState(
                f"{each.name} is each rank's own: the {others.world_size} ranks that saved it hold different "
                "values under this name, so that another number of ranks would lose some. Start the script "
                f"on {others.world_size} ranks, or name such parameters by their number in the whole model"
            )


def _refuse_left_over(model: nn.Module, others: SavedRanks) -> None:
    """Raises DifferentState if no rank has a place for a saved tensor of the model. A collective call."""
    here = {f"model/{key}" for key, _, _ in model_items(model)}
    saved = {name for name in (*others.holders, *others.private) if name.startswith("model/")}
    if lost := set.intersection(*gather_from_all(saved - here)):
        raise DifferentState(describe_difference(lost, here - saved))


def _was_frozen(name: str, others: SavedRanks, rank: int) -> bool | None:
    """Returns whether a parameter, perhaps of another pipeline stage, was frozen; None: not known."""
    sources = others.sources(f"model/{name}", rank)
    frozen = others.facts(sources[0][0]).get("frozen") if sources else None
    return None if frozen is None else name in frozen


def _model(
    here: TrainedState, others: SavedRanks, extra: Mapping[str, Any], model: nn.Module, prefix: str = "model/"
) -> Iterator[_Wanted]:
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for key, value, trained in model_items(model):
        if isinstance(value, Tensor) and not is_extra(key):
            name, local = f"{prefix}{key}", local_shard(value)
            stored = others.sources(name, here.rank)
            if key in buffers and type(value) in PLAIN and stored and stored[0][1].shape != local.shape:
                local = take_shape(buffers[key], stored[0][1].shape)
            piece = here.shares.shard(name, local if type(value) in PLAIN else value)
            yield _Wanted(name, local, piece, trained)
        elif key not in extra:
            raise DifferentState(describe_difference((), [f"{prefix}{key}"]))


def _having(index: int, optimizer: Optimizer, model: nn.Module, others: SavedRanks) -> set[int]:
    """Returns, for each parameter, one rank with an optimizer that had it."""
    found = set()
    for name, _ in named_parameters_of(optimizer, model):
        prefix = f"optimizer{index}/{name}/"
        sources = [
            holders[0][0] for stored, holders in others.holders.items() if stored.startswith(prefix)
        ] + [ranks[0] for stored, ranks in others.private.items() if stored.startswith(prefix)]
        found |= {*sources[:1]}
    return found


def _optimizer(
    index: int,
    optimizer: Optimizer,
    model: nn.Module,
    shares: Shares,
    others: SavedRanks,
    *,
    blobs: Mapping[int, dict[str, Any]],
    blob_rank: int,
    held: Callable[[Tensor], bool],
) -> list[_Wanted]:
    """Rebuilds the optimizer's state, empty, and returns what is to be filled."""
    saved = [blob["facts"]["optimizers"][index] for blob in blobs.values()]
    facts = blobs[blob_rank]["facts"]
    own = facts["optimizers"][index]
    if own["class"] and own["class"] != type(optimizer).__name__:  # an import has none
        raise DifferentState(
            f"optimizer {index} is {own['class']} in the checkpoint, here {type(optimizer).__name__}"
        )
    add_groups(shares.outer[index], model, own)
    if len(own["groups"]) != len(optimizer.param_groups):
        raise DifferentState(
            f"optimizer {index} has another number of parameter groups than in the checkpoint"
        )
    group_as_saved(optimizer, model, own)
    set_hyper_parameters(optimizer, own["groups"], keys_given(facts, index))
    optimizer_state.put_attributes(optimizer, own.get("attributes", {}))
    optimizer.state.clear()
    wanted: list[_Wanted] = []
    same = facts.get("parameters") == names_of(model)
    for name, parameter in named_parameters_of(optimizer, model):
        prefix = f"optimizer{index}/{name}/"
        mine = own_entries(prefix, name, parameter)
        if mine and not same:  # `#0` is another parameter on each stage of a pipeline
            raise DifferentState(
                f"optimizer {index} has parameters of its own ({name}), of which parameters is not known here"
            )
        stored_ones = [entry for entry in mine if others.sources(entry.name, blob_rank)]
        refuse_lost(mine, held, [entry.name for entry in stored_ones])
        wanted += (
            _Wanted(entry.name, entry.tensor, shares.shard(entry.name, parameter), True)
            for entry in stored_ones
        )
        states: Mapping[str, Any] = next(
            (entry["states"][name] for entry in saved if entry["states"].get(name)), {}
        )
        state: dict[str, Any] = {}
        for key, described in states.items():
            if "value" in described:
                state[key] = described["value"]
                continue
            stored = f"{prefix}{key}"
            if not optimizer_state.is_plain(described):
                raise DifferentState(
                    f"{stored} is made of several tensors and cannot come back on another mesh"
                )
            local, state[key] = _room(others.shape(stored), others.dtype(stored), described, parameter)
            wanted.append(_Wanted(stored, local, shares.shard(stored, state[key]), True))
        if state:
            optimizer.state[parameter] = state

    optimizer_state.tie(optimizer, named_parameters_of(optimizer, model), own.get("ties", ()), model)

    def private(stored: str, described: Mapping[str, Any]) -> Tensor:
        local = torch.empty(others.shape(stored), dtype=others.dtype(stored), device=described["device"])
        wanted.append(_Wanted(stored, local, None))
        return local

    optimizer_state.put_back_others(optimizer, own.get("others", ()), f"optimizer{index}/", private)
    return wanted


def _room(
    shape: tuple[int, ...], dtype: torch.dtype, described: Mapping[str, Any], parameter: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns what is to be filled, and the optimizer's tensor that it is a shard of (or itself)."""
    shard = local_shard(parameter)
    device = shard.device if described["device"] != "cpu" else torch.device("cpu")
    if shape == tuple(parameter.shape) and (shape or not hasattr(parameter, "placements")):
        local = torch.empty_like(shard, dtype=dtype, device=device)
        return local, sharded_like(local, parameter, parameter.shape, parameter.stride())
    if "sharded" in described:
        raise DifferentState(
            f"optimizer state of shape {shape} was sharded in its own way and cannot come back on another "
            "mesh"
        )
    local = torch.empty(shape, dtype=dtype, device=device)
    return local, local


_Plan = list[tuple[_Wanted, Take[int]]]


def _plan(wanted: Sequence[_Wanted], others: SavedRanks, rank: int) -> _Plan:
    """Returns the rank of each part: the one with this number if it has it, as it is often the nearest."""
    takes: _Plan = []
    for each in wanted:
        sources = others.sources(each.name, rank)
        if not sources:
            raise DifferentState(describe_difference((), [each.name]))
        piece = each.piece or Piece.whole(each.local.shape)
        saved, dtype = sources[0][1].shape, others.dtype(each.name)
        if (saved, dtype) != (piece.shape, each.local.dtype):
            raise DifferentState(
                f"{each.name} is {saved} {dtype} in the checkpoint, here it is {piece.shape} "
                f"{each.local.dtype}"
            )
        try:
            takes += ((each, take) for take in cover(piece.box, sources))
        except NotCovered as error:
            raise DifferentState(f"{each.name}: {error}") from error
    return takes


def _read(takes: _Plan, others: SavedRanks) -> None:
    by_source: dict[int, _Plan] = {}
    for each, take in takes:
        by_source.setdefault(take.source, []).append((each, take))
    for source, parts in sorted(by_source.items()):
        wanted = [
            bytes_of
            for each, take in parts
            for bytes_of in _ranges(take, *others.place(source, each.name), each.local)
        ]
        stored = others.open(source, merged_ranges(wanted)).tensors()
        solid: list[tuple[str, int, Tensor]] = []
        for each, take in parts:
            box = each.piece.box if each.piece is not None else Box.whole(each.local.shape)
            target = each.local[take.box.within(box)]
            ranges = take.part.ranges(take.box)
            first, last = ranges[0][0], ranges[-1][1]
            if target.is_contiguous() and last - first == target.numel():
                solid.append((each.name, first, target))
                continue
            # There are gaps between its rows, in the target or in the slot.
            for rows in _slabs(take.box, take.part.box, target.element_size()):
                ranges = take.part.ranges(rows)
                around = torch.empty(ranges[-1][1] - ranges[0][0], dtype=target.dtype, device="cpu")
                stored.read_parts([(each.name, ranges[0][0], around)])
                each.local[rows.within(box)].copy_(around.as_strided(rows.shape, take.part.box.strides))
        stored.read_parts(solid)


def _slabs(box: Box, around: Box, size: int) -> Iterator[Box]:
    """Yields `box` as slabs of rows that fit the buffer within `around`; `size`: bytes of an element."""
    step = max(1, _BUFFER // (around.strides[0] * size))
    for row in range(0, box.shape[0], step):
        count = min(step, box.shape[0] - row)
        yield Box((box.offset[0] + row, *box.offset[1:]), (count, *box.shape[1:]))


def _ranges(take: Take[int], begin: int, end: int, like: Tensor) -> Iterator[tuple[int, int]]:
    size = like.element_size()
    for first, last in take.part.ranges(take.box):
        yield begin + first * size, min(begin + last * size, end)


def merged_ranges(ranges: Sequence[tuple[int, int]], near: int = _NEAR) -> list[tuple[int, int]]:
    """Sorts ranges and merges near ones. Returns at most `_MOST`, because a message has to name them."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1] + near:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged if len(merged) <= _MOST else merged_ranges(merged, 4 * near)
