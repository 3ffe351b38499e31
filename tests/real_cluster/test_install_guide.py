"""docs/start/install.md, typed from top to bottom by somebody who has a cluster and nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from stage import ROOT, start_s3
from testbed.cluster import Testbed
from testbed.network import REGISTRY

from tests.images.building import CACHE, Store, builder_environment
from tests.sidecar.remote.radosgw import ACCESS_KEY, SECRET_KEY

_GUIDE = ROOT / "docs" / "start" / "install.md"
_SECTION = "## From nothing to a training job"
_IN_CLUSTER = """#!/bin/sh
{only}exec nsenter -t {core} -n {program} "$@"
"""
"""The newcomer's machine has its own network, from which these step into the cluster's."""
_HELM = """#!{python}
# The commands of the guide, through the real Helm SDK: there is no package of the program itself.
import sys
sys.path.insert(0, {here!r})
from helm_commands import main
sys.exit(main(sys.argv[1:]))
"""


def commands() -> list[str]:
    """Every line of the guide that a person types."""
    text = _GUIDE.read_text().split(_SECTION)[1].split("\n## ")[0]
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = re.sub(r"\\\n *", "", "".join(blocks)).splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]


@pytest.mark.anywhere
def test_guide_has_commands_for_every_part_of_the_way() -> None:
    found = "\n".join(commands())
    for part in (
        "make images",
        "helm install",
        "label node",
        "create secret",
        "apply -f",
        "delete pod",
        "helm uninstall",
    ):
        assert part in found


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """A copy of the repository with what is theirs filled in, and their environment."""
    testbed = Testbed(Path(os.environ["TIERCHECK_TESTBED"]))
    server = start_s3(tmp_path / "s3")
    try:
        boto3.client(
            "s3", endpoint_url=server.endpoint, aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        ).create_bucket(Bucket="my-checkpoints")  # fmt: skip
        work = tmp_path / "tiercheck"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(work)], check=True)
        example = work / "examples" / "first-job.yaml"
        example.write_text(_theirs(example.read_text(), server.endpoint))
        helm = _program(
            tmp_path / "helm-sdk", _HELM.format(python=sys.executable, here=str(Path(__file__).parent))
        )
        tools = tmp_path / "bin"
        tools.mkdir()
        buildah = str(shutil.which("buildah"))
        pushes_only = f'[ "$1" = push ] || exec {buildah} "$@"\nshift\n'
        for name, program, only in (
            ("kubectl", str(shutil.which("kubectl")), ""),
            ("helm", str(helm), ""),
            ("buildah", f"{buildah} push --tls-verify=false", pushes_only),
        ):
            _program(tools / name, _IN_CLUSTER.format(only=only, core=testbed.core, program=program))
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
        path = f"{tools}:{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}"
        builder = builder_environment(Store(CACHE), tmp_path)
        yield work, {**builder, "PATH": path, "TIERCHECK_ENDPOINT": server.endpoint}
    finally:
        server.stop()
        shutil.rmtree(tmp_path / "s3", ignore_errors=True)


def test_newcomer_gets_from_nothing_to_a_training_job_and_back(newcomer: tuple[Path, dict[str, str]]) -> None:
    work, environment = newcomer
    for command in commands():
        typed = _theirs(command, environment["TIERCHECK_ENDPOINT"])
        print(f"$ {typed}", flush=True)
        done = subprocess.run(
            ["nsenter", "-t", str(os.getppid()), "-n", "bash", "-c", typed], cwd=work, env=environment,
            text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=900,
        )  # fmt: skip
        print(done.stdout, flush=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}"


def _program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def _theirs(text: str, endpoint: str) -> str:
    """With what the guide asks its reader to fill in."""
    filled = text.replace("registry.example.com", REGISTRY).replace("https://s3.example.com", endpoint)
    return filled.replace("my-key", ACCESS_KEY).replace("my-secret", SECRET_KEY)
