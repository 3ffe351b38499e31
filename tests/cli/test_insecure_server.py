"""A server whose certificate is not checked is mentioned once, not with every request."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from tests.cli import recorded
from tests.cli.test_as_a_plugin import start
from tiercheck_operator.kubernetes.certificates import issue


class Answers(BaseHTTPRequestHandler):
    """What the commands look at of the recorded job."""

    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        body = json.dumps(_object(self.path.partition("?")[0].rsplit("/", 1)[-1])).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def _object(name: str) -> dict[str, Any]:
    single = {recorded.NAME: recorded.job(), recorded.placement()["metadata"]["name"]: recorded.placement()}
    lists = {"pods": recorded.pods(), "nodes": recorded.nodes()}
    return single.get(name) or {"items": lists.get(name, [])}


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    made = issue("uid")
    for name, content in (("crt", made.certificate), ("key", made.key)):
        (tmp_path / name).write_bytes(content)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "crt", tmp_path / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {
            "server": f"https://127.0.0.1:{server.server_port}", "insecure-skip-tls-verify": True,
        }}],
        "users": [{"name": "u", "user": {"token": "t"}}],
    }  # fmt: skip
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    yield path
    server.shutdown()
    thread.join()
    server.server_close()


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
