"""`export`: what a bug report needs, in one file."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tiercheck_cli.cluster import Cluster
from tiercheck_cli.export.collect import collect, gaps
from tiercheck_cli.failure import USAGE, CannotDo
from tiercheck_cli.options import Context, Kubeconfig, Namespace
from tiercheck_cli.terminal import remark

_ARCHIVES = (".tar.gz", ".tgz")


class What(str, Enum):
    """What is exported. Versions of the training state are meant to come here too."""

    DIAGNOSTICS = "diagnostics"


def export(
    job: Annotated[str, typer.Argument(help="The job.")],
    *,
    what: Annotated[
        What, typer.Option(help="diagnostics: all that a bug report needs, without secrets.")
    ] = What.DIAGNOSTICS,
    to: Annotated[
        Path | None, typer.Option(help="FILE.tar.gz, or a new folder. Default: JOB-diagnostics-TIME.tar.gz.")
    ] = None,
    trainer_logs: Annotated[
        bool, typer.Option("--trainer-logs", help="Also what the training commands printed. Look through it first.")
    ] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Everything for a bug report in one file: job, pods, placement, events, logs; secrets taken out."""
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
    print(path)
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
