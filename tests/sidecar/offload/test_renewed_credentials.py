"""A Secret that is mended after the pod started reaches the sidecar without a new pod."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.sidecar.world import MakeWorld, until
from tiercheck.protocol import names
from tiercheck_sidecar.offload import renewal


def put(folder: Path, **values: str) -> None:
    """As the kubelet does: a new folder, and one link that is exchanged at once."""
    version = folder / f"..{len(list(folder.iterdir()))}"
    version.mkdir()
    for key, value in values.items():
        (version / key).write_text(value)
    fresh = folder / "..fresh"
    fresh.symlink_to(version.name)
    os.replace(fresh, folder / "..data")
    for key in values:
        if not (folder / key).is_symlink():
            (folder / key).symlink_to(f"..data/{key}")


def test_fingerprint_follows_contents_and_not_the_kubelets_housekeeping(tmp_path: Path) -> None:
    assert renewal.fingerprint(tmp_path) == renewal.fingerprint(tmp_path / "missing")
    empty = renewal.fingerprint(tmp_path)
    put(tmp_path, KEY="a")
    first = renewal.fingerprint(tmp_path)
    put(tmp_path, KEY="a")
    assert renewal.fingerprint(tmp_path) == first != empty
    put(tmp_path, KEY="b")
    assert renewal.fingerprint(tmp_path) != first


async def test_changed_credentials_do_not_disturb_a_remote_tier_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewal, "_LOOK_EVERY", 0.01)
    reachable, asked = True, asyncio.Event()

    def answer() -> bool:
        asked.set()
        return reachable

    waiting = asyncio.create_task(renewal.wait_for_renewal(tmp_path, answer))
    await asked.wait()
    put(tmp_path, KEY="a")
    for _ in range(3):
        asked.clear()
        await asked.wait()
    assert not waiting.done()
    reachable = False
    async with asyncio.timeout(30):
        await waiting


def test_sidecar_without_credentials_ends_when_their_secret_appears(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    secret = world.root / "secret"
    secret.mkdir()
    world.remote = '{"s3":{"bucket":"b","endpoint":"http://127.0.0.1:9"}}'
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv(names.ENV_REMOTE_CREDENTIALS_DIR, str(secret))
    world.start()
    until(lambda: world.report(0).remote.reachable is False, "the sidecar misses its credentials")
    process = world._processes.pop(0)
    put(secret, AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="key")
    assert process.wait(40) == 0
    assert "credentials have changed" in world.logs(0)
