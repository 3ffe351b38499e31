"""Runs a matrix of runs, and prints what each rank of each said.

`python matrix_runs.py FOLDER RUNS`, RUNS a file of JSON.

Its process forks the ranks of each run, so that a rank costs milliseconds and can really be killed. It has no
thread of its own when it forks (with a TCPStore's server in it, ranks now and then hung). A run starts when
the one that it comes `after` has ended, beside others while no more than `TOGETHER` ranks live.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import shutil
import signal
import sys
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tiercheck import Checkpointer
from tiercheck.trainer.proof.state_hash import fingerprints
from tiercheck.trainer.replicas.replicas import Partitions
from tiercheck.trainer.restore import resharding
from tiercheck.trainer.state.aliasing import Wrapped
from tiercheck.trainer.state.capture import take_inventory

EVERY = 2
TOGETHER = 8
WIDE = 1301
"""Wide enough for replicas to store shares of a layer, and no multiple of anything."""
SECONDS = 120
Kept = tuple[type[torch.optim.Optimizer], dict[str, Any]]
ELEMENTWISE: dict[str, Kept] = {
    "foreach AdamW": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),  # whose state has other shapes than its parameters
}
AXES = {
    "fsdp": ("data",),
    "hybrid": ("replica", "data"),
    "tensor": ("tensor",),
    "fsdp-tensor": ("data", "tensor"),
    "pipeline": ("pipe",),
    "pipeline-fsdp-tensor": ("pipe", "data", "tensor"),
}
"""Dimensions of the mesh, two ranks along each but the data's, which has the rest. ddp and zero have none."""


class Averaged(nn.Module):
    """An exponential average of a model's parameters, each sharded like itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._followed = dict(model.named_parameters())
        for name, parameter in self._followed.items():
            self.register_buffer(name.removeprefix("module.").replace(".", "_"), parameter.detach().clone())

    @torch.no_grad()
    def follow(self) -> None:
        for average, parameter in zip(self.buffers(), self._followed.values(), strict=True):
            average.mul_(0.9).add_(parameter, alpha=0.1)


class Run:
    """A training on the ranks of the process group. `quirk`: tied, frozen, groups, bf16, averaged or
    nothing: then FSDP shards each layer by itself.
    """

    def __init__(self, kind: str, optimizer: str, quirk: str) -> None:
        self.kind, self.quirk = kind, quirk
        self.mesh = _mesh(AXES[kind], dist.get_world_size()) if kind in AXES else None
        torch.manual_seed(0)
        layers = [nn.Linear(9, 34), nn.ReLU(), nn.Linear(34, WIDE), nn.ReLU(), nn.Linear(WIDE, 34), nn.ReLU()]
        # Five rows leave some ranks none; of thirty, replicas store shares.
        model = nn.Sequential(*layers, nn.Linear(34, WIDE), nn.ReLU(), nn.Linear(WIDE, 5 if quirk else 30))
        if quirk == "frozen":
            model[2].weight.requires_grad_(False)
            model[4].bias.requires_grad_(False)
        self.dtype = torch.bfloat16 if quirk == "bf16" else torch.float32
        self.model = self._wrapped(model.to(self.dtype))
        self.optimizers = list(self._optimizers(optimizer))
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, 0.5) for each in self.optimizers]
        self.position = {"samples": 0}
        self.state: dict[str, Any] = {"position": self.position}
        self.state |= {f"scheduler{index}": each for index, each in enumerate(self.schedulers)}
        self.average = Averaged(self.model) if quirk == "averaged" else None
        if self.average is not None:
            self.state["average"] = self.average
        self.stage: PipelineStage | None = None
        if self.mesh is not None and "pipe" in AXES[kind]:
            where, group = self.mesh["pipe"].get_local_rank(), self.mesh.get_group("pipe")
            self.stage = PipelineStage(self.model, where, 2, torch.device("cpu"), group=group)
            self._schedule = Schedule1F1B(self.stage, 2, loss_fn=lambda out, _: out.float().square().mean())
        self.seed(1)

    def _wrapped(self, model: nn.Sequential) -> nn.Module:
        mesh = self.mesh
        if mesh is None:
            self._tie(model)
            return nn.parallel.DistributedDataParallel(
                model, gradient_as_bucket_view=True, bucket_cap_mb=0.01
            )
        axes = AXES[self.kind]
        named = list(model.named_children())
        if "pipe" in axes:
            model = nn.Sequential(OrderedDict(named[4:] if mesh["pipe"].get_local_rank() else named[:4]))
        if "tensor" in axes:
            plan = {
                "0": ColwiseParallel(),
                "2": RowwiseParallel(),
                "4": ColwiseParallel(),
                "6": RowwiseParallel(),
            }
            plan["8"] = ColwiseParallel(output_layouts=Replicate())
            here = {name: each for name, each in plan.items() if name in dict(model.named_children())}
            parallelize_module(model, mesh["tensor"], here)
        self._tie(model)
        if "data" in axes:
            data = mesh[tuple(axis for axis in axes if axis in ("replica", "data"))]
            for layer in [] if self.quirk else [each for each in model if isinstance(each, nn.Linear)]:
                fully_shard(layer, mesh=data)
            fully_shard(model, mesh=data)
        return model

    def _tie(self, model: nn.Sequential) -> None:
        if self.quirk == "tied":
            model[6].weight = model[2].weight

    def _optimizers(self, name: str) -> Iterator[torch.optim.Optimizer]:
        """Muon, which mixes all elements of a matrix, is used as it is meant: with another for what is no
        matrix."""
        trained = {name: each for name, each in self.model.named_parameters() if each.requires_grad}
        if name != "Muon":
            yield self._optimizer(trained, *ELEMENTWISE[name])
            return
        yield self._optimizer(
            {n: each for n, each in trained.items() if each.dim() == 2}, torch.optim.Muon, {"lr": 1e-2}
        )
        yield self._optimizer(
            {n: each for n, each in trained.items() if each.dim() != 2}, *ELEMENTWISE["foreach AdamW"]
        )

    def _optimizer(self, of: dict[str, Tensor], make: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
        groups: Any = list(of.values())
        if self.quirk == "groups":
            odd = [each for name, each in of.items() if name.removeprefix("module.")[0] in "26"]
            even = [each for name, each in of.items() if name.removeprefix("module.")[0] not in "26"]
            groups = [{"params": even}, {"params": odd, "lr": 1e-3, "weight_decay": 0.1}]
        if self.kind == "zero":
            return ZeroRedundancyOptimizer(groups, make, **options)
        return make(groups, **options)

    def seed(self, number: int) -> None:
        """Ranks along other dimensions than the data's see the same batches."""
        if self.mesh is None:
            torch.manual_seed(number + dist.get_rank())
            return
        axes = [axis for axis in AXES[self.kind] if axis in ("replica", "data")]
        torch.manual_seed(
            number + sum((10 if axis == "replica" else 1) * self.mesh[axis].get_local_rank() for axis in axes)
        )

    def backward(self) -> float:
        batch = torch.randn(6, 9).to(self.dtype)
        self.position["samples"] += 6
        if self.stage is None:
            loss: Tensor = self.model(batch).float().square().mean()
            loss.backward()
            return loss.item()
        if self.stage.is_first:
            self._schedule.step(batch)
            return 0.0
        losses: list[Tensor] = []
        self._schedule.step(target=batch, losses=losses)
        return sum(each.item() for each in losses)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def after(self) -> None:
        """What else a script does at the end of a step."""
        for scheduler in self.schedulers:
            scheduler.step()
        if self.average is not None:
            self.average.follow()

    def whole(self) -> dict[str, str]:
        """Fingerprints of the gathered state, and learning rates. A collective call."""
        beside = {} if self.average is None else {"average": self.average}
        inventory = take_inventory(Wrapped.look(self.model).model, Partitions(self.optimizers).inner, beside)
        found = {
            f"learning rate {index}.{number}": repr(group["lr"])
            for index, optimizer in enumerate(self.optimizers)
            for number, group in enumerate(optimizer.param_groups)
        }
        for entry in inventory.entries:
            value = entry.origin if entry.origin is not None else entry.tensor
            gathered = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[entry.name] = fingerprints([gathered.detach().contiguous()])[0]
        return found


def _mesh(axes: tuple[str, ...], world: int) -> DeviceMesh:
    rest = world // 2 ** (len(axes) - 1)
    return init_device_mesh(
        "cpu", tuple(rest if axis == "data" or len(axes) == 1 else 2 for axis in axes), mesh_dim_names=axes
    )


def train(run: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One rank of one run. `killed`: [rank, step, moment] of its end by SIGKILL; `watched`: steps after which
    the state is told."""
    made = Run(run["kind"], run["optimizer"], run["quirk"])
    said: dict[str, Any] = {"losses": {}, "states": {}}
    victim, last, moment = run.get("killed") or (-1, -1, "")

    def die_at(step: int, here: str) -> None:
        if (dist.get_rank(), step, here) == (victim, last, moment):
            os.kill(os.getpid(), signal.SIGKILL)

    with Checkpointer(
        made.model, made.optimizers, state=made.state, folder=folder, every=EVERY, keep=9
    ) as checkpointer:
        first = said["first"] = checkpointer.restore()
        if first:
            said["states"][str(first)] = made.whole()
            said["samples"] = made.position["samples"]
        if run.get("reseeded"):
            made.seed(100)
        for step in range(first + 1, run["steps"] + 1):
            for optimizer in made.optimizers:
                optimizer.zero_grad()
            loss = made.backward()
            die_at(step, "before the update")
            made.update()
            die_at(step, "after the update")
            made.after()
            checkpointer.step(loss)
            die_at(step, "while it is copied")
            said["losses"][str(step)] = loss.hex()
            if step == 2 * EVERY:
                checkpointer.wait()  # nobody is killed before there is something to come back to
            if step in run.get("watched", ()):
                said["states"][str(step)] = made.whole()
        checkpointer.wait()
        said["captured"], said["skipped"] = checkpointer.captured, checkpointer.skipped
    return said


def prepare(run: dict[str, Any], folder: Path) -> bool:
    """The folder as the failure leaves it; False if there is nothing to begin with. `begins`: [folder, step],
    what a run that ended after that step has left there.

    `hurt`: [rank, step, how], that rank's part of the version is lost, or a byte of it is another one.
    """
    if "begins" in run:
        left, last = run["begins"]
        for path in (folder / left).glob("rank-*/*"):
            if int(path.name[:12]) <= last:
                target = folder / run["folder"] / path.parent.name / path.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    if "hurt" in run:
        rank, step, how = run["hurt"]
        path = next((folder / run["folder"]).glob(f"rank-{rank}-of-*/{step:012}-*.safetensors"), None)
        if path is None:
            return False
        if how == "lost":
            path.unlink()
            path.with_suffix(".json").unlink()
        else:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    return True


@dataclass
class Ranks:
    """A run under way."""

    number: int
    left: dict[int, int] = field(default_factory=dict)
    """Rank by process."""


class Runs:
    """All runs of a matrix."""

    def __init__(self, runs: list[dict[str, Any]], folder: Path) -> None:
        self._runs, self._folder = runs, folder
        self._waiting = list(range(len(runs)))
        self._ended: set[int] = set()
        self._live: list[Ranks] = []

    def all(self) -> list[list[Any]]:
        """What each rank of each run said, None for one that was killed."""
        while self._waiting or self._live:
            self._start()
            pid, status = os.waitpid(-1, 0)
            ranks = next(each for each in self._live if pid in each.left)
            del ranks.left[pid]
            if status:  # the others would wait for it for long
                for other in ranks.left:
                    os.kill(other, signal.SIGKILL)
            if not ranks.left:
                self._live.remove(ranks)
                self._ended.add(ranks.number)
        return [
            [self._said(number, rank) for rank in range(run["world"])]
            for number, run in enumerate(self._runs)
        ]

    def _start(self) -> None:
        for number in list(self._waiting):
            run = self._runs[number]
            living = sum(len(each.left) for each in self._live)
            if run.get("after", -1) in {-1, *self._ended} and living + run["world"] <= TOGETHER:
                self._waiting.remove(number)
                if not prepare(run, self._folder):
                    self._ended.add(
                        number
                    )  # what it should come back from was not made, and is reported as such
                    continue
                ranks = Ranks(number)
                for rank in range(run["world"]):
                    pid = os.fork()
                    if not pid:
                        self._be(number, rank)
                    ranks.left[pid] = rank
                self._live.append(ranks)

    def _answer(self, number: int, rank: int) -> Path:
        return self._folder / f"answer-{number}-{rank}.json"

    def _said(self, number: int, rank: int) -> Any:
        answer = self._answer(number, rank)
        return json.loads(answer.read_text()) if answer.exists() else None

    def _be(self, number: int, rank: int) -> None:
        """In the forked process."""
        run, status = self._runs[number], 1
        try:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            torch.set_num_threads(1)
            store = dist.FileStore(str(self._folder / f"store-{number}"), run["world"])
            dist.init_process_group("gloo", store=store, rank=rank, world_size=run["world"])
            said = train(run, self._folder / run["folder"])
            whole = self._answer(number, rank)
            part = whole.with_suffix(
                ".part"
            )  # an end while it is written leaves no answer, never half of one
            part.write_text(json.dumps(said))
            part.rename(whole)
            dist.barrier()  # nobody leaves while others still need it
            status = 0
        except BaseException:
            if "killed" not in run:  # then the others' collectives break, as they should
                print(f"rank {rank} of {run}", file=sys.stderr)
                traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)


def main(folder: Path, runs: Path) -> None:
    warnings.filterwarnings("ignore")
    gc.freeze()  # or each rank's first collection would copy what all of them share
    resharding._BUFFER = 64 * 1024  # so that so small a model is read in several pieces, too
    logging.getLogger("torch").setLevel(logging.ERROR)  # which way of many small collectives would be faster
    print(json.dumps({"said": Runs(json.loads(runs.read_text()), folder).all()}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
