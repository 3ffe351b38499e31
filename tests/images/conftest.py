"""The images, built once, and pods made of them, which end with the test that started them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.images.building import CACHE, TARGETS, Store, build_images, image_name, make_base
from tests.images.pods import Image, Pod, StartPod
from tiercheck.about import __version__
from tiercheck_local.markers import Octet

NEEDED = ("buildah", "debootstrap", "runc", "make", "git")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.images)


@pytest.fixture(scope="session")
def images(request: pytest.FixtureRequest) -> Iterator[dict[str, Image]]:
    """By their whole names, mounted."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    assert os.geteuid() == 0, "building images without an engine needs root"
    assert not missing, f"not installed: {', '.join(missing)}"
    began = time.monotonic()
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(what: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n[{time.monotonic() - began:4.0f} s] {what}", end=" ", flush=True)

    store = Store(CACHE)
    make_base(store, say)
    build_images(store, say)
    say("built")
    with ExitStack() as mounts:
        names = [image_name(target, __version__) for target in TARGETS]
        yield {name: Image(mounts.enter_context(store.mounted(name)), store.config(name)) for name in names}


@pytest.fixture
def start_pod(images: dict[str, Image], tmp_path: Path) -> Iterator[StartPod]:
    """A pod of this manifest, at a loopback address of its own; its containers are started by name."""
    octet = Octet()
    pods: list[Pod] = []

    def start(manifest: dict[str, Any], **options: Any) -> Pod:
        number = len(pods) + 1
        pod = Pod(manifest, f"127.{octet.value}.250.{number}", tmp_path / f"pod-{number}", images, **options)
        pods.append(pod)
        return pod

    yield start
    for pod in pods:
        pod.remove()
    octet.release()
