"""Promise: each rank of a sharded or replicated run replays its own part, and the run goes on with the same losses."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_sidecar import ScriptedSidecar

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import Welcome
from tiercheck.protocol.pieces import Box, Piece, cover
from tiercheck.trainer.slot_file import SlotReader

SCRIPT = Path(__file__).parent / "sharded_script.py"
KINDS = {"ddp": 2, "zero": 2, "fsdp": 2, "hybrid": 4, "tensor": 2, "fsdp-tensor": 4, "pipeline": 2}
"""Ways to be parallel, and how many ranks each is run on."""


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sidecars(tmp_path: Path, kind: str) -> Iterator[list[ScriptedSidecar]]:
    found = []
    for rank in range(KINDS[kind]):
        run_dir = tmp_path / str(rank)
        run_dir.mkdir()
        found.append(ScriptedSidecar(run_dir, Welcome(attempt=1, snapshot_every=4, delta=DeltaMode.AUTO)))
    yield found
    for sidecar in found:
        sidecar.stop()


def run(tmp_path: Path, kind: str, steps: int) -> list[dict[str, Any]]:
    ranks = KINDS[kind]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), kind, str(steps)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "TIERCHECK_RUN_DIR": str(tmp_path / str(rank)),
                "TIERCHECK_ATTEMPT": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks
    return [json.loads(text.splitlines()[-1]) for text in said]


def test_every_rank_replays_its_shard(sidecars: list[ScriptedSidecar], tmp_path: Path, kind: str) -> None:
    whole = run(tmp_path, kind, 13)
    for sidecar in sidecars:
        assert sorted(sidecar.completed(Kind.DELTA)) == list(range(5, 14))
        assert not sidecar.asked("no-deltas")
        sidecar.offer(base=4, step=9)
    resumed = run(tmp_path, kind, 13)
    for one, other in zip(whole, resumed, strict=True):
        assert (one["deltas"], one["skipped"]) == (9, 0)
        assert other["restored"] == one["at"]
        assert other["losses"] == one["losses"][9:]


def test_ranks_store_the_whole_state_together_and_replicas_a_share_each(
    sidecars: list[ScriptedSidecar], tmp_path: Path, kind: str
) -> None:
    run(tmp_path, kind, 4)
    slots = [SlotReader.open(sidecar.completed(Kind.SNAPSHOT)[4]) for sidecar in sidecars]
    held: dict[str, list[tuple[int, Piece]]] = {}
    for rank, slot in enumerate(slots):
        for name, piece in slot.pieces().items():
            assert slot.tensors()[name].numel() == piece.count
            held.setdefault(name, []).append((rank, piece))
    for pieces in held.values():
        cover(Box.whole(pieces[0][1].shape), pieces)
    if kind != "pipeline":  # each stage has layers of its own, as plain tensors
        assert len(held) == 8 + 3 * 8
    stored = sum(tensor.nbytes for slot in slots for tensor in slot.tensors().values())
    once = sum(4 * math.prod(pieces[0][1].shape) for pieces in held.values())
    assert stored <= 1.1 * once or kind == "pipeline"
