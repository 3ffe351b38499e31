"""Measures a restore on another mesh, beside reading each shard whole and beside torch DCP.

Each ratio is that of two restores in one round of the same processes, the median over the rounds.

As from another machine, slots come through the sidecar's own lending: chunk by verified chunk, out of a
folder in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.harness import (
    MIB,
    Figure,
    Outcome,
    Scale,
    Sense,
    be_rank,
    bytes_text,
    run_ranks,
    scratch,
    seconds_text,
)
from benchmarks.sharing import paired
from tiercheck import Checkpointer
from tiercheck.protocol.directive import Directive, Tier
from tiercheck.protocol.encoding import from_json, to_json
from tiercheck.protocol.version import Artifact, Digests
from tiercheck.trainer.backends.backend import Offer, Ranges
from tiercheck.trainer.checkpointer import Found, find
from tiercheck_sidecar.artifact_source import ArtifactSink, BoundedCall, OpenArtifact
from tiercheck_sidecar.digest import digest, digest_chunk
from tiercheck_sidecar.restore.sources import RestoreSources, ShardReader
from tiercheck_sidecar.vault import NotHeld, Seal, Vault

CHANGES = {
    "FSDP 4 to 2": (4, "fsdp", 2),
    "FSDP 2 to 4": (2, "fsdp", 4),
    "FSDP 4 to 3": (4, "fsdp", 3),
    "FSDP 4 to TP 2 x DP 2": (4, "tensor-data", 4),
}
_LAYERS = 4
_SMALL = 256 * 1024
"""Bytes: what is asked for of a slot of which no tensor is wanted is what its rank kept for itself."""


def run(scale: Scale) -> Outcome:
    """The same state, saved by FSDP on two and on four ranks."""
    size, rounds = (48 if scale.quick else 512) * MIB, 2 if scale.quick else 7
    found: dict[str, dict[str, Any]] = {}
    with scratch() as folder:
        for before in sorted({change[0] for change in CHANGES.values()}):
            saved = folder / str(before)
            saved.mkdir()
            run_ranks("benchmarks.resharding", before, saved, "save", size, rounds)
        for name, (before, kind, after) in CHANGES.items():
            found[name] = together(
                run_ranks("benchmarks.resharding", after, folder / str(before), kind, size, rounds)
            )
    return Outcome(figures(found), {"changes": found})


def together(each: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks read, and in each round the seconds of the slowest."""
    return {
        "needed": sum(rank["needed"] for rank in each),
        "read": {how: sum(rank["read"][how] for rank in each) for how in ("ranged", "whole")},
        "seconds": {
            how: [max(seconds) for seconds in zip(*(rank["seconds"][how] for rank in each), strict=True)]
            for how in each[0]["seconds"]
        },
    }


def figures(found: dict[str, dict[str, Any]]) -> list[Figure]:
    """Three rows for each change: bytes, seconds, and DCP."""
    rows = []
    for name, each in found.items():
        read, seconds, needed = each["read"], each["seconds"], each["needed"]
        usual = {how: seconds_text(statistics.median(values)) for how, values in seconds.items()}
        count = len(seconds["ranged"])
        rows += [
            Figure(f"resharding, {name}: bytes read", bytes_text(read["ranged"]),
                f"whole shards: {bytes_text(read['whole'])}", read["ranged"] / read["whole"], 1.0,
                note=f"{read['ranged'] / needed:.2f} bytes read for each held"),
            Figure(f"resharding, {name}: restore by ranges", usual["ranged"],
                f"whole shards: {usual['whole']}", paired(seconds["ranged"], seconds["whole"]), 1.05,
                note=f"median of {count} paired ratios"),
            Figure(f"resharding, {name}: restore in place, against torch DCP load", usual["in place"],
                usual["dcp"], paired(seconds["dcp"], seconds["in place"]), 1.0, Sense.AT_LEAST,
                note="neither verifies here"),
        ]  # fmt: skip
    return rows


# One rank, which saves, or restores in several ways


def measure(folder: Path, arguments: list[str]) -> dict[str, Any]:
    """`arguments`: `save`, or the kind of a mesh; bytes; rounds."""
    action, size, rounds = arguments[0], int(arguments[1]), int(arguments[2])
    torch.manual_seed(0)
    width = int((size / 12 / _LAYERS) ** 0.5) // 16 * 16
    model = sharded(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(_LAYERS))), action)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if action == "save":
        save(model, optimizer, folder)
        return {}
    return restore(model, optimizer, folder, rounds)


def sharded(model: nn.Module, kind: str) -> nn.Module:
    world = dist.get_world_size()
    if kind != "tensor-data":
        return fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
    plan = {str(n): ColwiseParallel() if n % 2 == 0 else RowwiseParallel() for n in range(_LAYERS)}
    return fully_shard(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["data"])


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """With ours, digests beside it, and with torch DCP."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # so that the moments exist
    with Checkpointer(model, optimizer, every=1, folder=folder / "ours") as checkpointer:
        checkpointer.restore()
        checkpointer.step()
        checkpointer.wait()
    (slot,) = (folder / "ours" / f"rank-{dist.get_rank()}-of-{dist.get_world_size()}").glob("*.safetensors")
    (folder / f"digests-{dist.get_rank()}").write_bytes(to_json(digest(memoryview(slot.read_bytes()))))
    states, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": states, "optimizer": of_optimizer}, checkpoint_id=str(folder / "dcp"))


class Store:
    """What lending wants of the remote tier, out of the folder that all have saved into."""

    def __init__(self, folder: Path, offer: Offer) -> None:
        self._folder, self._offer = folder, offer
        self.read = 0

    def digests(self, artifact: Artifact) -> Digests:
        return from_json((self._folder / f"digests-{artifact.rank}").read_bytes(), Digests)

    @contextlib.contextmanager
    def open(self, artifact: Artifact, call: BoundedCall) -> Iterator[OpenArtifact]:
        digests = self.digests(artifact)
        assert self._offer.borrow is not None

        def read(indices: Sequence[int], sink: ArtifactSink) -> None:
            for index in indices:
                with sink.room(digests, index) as chunk:
                    os.preadv(file.fileno(), [chunk], index * digests.chunk)
                    self.read += len(chunk)
                    if digest_chunk(chunk) != digests.values[index]:
                        raise RuntimeError(f"chunk {index} is damaged")

        with open(self._offer.borrow(artifact.rank, ()), "rb", buffering=0) as file:
            yield OpenArtifact(Seal(artifact.rank, artifact.version, 0, Tier.LOCAL, digests), read)


class Empty:
    """A vault that holds nothing, and has room for everything."""

    limit = 1 << 62

    def used(self) -> int:
        return 0

    def fault(self, *_: object, **__: object) -> str:
        raise NotHeld


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, rounds: int) -> dict[str, Any]:
    """In each round: by ranges, by whole shards, ours and DCP without anything between the folder and the
    model."""
    found: dict[str, Any] = {"seconds": {}, "read": {}}
    known = find(folder / "ours")
    if known.offer is None:
        raise RuntimeError("nothing was saved")
    expected = ""
    for number in range(rounds + 1):  # the first one finds files and code cold
        for how in ("ranged", "whole", "in place", "dcp"):
            optimizer.state.clear()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            dist.barrier()
            begun = time.perf_counter()
            if how == "dcp":
                theirs(model, optimizer, folder)
            else:
                found["read"][how] = ours(model, optimizer, known, folder, how)
            seconds = time.perf_counter() - begun
            expected = expected or told(model)
            if told(model) != expected:
                raise RuntimeError(f"{how} brought another state")
            if number:
                found["seconds"].setdefault(how, []).append(seconds)
    found["needed"] = sum(
        value.to_local().nbytes
        for parameter, state in optimizer.state.items()
        for value in (parameter, state["exp_avg"], state["exp_avg_sq"])
    )
    return found


def told(model: nn.Module) -> str:
    return json.dumps([parameter.to_local().double().sum().item() for parameter in model.parameters()])


def ours(model: nn.Module, optimizer: torch.optim.Optimizer, known: Found, folder: Path, how: str) -> int:
    """Bytes read."""
    offer = known.offer
    assert offer is not None
    if how == "in place":
        with Checkpointer(model, optimizer, found=known) as checkpointer:
            checkpointer.restore()
        return 0
    place = Path(tempfile.mkdtemp(dir=folder))
    store = Store(folder, offer)
    lender = ShardReader(
        cast(Vault, Empty()),
        place,
        cast(RestoreSources, SimpleNamespace(call=lambda body, rank, source: body(store, BoundedCall()))),
    )
    directive = cast(Directive, SimpleNamespace(restore=None))  # no source but the store

    def borrow(rank: int, ranges: Ranges) -> str:
        artifact, wanted = Artifact(rank, offer.version), ranges
        if how == "whole" and sum(end - begin for begin, end in ranges) > _SMALL:
            wanted = [(0, store.digests(artifact).size)]
        return str(lender.lend(directive, artifact, wanted))

    with Checkpointer(
        model, optimizer, found=replace(known, offer=replace(offer, borrow=borrow))
    ) as checkpointer:
        checkpointer.restore()
    lender.close()
    shutil.rmtree(place, ignore_errors=True)
    return store.read


def theirs(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    states, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": states, "optimizer": of_optimizer}, checkpoint_id=str(folder / "dcp"))
    set_state_dict(model, optimizer, model_state_dict=states, optim_state_dict=of_optimizer)


if __name__ == "__main__":
    be_rank(measure)
