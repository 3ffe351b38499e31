"""`helm test` passes on an operator that is up, and says what is wrong with one that is not."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.chart.chart_under_test import ROOT, of_kind, only
from tiercheck_operator.metrics import Metrics


def command() -> list[str]:
    (container,) = only("Pod")["spec"]["containers"]
    assert container["command"][0] == "python3"
    return [sys.executable, *container["command"][1:]]


def run(url: str, seconds: float = 0) -> subprocess.CompletedProcess[str]:
    """The pod's command, against another address and with another patience."""
    *script, address, patience = command()
    assert address.startswith("http://")
    assert float(patience) > 0
    return subprocess.run(
        [*script, url, str(seconds)], capture_output=True, text=True, check=False, timeout=60
    )


@contextmanager
def serving(pages: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = pages.get(self.path, (404, b""))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the test's output is the script's."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def operators_pages(**changes: tuple[int, bytes]) -> dict[str, tuple[int, bytes]]:
    metrics = Metrics()
    metrics.watched("Node")
    pages = {
        "healthz": (200, b"ok\n"),
        "readyz": (200, b"ready\n"),
        "metrics": (200, metrics.text()),
        **changes,
    }
    return {f"/{name}": page for name, page in pages.items()}


def test_it_passes_and_names_the_version_when_the_operator_is_up() -> None:
    with serving(operators_pages()) as url:
        done = run(url)
    assert done.returncode == 0, done.stderr
    assert 'tiercheck_build_info{version="' in done.stdout


def test_it_fails_while_the_operator_is_starting() -> None:
    with serving(operators_pages(readyz=(503, b"starting\n"))) as url:
        done = run(url)
    assert done.returncode == 1
    assert "answers 503: the operator runs but is not ready" in done.stderr


def test_it_fails_when_nobody_answers() -> None:
    with serving({}) as url:
        pass
    done = run(url)
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    assert "network policy" in done.stderr


def test_it_fails_on_an_operator_that_has_seen_no_node() -> None:
    with serving(operators_pages(metrics=(200, Metrics().text()))) as url:
        done = run(url)
    assert done.returncode == 1
    assert "no tiercheck_watch_last_event_timestamp_seconds" in done.stderr


def test_it_is_a_hook_that_asks_the_service_that_is_installed() -> None:
    (pod,) = of_kind("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    service = only("Service")
    name, namespace, port = (
        service["metadata"]["name"],
        service["metadata"]["namespace"],
        service["spec"]["ports"][0]["port"],
    )
    assert command()[-2] == f"http://{name}.{namespace}.svc:{port}"


def test_it_needs_nothing_that_the_operators_image_lacks() -> None:
    """Only the standard library, and the `python3` that the image has on its PATH."""
    script = (ROOT / "charts" / "tiercheck" / "files" / "check.py").read_text()
    imported = {
        line.split()[1].partition(".")[0] for line in script.splitlines() if line.startswith("import ")
    }
    assert imported <= set(sys.stdlib_module_names)
    assert command()[2].strip() == script.strip()
