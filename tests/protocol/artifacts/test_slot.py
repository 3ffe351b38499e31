"""A slot is a plain safetensors file, torn until its last write, and believed only when checked."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.artifacts.contents import Incomplete, contents
from tiercheck.protocol.artifacts.pieces import Box, Piece, pieces_table, read_pieces
from tiercheck.protocol.artifacts.sizing import (
    LONGEST_CADENCE,
    OWN_SLOTS,
    OWN_SLOTS_MIN,
    SHORTEST_CADENCE,
    SPARE_DELTAS,
    Room,
    auto_cadence,
    cost,
    plan,
    roomy,
)
from tiercheck.protocol.artifacts.slot import (
    ITEM_BYTES,
    PAGE,
    TORN,
    NotASlot,
    SlotLayout,
    beginning,
    read_header,
    read_tensors,
)
from tiercheck.protocol.plain_json import MOST_VALUES, Malformed
from tiercheck.protocol.version import Version
from tiercheck.trainer.tensors.tensor_parts import _NAMES

ENTRIES = st.lists(
    st.tuples(
        st.text(min_size=1, max_size=20).filter(lambda name: not name.startswith("__")), st.integers(0, 5000)
    ),
    max_size=8,
    unique_by=lambda entry: entry[0],
)


def written(layout: SlotLayout, metadata: dict[str, str] | None = None) -> bytearray:
    image = bytearray(layout.size)
    image[8 : layout.data_begin] = layout.header(3, Version(70, 2), 4, metadata or {})
    for number, tensor in enumerate(layout.tensors):
        image[tensor.begin : tensor.end] = bytes([number + 1]) * (tensor.end - tensor.begin)
    image[:8] = layout.state_word
    return image


@given(ENTRIES)
def test_header_is_read_back(entries: list[tuple[str, int]]) -> None:
    layout = SlotLayout.plan([(name, "U8", (size,), size) for name, size in entries])
    header = read_header(bytes(written(layout, {"note": "ü"})))
    assert (header.rank, header.version, header.world_size) == (3, Version(70, 2), 4)
    assert header.metadata == {"note": "ü"}
    assert header.tensors == layout.tensors
    assert header.size == layout.size


@given(ENTRIES)
def test_tensors_are_aligned_and_do_not_overlap(entries: list[tuple[str, int]]) -> None:
    layout = SlotLayout.plan([(name, "U8", (size,), size) for name, size in entries])
    assert layout.data_begin % PAGE == 0
    end = layout.data_begin
    for tensor in layout.tensors:
        assert tensor.begin % 64 == 0
        assert end <= tensor.begin <= tensor.end <= layout.size
        end = tensor.end


def test_size_does_not_depend_on_the_version() -> None:
    layout = SlotLayout.plan([("weight", "F32", (10,), 40)])
    early = layout.header(0, Version(0, 0), 1, {})
    late = layout.header(10**6, Version(10**18, 10**9), 10**6, {"digest": "x" * 500})
    assert len(early) == len(late) == layout.data_begin - 8


def test_safetensors_reads_a_slot(tmp_path: Path) -> None:
    layout = SlotLayout.plan([("a", "F32", (3,), 12), ("empty", "F32", (0,), 0), ("b", "U8", (5, 2), 10)])
    path = tmp_path / "slot.safetensors"
    path.write_bytes(written(layout))
    with safetensors.safe_open(path, "numpy") as slot:
        assert {"a", "b", "empty"} <= set(slot.keys())
        assert slot.get_tensor("b").shape == (5, 2)
        assert numpy.array_equal(slot.get_tensor("b"), numpy.full((5, 2), 3, numpy.uint8))
        assert slot.metadata()["step"] == "70"


def test_torn_slot_is_no_checkpoint_for_anybody(tmp_path: Path) -> None:
    image = written(SlotLayout.plan([("a", "F32", (3,), 12)]))
    image[:8] = TORN
    with pytest.raises(NotASlot, match="torn"):
        read_header(bytes(image))
    path = tmp_path / "slot.safetensors"
    path.write_bytes(image)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "numpy").__enter__()


def test_truncated_slot_and_noise_are_refused() -> None:
    image = bytes(written(SlotLayout.plan([("a", "F32", (3,), 12)])))
    with pytest.raises(NotASlot, match="truncated"):
        read_header(image[:-1])
    with pytest.raises(NotASlot, match="does not fit"):
        read_header(image[:100])
    for noise in (b"", b"short", b"\1" + b"\0" * 7 + b"{", b"\2" + b"\0" * 7 + b"{}", b"\xff" * 64):
        with pytest.raises(NotASlot):
            read_header(noise)


def test_repeated_name_and_too_long_metadata_are_refused() -> None:
    with pytest.raises(ValueError, match="unique"):
        SlotLayout.plan([("a", "U8", (1,), 1), ("a", "U8", (1,), 1)])
    with pytest.raises(ValueError, match="too long"):
        SlotLayout.plan([("a", "U8", (1,), 1)]).header(0, Version(1, 1), 1, {"note": "x" * 9000})


# What somebody else wrote


ABOUT = {"rank": "0", "step": "5", "attempt": "1", "world_size": "1", "kind": "snapshot"}
INF = float("inf")


def tensor(begin: Any = 0, end: Any = 64, shape: Any = (16,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def image(table: object, size: int = 4096) -> bytes:
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def test_a_true_one_is_read() -> None:
    header = read_header(image({"__metadata__": ABOUT, "w": tensor(), "v": tensor(64, 68, [])}))
    assert [each.name for each in header.tensors] == ["w", "v"]


@pytest.mark.parametrize(
    "table",
    [
        [], None, 5, {}, {"__metadata__": None}, {"__metadata__": [["rank", "0"]]},
        {"__metadata__": {**ABOUT, "rank": 0}}, {"__metadata__": {**ABOUT, "rank": "-1"}},
        {"__metadata__": {**ABOUT, "step": "٣"}},
        {"__metadata__": {**ABOUT, "step": "1_0"}}, {"__metadata__": {**ABOUT, "attempt": "9" * 20}},
        {"__metadata__": {**ABOUT, "attempt": "9" * 4500}},
        {"__metadata__": {**ABOUT, "kind": "else"}},
        *(
            {"__metadata__": ABOUT, "w": entry}
            for entry in (
                None, [], "x", {}, {"dtype": "F32", "shape": [16]}, {**tensor(), "data_offsets": []},
                {**tensor(), "data_offsets": [0]},
                {**tensor(), "data_offsets": [0, 64, 64]}, {**tensor(), "data_offsets": "ab"}, tensor(0, INF),
                tensor(0, 64.0), tensor(False, 64),
                tensor(-64, 0), tensor(64, 0), tensor(0, 60), tensor(0, 10**30), tensor(shape=16),
                tensor(shape=[INF]), tensor(shape=[-16]),
                tensor(shape=[-4, -4]), tensor(shape=["16"]), tensor(shape=[True] * 16),
                tensor(shape=[1] * 65 + [16]), tensor(shape=None),
                tensor(dtype="X9"), tensor(dtype=None), tensor(dtype=["F32"]), tensor(64, 128),
            )
        ),
        {"__metadata__": ABOUT, "w": tensor(), "v": tensor()},
        {"__metadata__": ABOUT, "w": tensor(), "v": tensor(32, 96)},
        {"__metadata__": ABOUT, "w": tensor(), "v": tensor(128, 192)},
        {"__metadata__": ABOUT, "w": tensor(), "__pad64": tensor(60, 64, [4], "U8")},
        {"__metadata__": ABOUT, "w": tensor(0, 8192, [8192], "U8")},
    ],
    ids=lambda table: json.dumps(table)[-50:],
)  # fmt: skip
def test_nonsense_in_a_header_is_no_slot(table: object) -> None:
    view = image(table)
    with pytest.raises(NotASlot):
        read_header(view)
    if isinstance(table, dict) and "w" in table:
        with pytest.raises(NotASlot):
            read_tensors(Reader(view), len(view))


class Reader:
    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def __call__(self, size: int) -> bytes:
        self.at += size
        return self.content[self.at - size : self.at]


@pytest.mark.parametrize("length", [0, 49 * 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_header_is_measured_before_it_is_read(length: int) -> None:
    view = struct.pack("<Q", length) + b"{}"
    for read in (read_header, beginning):
        with pytest.raises(NotASlot):
            read(view, 2**62)
    reader = Reader(view)
    with pytest.raises(NotASlot):
        read_tensors(reader, 1000)
    assert reader.at == 8, "no more is read"


@pytest.mark.parametrize(
    "view", [b"", b"1234567", b"\x02\0\0\0\0\0\0\0{", struct.pack("<Q", 200_000) + b"[" * 200_000]
)
def test_no_beginning_is_longer_than_its_artifact(view: bytes) -> None:
    with pytest.raises(NotASlot):
        beginning(view, 9)


def test_what_is_used_of_an_entry_lies_inside_it() -> None:
    for used in ("65", "-1", "x", "9" * 30, ""):
        header = read_header(
            image({"__metadata__": {**ABOUT, "used": used}, "user": tensor(0, 64, [64], "U8")})
        )
        with pytest.raises(ValueError, match=r"count|bytes"):
            header.blob("user", "used")
    header = read_header(image({"__metadata__": {**ABOUT, "used": "10"}, "user": tensor(0, 64, [64], "U8")}))
    begin, end = header.blob("user", "used")
    assert end - begin == 10
    with pytest.raises(KeyError):
        header.blob("other", "used")


PIECE = {"shape": [8, 4], "offset": [4, 0], "extent": [4, 4], "span": [3, 15]}


@pytest.mark.parametrize(
    "table",
    [
        None, [], "x", {"w": None}, {"w": []}, {"w": {}},
        *(
            {"w": {**PIECE, key: value}}
            for key in ("shape", "offset", "extent", "span")
            for value in (None, 5, [], [0], [1, 2, 3], [INF, 1], [1.0, 4], ["1", "4"], [True, 4], [-1, 4],
                [0, 10**30], "ab", {"0": 1}, [1] * 65)
        ),
        {"w": {**PIECE, "offset": [5, 0]}}, {"w": {**PIECE, "offset": [0, 2**62]}},
        {"w": {**PIECE, "span": [15, 3]}}, {"w": {**PIECE, "span": [0, 17]}},
    ],
    ids=lambda table: json.dumps(table)[-60:],
)  # fmt: skip
def test_nonsense_in_a_table_of_pieces_is_refused(table: object) -> None:
    with pytest.raises(Malformed):
        read_pieces(json.dumps(table).encode())


def test_pieces_that_hold_nothing_may_lie_behind_the_last_index() -> None:
    """As shards of dimensions that do not divide do."""
    pieces = {"w": Piece((5,), Box((6,), (0,))), "v": Piece((5,), Box((0,), (5,)), (5, 5))}
    assert read_pieces(pieces_table(pieces)) == pieces


@pytest.mark.parametrize(
    "piece", [Piece((8,), Box((0,), (8,))), Piece((32,), Box((0,), (32,))), Piece((16,), Box((0,), (0,)))]
)
def test_a_piece_of_another_size_than_its_tensor_is_no_state(piece: Piece) -> None:
    header = read_header(image({"__metadata__": ABOUT, "w": tensor()}))
    with pytest.raises(Incomplete):
        contents([(header, {"w": piece})])


def test_every_dtype_that_is_written_is_read() -> None:
    assert {name: dtype.itemsize for dtype, name in _NAMES.items()}.items() <= ITEM_BYTES.items()


def test_more_tensors_than_could_be_read_back_are_never_laid_out() -> None:
    entry = ("", "U8", (0,) * 64, 0)
    with pytest.raises(ValueError, match="more than a slot can name"):
        SlotLayout.plan([(str(number), *entry[1:]) for number in range(MOST_VALUES // 200)])
    with pytest.raises(ValueError, match="longer than a slot's header"):
        SlotLayout.plan([(f"{number}{'x' * 2_000_000}", "U8", (0,), 0) for number in range(26)])


def test_as_many_as_large_models_have_are_read_back() -> None:
    layout = SlotLayout.plan(
        [(f"model.layers.{number}.mlp.experts.gate_proj.weight", "F32", (1,), 4) for number in range(12_000)]
    )
    header = read_header(layout.state_word + layout.header(0, Version(1, 1), 1, {}), layout.size)
    assert header.tensors == layout.tensors


# What is refused for memory could not have worked, and what is granted fits.

rooms = st.builds(Room, st.integers(1, 10**9), st.integers(0, 10**8), st.integers(1, 6))


@given(
    st.integers(0, 2 * 10**10),
    st.lists(rooms, min_size=1, max_size=4),
    st.lists(rooms, max_size=6),
    st.integers(2, 50),
)
def test_slots_that_are_granted_fit_and_are_as_many_as_fit(
    limit: int, own: list[Room], kept: list[Room], cadence: int
) -> None:
    found = plan(limit, own, kept, cadence)
    snapshots = sum(cost(room.snapshot) for room in own)
    hosted = 2 * sum(cost(room.snapshot, room.parts) for room in kept)
    assert found.fits == (OWN_SLOTS_MIN * snapshots + hosted <= limit)
    assert (found.own_slots == OWN_SLOTS) == (OWN_SLOTS * snapshots + hosted <= limit)
    if found.fits:
        row = sum(cost(room.delta) for room in own if room.delta)
        row += sum(cost(room.delta, room.parts) for room in kept if room.delta)
        used = found.own_slots * snapshots + hosted
        assert used + found.delta_slots * row <= limit
        assert (
            found.delta_slots == 0
            or cadence + SPARE_DELTAS <= found.delta_slots <= 2 * cadence + SPARE_DELTAS
        )
        if 0 < found.delta_slots < 2 * cadence + SPARE_DELTAS:
            assert used + (found.delta_slots + 1) * row > limit
    assert found.needed == found.local + found.peer
    assert found.minimum <= found.delta_minimum
    assert plan(found.needed, own, kept, cadence).own_slots == OWN_SLOTS


@given(st.integers(1, 10**12), st.integers(1, 10**12))
def test_deltas_between_two_snapshots_cost_about_a_snapshot(snapshot: int, delta: int) -> None:
    every = auto_cadence(snapshot, delta)
    assert SHORTEST_CADENCE <= every <= LONGEST_CADENCE
    assert every == SHORTEST_CADENCE or (every - 1) * delta < snapshot, (
        "what lies between two snapshots costs less than one"
    )
    assert every == LONGEST_CADENCE or (every + 1) * delta > snapshot


def test_without_deltas_no_cadence_follows_from_the_sizes() -> None:
    assert auto_cadence(10**9, 0) == 0
    assert auto_cadence(0, 10**9) == 0


@given(st.integers(64 * 1024 + 1, 10**12))
def test_slot_for_artifacts_that_differ_in_size_is_at_most_an_eighth_too_large(size: int) -> None:
    assert size <= roomy(size) <= size * 9 // 8 + 1
