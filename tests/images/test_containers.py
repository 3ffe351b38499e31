"""Our images have what they need and no more, work as the chart runs them, and end at SIGTERM."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.access import Access, load
from tests.chart.releases import NAMESPACE, of_kind, only
from tests.cluster.jobs import Jobs, page
from tests.images.building import BASE, CACHE, ROOT, Store, image_name, write_archives
from tests.images.container import Container
from tests.images.pods import Image, Pod, StartPod, Worker, in_cluster
from tiercheck.about import __version__
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import Report
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.demo.job import CREDENTIALS, ObjectStore, credentials, in_bucket
from tiercheck_local.nodespec import NodeSpec

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
        differ = f"diff --recursive --brief --no-dereference --exclude=__pycache__ {base} {root}"
        changes = subprocess.run(differ.split(), capture_output=True, text=True, check=False).stdout
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


# A worker's pod of our images: library, sidecar and example trainer bring a run to its end.

STEPS = 6


def test_worker_trains_to_its_end_and_its_state_reaches_the_bucket(
    start_pod: StartPod, tmp_path: Path
) -> None:
    with ObjectStore(tmp_path / "s3.log", "checkpoints") as bucket:
        opened = {
            key: base64.b64encode(value.encode()).decode()
            for key, value in credentials()["stringData"].items()
        }
        tiers = {"remote": {"s3": in_bucket(bucket.bucket, bucket.endpoint, "prod"), "everySteps": STEPS}}
        arguments = ["--steps", str(STEPS), "--every", "2"]
        worker = Worker(start_pod, arguments, secrets={CREDENTIALS: opened}, tiers=tiers)
        sidecar, trainer = worker.train()
        trainer.wait_for(lambda: '"digest"' in trainer.log, "the last step")
        lines = [json.loads(line) for line in trainer.log.splitlines() if line.startswith('{"')]
        assert [line["step"] for line in lines if "step" in line] == list(range(1, STEPS + 1))
        sidecar.wait_for(lambda: uploaded(worker.report()) == STEPS, "last step in the bucket")
        worker.tell(Phase.FINISH)
        assert trainer.wait() == 0, trainer.log
        sidecar.kill(signal.SIGTERM)
        assert sidecar.wait() == 0, sidecar.log


def uploaded(report: Report) -> int:
    """The step of the newest version that is complete in the remote tier."""
    return report.watermarks.remote.step if report.watermarks.remote else 0


# The operator's image, run as the chart's Deployment runs it, brings a job to its end.

SOON = 5.0
"""Seconds that an operator may take to end, its lease given back."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    nodes = NodeSpec.load(ROOT / "examples" / "clusters" / "two-racks.yaml")
    with LocalCluster(tmp_path / "cluster", nodes, lease_grace=4.0) as started:
        started.apply_crds(ROOT / "crds")
        started.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        yield started


def operators_pod() -> dict[str, Any]:
    """As the Deployment's controller would make it."""
    template = only("Deployment")["spec"]["template"]
    metadata = {**template["metadata"], "name": "tiercheck-operator-0", "namespace": NAMESPACE}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


def test_operator_brings_a_job_to_its_end_and_helm_test_passes(
    cluster: LocalCluster, start_pod: StartPod, tmp_path: Path
) -> None:
    account = tmp_path / "account"
    with in_cluster(load(cluster.kubeconfig), account, NAMESPACE) as variables:
        pod = start_pod(operators_pod(), variables=variables, account=account)
        operator = pod.start("operator")
        operator.wait_for(lambda: page(f"{pod.ip}:8080", "/readyz"), "readiness")
        job = Jobs(cluster, tmp_path).start(workers=2, steps=20)
        job.wait_condition("Completed")
        assert len(job.last_words()) == 2

        (test,) = (entry for entry in of_kind("Pod") if entry["metadata"]["name"].endswith("-test"))
        service = f"tiercheck-operator-metrics.{NAMESPACE}.svc"
        check = start_pod(test, hosts=f"127.0.0.1 localhost\n{pod.ip} {service}\n").start("test")
        assert check.wait() == 0, check.log

        operator.kill(signal.SIGTERM)
        assert operator.wait(SOON) == 0, operator.log
        lease = cluster.api.request(
            "GET", f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/tiercheck-operator"
        )
        assert not lease["spec"].get("holderIdentity"), (
            "it was given back, so that another replica leads at once"
        )


# SIGTERM ends the first process of every container, at any moment of its first seconds.

MOMENTS = (0.0, 0.05, 0.15, 0.4, 0.8, 1.5, 3.0)
SECONDS = 2.0
"""It may take to end."""
ORDERLY = (0, 128 + signal.SIGTERM)
"""Exit codes."""
TRIES = 3
"""For a moment at which it took longer, because the machine was busy with something else."""


def operator(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    """No API server answers it."""
    with in_cluster(Access("http://127.0.0.1:9", {}, None), folder / "account", NAMESPACE) as variables:
        return start_pod(operators_pod(), variables=variables, account=folder / "account"), "operator"


def library(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    return Worker(start_pod, []).pod, names.LIBRARY_CONTAINER


def sidecar(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    return Worker(start_pod, []).pod, names.SIDECAR_CONTAINER


def launcher(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    pod = Worker(start_pod, []).pod
    assert pod.start(names.LIBRARY_CONTAINER).wait() == 0
    return pod, names.TRAINER_CONTAINER


def trainer_alone(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    """By the image's own entry point, with the library and nothing else of TierCheck."""
    pod, name = launcher(start_pod, folder)
    (container,) = pod.spec["containers"]
    del container["command"]
    container["args"] = ["--folder", "/tmp/checkpoints"]
    container["env"] = [{"name": "PYTHONPATH", "value": names.LIBRARY_DIR}]
    return pod, name


def node_memory(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    worker = Worker(start_pod, [], tiers={"local": {"medium": "NodeMemory"}})
    return worker.pod, worker.pod.spec["initContainers"][1]["name"]


def janitor(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    (daemons,) = of_kind("DaemonSet", {"nodeMemory": {"janitor": {"enabled": True}}})
    return start_pod({"metadata": {}, "spec": daemons["spec"]["template"]["spec"]}), "janitor"


def helm_test(start_pod: StartPod, folder: Path) -> tuple[Pod, str]:
    (test,) = (entry for entry in of_kind("Pod") if entry["metadata"]["name"].endswith("-test"))
    return start_pod(test), "test"


ALL = [operator, library, sidecar, launcher, trainer_alone, node_memory, janitor, helm_test]


@pytest.mark.parametrize("which", ALL, ids=lambda which: which.__name__)
def test_sigterm_in_the_first_seconds_ends_it_within_two(
    which: Any, start_pod: StartPod, tmp_path: Path
) -> None:
    pod, name = which(start_pod, tmp_path)
    for moment in MOMENTS:
        ends_soon(lambda after: seconds_to_end(pod.start(name), after), moment)


def test_sigterm_ends_a_worker_that_trains_within_two_seconds(start_pod: StartPod) -> None:
    """The launcher passes it on to the command, and waits for it."""

    def once(moment: float) -> float:
        worker = Worker(start_pod, [])
        sidecar, trainer = worker.train()
        try:
            return seconds_to_end(trainer, moment, codes=range(256))  # torchrun's
        finally:
            sidecar.remove()

    for moment in MOMENTS[-3:]:
        ends_soon(once, moment)


def ends_soon(once: Callable[[float], float], moment: float) -> None:
    """`once` tells it to end at that moment, and how long it took."""
    took = [once(moment)]
    while took[-1] > SECONDS and len(took) < TRIES:
        took.append(once(moment))
    assert took[-1] <= SECONDS, f"told after {moment} s, it took {took} s to end"


def seconds_to_end(container: Container, moment: float, codes: Collection[int] = ORDERLY) -> float:
    """From SIGTERM, `moment` seconds after it began to listen. 0 if it had done its work before."""
    container.wait_for(
        lambda: container.hears(signal.SIGTERM) or container.ended, "sign that it hears SIGTERM"
    )
    if container.ends_within(moment):
        assert container.wait() == 0, container.log
        return 0.0
    began = time.monotonic()
    container.kill(signal.SIGTERM)
    assert container.wait() in codes, container.log
    return time.monotonic() - began
