"""Measures what Python in the training thread costs a model of many sharded parameters.

Tensors are tiny, so that what is measured is what is paid for their number. Time of the thread's own, in
which waits do not count.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.harness import MIB, Figure, Outcome, Scale, seconds_text
from benchmarks.job import Job
from tiercheck import Checkpointer
from tiercheck.protocol.directive import DeltaMode

FEW, MANY = 291, 1138
"""Parameters of an 8B and of a 405B model (Llama 3: 9 per layer and 3, of 32 and 126 layers)."""
UPDATE, SNAPSHOT = 0.0025, 0.010
"""Seconds promised for FEW parameters, with an update each, and with a snapshot."""
JOURNAL = 20e-6
"""Seconds promised for the journal of a step, whatever the model."""
GROWTH = 1.2
"""At most as many times as long for each parameter with MANY, whose tensors are colder in the cache."""
_PER_LAYER = 9
_EVERY = 4


def run(scale: Scale) -> Outcome:
    """Few parameters, then many."""
    torch.set_num_threads(1)
    steps = 12 if scale.quick else 80
    found = {str(count): measure(count, steps) for count in (FEW, MANY)}
    return Outcome(figures(found), found)


def measure(parameters: int, steps: int) -> dict[str, float]:
    """Median seconds per update without and with a snapshot, of a model sharded with FSDP2 by one rank, a
    delta at every step."""
    with (
        tempfile.NamedTemporaryFile() as ranks,
        Job(limit=512 * MIB, every=_EVERY, delta=DeltaMode.AUTO) as job,
    ):
        dist.init_process_group("gloo", init_method=f"file://{ranks.name}", rank=0, world_size=1)
        try:
            job.begin()
            os.environ |= job.trainer_env(0)
            return _train(sharded(parameters), steps)
        finally:
            dist.destroy_process_group()


def sharded(parameters: int) -> nn.Module:
    """Layers of nine parameters each, as today's transformers have them, and the rest in the last one."""
    layers = [_layer(_PER_LAYER) for _ in range(parameters // _PER_LAYER)] + [_layer(parameters % _PER_LAYER)]
    model, mesh = nn.Sequential(*layers), init_device_mesh("cpu", (1,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _layer(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(count)])


def _train(model: nn.Module, steps: int) -> dict[str, float]:
    clock = _Clock()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    with Checkpointer(model, optimizer) as checkpointer:
        checkpointer.restore()
        for name in ("_before_update", "_after_update", "step"):
            setattr(checkpointer, name, clock.timed(getattr(checkpointer, name)))
        # The hooks were registered before the clock was: what is called are the methods that the optimizer
        # knows.
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            for key, hook in hooks.items():
                hooks[key] = clock.timed(hook)
        plain, with_snapshot = [], []
        for number in range(1, steps + 1):
            optimizer.zero_grad()
            model(torch.randn(2, 8)).square().mean().backward()
            clock.take()
            optimizer.step()
            checkpointer.step()
            (with_snapshot if number % _EVERY == 0 else plain).append(clock.take())
            checkpointer.wait(60)
        journal = _journal(checkpointer, steps)
    half = len(plain) // 2, len(with_snapshot) // 2  # the first steps warm up
    return {
        "update": statistics.median(plain[half[0] :]),
        "snapshot": statistics.median(with_snapshot[half[1] :]),
        "journal": journal,
        "readings": _bare_readings(model, optimizer, steps),
    }


def _journal(checkpointer: Checkpointer, steps: int) -> float:
    """Seconds per step that the journal takes."""
    seconds = []
    for number in range(20 * steps):
        begin = time.thread_time()
        checkpointer._resume.note(checkpointer.step_number + number, 0.5)
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds)


def _bare_readings(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """Seconds that torch's in-place counters of all that is watched take per update, read when `Watch` reads
    them: before and after the update, and at the end of the step. Nothing is compared, and nothing else is
    done."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [tensor for whole in (*model.parameters(), *kept) for tensor in _and_shard(whole)]
    read, seconds = attrgetter("_version"), []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(2, 8)).square().mean().backward()
        found = 0.0
        for between in (optimizer.step, lambda: None, lambda: None):
            begin = time.thread_time()
            list(map(read, tensors))
            found += time.thread_time() - begin
            between()
        seconds.append(found)
    return statistics.median(seconds[steps // 2 :])


def _and_shard(tensor: torch.Tensor) -> list[torch.Tensor]:
    shard = getattr(tensor, "_local_tensor", None)
    return [tensor] if shard is None else [tensor, shard]


class _Clock:
    """Sums up the training thread's own time inside of calls."""

    def __init__(self) -> None:
        self._sum, self._deep = 0.0, 0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            self._deep += 1
            begin = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                self._deep -= 1
                if not self._deep:
                    self._sum += time.thread_time() - begin

        return timed

    def take(self) -> float:
        found, self._sum = self._sum, 0.0
        return found


def figures(found: dict[str, Any]) -> list[Figure]:
    few, many = found[str(FEW)], found[str(MANY)]
    about = "FSDP2, AdamW; counters alone {}"
    rows = [
        Figure(f"Python in the training thread, {FEW} sharded parameters, per {what}",
            seconds_text(few[what]),
               f"promised {seconds_text(promised)}", few[what] / promised, 1.0,
               note=about.format(seconds_text(few["readings"])))
        for what, promised in (("update", UPDATE), ("snapshot", SNAPSHOT))
    ]  # fmt: skip
    rows.append(
        Figure(f"journal of a step, {MANY} sharded parameters", seconds_text(many["journal"]),
               f"promised {seconds_text(JOURNAL)}", many["journal"] / JOURNAL, 1.0)
    )  # fmt: skip
    rows += [
        Figure(f"the same with {MANY}, per {what}, for each parameter",
               seconds_text(many[what] / MANY), seconds_text(few[what] / FEW),
               many[what] / few[what] * FEW / MANY, GROWTH, note=about.format(seconds_text(many["readings"])))
        for what in ("update", "snapshot")
    ]  # fmt: skip
    return rows
