"""Promise: each framework's example comes back from SIGKILL with the same losses bit for bit.

The command is the one of its README. Alone, on two ranks, and under a sidecar that takes a delta of every
step.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import documented_block
from tests.lives import Lives, Said
from tests.scripted_sidecar import ScriptedSidecar
from tests.trainer.torch_limits import needs_fsdp2_on_cpus
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import Welcome
from tiercheck.protocol.version import Kind

pytestmark = pytest.mark.timeout(400)  # to import transformers takes long where others are busy

ROOT = Path(__file__).parents[2]

NEEDS = {
    # example: what it imports
    "huggingface": ["transformers", "transformers.models.llama", "accelerate"],
    "lightning": ["lightning", "torchdata.stateful_dataloader"],
    "accelerate": ["accelerate"],
    "plain-loop": ["torchdata.stateful_dataloader"],
}
KILLS = {
    # example: (steps on one rank, kills there, steps on two, the kill there)
    "huggingface": (18, (4, 7, 12), 9, 4),  # 6 steps are an epoch, or 3
    "lightning": (36, (5, 13, 24), 18, 9),  # each line is a batch, half a step; 12 are an epoch, or 6
    "accelerate": (18, (4, 7, 12), 18, 9),
    "plain-loop": (18, (4, 7, 12), 18, 8),
}


def needed(name: str) -> list[str]:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package.partition(".")[0]) is None:
            pytest.skip(f"{package} is not installed: pip install -c constraints.txt -e '.[frameworks]'")
    return NEEDS[name]


def command(name: str, program: str) -> list[str]:
    """The words after `program` of the command in the example's README, without where it keeps its
    versions.
    """
    text = (ROOT / "examples" / "frameworks" / name / "README.md").read_text()
    found = re.search(rf"^    {program} (.*) --folder \S+$", text, re.MULTILINE)
    assert found, f"the README of {name} has no command that begins with {program}"
    script, *rest = shlex.split(found[1])
    return [str(ROOT / script), *rest]


def steps(lives: Lives, modules: list[str], argv: Sequence[str | Path], **how: Any) -> Said:
    """What rank 0 said of each step; the others say nothing."""
    first, *others = lives.run(modules, argv, **how)
    assert not any(others), "the ranks do not know of each other"
    return [line for line in first if "step" in line]


@pytest.fixture(scope="module")
def undisturbed(lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Said]:
    """What an example says on one rank that nobody kills; it is run once."""

    @cache
    def run(name: str) -> Said:
        modules, argv = needed(name), command(name, "python")
        return steps(lives, modules, [*argv, "--folder", tmp_path_factory.mktemp(name)])

    return run


def assert_continues(whole: Said, parts: Sequence[tuple[Said, int | None]]) -> None:
    """Each life, to where it was killed, said what the run without kills had said from its first step on."""
    first = whole[0]["step"]
    for said, kill in parts:
        assert said == whole[said[0]["step"] - first : None if kill is None else kill - first + 1]
    assert parts[-1][0][0]["step"] > first, "it went on, and did not begin anew"


@pytest.mark.parametrize("name", NEEDS)
def test_killed_example_goes_on_with_equal_losses(
    name: str, lives: Lives, undisturbed: Callable[[str], Said], tmp_path: Path
) -> None:
    modules, argv = needed(name), command(name, "python")
    last, kills, *_ = KILLS[name]
    whole = undisturbed(name)
    assert [line["step"] for line in whole] == list(range(1, last + 1))
    assert len({line["loss_hex"] for line in whole}) == last, "a step told for another would be seen"
    cut = [*argv, "--folder", tmp_path / "cut", "--every", "1"]
    assert_continues(whole, [(steps(lives, modules, cut, kill_at=kill), kill) for kill in (*kills, None)])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=needs_fsdp2_on_cpus) if name == "plain-loop" else name for name in NEEDS],
)
def test_killed_ranks_go_on_with_equal_losses(name: str, lives: Lives, tmp_path: Path) -> None:
    modules, argv = needed(name), command(name, "torchrun --nproc-per-node 2")
    *_, last, kill = KILLS[name]
    whole = steps(lives, modules, [*argv, "--folder", tmp_path / "whole"], ranks=2)
    assert [line["step"] for line in whole] == list(range(1, last + 1))
    cut = [*argv, "--folder", tmp_path / "cut", "--every", "1"]
    assert_continues(
        whole, [(steps(lives, modules, cut, kill_at=kill, ranks=2), kill) for kill in (kill, None)]
    )


@pytest.mark.parametrize(
    "name", ["huggingface", "lightning", "accelerate"]
)  # averaged weights have no deltas
def test_killed_example_under_a_sidecar_goes_on_from_deltas(
    name: str, lives: Lives, undisturbed: Callable[[str], Said], tmp_path: Path
) -> None:
    modules, argv = needed(name), command(name, "python")
    kills = KILLS[name][1]
    whole = undisturbed(name)
    env = {"TIERCHECK_RUN_DIR": str(tmp_path), "TIERCHECK_ATTEMPT": "1"}
    sidecar = ScriptedSidecar(tmp_path, Welcome(attempt=1, snapshot_every=4, delta=DeltaMode.AUTO))
    try:
        before = steps(lives, modules, argv, kill_at=kills[-1], env=env)
        base, step = longest_chain(sidecar)
        sidecar.offer(base, step)
        sidecar.welcome = dataclasses.replace(sidecar.welcome, attempt=2)
        after = steps(lives, modules, argv, env=env)
    finally:
        sidecar.stop()
    assert_continues(whole, [(before, kills[-1]), (after, None)])


def longest_chain(sidecar: ScriptedSidecar) -> tuple[int, int]:
    """A snapshot, and the last of most deltas that follow it: one may be missing, which a busy machine had no
    time for."""
    snapshots, deltas = sidecar.completed(Kind.SNAPSHOT), sidecar.completed(Kind.DELTA)

    def end(base: int) -> int:
        return next(step for step in range(base, base + len(deltas) + 1) if step + 1 not in deltas)

    base = max(snapshots, key=lambda each: end(each) - each)
    assert end(base) > base, "no delta follows a snapshot"
    return base, end(base)


# Blocks of the page on training scripts run as they stand, and go on exactly after kills.

BLOCKS = {
    # block: (example with the same imports, where lives end; an epoch has 12 batches, or 6 of 8 samples)
    "huggingface": ("huggingface", (4, 7)),
    "lightning": ("lightning", (4, 13)),
    "accelerate": ("accelerate", (3, 7)),
    "loop": ("plain-loop", (4, 13)),
    "nanogpt": ("plain-loop", (4, 13)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_documented_block_goes_on_after_kills(name: str, lives: Lives, tmp_path: Path) -> None:
    example, kills = BLOCKS[name]
    modules, script = needed(example), Path(documented_block.__file__)
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = steps(lives, modules, [script, name, tmp_path / "whole"])
    parts = [
        (steps(lives, modules, [script, name, tmp_path / "cut"], kill_at=kill), kill)
        for kill in (*kills, None)
    ]
    assert [said[0]["step"] for said, _ in parts[1:]] == [kill + 1 for kill in kills]
    assert_continues(whole, parts)


ENDING = """
import os, signal, sys
if os.environ["RANK"] == "0":
    sys.exit(3)
signal.pause()
"""


def test_ranks_that_would_wait_for_one_that_is_gone_end_with_it(lives: Lives, tmp_path: Path) -> None:
    """A rank that ends as it should not is told of, and nobody waits for it."""
    script = tmp_path / "script.py"
    script.write_text(ENDING)
    with pytest.raises(AssertionError, match=r"the ranks ended with \[\(0, 1\), \(1, -9\)\] instead of 0"):
        lives.run([], [script], ranks=2)
