"""Why obstore moves the bytes: what an upload costs this process in CPU, through our remote tier and through boto3.

    python -m benchmarks.remote [--mebibytes 256] [--rounds 3]

The server is moto in a process of its own, so only the client's CPU is counted. Wall time is the server's, and says
nothing; CPU seconds per gigabyte are what training loses.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tiercheck.protocol.version import Version
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.remote import open_store

BUCKET = "benchmark"

_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://%s:%s" % server.get_host_and_port(), flush=True)
sys.stdin.read()
server.stop()
"""


@contextmanager
def moto() -> Iterator[str]:
    """The base URL of an S3 server in another process; it ends with its standard input."""
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        yield server.stdout.readline().decode().strip()
        server.communicate()


def measured(work: Callable[[], object]) -> tuple[float, float]:
    """(CPU seconds of this process, wall seconds)"""
    cpu, wall = time.process_time(), time.monotonic()
    work()
    return time.process_time() - cpu, time.monotonic() - wall


def main() -> None:
    """Print one row per client."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_EC2_METADATA_DISABLED": "true"}
    size = arguments.mebibytes * 2**20

    import boto3
    from boto3.s3.transfer import TransferConfig

    with moto() as endpoint, tempfile.TemporaryDirectory() as folder:
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket=BUCKET)
        slot = Path(folder) / "slot"
        content = os.urandom(size)
        slot.write_bytes(content)
        digests = digest(memoryview(content))
        del content
        store = open_store(json.dumps({"s3": {"bucket": BUCKET, "endpoint": endpoint}}), "default/benchmark")
        store.check()
        parts = TransferConfig(multipart_chunksize=16 * 2**20, max_concurrency=4)
        into = memoryview(bytearray(size))
        clients: dict[str, Callable[[int], object]] = {
            "upload, remote tier (digests checked)": lambda n: store.put_artifact(
                0, Version(n, 1), slot, digests, None
            ),
            "upload, boto3": lambda n: client.upload_file(str(slot), BUCKET, f"boto3-{n}", Config=parts),
            "download, remote tier (digests checked)": lambda n: store.fetch(store.uploaded(Version(n, 1))[0], into),
            "download, boto3": lambda n: client.download_file(BUCKET, f"boto3-{n}", f"{folder}/back", Config=parts),
        }
        print(f"{arguments.mebibytes} MiB, best of {arguments.rounds}")
        print(f"{'':42}{'CPU s per GB':>14}{'GB per CPU s':>14}{'wall s':>9}")
        for name, work in clients.items():
            results = [measured(lambda n=n, work=work: work(n)) for n in range(1, arguments.rounds + 1)]
            cpu, wall = min(result[0] for result in results), min(result[1] for result in results)
            print(f"{name:42}{cpu / size * 1e9:14.2f}{size / 1e9 / cpu:14.2f}{wall:9.2f}")
        store.close()


if __name__ == "__main__":
    main()
