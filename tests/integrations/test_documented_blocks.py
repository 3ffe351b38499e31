"""Promise: blocks of the page on training scripts run as they stand, and go on exactly after kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations import documented_block
from tests.integrations.test_frameworks import assert_continues, needed, steps
from tests.lives import Lives

pytestmark = pytest.mark.timeout(400)

BLOCKS = {
    # block: (example with the same imports, where lives end; an epoch has 12 batches, or 6 of 8 samples)
    "huggingface": ("huggingface", (4, 7)),
    "lightning": ("lightning", (4, 13)),
    "accelerate": ("accelerate", (3, 7)),
    "loop": ("plain-loop", (4, 13)),
    "nanogpt": ("plain-loop", (4, 13)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_documented_block_goes_on_after_kills(name: str, lives: Lives, tmp_path: Path) -> None:
    example, kills = BLOCKS[name]
    modules, script = needed(example), Path(documented_block.__file__)
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = steps(lives, modules, [script, name, tmp_path / "whole"])
    parts = [
        (steps(lives, modules, [script, name, tmp_path / "cut"], kill_at=kill), kill)
        for kill in (*kills, None)
    ]
    assert [said[0]["step"] for said, _ in parts[1:]] == [kill + 1 for kill in kills]
    assert_continues(whole, parts)
