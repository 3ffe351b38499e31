"""Promise: whatever goes wrong in the saver's thread, training goes on, and so does saving."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.small_runs import Run, adamw
from tiercheck.trainer.backends.folder_backend import FolderBackend
from tiercheck.trainer.save.snapshot import SnapshotJob

DEADLINE = 30.0
STEPS = 6


def failing(times: int, real: Callable[..., Any]) -> tuple[Callable[..., Any], threading.Event]:
    """`real`, of which the first calls fail in a way that nobody thought of; and whether all of these are
    over."""
    left, over = iter(range(times)), threading.Event()

    def sometimes(*given: Any, **more: Any) -> Any:
        for _ in left:
            raise RuntimeError("nobody thought of it")
        over.set()
        return real(*given, **more)

    return sometimes, over


@pytest.mark.parametrize(
    ("owner", "name", "skipped"),
    [
        (FolderBackend, "flush", 0),
        (SnapshotJob, "__init__", 3),
        (SnapshotJob, "finish", 3),
        (FolderBackend, "begin", 3),
    ],
)
def test_saving_goes_on_after_what_nobody_thought_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, skipped: int
) -> None:
    body, over = failing(3, getattr(owner, name))
    monkeypatch.setattr(owner, name, body)
    run = Run(adamw, tmp_path)
    if name == "flush":
        assert over.wait(DEADLINE), "the idle thread has died three times, and lives"
    for _ in range(STEPS):
        train_a_step(run)
    assert run.checkpointer.captured >= STEPS - skipped
    run.checkpointer.close()
    offer = FolderBackend(tmp_path, 0, 1, keep=2).find()
    assert offer is not None
    assert offer.version.step == STEPS


def train_a_step(run: Run) -> None:
    """Never waits for more than the deadline."""
    done = threading.Thread(target=lambda: (run.train(1), run.checkpointer.wait(DEADLINE)), daemon=True)
    done.start()
    done.join(DEADLINE)
    assert not done.is_alive(), "training waits for ever"
