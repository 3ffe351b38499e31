"""A store is tried out before a job relies on it, and a person says whose a folder in it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cli import recorded
from tests.cli.shown import FakeCluster, run
from tiercheck_cli.cluster import Cluster

PLACE = ("-n", "ml", "--remote")


def test_good_place_is_said_to_be_good_line_by_line_and_left_empty(tmp_path: Path) -> None:
    ran = run("remote", "check", str(tmp_path), columns=200).well()
    lines = ran.out.splitlines()
    assert len(lines) == 7
    assert all(line.startswith("ok ") for line in lines)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_bad_place_is_said_to_be_bad_with_what_to_do_and_an_exit_status(tmp_path: Path) -> None:
    ran = run("remote", "check", str(tmp_path / "not-mounted"))
    assert ran.status == 1
    assert ran.out.startswith("FAIL  access")
    assert "mount the shared volume" in ran.out
    assert run("remote", "check", "ftp://somewhere").status == 2


def test_folder_is_nobodys_then_one_jobs_then_the_others(tmp_path: Path) -> None:
    place = (*PLACE, str(tmp_path))
    assert run("remote", "owner", "gpt", *place).out.strip() == "no owner yet"
    first = run("remote", "take-over", "gpt", *place, "--uid", "uid-1")
    assert (first.status, first.out.strip()) == (0, "ml/gpt, UID uid-1, has it now")
    assert first.err.strip() == "before: no owner"
    assert run("remote", "take-over", "gpt", *place, "--uid", "uid-1").out.strip() == "ml/gpt has it already"
    second = run("remote", "take-over", "gpt", *place, "--uid", "uid-2", "--cluster", "c-2")
    assert "before: job UID uid-1 of cluster unknown since 20" in second.err
    assert "job UID uid-2 of cluster c-2 since 20" in run("remote", "owner", "gpt", *place).out
    clone = run("remote", "take-over", "gpt", *place, "--uid", "uid-2", "--cluster", "c-3")
    assert "has it now" in clone.out
    assert run("remote", "owner", "other", *place).out.strip() == "no owner yet"


def test_uid_without_a_place_is_a_wrong_command_line(tmp_path: Path) -> None:
    assert run("remote", "take-over", "gpt", "--uid", "uid-1", "-n", "ml").status == 2
    assert run("remote", "take-over", "gpt", "--uid", "uid-1", "--remote", str(tmp_path)).status == 2


@pytest.mark.parametrize("attached", [False, True])
def test_job_is_known_by_what_its_pods_know_it_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attached: bool
) -> None:
    class Known(FakeCluster):
        def job(self, name: str) -> dict[str, Any]:
            found = recorded.job()
            owner: Mapping[str, Any] = {"uid": "uid-of-the-owner"}
            return {**found, "spec": {**found["spec"], **({"attach": {"owner": owner}} if attached else {})}}

        def uid(self) -> str:
            return "uid-of-the-cluster"

    monkeypatch.setattr(Cluster, "connect", staticmethod(lambda *_: Known()))
    assert run("remote", "take-over", recorded.NAME, "--remote", str(tmp_path)).status == 0
    wanted = "uid-of-the-owner" if attached else recorded.UID
    told = run("remote", "owner", recorded.NAME, "--remote", str(tmp_path)).out
    assert f"job UID {wanted} of cluster uid-of-the-cluster" in told
