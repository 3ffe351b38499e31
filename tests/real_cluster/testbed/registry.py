"""A real registry, which the nodes pull from as a user's would."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from testbed.network import CORE, REGISTRY
from testbed.processes import Processes, run, wait_for


def start(processes: Processes, folder: Path, core: int) -> None:
    """With the image that every pod's sandbox needs."""
    settings = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": f"{folder}/registry"}},
        "http": {"addr": f"{CORE}:5000"},
        "log": {"level": "warn"},
    }
    (folder / "registry.json").write_text(json.dumps(settings))
    inside = ["nsenter", "-t", str(core), "-n"]
    processes.start("registry", [*inside, "docker-registry", "serve", f"{folder}/registry.json"])
    ask = [*inside, "curl", "-sf", f"http://{REGISTRY}/v2/"]
    wait_for(
        lambda: subprocess.run(ask, capture_output=True, check=False).returncode == 0, 30, "the registry"
    )
    _push_pause(folder, inside)


def push_archive(core: int, archive: Path, image: str) -> None:
    """`image` with tag and without registry, from a docker archive."""
    command = ["nsenter", "-t", str(core), "-n", "skopeo", "copy", "--dest-tls-verify=false", "--quiet"]
    run([*command, f"docker-archive:{archive}", f"docker://{REGISTRY}/{image}"])


def _push_pause(folder: Path, inside: list[str]) -> None:
    """One program that waits to be ended, and ends at once: busybox as PID 1 has no default for SIGTERM."""
    context = folder / "pause"
    context.mkdir()
    (context / "Containerfile").write_text(
        "FROM scratch\nCOPY busybox /bin/busybox\n"
        'ENTRYPOINT ["/bin/busybox", "sh", "-c", "trap exit TERM; while :; do /bin/busybox sleep 1000 & '
        'wait $!; done"]\n'
    )
    run(["cp", "/bin/busybox", str(context)])
    store = ["--root", f"{folder}/pause-store", "--runroot", f"{folder}/pause-run", "--storage-driver", "vfs"]
    run(["buildah", *store, "bud", "--isolation", "chroot", "-q", "-t", "pause", str(context)])
    run(
        [
            *inside,
            "buildah",
            *store,
            "push",
            "--tls-verify=false",
            "-q",
            "pause",
            f"docker://{REGISTRY}/pause:1",
        ]
    )
