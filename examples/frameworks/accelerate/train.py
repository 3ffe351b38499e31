"""A loop with Accelerate that comes back from any kill, on any number of processes.

python examples/frameworks/accelerate/train.py --folder /tmp/accelerate
torchrun --nproc-per-node 2 examples/frameworks/accelerate/train.py --folder /tmp/accelerate-2
"""

from __future__ import annotations

import argparse
import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tiercheck import Checkpointer, ResumableSampler


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network with Accelerate under TierCheck.")
    parser.add_argument("--folder", default="checkpoints", help="for snapshots outside a cluster")
    parser.add_argument("--every", type=int, help="steps between snapshots; default: as the job says")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    # Without a GPU it has to be set, or each of several processes would train for itself.
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    set_seed(0)
    data = TensorDataset(torch.randn(48, 8))
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-1, total_steps=100)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    order = ResumableSampler(len(data), global_batch_size=4, seed=0)
    loader = DataLoader(data, batch_sampler=order)  # each rank's part of it already, so it is not prepared

    state = {"scheduler": scheduler, "order": order}
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    with Checkpointer(model, optimizer, state=state, every=args.every, folder=args.folder) as checkpointer:
        checkpointer.restore()
        while order.epoch < args.epochs:
            for (x,) in order.follow(loader):
                x = x.to(accelerator.device)  # noqa: PLW2901
                with accelerator.accumulate(model):
                    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if not accelerator.sync_gradients:
                    continue  # in the middle of accumulated gradients there is no step to keep
                mean = accelerator.reduce(loss.detach(), "mean").item()
                if accelerator.is_main_process:
                    line = {"step": checkpointer.step_number + 1, "loss": mean, "loss_hex": mean.hex()}
                    sys.stdout.write(json.dumps(line) + "\n")
                    sys.stdout.flush()
                checkpointer.step(mean)
    accelerator.end_training()


if __name__ == "__main__":
    main()
