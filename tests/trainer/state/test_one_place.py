"""Two models of one script, such as a GAN's, never write over each other's versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tiercheck import Checkpointer
from tiercheck.protocol.version import Kind
from tiercheck.trainer.tensors.leaves import NotCapturable


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
