"""The command works as a plugin of kubectl, and on a server whose certificate is not checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from tests.access import server_tls
from tests.cli import recorded
from tests.sidecar.remote.s3.faulty_proxy import QuietHandler, listening
from tiercheck_cli.commands import complete
from tiercheck_cli.terminal import to_json_value
from tiercheck_operator.kubernetes.certificates import issue

ROOT = Path(__file__).parents[2]


def code_of(name: str) -> str:
    return f"import sys; sys.argv[0] = {name!r}; from tiercheck_cli.main import main; sys.exit(main())"


def start(
    *words: str, name: str = "tiercheck", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As the installed script called `name` does."""
    return subprocess.run(
        [sys.executable, "-c", code_of(name), *words],
        capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **(env or {})},
    )  # fmt: skip


PLAN = ("plan", "-f", "examples/parity.yaml", "--made-up", "4x4")


def test_help_names_the_command_as_it_was_called() -> None:
    assert "Usage: tiercheck " in start("--help").stdout
    assert "Usage: kubectl tiercheck " in start("--help", name="/usr/local/bin/kubectl-tiercheck").stdout


def test_there_are_no_colours_in_a_pipe_nor_with_no_color() -> None:
    for env in ({}, {"NO_COLOR": "1"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}):
        ran = start(*PLAN, env=env)
        assert ran.returncode == 0, ran.stderr
        assert "\x1b[3" not in ran.stdout


def test_a_terminal_without_unicode_gets_question_marks_and_no_traceback() -> None:
    ran = start(*PLAN, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "LC_ALL": "C"})
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "survives     the loss of any one rack" in ran.stdout


def test_a_reader_that_leaves_early_is_no_error() -> None:
    words = ["plan", "-f", "examples/parity.yaml", "--made-up", "64x64", "-o", "json"]
    command = [sys.executable, "-c", code_of("tiercheck"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_a_wrong_option_is_a_usage_error() -> None:
    ran = start("status", "--colour", "red")
    assert ran.returncode == 2
    assert "No such option: --colour" in ran.stderr


def test_version_and_colour_are_options_too() -> None:
    assert start("--version").stdout == start("version").stdout != ""
    assert "\x1b[3" not in start("--no-color", *PLAN, env={"FORCE_COLOR": "1"}).stdout


def test_lines_in_a_pipe_end_without_blanks() -> None:
    shown = start(*PLAN).stdout.splitlines()
    assert len(shown) > 5
    assert [line for line in shown if line != line.rstrip()] == []


def test_json_is_in_camel_case_with_a_version_and_few_digits() -> None:
    told = to_json_value(
        {"node_1": {"a-b": 1.23456789e-9}, "view": Held(lost_steps=2, age_seconds=1234.56789)}
    )
    assert told == {"node_1": {"a-b": 1.235e-9}, "view": {"lostSteps": 2, "ageSeconds": 1234.568}}
    ran = start(*PLAN, "-o", "json")
    assert json.loads(ran.stdout)["apiVersion"] == "cli.tiercheck.io/v1alpha1"


@dataclass
class Held:
    lost_steps: int
    age_seconds: float


@pytest.mark.parametrize(
    ("words", "found"),
    [([""], "plan"), (["st"], "status"), (["status", "--w"], "--wide"), (["remote", "ch"], "check")],
)
def test_words_are_completed_for_kubectl(words: list[str], found: str) -> None:
    assert found in complete(words)


def test_no_job_is_offered_where_a_value_is_wanted_or_no_cluster_answers(tmp_path: Path) -> None:
    assert complete(["status", "-n", ""]) == []
    assert complete(["status", "--kubeconfig", str(tmp_path / "none"), ""]) == []


def test_kubeconfig_that_was_looked_for_is_named(tmp_path: Path) -> None:
    ran = start("status", "--kubeconfig", str(tmp_path / "none"), name="kubectl-tiercheck")
    assert ran.returncode == 2
    assert str(tmp_path / "none") in ran.stderr


class Answers(QuietHandler):
    """What the commands look at of the recorded job."""

    asked: ClassVar[list[str]] = []
    tokens: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:  # noqa: N802
        self.asked.append(self.path)
        self.tokens.append(self.headers.get("Authorization"))
        body = json.dumps(_object(self.path.partition("?")[0].rsplit("/", 1)[-1])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _object(name: str) -> dict[str, Any]:
    single = {recorded.NAME: recorded.job(), recorded.placement()["metadata"]["name"]: recorded.placement()}
    lists = {"pods": recorded.pods(), "nodes": recorded.nodes()}
    return single.get(name) or {"items": lists.get(name, [])}


def write_kubeconfig(path: Path, cluster: dict[str, Any], user: dict[str, Any]) -> Path:
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }  # fmt: skip
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    with listening(Answers, server_tls(issue("uid"), tmp_path)) as url:
        cluster = {"server": url, "insecure-skip-tls-verify": True}
        yield write_kubeconfig(tmp_path / "kubeconfig", cluster, {"token": "t"})


def test_token_of_another_program_is_fetched_anew_when_it_has_ended(tmp_path: Path) -> None:
    program = (
        'echo >> calls; printf \'{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", '
        '"status": {"token": "t%d", "expirationTimestamp": "2020-01-01T00:00:00Z"}}\' $(wc -l < calls)'
    )
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", program]}
    Answers.tokens.clear()
    with listening(Answers) as url:
        path = write_kubeconfig(tmp_path / "kubeconfig", {"server": url}, {"exec": plugin})
        ran = start(
            "status", recorded.NAME, "-n", recorded.NAMESPACE, "--wide", env={"KUBECONFIG": str(path)}
        )
    assert ran.returncode == 0, ran.stderr
    assert all(token and token.startswith("Bearer t") for token in Answers.tokens)
    assert len(set(Answers.tokens)) == len(Answers.tokens) > 2


def test_proxy_of_the_kubeconfig_is_used(tmp_path: Path) -> None:
    Answers.asked.clear()
    with listening(Answers) as url:
        cluster = {"server": "http://api.invalid", "proxy-url": url}
        path = write_kubeconfig(tmp_path / "kubeconfig", cluster, {"token": "t"})
        ran = start("status", recorded.NAME, "-n", recorded.NAMESPACE, env={"KUBECONFIG": str(path)})
    assert ran.returncode == 0, ran.stderr
    assert Answers.asked[0].startswith("http://api.invalid/apis/tiercheck.io/")


def test_certificate_that_is_not_checked_is_mentioned_once_however_many_requests_are_made(
    kubeconfig: Path,
) -> None:
    Answers.asked.clear()
    ran = start(
        "status", recorded.NAME, "-n", recorded.NAMESPACE, "--wide", env={"KUBECONFIG": str(kubeconfig)}
    )
    assert ran.returncode == 0, ran.stderr
    assert len(Answers.asked) > 2
    assert "InsecureRequestWarning" not in ran.stderr
    assert len(ran.stderr.splitlines()) == 1
    assert "is not checked" in ran.stderr
