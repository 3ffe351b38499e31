"""Gives slow machines time, and says once per reason what was skipped."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.examples import examples
from tests.lives import Lives
from tests.packaging.dockerfile import shipped_python

# A slow machine is no failure: nothing here may depend on speed.
settings.register_profile(
    "tiercheck", max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tiercheck")


@pytest.fixture(scope="session")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """One process that imports what training scripts need, for all tests that ask for lives of such
    scripts.
    """
    folder = tmp_path_factory.getbasetemp()
    started = Lives(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
    yield started
    started.stop()


@pytest.hookimpl(trylast=True)  # what is deselected does not count
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where files run beside each other, every third is one that waits for a cluster while others compute.
    Left to themselves those come last, because they have few tests.
    """
    if not hasattr(config, "workerinput"):
        return
    files: defaultdict[Path, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[item.path].append(item)
    largest_first = sorted(files.values(), key=len, reverse=True)
    waiting = [tests for tests in largest_first if tests[0].get_closest_marker("cluster")]
    computing = [tests for tests in largest_first if tests not in waiting]
    ordered: list[pytest.Item] = []
    while waiting or computing:
        for tests in (*waiting[:1], *computing[:2]):
            ordered += tests
        del waiting[:1], computing[:2]
    items[:] = ordered


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the collector need not look at it again and again."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran, shipped = ".".join(map(str, sys.version_info[:2])), shipped_python()
    if ran != shipped:
        terminalreporter.write_line(f"run by Python {ran}; the images have {shipped}", yellow=True)
    skipped: Counter[str] = Counter()
    for report in terminalreporter.getreports("skipped"):
        longrepr = report.longrepr
        reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        skipped[reason.removeprefix("Skipped: ")] += 1
    for reason, count in skipped.most_common():
        terminalreporter.write_line(f"{count} tests skipped: {reason}", yellow=True)
