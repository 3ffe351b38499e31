"""Trains in a loop that outlives the loss of another rank, and says at every step who it is.

KIND: ddp, fsdp, hsdp, tp or pp. Outside a job it trains STEPS steps with torch alone: what the losses should
be. In a job it trains until it is hit for the LIVES-th time (1 if not given), and then TAIL steps; PACE is in
seconds per step. With SPREAD=1 it exchanges a value before its restore, which a rank that builds its model
alone cannot do. PLAN, "PLACE=RANK;...": in the n-th attempt that rank kills itself there, of all PLACES, when
it has trained for a while; STRIKE=SIGSTOP: it only stops. After SIGUSR1 a rank spoils a bit of a gradient and
suspects the step. PLAIN=1: no `with step`. AGAIN, "PLACE=RANK": in the second attempt that rank kills itself
before it has `reconnected`, `loaded` or `entered` a step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tiercheck import Checkpointer
from tiercheck.trainer.inprocess.groups import ReconnectableGroups
from tiercheck.trainer.inprocess.steps import StepLoop
from tiercheck.trainer.restore.restoring import Restoring
from tiercheck.trainer.save import staging
from tiercheck.trainer.save.capturing import Capturing
from tiercheck.trainer.save.deltas import Deltas
from tiercheck.trainer.state import slot_file

WIDTH, TAIL = 256, 12
PLACES = (
    "loader", "step begins", "in a collective", "forward 0", "forward 1", "forward done", "backward 1",
    "between buckets", "backward 0", "backward done", "clipped", "update begins", "updated", "scheduled",
    "gradients freed", "before step", "delta begun", "snapshot begun", "mid-copy", "before-state-word",
    "after-state-word", "stepped", "evaluation", "step left",
)  # fmt: skip
NOT_IN_PIPELINES = {"in a collective", "forward 1", "forward done", "backward 1", "evaluation"}
"""Each of their ranks has one block."""
_PLAN = [each.rsplit("=", 1) for each in filter(None, os.environ.get("PLAN", "").split(";"))]
_REST = 1.2
"""Seconds of training in an attempt before it is struck: the recovery before it is over then. Five times as
long in the first, which has no version yet."""
_began: dict[int, float] = {}
"""When this process first ended a step, by attempt."""


def attempt() -> int:
    return int(os.environ.get("TIERCHECK_ATTEMPT", "0"))


def wanted(place: str) -> bool:
    """Whether this attempt is to be struck there, by now."""
    number = attempt()
    due = 0 < number <= len(_PLAN) and time.monotonic() - _began.get(number, 1e12) > _REST * (
        5 if number == 1 else 1
    )
    return due and _PLAN[number - 1][0] == place


def at(place: str) -> None:
    """Ends this process if it is to be struck here."""
    if wanted(place) and os.environ["RANK"] == _PLAN[attempt() - 1][1]:
        say(struck=place, rank=int(os.environ["RANK"]))
        os.kill(os.getpid(), signal.Signals[os.environ.get("STRIKE", "SIGKILL")])


def before(method: Callable[..., Any], place: str) -> Callable[..., Any]:
    def called(*given: Any, **named: Any) -> Any:
        at(place)
        return method(*given, **named)

    return called


def lost_in_second_attempt(place: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def called(*given: Any, **named: Any) -> Any:
        if os.environ.get("AGAIN") == f"{place}={os.environ['RANK']}" and attempt() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*given, **named)

    return called


def leaving(method: Callable[..., bool]) -> Callable[..., bool]:
    def left(loop: StepLoop, error: BaseException | None, trace: object) -> bool:
        if error is not None:
            held = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")}
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            say(left=time.time(), attempt=attempt(), rank=int(os.environ["RANK"]), pages=pages, **held)
        return method(loop, error, trace)

    return left


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down, self.number = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at(f"forward {self.number}")
        given: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        if given.requires_grad:
            given.register_hook(lambda _: at(f"backward {self.number}"))
        return given


class Stage(nn.Module):
    """A model that is one of a pipeline's stages."""

    def __init__(self, part: nn.Module, rank: int, world: int) -> None:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe  # takes a second

        super().__init__()
        self.part, self.is_last = part, rank == world - 1
        stage = PipelineStage(part, rank, world, torch.device("cpu"))
        self.schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, _: (y - 1.0).square().mean())

    def train_on(self, x: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        more = {"target": x, "losses": losses} if self.is_last else {}
        self.schedule.step(*([x] if self.schedule._stage.is_first else []), **more)
        return torch.stack(losses).mean() if losses else next(self.parameters()).detach().sum()


def build(kind: str, world: int) -> nn.Module:
    torch.manual_seed(5)
    if kind == "pp":
        rank = dist.get_rank()
        head = [nn.Linear(WIDTH, 1)] if rank == world - 1 else []
        return Stage(nn.Sequential(Block(0), *head), rank, world)
    model: nn.Module = nn.Sequential(Block(0), Block(1), nn.Linear(WIDTH, 1))
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        for block in list(model.children())[:2]:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shards = mesh["data"]
    elif kind == "hsdp":
        shards = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("copies", "shards"))
    else:
        shards = init_device_mesh("cpu", (world,))
    for block in model.children():
        fully_shard(block, mesh=shards)
    return fully_shard(model, mesh=shards)


def train_on(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if isinstance(model, Stage):
        return model.train_on(x)
    loss: torch.Tensor = (model(x) - 1.0).square().mean()
    at("forward done")
    loss.backward()
    return loss


def say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")  # in one piece: other threads write to the same log
    sys.stdout.flush()


def main() -> None:
    kind, total = os.environ["KIND"], int(os.environ["STEPS"]) or 10**9
    lives, last = int(os.environ.get("LIVES", "0")) or len(_PLAN) or 1, 10**9
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if os.environ.get("SPREAD") == "1":
        dist.all_reduce(torch.ones(1))
    model = build(kind, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.999)
    torch.manual_seed(100 + (rank // 2 if kind == "tp" else rank))
    checkpointer: Checkpointer | None = None
    steps: Iterable[Any] = range(total)
    if "TIERCHECK_ATTEMPT" in os.environ:
        checkpointer = Checkpointer(model, optimizer, state={"schedule": schedule})
        steps = checkpointer.steps(total)
    first = next(model.parameters())
    of_blocks = [each for part in model.modules() if isinstance(part, Block) for each in part.parameters()]
    first.register_post_accumulate_grad_hook(lambda _: at("between buckets"))
    optimizer.register_step_pre_hook(lambda *_: at("update begins"))
    optimizer.register_step_post_hook(lambda *_: at("updated"))
    StepLoop.leave = leaving(StepLoop.leave)  # type: ignore[method-assign]
    ReconnectableGroups.reconnect = lost_in_second_attempt(  # type: ignore[method-assign]
        "reconnected", ReconnectableGroups.reconnect
    )
    Restoring.load = lost_in_second_attempt("loaded", Restoring.load)  # type: ignore[method-assign]
    StepLoop.enter = lost_in_second_attempt("entered", StepLoop.enter)  # type: ignore[method-assign]
    if _PLAN:
        staging.failpoint = slot_file.failpoint = at
        Deltas.end_step = before(Deltas.end_step, "delta begun")  # type: ignore[method-assign]
        Capturing.take = before(Capturing.take, "snapshot begun")  # type: ignore[method-assign]
    spoilt: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: spoilt.append(number))
    for step in steps:
        at("loader")
        with nullcontext() if checkpointer is None or os.environ.get("PLAIN") == "1" else step:
            at("step begins")
            if wanted("in a collective"):  # it waits for the others there
                threading.Timer(0.01, at, ["in a collective"]).start()
                time.sleep(0.05 * (str(rank) != _PLAN[attempt() - 1][1]))
            loss = train_on(model, torch.randn(8, WIDTH))
            at("backward done")
            nn.utils.clip_grad_norm_(of_blocks, 1.0)
            if checkpointer is not None and spoilt:
                spoilt.clear()
                shard = getattr(first.grad, "_local_tensor", first.grad)
                shard.view(-1).view(torch.int32)[-1] ^= 1 << 20
                checkpointer.suspect("two runs of the step differ")
            at("clipped")
            optimizer.step()
            schedule.step()
            at("scheduled")
            optimizer.zero_grad()
            at("gradients freed")
            at("before step")
            if checkpointer is not None:
                checkpointer.step(loss)
            at("stepped")
            where = getattr(first, "_local_tensor", first).data_ptr()
            now, pid, number = time.time(), os.getpid(), attempt()
            say(step=int(step), rank=rank, attempt=number, loss=loss.item().hex(), pid=pid, at=where, t=now)
            _began.setdefault(number, time.monotonic())
            if kind != "pp" and step % 4 == 0:
                with torch.no_grad():
                    model.eval()(torch.ones(2, WIDTH))
                    at("evaluation")
                    model.train()
            time.sleep(float(os.environ.get("PACE", "0")))
            if number > lives and last == 10**9:
                last = step + TAIL
            if step == last:
                break
        at("step left")
    say(done=rank)
    if checkpointer is not None:
        checkpointer.close()


if __name__ == "__main__":
    main()
