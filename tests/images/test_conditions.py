"""What is in the images, and that pods here are as strict as the restricted standard."""

from __future__ import annotations

import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.chart.releases import only
from tests.images.building import BASE, CACHE, Store, image_name, write_archives
from tests.images.conftest import StartPod
from tests.images.pods import Image
from tiercheck.about import __version__

SCRIPT = """
import os, pwd
for path in ("/", "/opt/tiercheck", "/etc", "/var/tmp", "/workspace"):
    assert not os.path.exists(path) or not os.access(path, os.W_OK), path
assert os.statvfs("/").f_flag & os.ST_RDONLY
try: print(pwd.getpwuid(os.getuid()))
except KeyError: print("nobody knows me")
print(open("/proc/self/status").read())
"""


def template() -> dict[str, Any]:
    spec: dict[str, Any] = only("Deployment")["spec"]["template"]
    return {"metadata": {}, "spec": spec["spec"]}


def test_containers_run_as_a_stranger_with_no_rights_and_can_write_nowhere(start_pod: StartPod) -> None:
    manifest = template()
    manifest["spec"]["containers"][0]["command"] = ["python3", "-c", SCRIPT]
    container = start_pod(manifest).start("operator")
    assert container.wait() == 0, container.log
    assert "nobody knows me" in container.log
    said = dict(line.split(":\t", 1) for line in container.log.splitlines() if ":\t" in line)
    assert said["Pid"] == "1"
    assert set(said["Uid"].split()) == set(said["Gid"].split()) == {"65532"}
    assert said["NoNewPrivs"] == "1"
    assert {said[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}


@pytest.mark.parametrize("target", ["operator", "sidecar", "example-trainer"])
@pytest.mark.usefixtures("images")
def test_image_adds_nothing_to_its_base_but_what_it_is_for(target: str) -> None:
    """Neither settings nor folders of the machine that built it."""
    store = Store(CACHE)
    with store.mounted(BASE) as base, store.mounted(image_name(target, __version__)) as root:
        differ = [
            "diff",
            "--recursive",
            "--brief",
            "--no-dereference",
            "--exclude=__pycache__",
            str(base),
            str(root),
        ]
        changes = subprocess.run(differ, capture_output=True, text=True, check=False).stdout
    added = {line.removeprefix(f"Only in {root}") for line in changes.splitlines()}
    assert added == {"/opt: tiercheck"} | ({": workspace"} if target == "example-trainer" else set())


@pytest.mark.parametrize("target", ["operator", "sidecar", "example-trainer"])
def test_nothing_is_compiled_anew_at_each_start(images: dict[str, Image], target: str) -> None:
    """Bytecode is in the image, as nobody may write it later."""
    root = images[image_name(target, __version__)].root
    packages = next(root.glob("opt/tiercheck/lib/python3*/site-packages"))
    standard = next(path.parent for path in root.glob("usr/**/lib/python3*/asyncio"))
    for folder in (standard, standard / "asyncio", *packages.glob("tiercheck*"), *packages.glob("aiohttp")):
        compiled = {path.name.split(".")[0] for path in folder.glob("__pycache__/*.pyc")}
        assert {path.stem for path in folder.glob("*.py")} <= compiled | {"__phello__"}, folder


@pytest.mark.usefixtures("images")
def test_archive_has_the_name_by_which_the_chart_asks_for_the_image(tmp_path: Path) -> None:
    """`ctr images import` takes the name from it."""
    write_archives(Store(CACHE), tmp_path, ["sidecar"])
    with tarfile.open(tmp_path / "sidecar.tar") as archive:
        manifest = archive.extractfile("manifest.json")
        assert manifest is not None
        (image,) = json.load(manifest)
    env = only("Deployment")["spec"]["template"]["spec"]["containers"][0]["env"]
    (asked,) = (entry["value"] for entry in env if entry["name"] == "TIERCHECK_SIDECAR_IMAGE")
    assert image["RepoTags"] == [f"docker.io/library/{asked}"]


IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@pytest.mark.parametrize("target", ["operator", "sidecar"])
def test_image_has_all_that_its_program_imports(start_pod: StartPod, target: str) -> None:
    """Libraries of the system included, and with nobody at home."""
    manifest = template()
    container = manifest["spec"]["containers"][0]
    container["image"] = f"tiercheck-{target}:{__version__}"
    container["command"] = ["python3", "-c", IMPORT_ALL, f"tiercheck_{target}"]
    started = start_pod(manifest).start("operator")
    assert started.wait() == 0, started.log
