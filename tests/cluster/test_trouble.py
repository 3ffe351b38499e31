"""After bad input or trouble a condition says what to do; the job waits, the operator lives."""

from __future__ import annotations

import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.jobs import TRAINER, Jobs
from tests.cluster.test_recovery import assert_same_as_undisturbed
from tiercheck_cli.status.command import screen
from tiercheck_cli.status.view import status_view
from tiercheck_cli.terminal import to_plain_text
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.job import CREDENTIALS, ObjectStore, in_bucket
from tiercheck_local.demo.job import credentials as demo_credentials

pytestmark = pytest.mark.cluster

CLOSED_PORT = "http://127.0.0.1:9"


def s3(endpoint: str, secret: str) -> dict[str, Any]:
    settings = {**in_bucket("checkpoints", endpoint, "prod"), "credentialsSecretName": secret}
    return {"local": {"sizeLimit": "64Mi"}, "remote": {"s3": settings, "everySteps": 20}}


@pytest.fixture(autouse=True)
def operator_survives_it(cluster: LocalCluster) -> Iterator[None]:
    before = cluster.operator
    assert before is not None
    yield
    assert cluster.operator is before
    assert before.poll() is None


@pytest.fixture
def credentials(cluster: LocalCluster) -> str:
    cluster.apply(demo_credentials())
    return CREDENTIALS


def test_too_few_nodes_is_said_in_the_schedulers_words(jobs: Jobs) -> None:
    job = jobs.start(2, pod={"nodeSelector": {"example.com/gpu": "h200"}})
    placed = job.wait_condition("Placed", "False", "Unschedulable")
    assert "0/4 nodes are available" in placed["message"]


def test_unlabelled_nodes_are_named_and_the_job_runs_with_less(jobs: Jobs) -> None:
    levels = [
        {"name": "pdu", "label": "example.com/pdu"},
        {"name": "host", "label": "kubernetes.io/hostname"},
    ]
    job = jobs.start(2, steps=12, topology={"levels": levels}, peer={"spread": {"level": "pdu"}})
    placed = job.wait_condition("Placed", "True", "NodesUnlabelled")
    assert "example.com/pdu" in placed["message"]
    job.wait_condition("Completed")


def test_impossible_required_spread_waits_and_names_the_bound(jobs: Jobs) -> None:
    job = jobs.start(3, peer={"spread": {"level": "zone", "mode": "Required"}})
    placed = job.wait_condition("Placed", "False", "InsufficientDomains")
    assert "zone" in placed["message"]


def test_unreachable_bucket_at_the_start_waits_and_says_where(jobs: Jobs, credentials: str) -> None:
    job = jobs.start(workers=1, tiers=s3(CLOSED_PORT, credentials))
    waiting = job.wait_condition("Running", "False", "RemoteUnreachable")
    assert "127.0.0.1:9" in waiting["message"]
    assert "tiers.remote.s3.endpoint" in waiting["message"]


def test_missing_credentials_are_named(jobs: Jobs) -> None:
    job = jobs.start(workers=1, tiers=s3(CLOSED_PORT, "no-such-secret"))
    waiting = job.wait_condition("Running", "False", "RemoteCredentialsMissing")
    assert "credentials" in waiting["message"]


@pytest.mark.extended
def test_bucket_that_breaks_later_never_stops_training(jobs: Jobs, credentials: str, tmp_path: Path) -> None:
    with ObjectStore(tmp_path / "s3.log", "checkpoints") as store:
        job = jobs.start(workers=1, tiers=s3(store.endpoint, credentials))
        job.wait_trained(20, tier="remote")
    job.wait("the trouble to be said", lambda status: "remote" in str(status["conditions"]).lower())
    here = job.status["progress"]["step"]
    job.wait("training to go on", lambda status: status["progress"]["step"] > here + 20)
    assert job.status["attempt"] == 1
    problem = job.wait(
        "a message about the bucket",
        lambda status: any(
            store.endpoint.removeprefix("http://") in c["message"] for c in status["conditions"]
        ),
    )
    assert problem["phase"] == "Running"


def test_memory_for_less_than_two_snapshots_is_said_with_numbers_and_training_goes_on(jobs: Jobs) -> None:
    job = jobs.start(workers=1, steps=30, remote_every=None, tiers={"local": {"sizeLimit": "40Ki"}})
    protected = job.wait_condition("Protected", "False", "MemoryTooSmall")
    assert "tiers.local.sizeLimit" in protected["message"]
    job.wait_condition("Completed")


def test_state_that_cannot_be_captured_is_told_with_its_name_and_training_goes_on(
    jobs: Jobs, tmp_path: Path
) -> None:
    strange = tmp_path / "strange"
    job = jobs.start(workers=2, env={"OBJECT": str(strange), "TAIL": "10000"}, remote_every=None)
    before = job.wait_trained(6)
    strange.touch()
    protected = job.wait_condition("Protected", "False", "CannotSave")
    assert "optimizer0/0.weight/trace" in protected["message"]
    assert job.status["attempt"] == before["attempt"], "training goes on"
    strange.unlink()
    job.wait_condition("Protected", "True")


@pytest.mark.extended
def test_weights_that_are_swapped_for_an_evaluation_come_back_as_they_were_trained(jobs: Jobs) -> None:
    job, _ = jobs.start_trained(workers=2, env={"SWAP": "1"})
    job.hit("evict")
    assert_same_as_undisturbed(job)


def test_image_without_torch_ends_the_job_with_advice(jobs: Jobs, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False, system_site_packages=False)
    job = jobs.start(workers=1, command=[str(bare / "bin" / "python3"), str(TRAINER)])
    failed = job.wait_condition("Failed", "True", "TorchMissing")
    assert "torch" in failed["message"]


def test_command_that_cannot_be_started_is_named(jobs: Jobs) -> None:
    job = jobs.start(workers=1, command=["no-such-command", "--train"])
    failed = job.wait_condition("Failed", "True", "CannotStart")
    assert "no-such-command" in failed["message"]


def test_crash_loop_shows_the_commands_last_lines_and_its_pod_once(jobs: Jobs) -> None:
    script = "echo 'CUDA error: out of memory' >&2; exit 3"
    command = ["sh", "-c", script]
    job = jobs.start(1, remote_every=None, command=command, failurePolicy={"maxRestarts": 1})
    message = job.wait_condition("Failed", "True", "MaxRestartsExceeded")["message"]
    assert (
        f"ended with exit code 3: CUDA error: out of memory. Its log: kubectl logs -n default {job.name}-0-"
        in message
    )
    shown = to_plain_text(screen(status_view(job.get_job(), time.time()), 80), 80)
    assert shown.count("CUDA error") == 1
    assert shown.count("not configured") == 2


def test_image_that_is_not_there_is_the_reason_at_once(jobs: Jobs) -> None:
    job = jobs.start(1, remote_every=None, container={"image": "registry/no-such-image:1"})
    assert "container trainer: ErrImagePull" in job.wait_condition("Placed", "False", "ImagePull")["message"]
    assert job.get_job()["status"]["reason"] == "ImagePull"
