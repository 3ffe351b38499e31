"""Measures what uploads and restores cost in CPU and time, beside obstore alone and boto3.

All move the same bytes of shared memory, ours and obstore by the mapping that a slot has for as long as it
lasts, up in parts of 16 MiB, down in ranges of 8 MiB, four at a time. Ours verifies every chunk against the
digests of sealing, both ways; obstore does not. On the way up ours and obstore send a CRC64NVME with each
part. The server (`benchmarks.s3_sink`) is a process of its own, so that only the client's CPU is counted.
Rounds take turns, every other one backwards, and the median of the rounds' ratios counts. boto3, which takes
longest, has a third of the rounds.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, Outcome, Sense
from benchmarks.machine import shared_memory
from benchmarks.scale import ROOT, Scale
from tiercheck.protocol.version import Digests, RankArtifact, Version
from tiercheck_operator.kubernetes.certificates import issue_pair
from tiercheck_sidecar.digest import digest
from tiercheck_sidecar.remote import open_store
from tiercheck_sidecar.remote.store import FETCH_BYTES, FETCH_THREADS

PART = 16 * 2**20
PARALLEL = 4
BUCKET = "benchmark"
CLIENTS = ("ours", "obstore", "boto3")
DIRECTIONS = ("upload", "restore")


def run(scale: Scale) -> Outcome:
    """CPU seconds and wall beside obstore alone and boto3, over http and https."""
    mebibytes, rounds = (64, 2) if scale.quick else (512, 9)
    found: dict[str, Any] = {"mebibytes": mebibytes, "rounds": rounds, "part": PART, "parallel": PARALLEL}
    assert FETCH_THREADS == PARALLEL
    rows: list[Figure] = []
    for scheme in ("http", "https"):
        found[scheme] = _compare(scheme, mebibytes * 2**20, rounds)
        for direction, figures in found[scheme].items():
            cpu: dict[str, float] = figures["cpu s/GB"]
            wall: dict[str, float] = figures["wall s/GB"]
            name = f"S3 {direction} over {scheme}"
            rows += [
                Figure(
                    f"{name}, bytes per CPU second, against boto3",
                    f"{cpu['ours']:.2f} s/GB",
                    f"{cpu['boto3']:.2f} s/GB",
                    figures["per CPU second, ours / boto3"],
                ),
                Figure(
                    f"{name}, bytes per CPU second, against obstore alone",
                    f"{cpu['ours']:.2f} s/GB",
                    f"{cpu['obstore']:.2f} s/GB",
                    figures["per CPU second, ours / obstore"],
                    0.95,
                    Sense.AT_LEAST,
                    unit="%",
                    note="median of paired ratios; obstore verifies no digests",
                ),
                Figure(
                    f"{name}, throughput, against obstore alone",
                    f"{1 / wall['ours']:.2f} GB/s",
                    f"{1 / wall['obstore']:.2f} GB/s",
                    figures["throughput, ours / obstore"],
                    0.95,
                    Sense.AT_LEAST,
                    unit="%",
                ),
            ]
    return Outcome(rows, found)


def _compare(scheme: str, size: int, rounds: int) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=shared_memory())))
        _fill(folder / "slot", size)
        ca = _authority(folder) if scheme == "https" else None
        endpoint = stack.enter_context(_sink(folder, scheme))
        works = stack.enter_context(_clients(folder, size, endpoint, ca))
        found: dict[tuple[str, str], list[list[float]]] = {name: [] for name in works}
        for number in range(rounds):
            for name in list(works)[:: -1 if number % 2 else 1]:
                if name[1] != "boto3" or number % 3 == 0:
                    found[name].append(_measured(works[name]))
    return {direction: _figures(found, direction, size) for direction in DIRECTIONS}


def _figures(found: dict[tuple[str, str], list[list[float]]], direction: str, size: int) -> dict[str, Any]:
    """Medians of seconds per GB, and of what obstore and boto3 took of what ours did in each round."""
    result: dict[str, Any] = {}
    for place, what in enumerate(("cpu s/GB", "wall s/GB")):
        result[what] = {
            client: statistics.median(one[place] for one in found[direction, client]) / size * 1e9
            for client in CLIENTS
        }
    for place, what in enumerate(("per CPU second", "throughput")):
        ours = [one[place] for one in found[direction, "ours"]]
        for client, every in (("obstore", 1), ("boto3", 3)):
            theirs = [one[place] for one in found[direction, client]]
            pairs = zip(theirs, ours[::every], strict=True)
            result[f"{what}, ours / {client}"] = statistics.median(one / mine for one, mine in pairs)
    return result


def _measured(work: Callable[[], object]) -> list[float]:
    """CPU seconds of this process, wall seconds."""
    cpu, wall = time.process_time(), time.monotonic()
    work()
    return [time.process_time() - cpu, time.monotonic() - wall]


@contextmanager
def _clients(
    folder: Path, size: int, endpoint: str, ca: Path | None
) -> Iterator[dict[tuple[str, str], Callable[[], object]]]:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from obstore.store import S3Store

    os.environ |= {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    slot, back = folder / "slot", folder / "back"
    with open(slot, "rb") as read, open(back, "w+b") as write:
        write.truncate(size)
        source, target = _mapped(read.fileno(), size, False), _mapped(write.fileno(), size, True)
        target[:] = source  # first touch is not what is measured
        digests = digest(source)
        settings: dict[str, str] = {"bucket": BUCKET, "endpoint": endpoint}
        options: dict[str, Any] = {"allow_http": True}
        if ca is not None:
            settings["caBundle"] = str(ca)
            options["root_certificate"] = ca.read_bytes()
        store = open_store(json.dumps({"s3": settings}), "default/benchmark")
        config = {
            "region": "us-east-1",
            "endpoint": endpoint,
            "unsigned_payload": True,
            "checksum_algorithm": "CRC64NVME",
        }
        alone: Any = S3Store(BUCKET, config=config, client_options=options)  # type: ignore[arg-type]
        boto = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", verify=str(ca) if ca else None
        )
        transfer = TransferConfig(
            multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=PARALLEL
        )
        yield {
            ("upload", "ours"): lambda: store.put_artifact(
                0, Version(1, 1), slot, digests, None, mapped=source
            ),
            ("upload", "obstore"): lambda: _put(alone, source),
            ("upload", "boto3"): lambda: boto.upload_file(str(slot), BUCKET, "slot", Config=transfer),
            ("restore", "ours"): lambda: store.fetch(_artifact(digests), target),
            ("restore", "obstore"): lambda: (_stream if ca is None else _ranges)(alone, target),
            ("restore", "boto3"): lambda: boto.download_file(
                BUCKET, "slot", str(folder / "boto3"), Config=transfer
            ),
        }
        store.close()


def _artifact(digests: Digests) -> RankArtifact:
    return RankArtifact(0, Version(1, 1), "slot", digests)


def _put(alone: Any, source: memoryview) -> None:
    """From the mapped slot, as ours: without a copy."""
    import obstore

    parts = (source[begin : begin + PART] for begin in range(0, len(source), PART))
    obstore.put(alone, "slot", parts, use_multipart=True, chunk_size=PART, max_concurrency=PARALLEL)


def _stream(alone: Any, target: memoryview) -> None:
    """The cheapest way that obstore offers over http into memory that is there: pieces as they come, not
    collected first."""
    import obstore

    def one(begin: int) -> None:
        for piece in obstore.get(
            alone, "slot", options={"range": (begin, min(begin + PART, len(target)))}
        ).stream(2**20):
            target[begin : begin + len(piece)] = memoryview(piece)
            begin += len(piece)

    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(one, range(0, len(target), PART)))


def _ranges(alone: Any, target: memoryview) -> None:
    """The cheapest one over https, where each TLS record would wake who reads a stream."""
    import obstore

    def one(begin: int) -> None:
        async def read() -> Any:
            end = min(begin + FETCH_BYTES, len(target))
            return await obstore.get_range_async(alone, "slot", start=begin, end=end)

        with memoryview(asyncio.run(read())) as found:
            target[begin : begin + len(found)] = found

    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(one, range(0, len(target), FETCH_BYTES)))


def _mapped(file: int, size: int, write: bool) -> memoryview:
    return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_WRITE if write else mmap.ACCESS_READ))


def _fill(path: Path, size: int) -> None:
    block = os.urandom(2**20)
    with open(path, "wb") as file:
        for _ in range(size // len(block)):
            file.write(block)


@contextmanager
def _sink(folder: Path, scheme: str) -> Iterator[str]:
    """The base URL of a server in another process; it ends with its standard input."""
    words = [str(folder / "server.pem"), str(folder / "server.key")] if scheme == "https" else []
    command = [sys.executable, "-m", "benchmarks.s3_sink", str(folder / "slot"), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stdout is not None
        try:
            yield f"{scheme}://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.communicate()


def _authority(folder: Path) -> Path:
    """A certificate for 127.0.0.1 as server.pem and server.key; returns the authority that signed it."""
    pair = issue_pair("benchmark", ["127.0.0.1"], datetime.timedelta(days=1))
    (folder / "ca.pem").write_bytes(pair.ca)
    (folder / "server.pem").write_bytes(pair.certificate)
    (folder / "server.key").write_bytes(pair.key)
    return folder / "ca.pem"
