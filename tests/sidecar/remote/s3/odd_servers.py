"""S3 servers with one fault each, for what a well-behaved test server never does."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from tiercheck_local.addresses import free_ports

EMPTY_LIST = b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'

Answer = tuple[int, bytes]
Responder = Callable[[str, str, dict[str, str]], Answer]
"""(method, path with query, headers in lower case) -> (status, body)."""


def refusal(code: str, status: int = 403, message: str = "no") -> Answer:
    said = f"<Code>{code}</Code><Message>{message}</Message>"
    return status, f"<?xml version='1.0'?><Error>{said}</Error>".encode()


@contextlib.contextmanager
def serving(respond: Responder, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The base URL of a loopback server that answers what `respond` says."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, body = respond(self.command, self.path, headers)
            self.send_response(status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("ETag", '"0"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _answer  # noqa: N815

        def log_message(self, *args: object) -> None:
            pass

    with listening(Handler, tls) as url:
        yield url


@contextlib.contextmanager
def listening(handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The base URL of a loopback server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def closed_port() -> str:
    """The base URL of a port where nobody listens."""
    return f"http://127.0.0.1:{free_ports(1)[0]}"
