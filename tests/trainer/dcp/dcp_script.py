"""Runs one rank of a run that saves with torch.distributed.checkpoint.

`torchrun dcp_script.py FOLDER ACTION...`

Prints what it found as one line of JSON.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tiercheck.dcp import Storage
from tiercheck.trainer.proof.state_hash import fingerprints


class Unpicklable:
    """Fails at the rank that has it."""

    def __reduce__(self) -> Any:
        raise RuntimeError("this rank cannot")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5, bias=False))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embed(tokens))  # type: ignore[no-any-return]


class Run:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in (*self.model.layers, self.model):
                if not isinstance(layer, nn.ReLU):
                    fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.extra: dict[str, Any] = {"position": 0, "note": "plain"}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.arange(7)).pow(2).mean().backward()
            self.optimizer.step()
            self.extra["position"] += 1
            self.model.seen += 1

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "extra": self.extra}

    def load(self, storage: Storage) -> int:
        state = self.state()
        step = storage.load(state)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.extra = state["extra"]
        return step

    def whole(self) -> dict[str, str]:
        """A fingerprint of each tensor, gathered."""
        found: dict[str, str] = {}
        model, optimizer = get_state_dict(self.model, self.optimizer)
        states = {
            f"{name}.{key}": value for name, kept in optimizer["state"].items() for key, value in kept.items()
        }
        for name, value in {**model, **states}.items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[name] = fingerprints([full.detach().contiguous()])[0]
        return {**found, "extra": json.dumps(self.extra, sort_keys=True)}


def plain(metadata: Metadata) -> dict[str, Any]:
    """All but where it lies, which is each storage's own affair, and the strides that torch 2.15 adds: a
    tensor that is stored without them is contiguous."""
    known = dataclasses.asdict(dataclasses.replace(metadata, storage_data=None, storage_meta=None))
    for each in known["state_dict_metadata"].values():
        each.get("properties", {}).pop("strides", None)
    return known


def main(folder: Path, actions: list[str]) -> dict[str, Any]:
    said: dict[str, Any] = {}
    rank = dist.get_rank()
    run = Run(seed=rank)
    with Storage(folder / "checkpoints", keep=3) as storage:
        said["start"] = storage.start
        for action in actions:
            step = run.extra["position"]
            if action == "load":
                said["loaded"] = run.load(storage)
            elif action == "train":
                run.train(2)
            elif action == "save":
                said["ok"] = storage.save(run.state(), step)
            elif action == "plain-save":
                dcp.save(run.state(), checkpoint_id=f"somewhere/step-{step}", storage_writer=storage.writer())
            elif action == "plain-async":
                dcp.async_save(
                    run.state(), storage_writer=storage.writer(step), process_group=storage.process_group
                ).result()
            elif action == "async":
                storage.async_save(run.state(), step)
                run.train(1)  # while it is saved
                storage.wait()
            elif action == "process":
                from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

                storage.async_save(run.state(), step, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
                storage.wait()
            elif action == "fail-on-1":
                said["ok"] = storage.save(
                    {**run.state(), **({"bad": Unpicklable()} if rank == 1 else {})}, step
                )
            elif action == "raw-fail-on-1":
                try:
                    dcp.save(
                        {**run.state(), **({"bad": Unpicklable()} if rank == 1 else {})},
                        storage_writer=storage.writer(step),
                    )
                except CheckpointException as error:
                    said["raised"] = isinstance(error, Exception)
            elif action == "compare-metadata":
                ours = dcp.save(run.state(), storage_writer=storage.writer(step))
                theirs = dcp.save(run.state(), storage_writer=dcp.FileSystemWriter(folder / "plain"))
                said["written"] = plain(ours) == plain(theirs)
            elif action == "read-metadata":
                theirs = dcp.FileSystemReader(folder / "plain").read_metadata()
                said["read"] = {
                    **plain(storage.reader().read_metadata()), "version": None
                } == {**plain(theirs), "version": None}  # fmt: skip
            elif action == "whole":
                said.setdefault("whole", []).append(run.whole())
            storage.end_step(run.extra["position"])
    said["saved"], said["failed"], said["group"] = (
        storage.saved,
        storage.failed,
        storage.process_group is not None,
    )
    return said


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])), flush=True)
    dist.destroy_process_group()
