"""Serves the API until it is stopped, and never outlives its parent.

`python -m tiercheck_local.apiserver --directory DIR`
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import secrets
import signal
import socket
import ssl
import tempfile
from pathlib import Path

from aiohttp import web

from tiercheck_local.apiserver.http.server import application
from tiercheck_local.apiserver.store.storage import ObjectStorage
from tiercheck_local.controlplane import die_with_parent, write_kubeconfig
from tiercheck_operator.kubernetes.certificates import KeyPair, issue_pair

_LIFETIME = datetime.timedelta(days=365)


async def serve(port: int, directory: Path, history: int) -> None:
    """Listens on 127.0.0.1 and writes `directory`/kubeconfig once it answers, for its owner only.

    Port 0: a free one."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    token = secrets.token_urlsafe(24)
    pair = issue_pair("tiercheck-local", ["127.0.0.1", "localhost"], _LIFETIME)
    # Cancellation ends the watches of clients that went away.
    runner = web.AppRunner(
        application(ObjectStorage(history), token),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=0.5,
    )
    await runner.setup()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    await web.SockSite(runner, listener, ssl_context=_context(pair)).start()
    write_kubeconfig(
        directory / "kubeconfig", f"https://127.0.0.1:{listener.getsockname()[1]}", token, pair.ca
    )
    await stop.wait()
    await runner.cleanup()


def _context(pair: KeyPair) -> ssl.SSLContext:
    """Returns a TLS context, because kubectl sends its token over TLS only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:  # for its owner only
        file.write(pair.certificate + pair.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiercheck_local.apiserver", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (0: a free one)")
    parser.add_argument("--directory", type=Path, required=True, help="where the kubeconfig is written")
    parser.add_argument("--history", type=int, default=10_000, help="changes kept for watches to resume from")
    options = parser.parse_args()
    die_with_parent(os.getppid())
    options.directory.mkdir(parents=True, exist_ok=True)
    asyncio.run(serve(options.port, options.directory, options.history))


if __name__ == "__main__":
    main()
