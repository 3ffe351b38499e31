"""Stands between an operator and an API server, and lets everything through but the events of watches."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.access import load
from tiercheck_local.controlplane.kubeconfig import write_kubeconfig

_PASSED_ON = ("Accept", "Content-Type")


@contextmanager
def deaf_to_watches(kubeconfig: Path, target: Path) -> Iterator[Path]:
    """A kubeconfig, written to `target`, whose watches are answered and never say anything."""
    access, ended = load(kubeconfig), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            if "true" in parse_qs(urlsplit(self.path).query).get("watch", ()):
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                ended.wait()
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
            headers = {name: self.headers[name] for name in _PASSED_ON if self.headers[name]}
            request = urllib.request.Request(
                access.server + self.path, body, {**access.headers, **headers}, method=self.command
            )
            try:
                with urllib.request.urlopen(request, timeout=30, context=access.tls) as response:
                    status, kind, data = (
                        response.status,
                        response.headers.get("Content-Type"),
                        response.read(),
                    )
            except urllib.error.HTTPError as error:
                status, kind, data = error.code, error.headers.get("Content-Type"), error.read()
            self.send_response(status)
            self.send_header("Content-Type", kind or "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is logged."""

    server = ThreadingHTTPServer(("127.83.5.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        write_kubeconfig(target, f"http://127.83.5.1:{server.server_port}")
        yield target
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
