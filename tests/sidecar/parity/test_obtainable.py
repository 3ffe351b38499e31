"""A restore plans with what a group really has: blocks and survivors are counted, version by version."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sidecar.parity.group import Group
from tiercheck.protocol.version import Artifact, Kind, Version
from tiercheck_sidecar.bounded_calls import SourceFailed
from tiercheck_sidecar.parity.parts import obtainable

MakeJob = Callable[..., Group]
V = Version(10, 1)


def ask(job: Group, rank: int) -> dict[Artifact, int]:
    station = job.stations[rank // job.procs]
    return obtainable(job.group, rank, job.procs, station.connect)


def test_what_survivors_and_blocks_suffice_for_is_obtainable_with_its_size(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1, procs=2)
    saved = job.protect(V, 1_000_000, 70_000)
    for rank in (0, 4):  # step 11 of the third member is in no block yet
        job.save_rank(rank, Version(11, 1), 100_000, Kind.DELTA)
    job.lose(1)
    job.next_attempt(V.step)
    for rank in (2, 3):
        assert ask(job, rank) == {Artifact(rank, V): len(saved[rank])}


def test_version_with_too_few_blocks_is_not_promised(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=1)
    job.protect(V, 1_000_000)
    job.lose(0, 1)
    job.next_attempt(V.step)
    assert ask(job, 0) == {}


def test_two_blocks_make_up_for_two_members(make_job: MakeJob) -> None:
    job = make_job(data=3, parity=2)
    saved = job.protect(V, 1_000_000)
    job.lose(0, 1)
    job.next_attempt(V.step)
    assert ask(job, 0) == {Artifact(0, V): len(saved[0])}


def test_silence_is_not_taken_for_nothing(make_job: MakeJob) -> None:
    job = make_job(data=2, parity=1)
    for worker in (1, 2):
        job.stations[worker].stop()
    with pytest.raises(SourceFailed, match="worker 2"):
        ask(job, 0)
