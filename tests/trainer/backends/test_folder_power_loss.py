"""After a power cut, a folder has an older version until the newer one is there for good."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash_disk import CrashDisk
from tiercheck.trainer.backends.folder_backend import FolderBackend


def test_whenever_the_power_goes_one_whole_version_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = CrashDisk(tmp_path, monkeypatch)
    folder = tmp_path / "run"
    backend = FolderBackend(folder, 0, 1, keep=1)
    saved: list[Path] = []
    complete: list[int] = []

    def look() -> None:
        whole = [each for each in saved if disk.surely(each) and disk.surely(each.with_suffix(".json"))]
        assert whole or not complete, "nothing would be left"

    disk.look = look
    for step in (10, 20, 30):
        path = backend.begin(step, 100)
        Path(path).write_bytes(b"x" * 100)
        saved.append(folder / "rank-0-of-1" / f"{step:012d}-0.safetensors")
        backend.complete(path, step, 100)
        complete.append(step)
    assert not saved[0].exists()
    assert saved[-1].exists()
