"""Gives the tests of parity their fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from station import Job


@pytest.fixture
def make_job(memory: Path) -> Iterator[Callable[..., Job]]:
    """Builds jobs whose sidecars end with the test."""
    jobs: list[Job] = []

    def build(*arguments: Any, **options: Any) -> Job:
        jobs.append(Job(memory / str(len(jobs)), *arguments, **options))
        return jobs[-1]

    yield build
    for job in jobs:
        job.close()
