"""Measures what it costs a training to be kept: its steps, memory, thread of Python and start.

Steps are measured as a training has them: many in a row, and nobody waits for the device between. To
synchronise after each step hides what a lost lead of the host costs; a median hides the steps that save.

A warm start must stay possible with a CUDA build of torch: a driver that was opened before a fork is lost to
the child.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu_acceptance.checks import Found, Setting, Skip
from benchmarks.gpu_acceptance.station import PATIENT, Station
from benchmarks.harness import MIB, ROOT, Figure, bytes_text, seconds_text
from benchmarks.workload import Turn
from tiercheck import Checkpointer
from tiercheck.protocol.version import Kind

EVERY = 3
"""The cadence of bf16 parameters with bf16 moments and gradients: a snapshot is as large as three deltas."""
_SLOTS = {Kind.SNAPSHOT: 3, Kind.DELTA: 8}
_SHAPES = ((2048, 24, 32), (1536, 16, 32), (1024, 8, 32))
"""Width, layers and batch of the model, the largest first: 1.2, 0.5 and 0.1 billion parameters."""
_BLOCK = 24
"""Steps that are measured together; as many use each slot at least once."""


def mean_step(
    step: Callable[[], None],
    count: int,
    settle: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Mean seconds of `count` steps in a row. `settle` waits for the device; it is called before the first
    and after the last."""
    settle()
    began = clock()
    for _ in range(count):
        step()
    settle()
    return (clock() - began) / count


def longer(plain: Sequence[float], kept: Sequence[float]) -> float:
    """By which share the steps of `kept` are longer, of means of blocks that were taken in turn: the median
    of the pairs."""
    return statistics.median(ours / bare - 1 for bare, ours in zip(plain, kept, strict=True))


def every_step_kept(setting: Setting) -> Found:
    """P3. Two equal trainings take turns of 24 steps, one of them kept."""
    shape = _shape(setting)
    rounds, block = (1, EVERY) if setting.small else (4, _BLOCK)
    dtype = torch.bfloat16 if setting.gpu else torch.float32
    plain, kept = (Turn(shape, setting.device, dtype, fused=True) for _ in range(2))
    settle = torch.cuda.synchronize if setting.gpu else lambda: None
    mean_step(plain.step, 4, settle)
    with Station(setting, every=EVERY, slots=_SLOTS, patience=None if setting.gpu else PATIENT):
        with Checkpointer(kept.model, kept.optimizer) as kept.checkpointer:
            checkpointer = kept.checkpointer
            checkpointer.restore()
            first = mean_step(kept.step, block, settle)  # each slot is registered once
            checkpointer.wait()
            skipped, kept.called, peaks = checkpointer.skipped + checkpointer.deltas_skipped, 0.0, [0, 0]
            kept.clock.take()
            means: tuple[list[float], list[float]] = ([], [])
            for _ in range(rounds):
                for number, turn in enumerate((plain, kept)):
                    _forget_peak(setting)
                    means[number].append(mean_step(turn.step, block, settle))
                    peaks[number] = max(peaks[number], _peak(setting))
                checkpointer.wait()
            skipped = checkpointer.skipped + checkpointer.deltas_skipped - skipped
        taken = f"{checkpointer.captured} snapshots and {checkpointer.deltas} deltas"
    steps = rounds * block
    bare, ours = (statistics.median(each) for each in means)
    called, around = kept.called / steps, kept.clock.take() / steps
    more, gradients = max(0, peaks[1] - peaks[0]), sum(each.nbytes for each in kept.model.parameters())
    return Found(
        f"{gradients // (2 if setting.gpu else 4) / 1e9:.2f} billion parameters, {taken}; mean step "
        f"{seconds_text(bare)}, kept "
        f"{seconds_text(ours)}; in Checkpointer.step {seconds_text(called)}, in the optimizer's hooks "
        f"{seconds_text(around)}; while slots "
        f"were used for the first time {seconds_text(first)} a step",
        good=checkpointer.captured > 0 and checkpointer.deltas > 0,
        figures=(
            Figure("mean step longer by", ratio=longer(*means), bound=0.02, unit="%"),
            Figure("skipped", ratio=skipped, bound=0, unit=""),
            Figure(
                "GPU memory",
                f"{bytes_text(more)}",
                ratio=more / gradients,
                bound=0.25,
                unit="x of the gradients",
            ),
        ),
    )


@dataclass
class _Spent:
    """Seconds of processor time in the training thread."""

    update: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    """Ends of steps without a snapshot."""
    snapshot: list[float] = field(default_factory=list)


def python_with_fsdp2(setting: Setting) -> Found:
    """P7. One rank, tiny layers: what is counted does not depend on how large they are."""
    if not dist.is_available():
        raise Skip("this torch has no torch.distributed")
    from torch.distributed.fsdp import fully_shard

    blocks = 4 if setting.small else 32
    steps = EVERY * (2 if setting.small else 8)
    store = Path(tempfile.mkdtemp(dir=setting.memory)) / "store"
    dist.init_process_group(
        "nccl" if setting.gpu else "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    try:
        torch.manual_seed(0)
        parts = [nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(9))) for _ in range(blocks)]
        model = nn.Sequential(*parts, *(nn.Linear(16, 16, bias=False) for _ in range(3))).to(setting.device)
        for part in model:
            fully_shard(part)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        _spend(setting, model, optimizer, None, EVERY)
        bare = _spend(setting, model, optimizer, None, steps)
        with Station(setting, every=EVERY, slots=_SLOTS), Checkpointer(model, optimizer) as checkpointer:
            checkpointer.restore()
            _spend(setting, model, optimizer, checkpointer, 2 * EVERY)
            kept = _spend(setting, model, optimizer, checkpointer, steps)
            taken = f"{checkpointer.captured} snapshots and {checkpointer.deltas} deltas"
    finally:
        dist.destroy_process_group()
    hooks = statistics.median(kept.update) - statistics.median(bare.update)
    update, snapshot = hooks + statistics.median(kept.plain), statistics.median(kept.snapshot)
    return Found(
        f"{len(list(model.parameters()))} parameters, {taken}",
        good=checkpointer.captured > 0 and checkpointer.deltas > 0,
        figures=(
            Figure("an update and the end of its step", ratio=update * 1e3, bound=2, unit=" ms"),
            Figure("the end of a step with a snapshot", ratio=snapshot * 1e3, bound=10, unit=" ms"),
        ),
    )


def _spend(
    setting: Setting,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpointer: Checkpointer | None,
    steps: int,
) -> _Spent:
    found = _Spent()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 16, device=setting.device)).square().mean().backward()
        if setting.gpu:
            torch.cuda.synchronize()
        began = time.thread_time()
        optimizer.step()
        found.update.append(time.thread_time() - began)
        if checkpointer is None:
            continue
        began = time.thread_time()
        checkpointer.step()
        ends = found.plain if checkpointer.step_number % EVERY else found.snapshot
        ends.append(time.thread_time() - began)
        # what the other thread does would be counted as this one's where both want the interpreter
        checkpointer.wait()
    return found


def _shape(setting: Setting) -> tuple[int, int, int]:
    """The largest model whose slots have room. Raises Skip."""
    if setting.small:
        return 64, 1, 1
    about = os.statvfs(setting.memory)
    for shape in _SHAPES:
        count = 12 * shape[1] * shape[0] ** 2 + 4352 * shape[0]
        need = (6 * _SLOTS[Kind.SNAPSHOT] + 2 * _SLOTS[Kind.DELTA]) * count
        if about.f_bavail * about.f_frsize > 1.2 * need:
            return shape
    raise Skip(f"the memory volume needs {need / 1e9:.1f} GB")


def _forget_peak(setting: Setting) -> None:
    if setting.gpu:
        torch.cuda.reset_peak_memory_stats()


def _peak(setting: Setting) -> int:
    return int(torch.cuda.max_memory_allocated()) if setting.gpu else 0


_WARM = """
import json, os, sys, time
began = time.perf_counter()
import torch, torch.distributed, torch._dynamo
import tiercheck.trainer.checkpointer
found = {"imports": time.perf_counter() - began, "touched": torch.cuda.is_initialized()}
found["threads"] = len(os.listdir("/proc/self/task"))
private = [l for l in open("/proc/self/smaps_rollup") if l.startswith("Private")]
found["private"] = 1024 * sum(int(l.split()[1]) for l in private)
began = time.perf_counter()
found["works"] = float(torch.ones(1, device=sys.argv[1]).sum()) == 1
print(json.dumps({**found, "kernel": time.perf_counter() - began}))
"""


def warm(setting: Setting) -> Found:
    """P6. What the launcher imports beside a running command."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WARM, setting.device],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return Found(f"it ended with {done.returncode}: {done.stderr[-200:]}", good=False)
    found = json.loads(done.stdout)
    told = "driver touched" if found["touched"] else "no driver touched"
    return Found(
        f"imports {seconds_text(found['imports'])}, {found['threads']} threads, {told}, its first kernel "
        f"after {seconds_text(found['kernel'])}, {bytes_text(max(found['private'], MIB))} of private memory",
        good=found["works"] and not found["touched"],
    )
