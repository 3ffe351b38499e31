"""The frameworks' examples run as jobs unchanged: they save to memory and come back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.jobs import Jobs
from tests.integrations.test_frameworks import NEEDS, command, needed, steps
from tests.lives import Lives
from tiercheck_cli.api_server import PODS
from tiercheck_local.cluster import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.extended, pytest.mark.timeout(400)]

WRAPPER = Path(__file__).with_name("standing_script.py")
AT = 6
"""Of 9 or 18 steps."""


@pytest.mark.parametrize("name", NEEDS)
def test_lost_worker_of_an_example_comes_back_to_equal_losses(
    name: str, jobs: Jobs, cluster: LocalCluster, lives: Lives, tmp_path: Path
) -> None:
    modules, argv = needed(name), command(name, "torchrun --nproc-per-node 2")
    script = [sys.executable, str(WRAPPER), *argv, "--folder", str(tmp_path / "job")]
    job = jobs.start(
        workers=2, command=script, env={"AT": str(AT), "OMP_NUM_THREADS": "1"}, remote_every=None
    )
    job.wait(
        "a snapshot at its holders",
        lambda status: status.get("tiers", {}).get("peer", {}).get("step", 0) >= 5,
    )
    cluster.api.delete(PODS, "default", job.stage.pod_of(1), grace=0)
    recovery = job.wait_recovered(1)
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert recovery["step"] >= 5
    job.wait_condition("Completed")
    said = [line for line in job.printed() if "step" in line]
    whole = steps(lives, modules, [*argv, "--folder", tmp_path / "alone"], ranks=2)
    wanted = {line["step"]: line for line in whole}
    assert said == [wanted[line["step"]] for line in said]
    assert said[-1] == whole[-1], "to the end"
    assert {line["step"] for line in said} == set(wanted), (
        "every step, the one after the version twice if it was under way"
    )
