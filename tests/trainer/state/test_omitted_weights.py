"""Promise: frozen weights are left out by name only, and two models never write over each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tests.trainer.deltas.replaying import (
    Build,
    Script,
    loop,
    mean_square,
    started,
    survives,
    survives_from_a_snapshot,
    train,
    trained,
)
from tiercheck import Checkpointer
from tiercheck.protocol.version import Kind
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.restore.load import DifferentState
from tiercheck.trainer.state.slot_file import SlotReader
from tiercheck.trainer.tensors.tensor_parts import NotCapturable

WIDTH = 64


class Adapted(nn.Module):
    """LoRA on a layer that the script makes anew at each start."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + self.up(self.down(x))
        return adapted


def plain(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(WIDTH, WIDTH, bias=False)


def in_4_bits(seed: int) -> nn.Module:
    quantised = pytest.importorskip("bitsandbytes").nn
    layer = quantised.Linear4bit(WIDTH, WIDTH, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    layer.load_state_dict(plain(seed).state_dict())
    on_cpu: nn.Module = layer.to("cpu")
    return on_cpu


def in_8_bits(seed: int) -> nn.Module:
    quantised = pytest.importorskip("bitsandbytes").nn
    layer = quantised.Linear8bitLt(WIDTH, WIDTH, bias=False, has_fp16_weights=False)
    layer.load_state_dict(plain(seed).state_dict())
    on_cpu: nn.Module = layer.to("cpu")
    return on_cpu


BASES: dict[str, Callable[[int], nn.Module]] = {"plain": plain, "4 bits": in_4_bits, "8 bits": in_8_bits}


OUT = {"leave_out": ("base.weight",)}


def adapted(name: str, number: int = 1) -> Build:
    def build() -> Script:
        model = Adapted(BASES[name](number))
        optimizer = torch.optim.AdamW([*model.down.parameters(), *model.up.parameters()], lr=1e-2)
        return loop(model, optimizer, loss_of=lambda model: mean_square(4, WIDTH)(model).float())

    return build


@pytest.mark.parametrize("name", BASES)
def test_what_is_trained_on_it_comes_back(tmp_path: Path, name: str) -> None:
    survives_from_a_snapshot(adapted(name), tmp_path, **OUT)
    stored = SlotReader.open(str(next(tmp_path.rglob("*.safetensors"))))
    assert not [each for each in stored.tensors() if "base" in each]


@pytest.mark.parametrize("name", BASES)
def test_it_comes_back_from_deltas(delta_sidecar: ScriptedSidecar, name: str) -> None:
    survives(delta_sidecar, adapted(name), **OUT)


@pytest.mark.parametrize("name", BASES)
def test_restore_onto_other_weights_is_refused_by_name(tmp_path: Path, name: str) -> None:
    _, checkpointer = trained(adapted(name), 4, folder=tmp_path, every=4, **OUT)
    with checkpointer:
        assert checkpointer.wait(DEADLINE)
        assert checkpointer.skipped == 0
    _, checkpointer = started(adapted(name, 2), folder=tmp_path, **OUT)
    with checkpointer, pytest.raises(RestoreError, match=r"base\.\w+.* is left out"):
        checkpointer.restore()
    if name == "plain":
        _, checkpointer = started(adapted(name), folder=tmp_path)
        with checkpointer, pytest.raises(DifferentState, match="only in the model"):
            checkpointer.restore()


class Opaque(torch.Tensor):
    """A class that does not list the tensors that it consists of."""


@pytest.mark.parametrize("weight", [torch.eye(2).as_subclass(Opaque), torch.eye(2).to_sparse()])
def test_trained_weights_that_cannot_be_stored_are_named_with_the_remedy(
    tmp_path: Path, weight: torch.Tensor
) -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(weight)
    with pytest.raises(NotCapturable, match=r"model/weight: .*leave_out=\['weight'\]"):
        Checkpointer(model, torch.optim.SGD(model.parameters()), folder=tmp_path)


@pytest.mark.parametrize("name", ["4 bits", "8 bits"])
def test_weights_that_cannot_be_stored_are_named_with_the_remedy(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotCapturable, match=r"model/base\.weight: .*leave_out=\['base\.weight'\]"):
        started(adapted(name), folder=tmp_path)


@pytest.mark.parametrize(
    ("pattern", "kind", "words"),
    [
        ("down.*", NotCapturable, r"down\.weight is left out, and is updated by an optimizer"),
        ("nothing.*", ValueError, r"matches 'nothing\.\*'"),
    ],
)
def test_only_what_is_frozen_can_be_left_out(
    tmp_path: Path, pattern: str, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        started(adapted("plain"), folder=tmp_path, leave_out=(pattern,))


def test_weight_that_is_thawed_later_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one, checkpointer = started(adapted("plain"), folder=tmp_path, every=4, **OUT)
    with checkpointer:
        checkpointer.restore()
        one.model.base.requires_grad_(True)
        train(one, checkpointer, 4)
        assert checkpointer.skipped == 1
    assert "base.weight is left out, and requires a gradient" in caplog.text


def made(folder: Path | None = None, model: nn.Module | None = None) -> tuple[nn.Module, Checkpointer]:
    model = nn.Linear(4, 4) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, Checkpointer(model, optimizer, folder=folder, every=1)


def test_second_checkpointer_of_a_folder_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    model, first = made(tmp_path / "here")
    with first:
        first.restore()
        with pytest.raises(
            ValueError, match=r"another Checkpointer of this process saves to .*/here: close it first"
        ):
            made(tmp_path / "elsewhere" / ".." / "here")
        model(torch.randn(2, 4)).sum().backward()
        first._trained.optimizers[0].step()
        first.step()
        assert first.wait(DEADLINE)
        assert first.captured == 1
    _, next_one = made(tmp_path / "here")
    with next_one:
        assert next_one.restore() == 1


def test_each_folder_may_have_its_own(tmp_path: Path) -> None:
    (_, one), (_, other) = made(tmp_path / "generator"), made(tmp_path / "critic")
    with one, other:
        assert (one.restore(), other.restore()) == (0, 0)


def test_in_a_cluster_there_is_one_at_all(delta_sidecar: ScriptedSidecar) -> None:
    _, first = made()
    with first:
        with pytest.raises(ValueError, match="give all models and optimizers to one"):
            made()
        first.restore()
    assert len(delta_sidecar.hellos) == 1
    assert not delta_sidecar.completed(Kind.SNAPSHOT)


def test_one_that_was_refused_for_its_model_holds_no_place(tmp_path: Path) -> None:
    sparse = nn.Linear(4, 4)
    sparse.register_buffer("odd", torch.eye(4).to_sparse())
    with pytest.raises(NotCapturable, match="sparse"):
        made(tmp_path, sparse)
    made(tmp_path)[1].close()
