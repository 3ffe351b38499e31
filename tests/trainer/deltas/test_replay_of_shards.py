"""Promise: each rank of a sharded or replicated run replays its own part."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.lives import Lives
from tests.scripted_sidecar import ScriptedSidecar
from tests.trainer.torch_limits import FSDP2_ON_CPUS, shards_by_fsdp2
from tiercheck.protocol.artifacts.pieces import Box, Piece, cover
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import Welcome
from tiercheck.protocol.version import Kind
from tiercheck.trainer.state.slot_file import SlotReader

SCRIPT = Path(__file__).parents[1] / "sharded_script.py"
KINDS = {"ddp": 4, "zero": 4, "fsdp": 2, "hybrid": 4, "tensor": 2, "fsdp-tensor": 4, "pipeline": 2}
KINDS = {kind: ranks for kind, ranks in KINDS.items() if FSDP2_ON_CPUS or not shards_by_fsdp2(kind)}
"""Ways to be parallel, and how many ranks each is run on."""
pytestmark = pytest.mark.timeout(600)  # whichever test comes first trains for all of them


@dataclass
class Trained:
    """What the ranks of one kind said, in a whole run and in one that was resumed in new processes, and what
    they stored."""

    sidecars: list[ScriptedSidecar]
    whole: list[dict[str, Any]]
    resumed: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def trained(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trained]]:
    """Every kind, those of equal size in the same processes."""
    found: dict[str, Trained] = {}
    with contextlib.ExitStack() as stack:
        for ranks in sorted(set(KINDS.values())):
            kinds = [kind for kind in KINDS if KINDS[kind] == ranks]
            folder = tmp_path_factory.mktemp("ranks")
            sidecars: dict[str, list[ScriptedSidecar]] = {kind: [] for kind in kinds}
            for rank, kind in itertools.product(range(ranks), kinds):
                run_dir = folder / str(rank) / kind
                run_dir.mkdir(parents=True)
                sidecar = ScriptedSidecar(run_dir, Welcome(attempt=1, snapshot_every=4, delta=DeltaMode.AUTO))
                stack.callback(sidecar.stop)
                sidecars[kind].append(sidecar)
            for kind, said in run(lives, folder, ranks, kinds, 13).items():
                found[kind] = Trained(sidecars[kind], said)
                for sidecar in sidecars[kind]:
                    assert sorted(sidecar.completed(Kind.DELTA)) == list(range(5, 14)), kind
                    assert not sidecar.asked("no-deltas"), kind
                    sidecar.offer(base=4, step=9)
            for kind, said in run(lives, folder, ranks, kinds, 13).items():
                found[kind].resumed = said
        yield found


def run(
    lives: Lives, folder: Path, ranks: int, kinds: list[str], steps: int
) -> dict[str, list[dict[str, Any]]]:
    """What each rank said, by kind."""
    env = {"TIERCHECK_RUN_DIR": str(folder), "TIERCHECK_ATTEMPT": "1"}
    said = lives.run([], [SCRIPT, steps, *kinds], ranks=ranks, env=env)
    return {kind: [lines[number] for lines in said] for number, kind in enumerate(kinds)}


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_replays_its_shard(trained: dict[str, Trained], kind: str) -> None:
    for one, other in zip(trained[kind].whole, trained[kind].resumed, strict=True):
        assert (one["deltas"], one["skipped"]) == (9, 0)
        assert other["restored"] == one["at"]
        assert other["losses"] == one["losses"][9:]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_store_the_whole_state_together_and_replicas_a_share_each(
    trained: dict[str, Trained], kind: str
) -> None:
    slots = [SlotReader.open(sidecar.completed(Kind.SNAPSHOT)[4]) for sidecar in trained[kind].sidecars]
    held: dict[str, list[tuple[int, Piece]]] = {}
    for rank, slot in enumerate(slots):
        for name, piece in slot.pieces.items():
            assert slot.tensors()[name].numel() == piece.count
            held.setdefault(name, []).append((rank, piece))
    for pieces in held.values():
        cover(Box.whole(pieces[0][1].shape), pieces)
    if kind != "pipeline":  # each stage has layers of its own, as plain tensors
        assert len(held) == 8 + 3 * 8
    stored = sum(tensor.nbytes for slot in slots for tensor in slot.tensors().values())
    once = sum(4 * math.prod(pieces[0][1].shape) for pieces in held.values())
    assert stored <= 1.1 * once or kind == "pipeline"
