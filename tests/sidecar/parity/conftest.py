"""Gives the tests of parity their fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sidecar.parity.group import Group


@pytest.fixture
def make_job(memory: Path) -> Iterator[Callable[..., Group]]:
    """Builds jobs whose sidecars end with the test."""
    jobs: list[Group] = []

    def build(*arguments: Any, **options: Any) -> Group:
        jobs.append(Group(memory / str(len(jobs)), *arguments, **options))
        return jobs[-1]

    yield build
    for job in jobs:
        job.close()
