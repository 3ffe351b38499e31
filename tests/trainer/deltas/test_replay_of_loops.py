"""Promise: replay gives the same bits however a loop treats its gradients, on every rank."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.lives import Lives
from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tests.trainer.deltas.replaying import Script, by_closure, loop, mean_square, survives
from tests.trainer.restore.test_bitwise_restore import OPTIMIZERS
from tests.trainer.small_runs import MakeOptimizer, Run, same_bits
from tests.trainer.torch_limits import FSDP2_ON_CPUS, shards_by_fsdp2
from tiercheck.protocol.artifacts.pieces import Box, Piece, cover
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import Welcome
from tiercheck.protocol.version import Kind
from tiercheck.trainer.deltas.unseen import PATIENCE, UntrackedTensors
from tiercheck.trainer.state.slot_file import SlotReader
from tiercheck.trainer.tensors import accelerator
from tiercheck.trainer.tensors.samples import Sampler


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))


loss_of = mean_square(12, 8)


def clipping_and_accumulation() -> Script:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-1, total_steps=40)

    def accumulated(model: nn.Module) -> Tensor:
        for _ in range(2):
            (loss_of(model) / 3).backward()
        return loss_of(model) / 3

    return loop(
        model,
        optimizer,
        between=lambda _: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        after=lambda _: scheduler.step(),
        loss_of=accumulated,
        scheduler=scheduler,
    )


def gradients_zeroed_in_place() -> Script:
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def update() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        return loss

    return Script(model, [optimizer], update)


def groups_frozen_and_tensor_rate() -> Script:
    model = small_model()
    model[0].bias.requires_grad_(False)
    groups = [
        {"params": [model[0].weight, model[0].bias], "weight_decay": 0.3, "lr": torch.tensor(1e-2)},
        {"params": model[4].parameters(), "lr": torch.tensor(1e-3)},
    ]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return loop(model, optimizer, after=lambda _: scheduler.step(), loss_of=loss_of, scheduler=scheduler)


def several_optimizers_some_of_them_twice() -> Script:
    model = small_model()
    first = torch.optim.SGD(model[0].parameters(), lr=1e-2, momentum=0.9)
    second = torch.optim.AdamW(itertools.chain(model[1].parameters(), model[4].parameters()), fused=True)

    def update() -> Tensor:
        for optimizer in (second, first, second):
            first.zero_grad()
            second.zero_grad()
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
        return loss

    return Script(model, [first, second], update)


def bf16_parameters_and_gradients() -> Script:
    model = small_model().to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return loop(
        model,
        optimizer,
        loss_of=lambda model: model(torch.randn(12, 8, dtype=torch.bfloat16)).square().mean(),
    )


def channels_last() -> Script:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)).to(
        memory_format=torch.channels_last
    )
    optimizer = torch.optim.Adafactor(model.parameters())

    def of_images(model: nn.Module) -> Tensor:
        loss: Tensor = model(torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last)).square().mean()
        return loss

    return loop(model, optimizer, loss_of=of_images)


def closure() -> Script:
    model = small_model()
    return by_closure(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_of)


def sparse_gradients() -> Script:
    embedding = nn.EmbeddingBag(4000, 8, sparse=True)
    head = nn.Linear(8, 2)
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    optimizers = [torch.optim.SparseAdam(embedding.parameters()), torch.optim.Adagrad(head.parameters())]

    def of_words(model: nn.Module) -> Tensor:
        loss: Tensor = head(embedding(torch.randint(0, 4000, (6, 5)))).square().mean()
        return loss

    return loop(model, *optimizers, loss_of=of_words)


def rows_and_unused_experts() -> Script:
    model = nn.ParameterDict({"words": torch.randn(3000, 16), "experts": torch.randn(8, 64, 64)})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def of_a_few(model: nn.ParameterDict) -> Tensor:
        words = model["words"][torch.randint(0, 3000, (20,))]
        return (words.sum() + model["experts"][int(torch.randint(0, 8, ()))].square().mean()) * 0.1

    return loop(model, optimizer, loss_of=of_a_few)


@pytest.mark.parametrize(
    "build",
    [
        clipping_and_accumulation,
        gradients_zeroed_in_place,
        groups_frozen_and_tensor_rate,
        several_optimizers_some_of_them_twice,
        bf16_parameters_and_gradients,
        channels_last,
        closure,
        sparse_gradients,
        rows_and_unused_experts,
    ],
    ids=lambda build: build.__name__,
)
def test_loop_is_replayed(delta_sidecar: ScriptedSidecar, build: object) -> None:
    survives(delta_sidecar, build)


@pytest.mark.parametrize("fused", [False, True])
def test_updates_skipped_by_the_gradient_scaler_are_replayed_as_such(
    delta_sidecar: ScriptedSidecar, fused: bool
) -> None:
    skipped = []

    def build() -> Script:
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

        def between(step: int) -> None:
            if step in (6, 8):
                model[0].weight.grad[0, 0] = float("inf")

        def step() -> None:
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped.append(scaler.get_scale() < before)

        scaled = lambda model: scaler.scale(loss_of(model))  # noqa: E731
        return loop(model, optimizer, between=between, step=step, loss_of=scaled, scaler=scaler)

    survives(delta_sidecar, build)
    assert skipped.count(True) == 2


MORE: dict[str, MakeOptimizer] = {
    "sgd-momentum-plain": lambda model: torch.optim.SGD(
        model.parameters(), lr=1e-2, momentum=0.9, dampening=0.1
    ),
    "sgd-fused": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True),
    "sgd-weight-decay-maximize": lambda model: torch.optim.SGD(
        model.parameters(), lr=1e-3, weight_decay=0.1, maximize=True, foreach=True
    ),
    "adam-fused": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, fused=True),
    "adamw-loop": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
    "adamw-amsgrad-foreach": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True, foreach=True),
    "adagrad-fused": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2, fused=True),
    "adamax": lambda model: torch.optim.Adamax(model.parameters()),
    "radam": lambda model: torch.optim.RAdam(model.parameters()),
    "rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "asgd": lambda model: torch.optim.ASGD(model.parameters()),
    "adafactor-foreach": lambda model: torch.optim.Adafactor(model.parameters(), foreach=True),
}
if hasattr(torch.optim, "Muon"):
    MORE["muon"] = lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2])
ALL = OPTIMIZERS | MORE


@pytest.mark.parametrize("optimizer", ALL)
def test_replayed_run_continues_with_the_same_bits(
    delta_sidecar: ScriptedSidecar, tmp_path: Path, optimizer: str
) -> None:
    whole = Run(ALL[optimizer], tmp_path, every=None)
    whole.checkpointer.restore()
    assert whole.checkpointer.every == 4
    whole.train(11)
    whole.checkpointer.wait(DEADLINE)
    assert whole.checkpointer.deltas == 7  # of steps 5 to 11; those before lead nowhere
    state = whole.state()
    expected = whole.train(4)
    whole.checkpointer.close()
    assert whole.checkpointer.deltas_skipped == 0

    delta_sidecar.offer(base=4, step=11)
    again = Run(ALL[optimizer], tmp_path, seed=99, every=None)
    assert again.checkpointer.restore() == 11
    same_bits(again.state(), state)
    assert again.train(4) == expected
    same_bits(again.state(), whole.state())
    again.checkpointer.close()
    assert not delta_sidecar.asked("mismatch", Kind.DELTA)


SCRIPT = Path(__file__).parents[1] / "sharded_script.py"
KINDS = {"ddp": 4, "zero": 4, "fsdp": 2, "hybrid": 4, "tensor": 2, "fsdp-tensor": 4, "pipeline": 2}
KINDS = {kind: ranks for kind, ranks in KINDS.items() if FSDP2_ON_CPUS or not shards_by_fsdp2(kind)}
"""Ways to be parallel, and how many ranks each is run on."""
patient = pytest.mark.timeout(600)  # whichever test comes first trains for all of them


@dataclass
class Trained:
    """What the ranks of one kind said, in a whole run and in one that was resumed in new processes, and what
    they stored."""

    sidecars: list[ScriptedSidecar]
    whole: list[dict[str, Any]]
    resumed: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def trained(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trained]]:
    """Every kind, those of equal size in the same processes."""
    found: dict[str, Trained] = {}
    with contextlib.ExitStack() as stack:
        for ranks in sorted(set(KINDS.values())):
            kinds = [kind for kind in KINDS if KINDS[kind] == ranks]
            folder = tmp_path_factory.mktemp("ranks")
            sidecars: dict[str, list[ScriptedSidecar]] = {kind: [] for kind in kinds}
            for rank, kind in itertools.product(range(ranks), kinds):
                run_dir = folder / str(rank) / kind
                run_dir.mkdir(parents=True)
                sidecar = ScriptedSidecar(run_dir, Welcome(attempt=1, snapshot_every=4, delta=DeltaMode.AUTO))
                stack.callback(sidecar.stop)
                sidecars[kind].append(sidecar)
            for kind, said in run(lives, folder, ranks, kinds, 13).items():
                found[kind] = Trained(sidecars[kind], said)
                for sidecar in sidecars[kind]:
                    assert sorted(sidecar.completed(Kind.DELTA)) == list(range(5, 14)), kind
                    assert not sidecar.asked("no-deltas"), kind
                    sidecar.offer(base=4, step=9)
            for kind, said in run(lives, folder, ranks, kinds, 13).items():
                found[kind].resumed = said
        yield found


def run(
    lives: Lives, folder: Path, ranks: int, kinds: list[str], steps: int
) -> dict[str, list[dict[str, Any]]]:
    """What each rank said, by kind."""
    env = {"TIERCHECK_RUN_DIR": str(folder), "TIERCHECK_ATTEMPT": "1"}
    said = lives.run([], [SCRIPT, steps, *kinds], ranks=ranks, env=env)
    return {kind: [lines[number] for lines in said] for number, kind in enumerate(kinds)}


@patient
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_replays_its_shard(trained: dict[str, Trained], kind: str) -> None:
    for one, other in zip(trained[kind].whole, trained[kind].resumed, strict=True):
        assert (one["deltas"], one["skipped"]) == (9, 0)
        assert other["restored"] == one["at"]
        assert other["losses"] == one["losses"][9:]


@patient
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_store_the_whole_state_together_and_replicas_a_share_each(
    trained: dict[str, Trained], kind: str
) -> None:
    slots = [SlotReader.open(sidecar.completed(Kind.SNAPSHOT)[4]) for sidecar in trained[kind].sidecars]
    held: dict[str, list[tuple[int, Piece]]] = {}
    for rank, slot in enumerate(slots):
        for name, piece in slot.pieces.items():
            assert slot.tensors()[name].numel() == piece.count
            held.setdefault(name, []).append((rank, piece))
    for pieces in held.values():
        cover(Box.whole(pieces[0][1].shape), pieces)
    if kind != "pipeline":  # each stage has layers of its own, as plain tensors
        assert len(held) == 10 + 3 * 10
    stored = sum(tensor.nbytes for slot in slots for tensor in slot.tensors().values())
    once = sum(4 * math.prod(pieces[0][1].shape) for pieces in held.values())
    assert stored <= 1.1 * once or kind == "pipeline"


@pytest.fixture
def tensors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    monkeypatch.setattr(accelerator, "_HOST", {"meta"})
    return {"model/target": torch.zeros(8), "model/codes": torch.zeros(8)}


def watching(tensors: dict[str, Tensor]) -> UntrackedTensors:
    found = UntrackedTensors()
    found.watch(tensors)
    found.begin()
    return found


def delta(untracked: UntrackedTensors, step: int, *told: str) -> str:
    looked = untracked.look()
    assert looked is not None
    return untracked.delta(step, looked, told)


def snapshot(untracked: UntrackedTensors, step: int, tensors: dict[str, Tensor]) -> None:
    sums = Sampler().take(list(tensors.values())).sums
    untracked.snapshot(step, dict(zip(tensors, sums, strict=True)))


def test_change_since_training_began_or_since_the_delta_before_is_named_once(
    tensors: dict[str, Tensor],
) -> None:
    untracked = watching(tensors)
    tensors["model/target"].data.add_(1)
    assert [delta(untracked, step) for step in (1, 2)] == ["model/target", ""]
    tensors["model/codes"].data.add_(1)
    assert [delta(untracked, step) for step in (3, 4)] == ["model/codes", ""]


def test_what_a_delta_tells_of_may_change(tensors: dict[str, Tensor]) -> None:
    untracked = watching(tensors)
    tensors["model/codes"].data.add_(1)
    assert [delta(untracked, 1, "model/codes"), delta(untracked, 2)] == ["", ""]


def test_delta_of_the_step_whose_snapshot_was_looked_at_first_does_not_pass(
    tensors: dict[str, Tensor],
) -> None:
    """It would lead the chain before it to that step."""
    untracked = watching(tensors)
    tensors["model/target"].data.add_(1)
    snapshot(untracked, 4, tensors)
    assert [delta(untracked, 4), delta(untracked, 5)] == ["model/target", ""]


def test_what_keeps_changing_ends_deltas(tensors: dict[str, Tensor]) -> None:
    untracked = watching(tensors)
    for step in range(PATIENCE):
        assert untracked.hopeless == ""
        tensors["model/target"].data.add_(1)
        assert delta(untracked, step) == "model/target"
    assert untracked.hopeless == "model/target"


def test_host_memory_is_left_to_the_training_thread() -> None:
    untracked = UntrackedTensors()
    untracked.watch({"model/target": torch.zeros(8)})
    untracked.begin()
    assert untracked.look() is None


def test_what_a_delta_tells_of_may_change_although_the_snapshot_was_looked_at_first(
    tensors: dict[str, Tensor],
) -> None:
    untracked = watching(tensors)
    for step in range(1, PATIENCE + 2):
        tensors["model/codes"].data.add_(1)
        snapshot(untracked, step, tensors)
        assert delta(untracked, step, "model/codes") == ""
    tensors["model/codes"].data.add_(1)
    tensors["model/target"].data.add_(1)
    snapshot(untracked, PATIENCE + 2, tensors)
    assert delta(untracked, PATIENCE + 2, "model/codes") == "model/target"
    assert untracked.hopeless == ""
