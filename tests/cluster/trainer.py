"""Trains a tiny model whose every step couples all ranks, so that survivors notice a loss.

Deterministic: the same step gives the same bits on any attempt. Without STEPS the first attempt trains until
it is hit, and a later one TAIL steps beyond where it came back to, so that no test depends on speed. PACE is
in seconds per step, FAIL_AT=n exits at step n, GATE=file stands still once the file exists (first attempt
only; GATE_RANK=n: only this rank; GATE_AT=n: only n steps after a multiple of 20, at which jobs upload),
ALONE=1 uncouples the ranks, FAILURES=n makes the first n attempts go on until they are hit, DIVERGE_AT=n
makes the loss infinite from step n on (first attempt only), NOISY=1 takes an optimizer that draws random
numbers of its own. OBJECT=file: while it exists, the optimizer of rank 1 keeps an object that no checkpoint
can hold. SWAP=1 writes the weights through `.data` after each step. STOP=file: trains until the file exists,
when all ranks end after the same step.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tiercheck import Checkpointer

STEPS = int(os.environ.get("STEPS", "0"))
TAIL = int(os.environ.get("TAIL", "10"))
PACE = float(os.environ.get("PACE", "0.05"))
FAILURES = int(os.environ.get("FAILURES", "1"))
ENDLESS = 10**9


def build(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1234 + rank)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    kind = NoisySGD if os.environ.get("NOISY") == "1" else torch.optim.AdamW
    return model, kind(model.parameters(), lr=1e-2)


class NoisySGD(torch.optim.SGD):
    """Its step depends on more than parameters, gradients and state: it cannot be replayed."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.add_(torch.randn_like(parameter) * 1e-3)
        return super().step(closure)


def train_one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, factor: float = 1.0) -> float:
    """The loss of this rank."""
    data = torch.randn(8, 32)  # from the checkpointed RNG: a wrong restore shows in the digest
    loss = (model(data) - 1.0).square().mean() * factor
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of parameters and moments: 8 bytes in hex."""
    seen = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        seen.update(parameter.detach().numpy().tobytes())
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor):
                seen.update(value.detach().numpy().tobytes())
    return seen.hexdigest()


def undisturbed(rank: int, steps: int) -> Iterator[tuple[str, str]]:
    """Loss and digest after each step of a rank that nothing ever happened to. Ranks mix no gradients."""
    torch.set_num_threads(1)
    model, optimizer = build(rank)
    for _ in range(steps):
        loss = train_one_step(model, optimizer)
        yield loss.hex(), digest(model, optimizer)


def keep_object(optimizer: torch.optim.Optimizer, rank: int) -> None:
    state = next(iter(optimizer.state.values()), {})
    if rank == 1 and Path(os.environ.get("OBJECT", "/nonexistent")).exists():
        state["trace"] = object()
    else:
        state.pop("trace", None)


def evaluate_other_weights(model: torch.nn.Module) -> None:
    """As helpers for averaged weights do it: torch's counters do not see that they were there."""
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.fill_(7.0)
    for parameter, old in zip(model.parameters(), kept, strict=True):
        parameter.data.copy_(old)


def stand_still(gate: Path) -> None:
    while gate.exists():
        time.sleep(PACE)


def say(**line: object) -> None:
    line["at"] = time.time()
    sys.stdout.write(json.dumps(line) + "\n")  # in one piece: other threads write to the same log
    sys.stdout.flush()


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TIERCHECK_ATTEMPT"])
    gate, stop = (Path(os.environ.get(name, "/nonexistent")) for name in ("GATE", "STOP"))
    diverge_at = int(os.environ.get("DIVERGE_AT", ENDLESS))
    torch.set_num_threads(1)
    together = world > 1 and os.environ.get("ALONE") != "1"
    if together:
        dist.init_process_group("gloo")
    model, optimizer = build(rank)
    who = {"attempt": attempt, "rank": rank}
    with Checkpointer(model, optimizer) as checkpointer:
        start = checkpointer.restore()
        last = STEPS or (ENDLESS if "STOP" in os.environ or attempt <= FAILURES else start + TAIL)
        say(start=start, state=digest(model, optimizer), **who)
        for step in range(start + 1, last + 1):
            factor = math.inf if attempt == 1 and step >= diverge_at else 1.0
            loss = train_one_step(model, optimizer, factor)
            over = torch.tensor([float(stop.exists())])
            if together:
                dist.all_reduce(over)
            # Before it is saved: who comes back to a step, and was not told of it, could compare nothing.
            say(step=step, loss=loss.hex(), state=digest(model, optimizer), **who)
            keep_object(optimizer, rank)
            checkpointer.step(loss=loss)
            if os.environ.get("SWAP") == "1":
                evaluate_other_weights(model)
            if os.environ.get("FAIL_AT") == str(step):
                sys.exit(7)
            here = os.environ.get("GATE_AT", str(step % 20)) == str(step % 20)
            if attempt == 1 and here and str(rank) in os.environ.get("GATE_RANK", str(rank)):
                stand_still(gate)
            if over:
                break
            time.sleep(PACE)
    say(steps=step, digest=digest(model, optimizer), **who)
    if together:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
