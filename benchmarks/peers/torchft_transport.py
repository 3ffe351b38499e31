"""Times torchft's HTTP transport: how long a joining worker waits for a healthy one's state.

python -m benchmarks.peers.torchft_transport BYTES ANSWER
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torchft.checkpointing.http_transport import HTTPTransport

from benchmarks.workload import Training

_TIMEOUT = timedelta(seconds=120)
_CHUNKS = (0, 2, 8)
"""0: one stream."""


def serve(size: int, chunks: int) -> None:
    """The healthy worker. Says where it listens, and ends with its standard input."""
    transport: HTTPTransport[object] = HTTPTransport(_TIMEOUT, chunks)
    transport.send_checkpoint([1], 1, Training(size, tokens=0).state_dict(), _TIMEOUT)
    print(transport.metadata().rsplit(":", 1)[1], flush=True)
    sys.stdin.read()


def receive(size: int, chunks: int) -> tuple[float, float]:
    """Seconds that the joining worker waits, until its model and optimizer have the state; and those of the
    transfer alone, which ends with tensors of the transport's own."""
    training = Training(size, tokens=0, fresh=True)
    command = [sys.executable, "-m", "benchmarks.peers.torchft_transport", str(size), "", str(chunks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        metadata = f"http://localhost:{server.stdout.readline().strip()}"
        transport: HTTPTransport[object] = HTTPTransport(_TIMEOUT, chunks)
        start = time.perf_counter()
        state = transport.recv_checkpoint(0, metadata, 1, _TIMEOUT)
        transfer = time.perf_counter() - start
        assert isinstance(state, dict)
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        seconds = time.perf_counter() - start
        server.communicate()
    return seconds, transfer


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) > 3:
        serve(int(sys.argv[1]), int(sys.argv[3]))
    else:
        found = {
            f"{count} chunks" if count else "one stream": receive(int(sys.argv[1]), count)
            for count in _CHUNKS
        }
        Path(sys.argv[2]).write_text(json.dumps(found))
