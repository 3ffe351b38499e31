"""Runs a block of docs/start/training-scripts.md with a small model, and says each step.

python documented_block.py NAME FOLDER
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from tiercheck import Checkpointer

PAGE = Path(__file__).parents[2] / "docs" / "start" / "training-scripts.md"
ROWS = torch.randn(48, 8, generator=torch.Generator().manual_seed(5))


def read_block(name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found, f"the page has no block {name}"
    return found[1]


class Model(nn.Module):
    """Takes what each block gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> object:
        loss = (self.layers(x) - x).square().mean()
        return loss if labels is None else (x, loss)


def get_batch(_: str) -> tuple[Tensor, Tensor]:
    rows = ROWS[torch.randint(len(ROWS), (4,))]
    return rows, rows


def module(model: Model) -> nn.Module:
    import lightning as L  # noqa: N812

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch, number):
            return self.model(**batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


class ForTrainer(Model):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> object:
        return {"loss": super().forward(x)}


def main(name: str, folder: str) -> None:
    os.chdir(Path(folder))
    end_step = Checkpointer.step

    def step(self: Checkpointer, loss: object = None) -> None:
        end_step(self, loss)
        self.wait()
        total = sum(each.detach().double().sum() for each in self._trained.model.parameters())
        print(json.dumps({"step": self.step_number, "weights": total.item().hex()}), flush=True)

    Checkpointer.step = step
    Checkpointer.every = 1
    torch.manual_seed(0)
    model = ForTrainer() if name == "huggingface" else Model()
    known = {
        "model": module(model) if name == "lightning" else model, "get_batch": get_batch, "device": "cpu",
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2), "steps": 24, "max_iters": 24,
        "scaler": torch.amp.GradScaler("cpu"), "dataset": [{"x": row} for row in ROWS],
    }  # fmt: skip
    exec(compile(read_block(name), str(PAGE), "exec"), known)


if __name__ == "__main__":
    main(*sys.argv[1:])
