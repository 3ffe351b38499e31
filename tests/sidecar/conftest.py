"""Gives the sidecar's tests their fixtures."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.stations import Group, MakeJob, MakeStations, Stations
from tests.sidecar.world import MakeWorld, World


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in shared memory, as in production; on disk where there is none."""
    shared = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="tiercheck-test-", dir=shared if shared.is_dir() else None))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make_world(memory: Path) -> Iterator[MakeWorld]:
    """Builds worlds whose processes end with the test. Socket paths must be short, so not under tmp_path."""
    worlds: list[World] = []

    def build(kind: Callable[..., World] = World, **options: Any) -> World:
        worlds.append(kind(Path(tempfile.mkdtemp(prefix="tc-")), memory / str(len(worlds)), **options))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()
        shutil.rmtree(world.root, ignore_errors=True)


@pytest.fixture
def make_job(memory: Path) -> Iterator[MakeJob]:
    """Builds groups of parity in this process, whose sidecars end with the test."""
    built: list[Stations] = []

    def build(kind: Callable[..., Stations] = Group, **options: int) -> Any:
        built.append(kind(memory / str(len(built)), **options))
        return built[-1]

    yield build
    for job in built:
        job.close()


@pytest.fixture
def job(make_job: MakeJob) -> Any:
    """A parity group of two members and one holder."""
    return make_job(data=2, parity=1)


@pytest.fixture
def stations(make_job: MakeJob) -> MakeStations:
    """Builds the exchange's ends of several sidecars, in this process; they end with the test."""
    return partial(make_job, Stations)
