"""Promise: on another mesh, too, a run comes back to its last step and not only to its last snapshot, with the same state to the last bit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_sidecar import ScriptedSidecar
from test_resharding import whole

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import Reply, Request, Welcome
from tiercheck.protocol.version import Version

SCRIPT = Path(__file__).parent / "mesh_replays.py"
STEPS = 6
STAGES = (
    "fsdp:4", "fsdp:2", "fsdp-tensor:4", "ddp:2", "zero:2", "fsdp:3", "tensor:2", "hybrid:4", "pipeline:2", "ddp:1", "zero:3", "fsdp:2",
)  # fmt: skip
RICH = ("rich-fsdp:4", "rich-ddp:2", "rich-hybrid:4", "rich-zero:2", "rich-fsdp:3")


class Run:
    """Stages one after the other, each at sidecars that lend what those of the stage before were given."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, stages: tuple[str, ...]) -> None:
        self._folder, self._stack, self._stages = folder, stack, stages
        self.before: list[ScriptedSidecar] = []
        self.lent: list[Request] = []

    def sidecars(self, index: int) -> list[ScriptedSidecar]:
        ranks = int(self._stages[index].rpartition(":")[2])
        welcome = Welcome(attempt=1, snapshot_every=4, delta=DeltaMode.AUTO)
        if self.before:
            last = STEPS * index
            base = max(step for step in self.before[0].completed(Kind.SNAPSHOT) if step < last)
            chain = tuple(Version(step, 1) for step in range(base, last + 1))
            welcome = Welcome(
                attempt=1,
                snapshot_every=4,
                delta=DeltaMode.AUTO,
                restore_version=chain[-1],
                restore_world_size=len(self.before),
                restore_chain=chain,
            )
        made = []
        for rank in range(ranks):
            run_dir = self._folder / str(index) / str(rank)
            run_dir.mkdir(parents=True)
            sidecar = ScriptedSidecar(run_dir, welcome)
            self._stack.callback(sidecar.stop)
            sidecar.answer = self._lending(sidecar, self.before)
            made.append(sidecar)
        (self._folder / str(index) / "ready").touch()
        return made

    def _lending(self, sidecar: ScriptedSidecar, before: list[ScriptedSidecar]) -> Any:
        def answer(request: Request) -> Reply | None:
            if request.op != "borrow":
                return sidecar.behave(request)
            self.lent.append(request)
            return Reply(True, path=before[request.rank].completed(request.kind)[request.step])

        return answer

    def go(self) -> Iterator[tuple[str, list[dict[str, Any]]]]:
        processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(number), str(self._folder), *self._stages],
                env={**os.environ, "OMP_NUM_THREADS": "1", "TIERCHECK_ATTEMPT": "1"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(4)
        ]
        try:
            for index, stage in enumerate(self._stages):
                sidecars = self.sidecars(index)
                said = []
                for number, process in enumerate(processes):
                    assert process.stdout is not None
                    line = process.stdout.readline()
                    assert line, (
                        f"rank {number} ended in {stage}: {[s.asked('mismatch', Kind.DELTA) for s in sidecars]}"
                    )
                    said.append(json.loads(line))
                self.before = sidecars
                yield stage, [each for each in said if each]
        finally:
            for process in processes:
                process.kill()
                process.communicate()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stages", [STAGES, RICH], ids=["plain", "rich"])
def test_steps_after_the_snapshot_survive_every_change_of_mesh(tmp_path: Path, stages: tuple[str, ...]) -> None:
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack, stages)
        before: list[dict[str, Any]] = []
        for number, (stage, after) in enumerate(run.go()):
            assert all(not sidecar.asked("no-deltas") for sidecar in run.before)
            if before:
                assert {rank["first"] for rank in after} == {STEPS * number}, stage
                assert {rank["samples"] for rank in after} == {STEPS * number}, stage
                ended, restored = whole(before, "end"), whole(after, "restored")
                assert restored.keys() == ended.keys(), stage
                assert [name for name in ended if ended[name] != restored[name]] == [], stage
                assert {request.kind for request in run.lent} == {*Kind}
            before = after
