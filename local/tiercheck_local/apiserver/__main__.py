"""`python -m tiercheck_local.apiserver --directory DIR`: serve until told to stop, and never outlive the parent."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
from pathlib import Path

from aiohttp import web

from tiercheck_local.apiserver.server import application
from tiercheck_local.apiserver.storage import Storage
from tiercheck_local.controlplane.kubeconfig import write_kubeconfig
from tiercheck_local.controlplane.lifetime import die_with_parent


async def serve(port: int, directory: Path, history: int) -> None:
    """Listens on 127.0.0.1 and writes `directory`/kubeconfig once it answers. Port 0: a free one."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # Cancellation ends the watches of clients that went away.
    runner = web.AppRunner(
        application(Storage(history)), handler_cancellation=True, access_log=None, shutdown_timeout=0.5
    )
    await runner.setup()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    await web.SockSite(runner, listener).start()
    write_kubeconfig(directory / "kubeconfig", f"http://127.0.0.1:{listener.getsockname()[1]}")
    await stop.wait()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tiercheck_local.apiserver", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (0: a free one)")
    parser.add_argument("--directory", type=Path, required=True, help="where the kubeconfig is written")
    parser.add_argument("--history", type=int, default=10_000, help="changes kept for watches to resume from")
    options = parser.parse_args()
    die_with_parent()
    options.directory.mkdir(parents=True, exist_ok=True)
    asyncio.run(serve(options.port, options.directory, options.history))


if __name__ == "__main__":
    main()
