"""Gives the launcher's tests their fixture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.launcher.launcher_harness import Launch, Launched


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts launchers, which end with the test."""
    running: list[Launched] = []

    def start(command: Sequence[str], **options: object) -> Launched:
        running.append(Launched(tmp_path, command, **options))  # type: ignore[arg-type]
        return running[-1]

    yield start
    for launched in running:
        launched.end()
