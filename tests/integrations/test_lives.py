"""A rank that ends as it should not is told of, and nobody waits for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lives import Lives

SCRIPT = """
import os, signal, sys
if os.environ["RANK"] == "0":
    sys.exit(3)
signal.pause()
"""


def test_ranks_that_would_wait_for_one_that_is_gone_end_with_it(lives: Lives, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with pytest.raises(AssertionError, match=r"the ranks ended with \[\(0, 1\), \(1, -9\)\] instead of 0"):
        lives.run([], [script], ranks=2)
