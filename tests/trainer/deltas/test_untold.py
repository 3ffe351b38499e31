"""Promise: a delta that is silent about a change does not pass, on a device too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tiercheck.trainer.deltas.unseen import PATIENCE, Untold
from tiercheck.trainer.tensors import accelerator
from tiercheck.trainer.tensors.samples import Sampler


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    monkeypatch.setattr(accelerator, "_HOST", {"meta"})
    return {"model/target": torch.zeros(8), "model/codes": torch.zeros(8)}


def watching(tensors: dict[str, Tensor]) -> Untold:
    found = Untold()
    found.watch(tensors)
    found.begin()
    return found


def delta(untold: Untold, step: int, *told: str) -> str:
    looked = untold.look()
    assert looked is not None
    return untold.delta(step, looked, told)


def snapshot(untold: Untold, step: int, tensors: dict[str, Tensor]) -> None:
    sums = Sampler().take(list(tensors.values())).sums
    untold.snapshot(step, dict(zip(tensors, sums, strict=True)))


def test_change_since_training_began_or_since_the_delta_before_is_named_once(
    tensors: dict[str, Tensor],
) -> None:
    untold = watching(tensors)
    tensors["model/target"].data.add_(1)
    assert [delta(untold, step) for step in (1, 2)] == ["model/target", ""]
    tensors["model/codes"].data.add_(1)
    assert [delta(untold, step) for step in (3, 4)] == ["model/codes", ""]


def test_what_a_delta_tells_of_may_change(tensors: dict[str, Tensor]) -> None:
    untold = watching(tensors)
    tensors["model/codes"].data.add_(1)
    assert [delta(untold, 1, "model/codes"), delta(untold, 2)] == ["", ""]


def test_delta_of_the_step_whose_snapshot_was_looked_at_first_does_not_pass(
    tensors: dict[str, Tensor],
) -> None:
    """It would lead the chain before it to that step."""
    untold = watching(tensors)
    tensors["model/target"].data.add_(1)
    snapshot(untold, 4, tensors)
    assert [delta(untold, 4), delta(untold, 5)] == ["model/target", ""]


def test_what_keeps_changing_ends_deltas(tensors: dict[str, Tensor]) -> None:
    untold = watching(tensors)
    for step in range(PATIENCE):
        assert untold.hopeless == ""
        tensors["model/target"].data.add_(1)
        assert delta(untold, step) == "model/target"
    assert untold.hopeless == "model/target"


def test_host_memory_is_left_to_the_training_thread() -> None:
    untold = Untold()
    untold.watch({"model/target": torch.zeros(8)})
    untold.begin()
    assert untold.look() is None


def test_what_a_delta_tells_of_may_change_although_the_snapshot_was_looked_at_first(
    tensors: dict[str, Tensor],
) -> None:
    untold = watching(tensors)
    for step in range(1, PATIENCE + 2):
        tensors["model/codes"].data.add_(1)
        snapshot(untold, step, tensors)
        assert delta(untold, step, "model/codes") == ""
    tensors["model/codes"].data.add_(1)
    tensors["model/target"].data.add_(1)
    snapshot(untold, PATIENCE + 2, tensors)
    assert delta(untold, PATIENCE + 2, "model/codes") == "model/target"
    assert untold.hopeless == ""
