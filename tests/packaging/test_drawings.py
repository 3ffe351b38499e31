"""The drawings in docs/images are what their script draws.

python docs/images/journeys.py
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "images"


def test_committed_drawings_are_what_the_script_draws(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("journeys", FOLDER / "journeys.py")
    assert spec is not None
    assert spec.loader is not None
    journeys = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(journeys)
    journeys.main(tmp_path)
    drawn = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(drawn) == 4
    assert {file.name: file.read_bytes() for file in FOLDER.glob("journey-*.svg")} == drawn
