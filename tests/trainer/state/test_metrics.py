"""Promise: a metric of torchmetrics comes back, in `state` or in the model.

A module that shows nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn

from tests.scripted_sidecar import ScriptedSidecar
from tests.trainer.deltas.replaying import Script, survives, survives_from_a_snapshot
from tiercheck import Checkpointer


def with_mean(model: nn.Module, metric: Any, state: dict[str, Any]) -> Script:
    """The rate follows the metric."""
    layer: nn.Linear = model[0]  # type: ignore[index,assignment]
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)

    def update() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = layer(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        metric.update(loss.detach())
        found = metric.compute()
        means = [each.mean() for each in (found.values() if isinstance(found, dict) else [found])]
        optimizer.param_groups[0]["lr"] = 1e-2 * sum(map(float, means))
        return loss

    return Script(model, [optimizer], update, state)


def given(make: Callable[[], Any]) -> Callable[[], Script]:
    def build() -> Script:
        metric = make()
        return with_mean(nn.Sequential(nn.Linear(8, 8)), metric, {"metric": metric})

    return build


def inside(persistent: bool) -> Callable[[], Script]:
    def build() -> Script:
        metric = torchmetrics.MeanMetric()
        metric.persistent(persistent)
        return with_mean(nn.Sequential(nn.Linear(8, 8), metric), metric, {})

    return build


BUILDS: dict[str, Callable[[], Script]] = {
    "mean": given(torchmetrics.MeanMetric),
    "smallest and largest": given(lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())),
    "all values": given(torchmetrics.CatMetric),
    "collection": given(
        lambda: torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.MaxMetric()])
    ),
    "running": given(lambda: torchmetrics.RunningMean(3)),
    "in the model": inside(False),
    "in the model, persistent": inside(True),
}


@pytest.mark.parametrize("name", BUILDS)
def test_metric_comes_back_from_a_snapshot(tmp_path: Path, name: str) -> None:
    survives_from_a_snapshot(BUILDS[name], tmp_path)


@pytest.mark.parametrize("name", BUILDS)
def test_metric_comes_back_from_deltas(delta_sidecar: ScriptedSidecar, name: str) -> None:
    survives(delta_sidecar, BUILDS[name])


def test_module_that_shows_nothing_is_told_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with Checkpointer(
        model, optimizer, state={"shown": nn.Linear(1, 1), "hidden": nn.ReLU()}, folder=tmp_path
    ):
        assert "state['hidden'] is a module whose state_dict is empty" in caplog.text
        assert "shown" not in caplog.text
