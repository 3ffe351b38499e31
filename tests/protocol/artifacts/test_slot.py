"""A slot is a plain safetensors file, torn until its last write."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from tiercheck.protocol.artifacts.slot import PAGE, TORN, NotASlot, SlotLayout, read_header
from tiercheck.protocol.version import Version

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
