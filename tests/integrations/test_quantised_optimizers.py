"""Quantised optimizers and weights of torchao and bitsandbytes resume with the same losses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck import Checkpointer
from tiercheck.trainer.state.replayable import why_not_replayable


def _quantised(name: str, parameters: Iterable[Tensor]) -> Optimizer:
    # Both packages take seconds to import, which each process that only collects the tests would wait for.
    package, name = name.split(".")
    module = (
        pytest.importorskip("torchao.optim") if package == "torchao" else pytest.importorskip(package).optim
    )
    optimizer: Optimizer = getattr(module, name)(parameters, lr=1e-3)
    return optimizer


def _model(weights: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128))
    if weights:
        training = pytest.importorskip("torchao.prototype.quantized_training")
        pytest.importorskip("torchao.quantization").quantize_(model, getattr(training, weights)())
    return model


@pytest.fixture(params=["eager", pytest.param("compiled", marks=pytest.mark.extended)])
def as_compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those of torchao compile their arithmetic, which takes half a minute of C++ and changes nothing of
    their states."""
    if request.param == "eager":
        torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.mark.usefixtures("as_compiled")
@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("torchao.AdamW8bit", ""), ("torchao.AdamW4bit", ""), ("torchao.AdamWFp8", ""),
        ("bitsandbytes.AdamW8bit", ""), ("bitsandbytes.Lion8bit", ""),
        ("torchao._AdamW", "int8_weight_only_quantized_training"), ("torchao.AdamW8bit", "bitnet_training"),
    ],
)  # fmt: skip
def test_quantised_state_comes_back_exactly(tmp_path: Path, name: str, weights: str) -> None:
    def life(seed: int, folder: Path, end: int) -> list[float]:
        torch.manual_seed(seed)
        model = _model(weights)
        losses = []
        with Checkpointer(
            model, _quantised(name, model.parameters()), folder=folder, every=3
        ) as checkpointer:
            (optimizer,) = checkpointer._trained.optimizers
            assert ("rounds as its class decides" in why_not_replayable(optimizer)) == bool(weights)
            for step in range(checkpointer.restore(), end):
                torch.manual_seed(1000 + step)
                optimizer.zero_grad()
                loss = model(torch.randn(4, 128)).square().mean()
                loss.backward()
                optimizer.step()
                checkpointer.step()
                losses.append(float(loss.detach()))
            assert checkpointer.wait(60)
            assert checkpointer.skipped == 0
            assert checkpointer.captured
        return losses

    whole = life(0, tmp_path / "whole", 9)
    life(0, tmp_path / "cut", 6)
    assert life(1, tmp_path / "cut", 9) == whole[6:]
