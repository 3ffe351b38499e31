"""Gives the sidecar's tests their fixtures."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.stations import Stations
from tests.sidecar.world import World


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in shared memory, as in production; on disk where there is none."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="tiercheck-test-", dir=shared if shared.is_dir() else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make_world(memory: Path) -> Iterator[Callable[..., World]]:
    """Builds worlds whose processes end with the test. Socket paths must be short, so not under tmp_path."""
    worlds: list[World] = []

    def build(**options: Any) -> World:
        root = Path(tempfile.mkdtemp(prefix="tc-"))
        world = World(root, memory / str(len(worlds)), **options)
        worlds.append(world)
        return world

    yield build
    for world in worlds:
        world.close()
        shutil.rmtree(world.root, ignore_errors=True)


@pytest.fixture
def stations(memory: Path) -> Iterator[Callable[..., Stations]]:
    """Builds the exchange's ends of several sidecars, in this process; they end with the test."""
    built: list[Stations] = []

    def build(**options: int) -> Stations:
        built.append(Stations(memory / str(len(built)), **options))
        return built[-1]

    yield build
    for job in built:
        job.close()
