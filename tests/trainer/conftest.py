"""A sidecar for tests that want one, and none for those that do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import Welcome
from tiercheck.trainer.backends import sidecar_backend


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Models are small here: another thread of torch's would only wait, and compute while it does."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def slow_machines_are_no_slow_sidecars(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar that is late costs an artifact, and tests that expect them all must not depend on speed."""
    monkeypatch.setattr(sidecar_backend.SidecarBackend, "patience", DEADLINE)


@pytest.fixture
def delta_sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedSidecar]:
    """Wants deltas, and has not decided on a cadence of snapshots."""
    monkeypatch.setenv("TIERCHECK_RUN_DIR", str(tmp_path))
    monkeypatch.setenv("TIERCHECK_ATTEMPT", "1")
    monkeypatch.setattr(sidecar_backend, "_BACKOFF", (0.05, 0.1))
    scripted = ScriptedSidecar(tmp_path, Welcome(attempt=1, snapshot_every=0, delta=DeltaMode.AUTO))
    yield scripted
    scripted.stop()


@pytest.fixture
def one_of_two() -> Iterator[None]:
    """A job of two ranks, of which the other one is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
