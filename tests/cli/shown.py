"""Runs a command on recorded objects, and holds what it shows against a text that a person approved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from typer.testing import CliRunner

from tests.cli import recorded
from tiercheck_cli.cluster import Cluster, Forbidden
from tiercheck_cli.commands import app
from tiercheck_cli.terminal import to_plain_text
from tiercheck_operator.model.saved_placement import SavedPlacement, read_placement_data

FOLDER = Path(__file__).parent / "golden"


def rendered(shown: RenderableType, width: int) -> str:
    """As a pipe gets it: no colours, no trailing blanks."""
    return to_plain_text(shown, width)


def matches(name: str, text: str) -> None:
    """UPDATE_GOLDEN=1 writes the file: look at it before it is committed."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} differs; UPDATE_GOLDEN=1 rewrites it"


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str

    def well(self) -> Ran:
        """It did what was asked."""
        assert self.status == 0, self.err
        return self


def run(*words: str, columns: int = 80, env: dict[str, str] | None = None, stdin: str | None = None) -> Ran:
    """Without a terminal."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": str(columns), **(env or {})}, input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


class FakeCluster(Cluster):
    """Of `recorded`. `may_read_nodes`: whether the user has that right."""

    def __init__(self, may_read_nodes: bool = True, domains_saved: bool = False) -> None:
        self.namespace = recorded.NAMESPACE
        self._may_read_nodes, self._domains_saved = may_read_nodes, domains_saved

    def job(self, name: str) -> dict[str, Any]:
        return recorded.job()

    def pods(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        return recorded.pods()

    def placement(self, job: Mapping[str, Any]) -> SavedPlacement | None:
        return read_placement_data(recorded.placement(self._domains_saved)["data"])

    def nodes(self) -> list[dict[str, Any]]:
        if not self._may_read_nodes:
            raise Forbidden("nodes is forbidden")
        return recorded.nodes()

    def events(self, job: Mapping[str, Any]) -> list[dict[str, Any]]:
        return recorded.events()
