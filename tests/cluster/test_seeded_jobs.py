"""What other tools wrote begins a job, and a job's newest version leaves it for them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.cli.shown import run
from tests.cluster.jobs import Job, Jobs
from tests.cluster.sharded_trainer import BATCH, SAMPLES, make_model, whole
from tests.integrations.test_frameworks import NEEDS, command, needed, steps
from tests.lives import Lives
from tiercheck import ResumableSampler
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.job import ACCESS_KEY, REGION, SECRET_KEY, ObjectStore
from tiercheck_local.stage import tier_step
from tiercheck_operator.kubernetes.api_server import JOBS

pytestmark = pytest.mark.cluster

TRAINER = [sys.executable, str(Path(__file__).with_name("sharded_trainer.py"))]
CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
SEED = 40
"""The step that is imported."""


def fresh(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = make_model()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def written_elsewhere(form: str, folder: Path) -> str:
    """Three steps of training without us, saved by torch or as Hugging Face does it; a digest of what there
    is to come back."""
    model, optimizer = fresh(5)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 9)).square().mean().backward()
        optimizer.step()
    if form == "safetensors":
        folder.mkdir()
        save_file(model.state_dict(), folder / "model.safetensors")
        return whole(model, torch.optim.AdamW(model.parameters()))
    weights, moments = get_state_dict(model, optimizer)
    drawn = {**ResumableSampler(SAMPLES, BATCH, shuffle=False).state_dict(), "position": BATCH * SEED}
    dcp.save({"model": weights, "optimizer": moments, "state": {"order": drawn}}, checkpoint_id=folder)
    return whole(model, optimizer)


def exported(job: Job, form: str, to: Path) -> int:
    """The step of the version that `tiercheck export JOB` has found."""
    typed = f"export {job.name} --kubeconfig {job.cluster.kubeconfig} --format {form} --to {to}"
    ran = run(*typed.split(), env=CREDENTIALS)
    assert ran.status == 0, ran.err
    found = re.search(r"step (\d+)", ran.err)
    assert found, ran.err
    return int(found[1])


def loaded(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """By torch alone."""
    model, optimizer = fresh(6)
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return model, optimizer


@pytest.mark.extended
@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_job_begins_from_what_was_imported_and_its_newest_version_is_exported_by_name(
    jobs: Jobs, cluster: LocalCluster, bucket: ObjectStore, tmp_path: Path, form: str
) -> None:
    seed = written_elsewhere(form, tmp_path / "theirs")
    manifest = jobs.manifest(workers=2, command=TRAINER, env={"LIVES": "2"}, bucket=bucket, remote_every=5)
    ran = run(
        "import", "--from", str(tmp_path / "theirs"), "--format", form, "--step", str(SEED),
        "--to", f"s3://{bucket.bucket}/prod", "--job", f"default/{manifest['metadata']['name']}",
        "--endpoint", bucket.endpoint, "--region", REGION, env=CREDENTIALS,
    )  # fmt: skip
    assert ran.status == 0, ran.err
    job = jobs.apply(manifest)
    job.wait("a version of its own in the bucket", lambda status: tier_step(status, "remote") > SEED)
    begun = [line for line in job.printed() if "restored" in line]
    assert [(line["restored"], line["whole"]) for line in begun] == [(SEED, seed)] * 2
    assert {line["samples"] for line in begun} == {BATCH * SEED if form == "dcp" else 0}

    running = exported(job, "dcp", tmp_path / "running")
    assert whole(*loaded(tmp_path / "running")) == _told(job, running)
    cluster.api.patch(JOBS, "default", job.name, {"spec": {"suspend": True}})
    job.wait_condition("Suspended")
    suspended = exported(job, "dcp", tmp_path / "suspended")
    assert suspended >= running
    model, optimizer = loaded(tmp_path / "suspended")
    assert whole(model, optimizer) == _told(job, suspended)
    assert exported(job, "safetensors", tmp_path / "hf") == suspended
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def _told(job: Job, step: int) -> str:
    """The digest that the trainers told after this step."""
    (told,) = {line["whole"] for line in job.printed() if line.get("step") == step}
    return str(told)


# The frameworks' examples run as jobs unchanged: they save to memory and come back. A Trainer's process
# outlives the loss of another rank.


WRAPPER = Path(__file__).with_name("standing_script.py")
AT = 6
"""Of 9 or 18 steps."""
STAYING = ("huggingface", "lightning")


@pytest.mark.extended
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NEEDS)
def test_lost_worker_of_an_example_comes_back_to_equal_losses(
    name: str, jobs: Jobs, lives: Lives, tmp_path: Path
) -> None:
    modules, argv = needed(name), command(name, "torchrun --nproc-per-node 2")
    script = [sys.executable, str(WRAPPER), *argv, "--folder", str(tmp_path / "job")]
    job = jobs.start(
        workers=2, command=script, env={"AT": str(AT), "OMP_NUM_THREADS": "1"}, remote_every=None
    )
    job.wait("a snapshot at its holders", lambda status: tier_step(status, "peer") >= 5)
    recovery = job.hit("force delete")
    assert recovery["tiers"] == {"local": 1, "peer": 1, "remote": 0}
    assert recovery["step"] >= 5
    assert recovery["inProcess"] == (name in STAYING)
    job.wait_condition("Completed")
    said = [line for line in job.printed() if "step" in line]
    whole = steps(lives, modules, [*argv, "--folder", tmp_path / "alone"], ranks=2)
    wanted = {line["step"]: line for line in whole}
    assert said == [wanted[line["step"]] for line in said]
    assert said[-1] == whole[-1], "to the end"
    assert {line["step"] for line in said} == set(wanted), (
        "every step, the one after the version twice if it was under way"
    )
