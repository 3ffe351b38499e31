"""Implements `export --format`, `import` and `remote`: exports, imports and stores of versions."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tiercheck.redaction import escape_controls
from tiercheck_cli.checkpoint import to_safetensors
from tiercheck_cli.checkpoint.saved import Saved, check_new, open_folder
from tiercheck_cli.cluster import Cluster
from tiercheck_cli.failure import FAILED, USAGE, CannotDo
from tiercheck_cli.terminal import Context, Kubeconfig, Namespace, progress_bar, remark, say

_PANEL = "Checkpoint"
_UNITS = {
    "": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
NEEDS_TORCH = "torch is not installed, which --format dcp and imports need; run: pip install torch"


class Format(str, Enum):
    """The formats that other tools read."""

    DCP = "dcp"
    SAFETENSORS = "safetensors"


RemoteUrl = Annotated[
    str | None,
    typer.Option(
        "--remote", help="s3://BUCKET/PREFIX, or the path of a shared directory.", rich_help_panel=_PANEL
    ),
]
StoredAs = Annotated[
    str | None, typer.Option("--job", help="NAMESPACE/NAME of the job in --remote.", rich_help_panel=_PANEL)
]
Endpoint = Annotated[str | None, typer.Option(help="URL of a server that speaks S3.", rich_help_panel=_PANEL)]
Region = Annotated[str | None, typer.Option(help="Of the bucket.", rich_help_panel=_PANEL)]


@dataclass(frozen=True)
class VersionSource:
    """The place of a version: one of job, folder and remote."""

    job: str | None
    folder: Path | None
    remote: str | None
    stored_as: str | None
    endpoint: str | None
    region: str | None
    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None

    def open(self, step: int | None) -> Saved:
        """Opens the newest complete version, or that of `step`. Raises CannotDo."""
        if self.folder is not None:
            return open_folder(self.folder, step)
        from tiercheck_cli.checkpoint import remote as tier

        if self.remote is not None:
            if self.stored_as is None:
                raise CannotDo("--remote needs --job NAMESPACE/NAME: a remote tier may hold many jobs", USAGE)
            settings, job = tier.settings_of_url(self.remote, self.endpoint, self.region), self.stored_as
        else:
            assert self.job is not None
            cluster = Cluster.connect(self.kubeconfig, self.context, self.namespace)
            found = cluster.job(self.job)
            settings = tier.settings_of_job(found, self.endpoint, self.region)
            job = f"{cluster.namespace}/{self.job}"
        with tier.refusals():
            return tier.open_version(tier.open_store(settings, job), step)


def export_checkpoint(
    source: VersionSource, form: Format, to: Path, step: int | None, *, prefix: str, shard_size: str
) -> None:
    """Exports a version; nothing is at `to` unless all of it is. Raises CannotDo."""
    most = _bytes_of(shard_size)
    check_new(to)
    if form is Format.DCP:
        try:
            import torch  # noqa: F401
        except ModuleNotFoundError as error:
            raise CannotDo(NEEDS_TORCH) from error
    saved = source.open(step)
    unfinished = to.with_name(f"{to.name}.unfinished")
    try:
        if unfinished.exists():
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        if form is Format.DCP:
            from tiercheck_cli.checkpoint import conversion

            with progress_of(sum(tensor.size for tensor in saved.tensors.values())) as progress:
                remarks = conversion.write_dcp(saved, unfinished, progress)
        else:
            tensors = to_safetensors.choose_tensors(saved, prefix)
            with progress_of(sum(tensor.size for tensor in tensors.values())) as progress:
                to_safetensors.write(saved, tensors, unfinished, most, progress)
            remarks = []
        if to.is_dir():
            to.rmdir()
        os.rename(unfinished, to)
    except OSError as error:
        raise CannotDo(f"{to} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    for sentence in remarks:
        remark(sentence)
    say(to)
    remark(f"{saved.version}, saved by {len(saved.slots)} ranks")
    if saved.unequal:
        some = ", ".join(saved.unequal[:3]) + ("" if len(saved.unequal) < 4 else ", ...")
        remark(
            f"each rank has its own of {len(saved.unequal)} tensors under one name ({some}), and only the "
            "lowest rank's are exported: parameters need names by their number in the whole model"
        )


@contextmanager
def progress_of(total: int) -> Iterator[Callable[[str, int], None]]:
    """Shows progress to `total` bytes; yields a function to call with each written item and its bytes."""
    with progress_bar() as bar:
        task = bar.add_task("", total=total)

        def advance(name: str, count: int) -> None:
            bar.update(task, advance=count, description=escape_controls(name[:40]))

        yield advance


def _bytes_of(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS or not int(match[1]):
        raise CannotDo(f'--shard-size "{text}" is no size such as 5GB or 500MiB', USAGE)
    return int(match[1]) * _UNITS[match[2].upper()]


def import_checkpoint(
    *,
    to: Annotated[
        str,
        typer.Option(
            help="A Checkpointer's folder, s3://BUCKET/PREFIX, or with --job the path of a shared directory."
        ),
    ],
    came: Annotated[Path, typer.Option("--from", help="The folder to read.")],
    form: Annotated[Format, typer.Option("--format", help="What wrote it.")],
    step: Annotated[
        int, typer.Option(help="The step that it is the state after; training goes on from there.", min=1)
    ] = 1,
    prefix: Annotated[
        str, typer.Option(help='dcp: the name of the model in it; "" if all is the model.')
    ] = "model",
    job: Annotated[
        str | None, typer.Option("--job", help="NAMESPACE/NAME of the job that will begin from it.")
    ] = None,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Make a version of what other tools wrote, for a job to begin from."""
    if "://" in to and job is None:
        raise CannotDo("a remote tier needs --job NAMESPACE/NAME: it may hold many jobs", USAGE)
    try:
        from tiercheck.protocol.artifacts.pieces import Box
        from tiercheck.protocol.version import Version
        from tiercheck_cli.checkpoint import conversion
    except ModuleNotFoundError as error:
        raise CannotDo(NEEDS_TORCH) from error
    found = conversion.from_dcp(came, prefix) if form is Format.DCP else conversion.from_safetensors(came)
    size = sum(Box.whole(shape).count * dtype.itemsize for dtype, shape, _ in found.tensors.values())
    if job is None:
        if any(Path(to).glob("rank-*-of-*/*.json")):
            raise CannotDo(f"{to} holds versions already; give another folder with --to", USAGE)
        with progress_of(size) as progress:
            conversion.write_version(found, Path(to), Version(step, 0), progress)
    else:
        from tiercheck_cli.checkpoint import remote as tier

        version = Version(step, 1)  # attempts of a job are counted from 1
        with tier.refusals(), tempfile.TemporaryDirectory(prefix="tiercheck-import-") as folder:
            store = tier.open_store(tier.settings_of_url(to, endpoint, region), job)
            tier.check_empty(store)
            with progress_of(size) as progress:
                path = conversion.write_version(found, Path(folder), version, progress)
            store.seed(version, path)
    say(to)
    for name in found.left_out[:3]:
        remark(f"left out: {name}")
    if len(found.left_out) > 3:
        remark(f"left out: {len(found.left_out) - 3} more")
    what = "weights only" if found.optimizer is None else "weights and optimizer"
    remark(f"step {step}: {what}, {len(found.tensors)} tensors, {size / 1e9:.2f} GB")


remote = typer.Typer(
    no_args_is_help=True, help="Try a durable store out; show or change the owner of a job's folder there."
)

Job = Annotated[str, typer.Argument(help="The job.")]
Place = Annotated[
    str | None,
    typer.Option(
        "--remote",
        help="s3://BUCKET/PREFIX, or the path of a shared directory. Default: what the job's spec says.",
    ),
]


@remote.command()
def check(
    place: Annotated[str, typer.Argument(help="s3://BUCKET/PREFIX, or the path of a shared directory.")],
    *,
    endpoint: Endpoint = None,
    region: Region = None,
) -> None:
    """Test all that TierCheck relies on, with a few temporary objects. Exit status 1 if anything fails."""
    from tiercheck_cli.checkpoint import remote as tier

    failed = 0
    with tier.refusals():
        for finding in tier.examine_place(tier.settings_of_url(place, endpoint, region)):
            mark = "skip" if not finding.tried else "ok  " if finding.ok else "FAIL"
            say(f"{mark}  {finding.name:20} {finding.message}")
            failed += not finding.ok
    if failed:
        remark(
            f"{failed} of the checks failed; what to do stands behind each. A job with this store would lose "
            "what they are for."
        )
        raise typer.Exit(FAILED)


@remote.command()
def owner(
    job: Job,
    *,
    place: Place = None,
    endpoint: Endpoint = None,
    region: Region = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show the owner of the job's folder in its store. With --remote and -n no cluster is asked."""
    from tiercheck_cli.checkpoint import remote as tier

    if place is None or namespace is None:
        cluster = Cluster.connect(kubeconfig, context, namespace)
        namespace = cluster.namespace
    if place is not None:
        settings = tier.settings_of_url(place, endpoint, region)
    else:
        settings = tier.settings_of_job(cluster.job(job), endpoint, region)
    with tier.refusals():
        found = tier.open_store(settings, f"{namespace}/{job}").ownership.owner()
    say("no owner yet" if found is None else found.described)


@remote.command("take-over")
def take_over(
    job: Job,
    *,
    place: Place = None,
    uid: Annotated[
        str | None,
        typer.Option(
            "--uid",
            help="The job's UID. Default: as the cluster says. With it, --remote and -n no cluster is asked.",
        ),
    ] = None,
    cluster_uid: Annotated[
        str,
        typer.Option(
            "--cluster", help="UID of its cluster's namespace kube-system, if --uid alone is not unique."
        ),
    ] = "",
    endpoint: Endpoint = None,
    region: Region = None,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Give the job its folder in the store, whatever owner it had. That one writes nothing there any more."""
    from tiercheck_cli.checkpoint import remote as tier

    if uid is not None:
        if place is None or namespace is None:
            raise CannotDo(
                "--uid needs --remote and -n: without a cluster nothing else says where the folder is", USAGE
            )
        settings = tier.settings_of_url(place, endpoint, region)
    else:
        cluster = Cluster.connect(kubeconfig, context, namespace)
        namespace = cluster.namespace
        found = cluster.job(job)
        if place is not None:
            settings = tier.settings_of_url(place, endpoint, region)
        else:
            settings = tier.settings_of_job(found, endpoint, region)
        attached = (found["spec"].get("attach") or {}).get("owner") or {}
        uid = str(attached.get("uid") or found["metadata"]["uid"])  # the UID that its pods use
        cluster_uid = cluster_uid or cluster.uid()
    with tier.refusals():
        former = tier.open_store(settings, f"{namespace}/{job}").ownership.assign_owner(uid, cluster_uid)
    if former is not None and former.job_uid == uid and cluster_uid in ("", former.cluster):
        say(f"{namespace}/{job} has it already")
        return
    say(f"{namespace}/{job}, UID {uid}, has it now")
    remark("before: " + ("no owner" if former is None else former.described))
