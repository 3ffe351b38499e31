"""Implements `export`: a redacted file for a bug report, or a version of the training state."""

from __future__ import annotations

import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tiercheck.about import __version__
from tiercheck.protocol import names
from tiercheck.redaction import GONE, is_secret_name, redacted
from tiercheck_cli.checkpoint.command import (
    Endpoint,
    Format,
    Region,
    RemoteUrl,
    StoredAs,
    VersionSource,
    export_checkpoint,
)
from tiercheck_cli.cluster import Cluster
from tiercheck_cli.events import events_table, recoveries, timeline
from tiercheck_cli.explain.command import why_screen
from tiercheck_cli.failure import USAGE, CannotDo, program
from tiercheck_cli.layout import layout_of
from tiercheck_cli.plan.screen import screen as plan_screen
from tiercheck_cli.status.command import screen as status_screen
from tiercheck_cli.status.view import status_view, worker_views
from tiercheck_cli.terminal import Context, Kubeconfig, Namespace, clock, remark, say, to_plain_text
from tiercheck_operator.model.conditions import listed
from tiercheck_operator.planning.topology import Topology

_NOISE = ("managedFields", "kubectl.kubernetes.io/last-applied-configuration")
_FIELDS_OF_VALUES = {"env"}
_OPTION = re.compile(r"^--?[A-Za-z0-9_.-]+$")


# It is better to lose a harmless value than to reveal a secret, so the values of all environment variables
# are removed, whatever their names.
def clean(content: Any) -> Any:
    """Returns a copy of an API object, or of a part of one, without possible secrets and without noise."""
    if isinstance(content, Mapping):
        return {str(key): _value(str(key), value) for key, value in content.items() if key not in _NOISE}
    if isinstance(content, list):
        return (
            _words(content)
            if content and all(isinstance(item, str) for item in content)
            else [clean(x) for x in content]
        )
    return redacted(content) if isinstance(content, str) else content


def _value(key: str, value: Any) -> Any:
    if key in _FIELDS_OF_VALUES and isinstance(value, list):
        return [_variable(entry) for entry in value]
    listed = isinstance(value, list) and not any(isinstance(item, Mapping) for item in value)
    if is_secret_name(key) and (listed or isinstance(value, str | float) or type(value) is int):
        return GONE
    return clean(value)


def _variable(entry: Any) -> Any:
    """Removes the value of an environment variable; its name is enough."""
    if not isinstance(entry, Mapping):
        return GONE
    return {str(key): GONE if key == "value" else clean(value) for key, value in entry.items()}


def _words(command: list[str]) -> list[str]:
    """Redacts the words of a command, and those after options such as --token."""
    found: list[str] = []
    for word in command:
        before = found[-1] if found else ""
        secret = is_secret_name(before) or before.lower().endswith(("key", "auth"))
        if secret and _OPTION.match(before) and not word.startswith("-"):
            found.append(GONE)
        else:
            found.append(redacted(word))
    return found


_WIDTH = 120
_text = partial(to_plain_text, width=_WIDTH)
_OPERATOR = "app.kubernetes.io/name=tiercheck"
_LINES = 5000
_LOGS = 32
"""The most pods to fetch logs of: a thousand would take minutes and be too many to read."""


@dataclass
class CollectedFiles:
    """Holds `files`, contents by path, and `missing`, reasons by path."""

    files: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, path: str, what: Callable[[], str]) -> None:
        """Adds redacted text, or notes why there is none: a report with a gap is better than none."""
        with self.noting(path):
            self.files[path] = redacted(what())

    def add_object(self, path: str, what: Callable[[], Any]) -> None:
        """Adds an object of the API, or a part of one, as `add` does."""
        with self.noting(path):
            self.files[path] = _yaml(clean(what()))

    @contextmanager
    def noting(self, path: str) -> Iterator[None]:
        try:
            yield
        except CannotDo as error:
            self.missing[path] = redacted(str(error))


def collect(cluster: Cluster, job: Mapping[str, Any], now: float, trainer_logs: bool) -> CollectedFiles:
    """Collects the files about one job; what the user may not read is left out.

    A viewer of the namespace may read everything but nodes and the operator's log."""
    found = CollectedFiles()
    name = job["metadata"]["name"]
    pods: list[dict[str, Any]] = []
    with found.noting("pods"):
        pods = cluster.pods(job)
    found.add_object("job.yaml", lambda: job)
    found.add_object("placement.yaml", lambda: cluster.placement_object(job) or {})
    found.add_object("events.yaml", lambda: cluster.events(job))
    used = {(pod.get("spec") or {}).get("nodeName") for pod in pods}
    found.add_object(
        "nodes.yaml", lambda: [_node(each) for each in cluster.nodes() if each["metadata"]["name"] in used]
    )
    for pod in pods:
        found.files[f"pods/{pod['metadata']['name']}.yaml"] = _yaml(clean(pod))
    for pod in _most_useful_pods(pods):
        pod_name = pod["metadata"]["name"]
        for container in (names.SIDECAR_CONTAINER, *((names.TRAINER_CONTAINER,) if trainer_logs else ())):
            log = partial(cluster.log, cluster.namespace, pod_name, container, _LINES)
            found.add(f"logs/{pod_name}/{container}.log", log)
        metrics = partial(cluster.pod_page, pod_name, _metrics_port(pod), "metrics")
        found.add(f"metrics/{pod_name}.txt", metrics)
    if len(pods) > _LOGS:
        found.missing["logs"] = (
            f"of {len(pods)} pods only the {_LOGS} that show most: restarted, not running, and the first"
        )
    _operator_logs(cluster, found)
    found.add("status.txt", lambda: _text(status_screen(_view(cluster, job, pods, now), _WIDTH, wide=True)))
    found.add("plan.txt", lambda: _text(plan_screen(layout_of(cluster, job), _WIDTH)))
    found.add("explain.txt", lambda: _text(why_screen(job, recoveries(job), now, _WIDTH)))
    found.add("events.txt", lambda: _text(events_table(timeline(job, cluster.events(job)))))
    found.add("about.json", lambda: json.dumps(
        {"job": f"{cluster.namespace}/{name}", "time": clock(now), "tiercheck": __version__,
        "kubernetes": cluster.version()},
        indent=2,
    ) + "\n")  # fmt: skip
    found.files["README.txt"] = _readme(found, f"{cluster.namespace}/{name}", now)
    return found


def _metrics_port(pod: Mapping[str, Any]) -> int:
    """Returns the port of the metrics; pods in their node's network have ports of their own."""
    containers = (pod.get("spec") or {}).get("initContainers") or []
    ports = [port for entry in containers for port in entry.get("ports") or []]
    return next(
        (int(port["containerPort"]) for port in ports if port.get("name") == "tc-metrics"), names.METRICS_PORT
    )


def _view(cluster: Cluster, job: Mapping[str, Any], pods: list[dict[str, Any]], now: float) -> Any:
    saved = cluster.placement(job)
    members = worker_views(pods, saved.holders() if saved else {}, Topology.build({}, ()))
    return status_view(job, now, members)


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the node's place and condition, without its addresses and images."""
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    return {
        "name": metadata["name"],
        "labels": metadata.get("labels") or {},
        "taints": spec.get("taints") or [],
        "unschedulable": bool(spec.get("unschedulable")),
        "allocatable": status.get("allocatable") or {},
        "conditions": status.get("conditions") or [],
    }


def _operator_logs(cluster: Cluster, found: CollectedFiles) -> None:
    with found.noting("logs/operator"):
        pods = cluster.pods_labelled(_OPERATOR)
        if not pods:
            raise CannotDo(f"no pod has the label {_OPERATOR}")
        for pod in pods:
            namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
            log = partial(cluster.log, namespace, name, None, _LINES)
            found.add(f"logs/operator/{name}.log", log)


def _most_useful_pods(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the `_LOGS` most useful pods: those that do not run, that were restarted, then the first."""

    def order(pod: Mapping[str, Any]) -> tuple[bool, bool, int]:
        status, labels = pod.get("status") or {}, pod["metadata"].get("labels") or {}
        containers = [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]
        restarted = any(int(entry.get("restartCount") or 0) for entry in containers)
        worker = labels.get(names.LABEL_WORKER, "")
        return status.get("phase") == "Running", not restarted, int(worker) if worker.isdigit() else 0

    return sorted(pods, key=order)[:_LOGS]


def _readme(found: CollectedFiles, job: str, now: float) -> str:
    lines = [
        f"What tiercheck {__version__} collected about {job} on {clock(now)} UTC.",
        "",
        f"Values of environment variables and whatever looks like a credential are replaced by {GONE}.",
        "Names of images, nodes, buckets and files are not: look through it before you publish it.",
        "",
        "begin with status.txt, events.txt and explain.txt",
        "",
        *(f"  {path}" for path in sorted(found.files)),
    ]
    if found.missing:
        lines += [
            "",
            "not here, and why",
            "",
            *(f"  {what}: {reason}" for what, reason in sorted(found.missing.items())),
        ]
    return "\n".join(lines) + "\n"


def gaps(missing: Mapping[str, str]) -> list[str]:
    """Returns one line for each reason, with what is missing because of it."""
    by_reason: dict[str, list[str]] = {}
    for what, reason in sorted(missing.items()):
        by_reason.setdefault(reason, []).append(what)
    return [f"{listed(things, 3)}: {reason}" for reason, things in by_reason.items()]


def _yaml(content: Any) -> str:
    import yaml

    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))


_CHECKPOINT = "Checkpoint"
_ARCHIVES = (".tar.gz", ".tgz")


class What(str, Enum):
    """The kinds of content to export."""

    DIAGNOSTICS = "diagnostics"
    CHECKPOINT = "checkpoint"


def export(
    job: Annotated[str | None, typer.Argument(help="The job; not needed with --folder or --remote.")] = None,
    *,
    what: Annotated[
        What | None,
        typer.Option(
            help="diagnostics: all that a bug report needs, without secrets (the default). "
            "checkpoint: a complete version of the training state (the default with --format, --folder or "
            "--remote)."
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            help=(
                "FILE.tar.gz, or a new folder. Default: JOB-diagnostics-TIME.tar.gz. A new folder for "
                "checkpoint."
            )
        ),
    ] = None,
    trainer_logs: Annotated[
        bool,
        typer.Option(
            "--trainer-logs", help="Also what the training commands printed. Look through it first."
        ),
    ] = False,
    form: Annotated[
        Format | None, typer.Option("--format", help="Of the checkpoint.", rich_help_panel=_CHECKPOINT)
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Default: the newest.", rich_help_panel=_CHECKPOINT)
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="A Checkpointer's folder, instead of a job.", rich_help_panel=_CHECKPOINT),
    ] = None,
    remote: RemoteUrl = None,
    stored_as: StoredAs = None,
    endpoint: Endpoint = None,
    region: Region = None,
    prefix: Annotated[
        str,
        typer.Option(
            help='safetensors: only what is below this name, without it; "" for all.',
            rich_help_panel=_CHECKPOINT,
        ),
    ] = "model",
    shard_size: Annotated[
        str, typer.Option(help="safetensors: the most bytes of a file.", rich_help_panel=_CHECKPOINT)
    ] = "5GB",
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Export a bug report in one file, secrets taken out; with --format, a version of the training state."""
    if what is None:
        what = What.CHECKPOINT if form or folder or remote else What.DIAGNOSTICS
    if what is What.CHECKPOINT:
        if sum(each is not None for each in (job, folder, remote)) != 1:
            raise CannotDo("give one of JOB, --folder and --remote", USAGE)
        if form is None or to is None:
            raise CannotDo(
                "a checkpoint needs --format dcp or safetensors, and --to with a new folder", USAGE
            )
        source = VersionSource(
            job, folder, remote, stored_as, endpoint, region, namespace, context, kubeconfig
        )
        export_checkpoint(source, form, to, step, prefix=prefix, shard_size=shard_size)
        return
    if job is None:
        raise CannotDo(f"which job? {program()} status -A lists them", USAGE)
    now = time.time()
    cluster = Cluster.connect(kubeconfig, context, namespace)
    found = cluster.job(job)
    stem = f"{job}-{what.value}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(now))}"
    path = to or Path(f"{stem}.tar.gz")
    if path.exists():
        raise CannotDo(f"{path} is there already; give another name with --to", USAGE)
    collection = collect(cluster, found, now, trainer_logs)
    try:
        if path.name.endswith(_ARCHIVES):
            _archive(path, stem, collection.files, int(now))
        else:
            _folder(path, collection.files)
    except OSError as error:
        raise CannotDo(f"{path} cannot be written: {error.strerror}") from error
    say(path)
    remark(f"{len(collection.files)} files; look through them before you publish them")
    for line in gaps(collection.missing):
        remark(f"not there: {line}")


def _archive(path: Path, stem: str, files: Mapping[str, str], now: int) -> None:
    with tarfile.open(path, "x:gz") as archive:
        for name, content in sorted(files.items()):
            data = content.encode()
            member = tarfile.TarInfo(f"{stem}/{name}")
            member.size, member.mtime, member.mode = len(data), now, 0o600
            archive.addfile(member, io.BytesIO(data))


def _folder(path: Path, files: Mapping[str, str]) -> None:
    path.mkdir(mode=0o700)
    for name, content in files.items():
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
