"""Promise: from a GPU the same bits arrive as from a CPU, and the same updates are made again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.scripted_sidecar import ScriptedSidecar
from tests.trainer.deltas.replaying import Script, survives
from tiercheck import Checkpointer
from tiercheck.trainer.deltas.encoding import decode, encode
from tiercheck.trainer.proof.state_hash import fingerprints
from tiercheck.trainer.tensors.tensor_parts import have_same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

WIDTH = 2048  # a layer of 16 MiB: several chunks in flight


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)).cuda()


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_on_the_gpu_are_replayed(
    delta_sidecar: ScriptedSidecar, kernel: str, dtype: torch.dtype
) -> None:
    def build() -> Script:
        model = layers().to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **{kernel: True})

        def update() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(64, WIDTH, device="cuda", dtype=dtype)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return loss

        return Script(model, [optimizer], update)

    survives(delta_sidecar, build)


def test_gradient_scaler_with_a_fused_kernel_is_replayed(delta_sidecar: ScriptedSidecar) -> None:
    def build() -> Script:
        model = layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8, growth_interval=2)

        def update() -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(64, WIDTH, device="cuda")).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss

        return Script(model, [optimizer], update, {"scaler": scaler})

    survives(delta_sidecar, build)


def test_snapshot_is_the_state_after_its_step_though_training_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    states = {}
    with Checkpointer(model, optimizer, folder=tmp_path, every=1, keep=9) as checkpointer:
        for step in range(1, 5):
            optimizer.zero_grad()
            model(torch.randn(64, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            states[step] = {name: value.cpu() for name, value in model.state_dict().items()}
            checkpointer.step()
    for step, state in states.items():
        stored = load_file(tmp_path / "rank-0-of-1" / f"{step:012d}-0.safetensors")
        for name, value in state.items():
            assert have_same_bits(stored[f"model/{name}"], value)


def test_fingerprint_is_the_same_on_every_device() -> None:
    values = [torch.randn(100_003), torch.randn(7), torch.randn(3000, 1000).to(torch.bfloat16)]
    on_cpu = fingerprints(values)
    assert fingerprints([value.cuda() for value in values]) == on_cpu


def test_sparse_forms_found_on_the_gpu_are_lossless() -> None:
    embedding = torch.zeros(10_000, 64, device="cuda")
    embedding[[7, 4711]] = -1.5
    encoded = encode(embedding)
    assert encoded.nbytes == 2 * (64 * 4 + 4)
    restored = decode(encoded.parts.get, encoded.about, torch.device("cuda"))
    assert restored is not None
    assert have_same_bits(restored, embedding)
