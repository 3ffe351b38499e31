"""Serves S3 with faults: a proxy of a good server, and servers that answer what a test says."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from tiercheck_local.markers import free_ports

EMPTY_LIST = b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>'

Answer = tuple[int, bytes]
Responder = Callable[[str, str, dict[str, str]], Answer]
"""(method, path with query, headers in lower case) -> (status, body)."""


def refusal(code: str, status: int = 403, message: str = "no") -> Answer:
    said = f"<Code>{code}</Code><Message>{message}</Message>"
    return status, f"<?xml version='1.0'?><Error>{said}</Error>".encode()


class QuietHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args: object) -> None:
        pass  # connections that a test cuts off


@contextlib.contextmanager
def serving(respond: Responder, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The base URL of a loopback server that answers what `respond` says."""

    class Handler(QuietHandler):
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

    with listening(Handler, tls) as url:
        yield url


@contextlib.contextmanager
def listening(handler: type[BaseHTTPRequestHandler], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The base URL of a loopback server."""
    server = QuietServer(("127.0.0.1", 0), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
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


@dataclass(frozen=True)
class Seen:
    """One request that arrived."""

    method: str
    path: str
    headers: dict[str, str]
    """Names in lower case."""

    @property
    def part(self) -> int:
        """The number of the part that it uploads; 0 if it does not."""
        query = parse_qs(urlsplit(self.path).query)
        return int(query.get("partNumber", ["0"])[0]) if self.method == "PUT" else 0

    @property
    def key(self) -> str:
        return urlsplit(self.path).path


@dataclass
class Fault:
    """What happens instead. In this order: the answer waits for `until`; the connection is cut in mid-body;
    an error is answered."""

    until: threading.Event | None = None
    cut: bool = False
    answer: tuple[int, bytes] | None = None
    without: str = ""
    """A header that does not reach the server, in lower case: then it is passed on."""
    half: bool = False
    """The server's answer ends in mid-body."""


BUSY = Fault(answer=refusal("SlowDown", 503))
FORBIDDEN = Fault(answer=refusal("AccessDenied", 403))
EXPIRED = Fault(answer=refusal("ExpiredToken", 400))
FULL = Fault(answer=refusal("InsufficientStorage", 507))
CUT = Fault(cut=True)
DEAF = Fault(without="if-none-match")
"""As a server that does not mind conditions."""


@dataclass
class Proxy:
    url: str = ""
    rule: Callable[[Seen], Fault | None] = lambda seen: None
    seen: list[Seen] = field(default_factory=list)
    """Requests that were passed on, in order of arrival."""
    answered: Callable[[Seen, bytes, int], None] = lambda seen, body, status: None
    """Told of each of them, with its body and the server's status, before the client is."""
    stored: set[int] = field(default_factory=set)
    """Parts that the server has taken. To list them while it does makes moto's ETags wrong: it digests a part
    when it is first asked, in two threads at once from one buffer."""

    def parts(self) -> list[int]:
        """Numbers of the parts that reached the server."""
        return sorted(each.part for each in self.seen if each.part)

    def reads(self) -> list[str]:
        """Keys of artifacts that were read, once per request that reached the server."""
        return [each.key for each in self.seen if each.method == "GET" and each.key.endswith(".safetensors")]


@contextlib.contextmanager
def proxying(endpoint: str) -> Iterator[Proxy]:
    """A proxy of the S3 server at `endpoint`; its rule may be exchanged while it runs."""
    proxy, target = Proxy(), urlsplit(endpoint)

    class Handler(QuietHandler):
        def _pass_on(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            if "://" in self.path:  # we are a proxy to a host named after its bucket, behind which is a path
                self.path = f"/{headers['host'].partition('.')[0]}/{self.path.split('/', 3)[3]}"
                self.headers.replace_header("Host", target.netloc)
            seen = Seen(self.command, self.path, headers)
            fault = proxy.rule(seen) or Fault()
            length = int(self.headers.get("Content-Length", 0))
            if fault.cut:
                self.rfile.read(length // 2)
                linger = struct.pack("ii", 1, 0)  # close sends a reset
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            body = self.rfile.read(length)
            if fault.until is not None:
                fault.until.wait(60)
            if fault.answer is not None:
                self._answer(fault.answer[0], {"Content-Type": "application/xml"}, fault.answer[1])
                return
            proxy.seen.append(seen)
            onward = http.client.HTTPConnection(target.hostname or "", target.port or 80, timeout=60)
            try:
                # The Host header that was signed goes along.
                onward.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() != fault.without:
                        onward.putheader(name, value)
                onward.endheaders(body)
                response = onward.getresponse()
                content = response.read()
                if seen.part and response.status == 200:
                    proxy.stored.add(seen.part)
                proxy.answered(seen, body, response.status)
                kept = {
                    k: v
                    for k, v in response.getheaders()
                    if k.lower() not in ("connection", "transfer-encoding", "date", "server")
                }
                self._answer(response.status, kept, content, half=fault.half)
            finally:
                onward.close()

        def _answer(self, status: int, headers: dict[str, str], body: bytes, *, half: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() != "content-length":
                    self.send_header(name, value)
            self.send_header(
                "Content-Length",
                headers.get("Content-Length", str(len(body))) if self.command == "HEAD" else str(len(body)),
            )
            self.end_headers()
            self.close_connection |= half
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if half else body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

    with listening(Handler) as proxy.url:
        yield proxy
