"""What a step costs to keep: bytes of a delta beside bytes of a snapshot, as the sidecar holds them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from benchmarks.harness import MIB, Figure, Outcome, Scale, bytes_text
from benchmarks.job import Job, until
from benchmarks.workload import Gpt, MasterAdamW
from tiercheck import Checkpointer
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.version import Kind

_STEPS = 4


@dataclass(frozen=True)
class Case:
    """A kind of training."""

    name: str
    build: Callable[[int], nn.Module]
    """By width."""
    optimizer: Callable[[nn.Module], Optimizer]
    bound: float | None = None
    note: str = ""


def adamw(model: nn.Module) -> Optimizer:
    return AdamW((parameter for parameter in model.parameters() if parameter.requires_grad), lr=1e-4)


CASES = (
    Case(
        "delta bytes / snapshot bytes, bf16 gradients and fp32 state",
        lambda width: Gpt(width, 4).bfloat16(),
        lambda model: MasterAdamW(model.parameters()),
        1 / 6,
        "fp32 master weights and moments: 2 of 14 bytes a parameter",
    ),
    Case(
        "delta bytes / snapshot bytes, LoRA",
        lambda width: Gpt(width, 4, adapters=2),
        adamw,
        1 / 100,
        "rank 2 beside every linear layer",
    ),
    Case(
        "delta bytes / snapshot bytes, fp32 gradients and fp32 state",
        lambda width: Gpt(width, 4),
        adamw,
        note="4 of 12 bytes a parameter",
    ),
)


def run(scale: Scale) -> Outcome:
    """One short training per case."""
    width = 128 if scale.quick else 512
    rows, sizes = [], {}
    for case in CASES:
        found = measure(case, width)
        if isinstance(found, str):
            rows.append(Figure(case.name, bound=case.bound, note=found, unit="%"))
            continue
        sizes[case.name] = found
        rows.append(
            Figure(
                case.name,
                bytes_text(found["delta"]),
                bytes_text(found["snapshot"]),
                found["delta"] / found["snapshot"],
                case.bound,
                note=case.note,
                unit="%",
            )
        )
    return Outcome(rows, {"sizes": sizes})


def measure(case: Case, width: int) -> dict[str, int] | str:
    """Bytes of one snapshot and of the largest delta; a sentence if the trainer takes no deltas."""
    torch.manual_seed(0)
    model = case.build(width)
    optimizer = case.optimizer(model)
    state = sum(parameter.nbytes for parameter in model.parameters())
    with Job(limit=32 * state + 256 * MIB, every=_STEPS, delta=DeltaMode.AUTO) as job:
        job.begin()
        os.environ |= job.trainer_env(0)
        with Checkpointer(model, optimizer) as checkpointer:
            checkpointer.restore()

            def train_on() -> None:
                step(model, optimizer)
                checkpointer.step()
                checkpointer.wait(60)

            for _ in range(3 * _STEPS):
                train_on()
            return _sizes(job, train_on)


def step(model: nn.Module, optimizer: Optimizer) -> Tensor:
    """One step on random tokens; returns the loss."""
    tokens = torch.randint(0, 4096, (2, 128))
    optimizer.zero_grad()
    loss: Tensor = model(tokens)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _sizes(job: Job, train_on: Callable[[], None]) -> dict[str, int] | str:
    """Trains on until there is a delta: their slots are made behind the training, which may be faster."""

    def sealed() -> dict[str, int] | str | None:
        report = job.report(0)
        largest = {kind: [each.bytes for each in report.holdings if each.kind is kind] for kind in Kind}
        if largest[Kind.SNAPSHOT] and largest[Kind.DELTA]:
            return {"snapshot": max(largest[Kind.SNAPSHOT]), "delta": max(largest[Kind.DELTA])}
        if not report.trainer.no_deltas:
            train_on()
        return report.trainer.no_deltas or None

    try:
        return until(sealed, "a snapshot and a delta are held", 20) or ""
    except TimeoutError:
        problems = "; ".join(each.message for each in job.report(0).problems)
        return f"no deltas were kept: {problems or 'no reason was given'}"
