"""`export`: what a bug report needs, in one file; or a version of the training state, for other tools."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

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
from tiercheck_cli.export.collect import collect, gaps
from tiercheck_cli.failure import USAGE, CannotDo, program
from tiercheck_cli.terminal import Context, Kubeconfig, Namespace, remark, say

_CHECKPOINT = "Checkpoint"
_ARCHIVES = (".tar.gz", ".tgz")


class What(str, Enum):
    """What is exported."""

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
    """Everything for a bug report in one file, secrets taken out; or with --format a version of the training
    state."""
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
