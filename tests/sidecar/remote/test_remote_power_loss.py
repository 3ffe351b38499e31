"""After a power cut, a shared directory has no manifest without all that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import xxhash

from tests.crash_disk import CrashDisk
from tiercheck.protocol.manifest import Digests, Manifest
from tiercheck.protocol.version import Version
from tiercheck_sidecar.remote import open_store


def test_no_manifest_outlives_its_artifacts_and_none_comes_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    slot = tmp_path / "slot"
    slot.write_bytes(b"state")
    digests = Digests(5, 5, (xxhash.xxh3_128_hexdigest(b"state"),))
    disk = CrashDisk(root, monkeypatch)
    store = open_store(json.dumps({"directory": {"path": str(root), "subPath": "a/b"}}), "research/gpt")
    folder = root / "a/b/research/gpt"
    named: dict[Path, list[Path]] = {}
    judged: set[Path] = set()

    def look() -> None:
        for manifest, artifacts in named.items():
            if disk.perhaps(manifest):
                judged.add(manifest)
                for artifact in artifacts:
                    assert disk.surely(artifact), f"{manifest.name} may be there without {artifact}"

    disk.look = look
    for step in (10, 20, 30):
        version = Version(step, 1)
        stored = [store.put_artifact(rank, version, slot, digests, None) for rank in (0, 1)]
        manifest = folder / f"manifests/{step:012d}-1.json"
        artifacts = [folder / each.key for each in stored]
        named[manifest] = [*artifacts, *(path.with_suffix(".json") for path in artifacts)]
        assert store.commit(Manifest("research/gpt", "uid", version, 2, tuple(stored), 1.0))
        assert disk.surely(manifest), "what is said to exist does so after a crash"
        store.retain(1)
    assert judged == set(named)
    assert store.versions() == [Version(30, 1)]
