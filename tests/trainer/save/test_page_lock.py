"""Whatever page-locking does, training goes on, and nothing stays registered by halves.

With a runtime that stands in for CUDA's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiercheck.trainer.state.slot_file import SlotWriter
from tiercheck.trainer.tensors import accelerator

MIB = 2**20


class Runtime:
    def __init__(self, room: int) -> None:
        self.room, self.registered, self.calls = room, dict[int, int](), 0

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls += 1
        if sum(self.registered.values()) + size > self.room:
            return 2  # cudaErrorMemoryAllocation
        self.registered[begin] = size
        return 0

    def cudaHostUnregister(self, begin: int) -> int:  # noqa: N802
        del self.registered[begin]
        return 0


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    told: list[bool] = []
    monkeypatch.setattr(accelerator, "_clear_error", lambda: told.append(True))
    return told


def slot(folder: Path, size: int) -> SlotWriter:
    path = folder / "slot"
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(size)
    return SlotWriter(str(path))


@pytest.fixture
def memory_volume() -> Iterator[Path]:
    """Where slots lie. Other file systems are mapped at such addresses anyway."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("there is no memory volume here")
    with tempfile.TemporaryDirectory(dir=shared, prefix="tiercheck-test-") as folder:
        yield Path(folder)


def test_slots_are_mapped_where_the_huge_pages_of_their_files_fit(
    memory_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere each of them is mapped as hundreds of small pages: to touch a slot, or to register it, takes
    that much longer."""
    monkeypatch.setattr("tiercheck.protocol.artifacts.slot.huge_page", lambda: 2 * MIB)
    sizes = [size * MIB + 4096 for size in (2, 5, 9, 3)]
    writers = []
    for number, size in enumerate(sizes):
        (memory_volume / str(number)).mkdir()
        writers.append(slot(memory_volume / str(number), size))
    addresses = [torch.frombuffer(writer.buffer, dtype=torch.uint8).data_ptr() for writer in writers]
    assert [address % (2 * MIB) for address in addresses] == [0] * 4
    assert [len(writer.buffer) for writer in writers] == sizes


def test_slot_is_registered_in_pieces_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleared: list[bool]
) -> None:
    runtime = Runtime(room=10**12)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    writer = slot(tmp_path, 600 * MIB)
    writer.pin()
    writer.pin()
    assert writer.pinned
    assert sorted(runtime.registered.values()) == [88 * MIB, 256 * MIB, 256 * MIB]
    writer.close()
    assert runtime.registered == {}
    assert not writer.pinned
    assert not cleared


def test_registration_that_fails_is_told_undone_and_leaves_no_error_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleared: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(room=300 * MIB)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    writer = slot(tmp_path, 600 * MIB)
    writer.pin()
    assert not writer.pinned
    assert runtime.registered == {}
    assert cleared
    assert "failed with error 2 after 256 of 600 MiB" in caplog.text
    calls = runtime.calls
    writer.pin()
    assert runtime.calls == calls, "it is not tried at every artifact"
