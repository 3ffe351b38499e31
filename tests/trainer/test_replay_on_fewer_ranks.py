"""Promise: what a delta holds beside gradients comes back on other ranks too, and what cannot be replayed there is refused with a reason.

Two ranks that hold the same save, each in turn; one goes on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from replaying import AFTER, BASE, STEP, Build, Script, started, train
from scripted_sidecar import DEADLINE, ScriptedSidecar
from small_runs import same_bits
from torch import Tensor, nn

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import Reply, Welcome
from tiercheck.protocol.requests import Request
from tiercheck.protocol.version import Version
from tiercheck.trainer.backend import RestoreError


class Ranks:
    """Sidecars of two old ranks and of the new one."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, monkeypatch
        self.made: list[ScriptedSidecar] = []
        monkeypatch.setenv("TIERCHECK_ATTEMPT", "1")

    def become(self, rank: int, world: int, **welcome: Any) -> ScriptedSidecar:
        run_dir = self._folder / str(len(self.made))
        run_dir.mkdir()
        for name, value in (("RANK", rank), ("WORLD_SIZE", world), ("TIERCHECK_RUN_DIR", run_dir)):
            self._patch.setenv(name, str(value))
        said = Welcome(attempt=1, snapshot_every=BASE, delta=DeltaMode.AUTO, **welcome)
        self.made.append(ScriptedSidecar(run_dir, said))
        return self.made[-1]

    def become_one_of_one(self) -> ScriptedSidecar:
        """Offered what the two have saved, by the snapshot of step 4."""
        old = [*self.made]
        chain = tuple(Version(step, 1) for step in range(BASE, STEP + 1))
        sidecar = self.become(0, 1, restore_version=chain[-1], restore_world_size=2, restore_chain=chain)

        def answer(request: Request) -> Reply | None:
            if request.op == "borrow":
                return Reply(True, path=old[request.rank].completed(request.kind)[request.step])
            return sidecar.behave(request)

        sidecar.answer = answer
        return sidecar


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Ranks(tmp_path, monkeypatch)
    yield made
    for sidecar in made.made:
        sidecar.stop()


def everything() -> Script:
    """Running statistics, two optimizers of which one makes two steps, rates in tensors, clipping."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
    first = torch.optim.SGD(model[0].parameters(), lr=torch.tensor(1e-2), momentum=0.9)
    rest = [{"params": model[1].parameters(), "lr": 1e-3}, {"params": model[4].parameters(), "weight_decay": 0.3}]
    second = torch.optim.AdamW(rest, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(second, 0.9)

    def update() -> Tensor:
        for optimizers in ([first], [first, second]):
            model.zero_grad()
            loss: Tensor = model(torch.randn(12, 8)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step()
        scheduler.step()
        return loss

    return Script(model, [first, second], update, {"scheduler": scheduler})


def plain(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], model: nn.Module | None = None, late: int = 0
) -> Script:
    """`late`: step before which the last layer has no gradient."""
    net = model or nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer, steps = make(list(net.parameters())), itertools.count(1)

    def update() -> Tensor:
        optimizer.zero_grad()
        data = torch.randn(12, 8) if model is None else torch.randint(0, 50, (6,))
        loss: Tensor = net(data).square().mean()
        loss.backward()
        if next(steps) < late:
            list(net.parameters())[-1].grad = None
        optimizer.step()
        return loss

    return Script(net, [optimizer], update)


def saved(ranks: Ranks, builds: list[Build]) -> tuple[dict[str, Tensor], list[dict[str, Any]], list[str]]:
    """Of rank 0: its state at the step that is restored, its hyper-parameters, and the losses after it."""
    found = []
    for rank, build in enumerate(builds):
        sidecar = ranks.become(rank, len(builds))
        script, checkpointer = started(build, every=BASE)
        with checkpointer:
            checkpointer.restore()
            train(script, checkpointer, STEP)
            tensors, hyper = script.tensors(), script.hyper()
            assert checkpointer.wait(DEADLINE)
            found.append((tensors, hyper, train(script, checkpointer, AFTER)))
        assert {*range(BASE + 1, STEP + 1)} <= {*sidecar.completed(Kind.DELTA)}
    return found[0]


def test_all_that_a_delta_holds_comes_back(ranks: Ranks) -> None:
    tensors, hyper, losses = saved(ranks, [everything, everything])
    sidecar = ranks.become_one_of_one()
    again, other = started(everything, seed=77)
    assert other.restore() == STEP
    same_bits(again.tensors(), tensors)
    assert again.hyper() == hyper
    assert all(p.grad is None for p in again.model.parameters())
    assert train(again, other, AFTER) == losses, "random numbers of rank 0, too"
    other.close()
    assert not sidecar.asked("mismatch", Kind.DELTA)
    assert sidecar.asked("reserve")[-1].elementwise is True


def adamw(**options: Any) -> Callable[[list[nn.Parameter]], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, **{"lr": 1e-2, **options})


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 8, sparse=True))


@pytest.mark.parametrize(
    ("builds", "why"),
    [
        ([lambda: plain(adamw()), lambda: plain(adamw(lr=2e-2))], "ranks 0 and 1 updated with different hyper-parameters"),
        ([lambda: plain(torch.optim.Adafactor)] * 2, "Adafactor is not known to treat each element on its own"),
        ([lambda: plain(adamw(fused=True))] * 2, "fused=True rounds differently"),
        ([lambda: plain(lambda p: torch.optim.SGD(p, lr=0.1), embedding())] * 2, "0.weight is a torch.sparse one"),
        ([lambda: plain(adamw(), late=BASE + 2)] * 2, f"began to keep state of a parameter at step {BASE + 2}"),
    ],
    ids=["another rate", "not elementwise", "fused", "sparse", "new state"],
)  # fmt: skip
def test_what_cannot_be_replayed_is_refused_and_its_deltas_are_not_used_again(
    ranks: Ranks, builds: list[Build], why: str
) -> None:
    saved(ranks, builds)
    sidecar = ranks.become_one_of_one()
    _, checkpointer = started(builds[0], seed=77)
    with pytest.raises(RestoreError, match=why):
        checkpointer.restore()
    (told,) = sidecar.asked("mismatch", Kind.DELTA)
    assert why in told.message
    assert told.step == STEP
    checkpointer.close()
