"""Promise: a resumed DDP run sums gradients as one that was never stopped, on any number of ranks.

Each run has several buckets, and is stopped after its first, second and fourth step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lives import Lives

SCRIPT = Path(__file__).with_name("bucket_runs.py")
RUNS = (
    "plain:4", "plain:3", "plain:5", "static_graph:4", "gradient_as_bucket_view:4",
    "find_unused_parameters:4",
    "frozen on the way:4", "frozen before restore:4", "two parts:4", "dtypes:4", "sparse:4",
    "ZeRO:4", "hook before:4", "built-in hook:4", "hook after restore:4", "accumulated:4",
)  # fmt: skip
TOLD = ("counting hook:4", "other buckets:4")
pytestmark = pytest.mark.timeout(600)  # whichever test comes first trains for all of them


@pytest.fixture(scope="module")
def said(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    argv = [SCRIPT, tmp_path_factory.mktemp("buckets"), *RUNS, *TOLD]
    return [line for (line,) in lives.run([], argv, ranks=5)]


@pytest.mark.parametrize("run", RUNS)
def test_every_step_after_a_restart_is_bitwise_the_same(said: list[dict[str, Any]], run: str) -> None:
    found = [rank[run] for rank in said if run in rank]
    assert [each["differing"] for each in found] == [{"1": [], "2": [], "4": []}] * len(found)
    assert not any("BucketLayout" in text for each in found for text in each["warnings"])


def test_a_hook_with_a_state_that_no_version_holds_is_told(said: list[dict[str, Any]]) -> None:
    for rank in said[:4]:
        texts = [text for text in rank["counting hook:4"]["warnings"] if text.startswith("CommHook")]
        assert texts, "said nothing"
        assert "changes, and is in no version" in texts[0]


def test_a_layout_that_cannot_be_had_again_is_told_by_every_rank(said: list[dict[str, Any]]) -> None:
    for rank in said[:4]:
        texts = [text for text in rank["other buckets:4"]["warnings"] if text.startswith("BucketLayout")]
        assert len(texts) == 3
        assert "had other gradient buckets" in texts[0]
