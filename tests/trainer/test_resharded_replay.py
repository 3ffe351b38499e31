"""Promise: on another mesh, too, a run comes back to its last step and not only to its last snapshot, with the same state to the last bit."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_sidecar import ScriptedSidecar

from tiercheck.protocol.artifact import Kind
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import Reply, Welcome
from tiercheck.protocol.requests import Request
from tiercheck.protocol.version import Version
from tiercheck.trainer.delta import REPLAY_BLOB, REPLAY_BYTES
from tiercheck.trainer.slot_file import SlotReader

SCRIPT = Path(__file__).parent / "mesh_replays.py"
STEPS = 6
STAGES = (
    "fsdp-tensor:4", "zero:2", "pipeline:2", "fsdp:3",
    "rich-fsdp:4", "rich-ddp:2", "rich-hybrid:4", "rich-zero:2", "rich-fsdp:3", "rich-ddp:2",
)  # fmt: skip
"""Where another model comes, training begins anew. Before the last one a delta is damaged."""
MORE = (
    "fsdp:4",
    "fsdp:2",
    "fsdp-tensor:4",
    "ddp:2",
    "zero:2",
    "fsdp:3",
    "tensor:2",
    "hybrid:4",
    "pipeline:2",
    "ddp:1",
    "zero:3",
)


class Run:
    """Stages one after the other, each at sidecars that lend what those of the stage before were given."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, stages: tuple[str, ...]) -> None:
        self._folder, self._stack, self._stages = folder, stack, stages
        self.before: list[ScriptedSidecar] = []
        self.now: list[ScriptedSidecar] = []
        self.begun = self._index = 0
        self.lent: list[Request] = []

    def sidecars(self, index: int) -> list[ScriptedSidecar]:
        ranks = int(self._stages[index].rpartition(":")[2])
        if not index or is_rich(self._stages[index]) != is_rich(self._stages[index - 1]):
            self.before, self.begun = [], index
        welcome = Welcome(attempt=1, snapshot_every=4, delta=DeltaMode.AUTO)
        if self.before:
            last = self.trained
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

    @property
    def trained(self) -> int:
        """Steps before the stage under way."""
        return STEPS * (self._index - self.begun)

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
                self._index, self.before, self.lent = index, self.now, []
                sidecars = self.now = self.sidecars(index)
                said = []
                for number, process in enumerate(processes):
                    assert process.stdout is not None
                    line = process.stdout.readline()
                    assert line, (
                        f"rank {number} ended in {stage}: {[s.asked('mismatch', Kind.DELTA) for s in sidecars]}"
                    )
                    said.append(json.loads(line))
                yield stage, [each for each in said if each]
            assert [process.wait(60) for process in processes] == [0] * 4
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def spoil(path: str) -> None:
    """One element of a gradient is another one."""
    slot = SlotReader.open(path)
    place = next(each for each in slot.header.tensors if each.name == "gradient0/down.weight")
    with open(path, "r+b") as file:
        file.seek(place.begin + (place.end - place.begin) // 4 * 2)
        file.write(b"\x21\x21")


@pytest.mark.timeout(600)
def test_steps_after_the_snapshot_survive_changes_of_mesh_unless_a_bit_is_wrong(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack, STAGES)
        stages = run.go()
        come_back_to_the_last_step(run, itertools.islice(stages, len(STAGES) - 1))
        deltas = [sidecar.completed(Kind.DELTA) for sidecar in run.now]
        assert any(b'"sparse"' in replay_of(path) for path in deltas[0].values()), "few rows have a gradient"
        damaged = max(deltas[1]) - 1
        spoil(deltas[1][damaged])
        with pytest.raises(AssertionError, match=f"ended in {STAGES[-1]}"):
            next(stages)
        for sidecar in run.now:
            (said,) = sidecar.asked("mismatch", Kind.DELTA)
            assert f"replaying step {damaged} on these ranks did not give the bits" in said.message
            assert not sidecar.asked("restored")


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_steps_after_the_snapshot_survive_every_change_of_mesh(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        run = Run(tmp_path, stack, MORE)
        come_back_to_the_last_step(run, run.go())


def come_back_to_the_last_step(run: Run, stages: Iterable[tuple[str, list[dict[str, Any]]]]) -> None:
    before: list[dict[str, Any]] = []
    for stage, after in stages:
        assert all(not sidecar.asked("no-deltas") for sidecar in run.now), stage
        assert {rank["first"] for rank in after} == {rank["samples"] for rank in after} == {run.trained}, stage
        if run.trained:
            ended, restored = whole(before, "end"), whole(after, "restored")
            assert restored.keys() == ended.keys(), stage
            assert [name for name in ended if ended[name] != restored[name]] == [], stage
            assert {request.kind for request in run.lent} == {*Kind}, stage
        before = after


def whole(ranks: list[dict[str, Any]], moment: str) -> dict[str, str]:
    """What all ranks say together; where several know a tensor, they know the same."""
    found: dict[str, str] = {}
    for rank in ranks:
        for name, fingerprint in rank[moment].items():
            assert found.setdefault(name, fingerprint) == fingerprint, name
    return found


def is_rich(stage: str) -> bool:
    return stage.startswith("rich-")


def replay_of(path: str) -> bytes:
    return SlotReader.open(path).blob(REPLAY_BLOB, REPLAY_BYTES)
