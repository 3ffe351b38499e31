"""Trains a small GPT on real text, and needs little to survive every failure.

The same script runs on a laptop and in a TierCheckJob:

    python examples/train_gpt.py --folder /tmp/gpt
    torchrun --nproc-per-node 2 examples/train_gpt.py --folder /tmp/gpt

Stop it in any way and start it again: it continues, and every loss is bitwise what it would have been. The
text is Python's own documentation and sources, byte by byte, as every machine with Python has them.
Parameters are sharded over the ranks with FSDP2. Rank 0 prints one JSON line per step, and at the end a
digest of all ranks' parameters.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import math
import os
import pydoc_data.topics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tiercheck import Checkpointer

VOCABULARY = 256  # bytes


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        shape = (batch, context, self.heads, width // self.heads)
        q, k, v = (
            part.view(shape).transpose(1, 2) for part in self.attend(self.norm1(x)).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.shrink(F.gelu(self.expand(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads=max(1, width // 32)) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = (
                    0.02 / math.sqrt(2 * layers)
                    if name.endswith(("project.weight", "shrink.weight"))
                    else 0.02
                )
                nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text(limit: int = 4_000_000) -> Tensor:
    """Python's documentation, then its library's sources in order of their names, as one tensor of bytes."""
    text = bytearray(
        "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).encode()
    )
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Batches:
    """Random windows of the text. Its state is the position: a generator per epoch would do as well."""

    def __init__(self, text: Tensor, batch: int, context: int, seed: int) -> None:
        self.text, self.batch, self.context = text, batch, context
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self.text) - self.context - 1, (self.batch,), generator=self.generator)
        window = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        return window[:, :-1], window[:, 1:]

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])


def mean_over_ranks(value: Tensor, ranks: int) -> float:
    """Gathered and added in the order of the ranks, so that the sum is the same bits every time."""
    if ranks == 1:
        return value.item()
    everyones = [torch.zeros_like(value) for _ in range(ranks)]
    dist.all_gather(everyones, value)
    return sum(part.double().item() for part in everyones) / ranks


def digest(model: nn.Module, ranks: int) -> str:
    """SHA-256 over the digests of all ranks' own shards, in the order of the ranks."""
    mine = hashlib.sha256()
    for name, value in model.state_dict().items():
        local = value.to_local() if hasattr(value, "to_local") else value
        local = local.detach().cpu().contiguous()
        mine.update(name.encode() + ctypes.string_at(local.data_ptr(), local.nbytes))
    everyones = [mine.hexdigest()]
    if ranks > 1:
        everyones = [""] * ranks
        dist.all_gather_object(everyones, mine.hexdigest())
    return hashlib.sha256("".join(everyones).encode()).hexdigest()


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")  # in one piece: other threads write to the same log
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT under TierCheck.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, help="steps between snapshots; default: as the job says")
    parser.add_argument("--folder", default="checkpoints", help="for snapshots outside a cluster")
    args = parser.parse_args()

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    torch.manual_seed(args.seed)  # the same on all ranks: they begin with the same parameters
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # or a GPU's matrix products are refused by what follows
    torch.use_deterministic_algorithms(True)
    model = GPT(args.layers, args.width, args.context).to(device)
    if ranks > 1:
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        for block in model.blocks:
            fully_shard(
                block, reshard_after_forward=False
            )  # so small that gathering twice costs more than memory
        fully_shard(model)

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / 20) * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / args.steps))))
        ),
    )
    batches = Batches(read_text(), args.batch, args.context, seed=args.seed * 1000 + rank)

    with Checkpointer(
        model,
        optimizer,
        state={"schedule": schedule, "batches": batches},
        every=args.every,
        folder=args.folder,
    ) as checkpointer:
        for step in checkpointer.steps(args.steps):
            with step:  # if another rank is lost, this process stays, and makes the step again
                tokens, targets = (part.to(device) for part in batches.next())
                loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                mean = mean_over_ranks(loss.detach(), ranks)
                # Before the step is kept: what is restored was printed, whenever the process dies.
                if rank == 0:
                    say(
                        step=step + 1,
                        loss=mean,
                        loss_hex=mean.hex(),
                        attempt=checkpointer.attempt,
                        rank=0,
                        time=time.time(),
                    )
                checkpointer.step(mean)
        combined = digest(model, ranks)
        if rank == 0:
            say(digest=combined, steps=checkpointer.step_number)
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
