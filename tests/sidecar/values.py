"""Builds the plain values that tests of the sidecar begin with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests import operator_key
from tests.sidecar.world import JOB_UID, content
from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.directive import Directive, Peer, Phase, Policy
from tiercheck.protocol.version import Branch, History, Kind, Version
from tiercheck_sidecar.model.config import SidecarConfig

TOKEN = "token"


def config_of(folder: Path = Path(), **changes: Any) -> SidecarConfig:
    """The only worker of a job without a remote tier, with all its files in `folder`, but for `changes`."""
    plain = SidecarConfig(
        job="default/gpt", job_uid=JOB_UID, worker=0, procs_per_worker=1, pod_uid="pod-0", pod_ip="127.0.0.1",
        memory_dir=folder, memory_limit=1 << 20, run_dir=folder, credentials_dir=folder, remote=None,
        token=TOKEN, operator_public=operator_key.PUBLIC,
    )  # fmt: skip
    return replace(plain, **changes)


def directive_of(**changes: Any) -> Directive:
    """The release of a job's only worker in attempt 1, with nothing to restore, but for `changes`."""
    plain = Directive(
        job_uid=JOB_UID, worker=0, workers=1, procs_per_worker=1, attempt=1, phase=Phase.RELEASE,
        history=History((Branch(1, 0),)), policy=Policy(None, 1_000_000, 5), restore=None, holders=(),
        hosted=(), coordinator=Peer(0, "127.0.0.1"), master_host="127.0.0.1", master_port=29500,
        pod_uid="pod-0",
    )  # fmt: skip
    return replace(plain, **changes)


def image(
    rank: int, version: Version, plan: SlotLayout, kind: Kind = Kind.SNAPSHOT, world_size: int = 8
) -> bytes:
    """A whole artifact as a trainer would have written it."""
    body = content(rank, version.step, plan.size - plan.data_begin)
    return plan.state_word + plan.header(rank, version, world_size, {}, kind) + body
