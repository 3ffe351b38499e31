"""Builds the wheel once and unpacks it, so that what is tested is what is installed."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.packaging.dockerfile import build_wheel

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def unpacked(wheel: Path) -> Path:
    """A folder to put on sys.path."""
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
