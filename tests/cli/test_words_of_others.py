"""Text of others reaches a terminal without anything that the terminal would obey."""

from __future__ import annotations

import ast
import io
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table

from tests.cli import recorded
from tests.cli.shown import run
from tiercheck.redaction import redacted
from tiercheck_cli import terminal
from tiercheck_cli.events import events_table, timeline
from tiercheck_cli.export import clean
from tiercheck_cli.terminal import Output, Text

CLI = Path(terminal.__file__).parent
EVIL = [
    "\x1b]0;title\x07", "\x1b]52;c;cm0gLXJmIH4K\x07", "\x1b[2J\x1b[1;1H", "\x9b2K", "\x1b]8;;http://x\x1b\\",
    "\x08\x7f",
    "a\rb", "\u202egpj.exe", "\u2066x\u2069", "\u200fx", "\u2028", "\x85", "\x00",
]  # fmt: skip
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def shown(what: RenderableType | str) -> str:
    """On a terminal without colours."""
    made, sink = terminal.console(), io.StringIO()
    made.file, made._color_system = sink, None
    made.print(what)
    return sink.getvalue()


def table(cell: object) -> Table:
    made = Table(str(cell))
    made.add_row(cell)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("evil", EVIL)
def test_text_of_any_kind_is_shown_without_what_a_terminal_obeys(evil: str) -> None:
    event = {"type": "Normal", "reason": evil, "message": f"it {evil} ended", "metadata": {}}
    told = timeline(
        {"metadata": {"name": evil}, "status": {}}, [{**event, "lastTimestamp": "2026-11-26T08:00:00Z"}]
    )
    ways: list[RenderableType] = [
        Text(evil), Text("x").append(evil), Text.assemble(("x", "bold"), evil, (evil, "dim")),
        Text(" ").join([Text(evil), Text(evil)]), evil, table(evil), table(Text(evil)),
        Panel(Text(evil), title=Text(evil)), events_table(told),
    ]  # fmt: skip
    for way in ways:
        assert not OBEYED.search(shown(way))
        assert not OBEYED.search(terminal.to_plain_text(way, 80))


@pytest.mark.parametrize("evil", EVIL)
def test_sentences_and_documents_are_written_without_it_and_say_the_same(
    evil: str, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal.say(evil)
    terminal.remark(evil)
    written = capsys.readouterr()
    assert not OBEYED.search(written.out + written.err)
    for output, read in ((Output.JSON, json.loads), (Output.YAML, yaml.safe_load)):
        terminal.write({"name": evil, "list": [f"é {evil}"]}, output)
        text = capsys.readouterr().out
        assert not OBEYED.search(text)
        assert read(text) == {"apiVersion": ANY, "name": evil, "list": [f"é {evil}"]}


def test_error_of_a_command_is_a_sentence_without_it(tmp_path: Path) -> None:
    odd = f"{tmp_path}/\x1b]0;x\x07\u202ejob"
    ran = run("export", "--folder", odd, "--format", "safetensors", "--to", str(tmp_path / "to"))
    assert ran.status != 0
    assert "has no complete version" in ran.err
    assert not OBEYED.search(ran.err)


@pytest.mark.parametrize("path", sorted(CLI.rglob("*.py")), ids=lambda path: path.relative_to(CLI).as_posix())
def test_nothing_is_shown_by_another_way(path: Path) -> None:
    """Rich's own `Text` and `Console`, and `print`, pass everything on."""
    exempt = {"terminal.py": "the way itself", "main.py": "has only the standard library",
        "simulate/command.py": "counts its runs"}  # fmt: skip
    odd = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in ("rich.text", "rich.console", "rich"):
            odd |= {name.name for name in node.names} & {"Text", "Console", "print"}
        if isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "print",
            "typer.echo",
            "Text.from_markup",
        ):
            odd.add(ast.unparse(node.func))
    allowed = {"checkpoint/command.py": {"print"}}.get(path.relative_to(CLI).as_posix(), set())
    assert path.relative_to(CLI).as_posix() in exempt or odd <= allowed


# What is exported for a bug report holds no secret that its makers could have told from the rest.

SECRET = "hunter2-0f9a"


def test_environment_variables_keep_their_names_and_lose_their_values() -> None:
    pod = clean(recorded.pods()[0])
    assert pod["spec"]["containers"][0]["env"] == [{"name": "WANDB_API_KEY", "value": "REDACTED"}]


def test_names_of_secrets_stay_because_they_tell_where_to_look() -> None:
    env = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s3", "key": "AWS_SECRET_ACCESS_KEY"}}}
    content = {"s3": {"credentialsSecretName": "s3"}, "imagePullSecrets": [{"name": "pull"}], "env": [env]}
    assert clean(content) == content


def test_the_copy_that_kubectl_keeps_of_an_object_goes_as_a_whole() -> None:
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": SECRET, "team": "language"}
    assert clean({"metadata": {"annotations": annotations, "managedFields": [SECRET]}}) == {
        "metadata": {"annotations": {"team": "language"}}
    }


@pytest.mark.parametrize(
    "command",
    [["train", "--token", SECRET], ["train", f"--api-key={SECRET}"], ["sh", "-c", f"TOKEN={SECRET} x"]],
)
def test_secrets_on_the_command_line_are_taken_out(command: list[str]) -> None:
    assert SECRET not in str(clean({"command": command}))


_NAMES = st.sampled_from(["name", "env", "value", "token", "password", "spec", "list", "command", "apiKey"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=12,
)


@given(_VALUES)
def test_any_object_can_be_redacted_and_once_is_enough(content: Any) -> None:
    once = clean(content)
    assert clean(once) == once


@given(st.text())
def test_any_text_can_be_redacted_and_once_is_enough(content: str) -> None:
    once = redacted(content)
    assert redacted(once) == once
