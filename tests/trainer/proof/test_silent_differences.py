"""What no version can know of is found by the steps that are trained again, and by nothing else.

Each run differs after its restart without an error: the script forgets something, or what mends the fault in
TierCheck is switched off.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tests.lives import Lives
from tiercheck import Checkpointer
from tiercheck.protocol.report import Exact
from tiercheck.trainer.restore import restoring
from tiercheck.trainer.save.saver import Saver
from tiercheck.trainer.state import user_state

EVERY, KILLED, WIDTH = 4, 7, 8
DATA = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(5))


class Loop:
    """A training script: what it makes, and one step of it."""

    state: dict[str, Any]

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.state = {}
        self.make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def make(self) -> None:
        """What comes before the optimizer."""

    def begin(self) -> None:
        """What comes between `restore` and the loop."""

    def batch(self) -> Tensor:
        return DATA[torch.randint(len(DATA), (4,))]

    def loss(self) -> Tensor:
        return self.model(self.batch()).square().mean()

    def step(self) -> Tensor:
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


class BatchFetchedAhead(Loop):
    """As nanoGPT's loop."""

    def begin(self) -> None:
        self.next = self.batch()

    def loss(self) -> Tensor:
        now = self.next
        loss = self.model(now).square().mean()
        self.next = self.batch()
        return loss


class MetricNotSaved(Loop):
    """The loss is weighted by an average that the script did not hand over."""

    average = 1.0

    def loss(self) -> Tensor:
        loss = super().loss() * self.average
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss


class StreamBegunAnew(Loop):
    """The position of the stream is in no version."""

    def begin(self) -> None:
        self.stream = iter(DATA.split(4))

    def batch(self) -> Tensor:
        return next(self.stream)


class GradientsKept(Loop):
    """Gradients are never zeroed, so that each step adds to those of the steps before."""

    def step(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        return loss


class StatisticsTakenElsewhere(Loop):
    """One more pass in training mode, as for a picture each 100 batches: no loss depends on it."""

    def make(self) -> None:
        self.model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def begin(self) -> None:
        self.model(DATA)


class AveragedElsewhere(Loop):
    """Averaged weights, which the loss does not depend on, take in others at the start."""

    def make(self) -> None:
        self.average = AveragedModel(self.model)
        self.state = {"average": self.average}

    def begin(self) -> None:
        self.average.update_parameters(self.model)


class RateChanged(Loop):
    lives = 0

    def begin(self) -> None:
        type(self).lives += 1
        self.optimizer.param_groups[0]["lr"] *= type(self).lives


class Derived(nn.Module):
    """Derives a table from a buffer whenever it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH) + 1)
        self.refresh()
        self.register_load_state_dict_post_hook(lambda module, _: module.refresh())

    def refresh(self) -> None:
        self.table = self.scale.exp()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x) * self.table
        return found


class TableStale(Loop):
    """A load hook that is not called."""

    lives = 0

    def make(self) -> None:
        self.model = Derived()

    def begin(self) -> None:
        type(self).lives += 1
        if type(self).lives == 1:  # else what the first life had derived is derived here too
            with torch.no_grad():
                self.model.scale.mul_(2)
            self.model.refresh()  # type: ignore[operator]


class Loader:
    """Fixes the order of an epoch when it is asked for its position, as a loader with workers does."""

    def __init__(self) -> None:
        self.epoch, self.place = 0, 0
        self.order: list[int] = []

    def state_dict(self) -> dict[str, int]:
        if not self.order:
            self.order = torch.randperm(
                len(DATA), generator=torch.Generator().manual_seed(self.epoch)
            ).tolist()
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.order = state["place"], []

    def __iter__(self) -> Iterator[int]:
        self.state_dict()
        yield from self.order[self.place :]


class LoaderAskedTooEarly(Loop):
    def make(self) -> None:
        self.loader = Loader()
        self.state = {"loader": self.loader}

    def begin(self) -> None:
        self.loader.epoch = 3
        self.indices = iter(self.loader)

    def batch(self) -> Tensor:
        number = next(self.indices)
        self.loader.place += 1
        return DATA[number]


def resumed(kind: type[Loop], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Exact]:
    """Verdicts of a second life, which trains the last steps of a killed one again."""
    found: list[Exact] = []
    monkeypatch.setattr(Saver, "report", lambda _, each: each.op == "resume" and found.append(each.exact))
    for life, steps in enumerate((KILLED, KILLED - EVERY)):
        loop = kind()
        place = folder / str(life)
        with Checkpointer(
            loop.model, loop.optimizer, state=loop.state, folder=place, every=EVERY
        ) as checkpointer:
            assert checkpointer.restore() == life * EVERY
            loop.begin()
            for _ in range(steps):
                checkpointer.step(loop.step())
            assert checkpointer.wait()
            if not life:
                shutil.copytree(place, folder / "1")  # what a SIGKILL would leave
    return found


@pytest.mark.parametrize(
    "kind",
    [
        BatchFetchedAhead,
        MetricNotSaved,
        StreamBegunAnew,
        GradientsKept,
        RateChanged,
        StatisticsTakenElsewhere,
        AveragedElsewhere,
    ],
)
def test_what_the_script_forgot_is_found(
    kind: type[Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resumed(kind, tmp_path, monkeypatch) == [Exact.DIFFERS]


@pytest.mark.parametrize("kind", [Loop, TableStale, LoaderAskedTooEarly])
def test_what_comes_back_is_proven(kind: type[Loop], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "lives", 0, raising=False)
    assert resumed(kind, tmp_path, monkeypatch) == [Exact.PROVEN]


def test_table_that_no_load_hook_refreshed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TableStale, "lives", 0)
    monkeypatch.setattr(restoring, "run_load_hooks", lambda *_: None)
    assert resumed(TableStale, tmp_path, monkeypatch) == [Exact.DIFFERS]


def test_loader_that_was_asked_before_its_first_batch_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_back = restoring.Loaded.put_back

    def ask_again(loaded: restoring.Loaded, state: user_state.State) -> None:
        put_back(loaded, state)
        user_state.pack(state, {})

    monkeypatch.setattr(restoring.Loaded, "put_back", ask_again)
    assert resumed(LoaderAskedTooEarly, tmp_path, monkeypatch) == [Exact.DIFFERS]


@pytest.mark.parametrize(("how", "verdict"), [([], "Proven"), (["forget"], "Differs")])
def test_layout_of_gradient_buckets_that_is_forgotten_is_found(
    how: list[str], verdict: str, lives: Lives, tmp_path: Path
) -> None:
    argv = [Path(__file__).parents[1] / "replicas" / "replica_runs.py", "proved", tmp_path / "saved", "12"]
    lives.run([], argv, ranks=4, kill_at=KILLED)
    said = lives.run([], [*argv, *how], ranks=4)
    assert {line["resumed"] for rank in said for line in rank if "resumed" in line} == {verdict}
