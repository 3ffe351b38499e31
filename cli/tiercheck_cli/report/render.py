"""Writes the whole report into one folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tiercheck_cli.report.page import page
from tiercheck_cli.report.pictures import write_loss_png, write_recovery_png
from tiercheck_cli.report.record import RunRecord


@dataclass(frozen=True)
class Rendered:
    """The files of one report."""

    record: Path
    page: Path
    loss: Path
    recovery: Path


def render(record: RunRecord, folder: Path) -> Rendered:
    """Write run.json, index.html, loss.png and recovery.png into `folder`, which is made if need be. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    files = Rendered(folder / "run.json", folder / "index.html", folder / "loss.png", folder / "recovery.png")
    record.write(files.record)
    files.page.write_text(page(record), encoding="utf-8")
    write_loss_png(record, files.loss)
    write_recovery_png(record, files.recovery)
    return files
