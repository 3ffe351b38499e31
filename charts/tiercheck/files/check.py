"""Checks for `helm test`, from another pod, that the operator serves what it should.

It needs no library, so any Python image will do.
"""

import os
import signal
import ssl
import sys

# PID 1 ends by no signal that it does not catch.
signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))

import time  # noqa: E402
import urllib.error  # noqa: E402
import urllib.request  # noqa: E402

BASE, SECONDS = sys.argv[1], float(sys.argv[2])
WANTED = ("tiercheck_build_info{", "tiercheck_watch_last_event_timestamp_seconds{")


def page(path: str) -> str:
    # Whose certificate it is, is for Prometheus to check; this asks whether there is an answer.
    with urllib.request.urlopen(BASE + path, timeout=5, context=ssl._create_unverified_context()) as answer:
        return str(answer.read().decode())


def main() -> str:
    """What is wrong; empty: nothing."""
    try:
        page("/healthz")
        page("/readyz")
        metrics = page("/metrics")
    except urllib.error.HTTPError as error:
        return (
            f"{error.url} answers {error.code}: the operator runs but is not ready. Its log says what "
            "it waits for."
        )
    except OSError as error:
        return (
            f"{BASE} does not answer ({error}): is the operator's pod running, and does a network "
            "policy let this pod in?"
        )
    missing = [name for name in WANTED if name not in metrics]
    if missing:
        return (
            "no "
            f"{' and no '.join(name.rstrip('{') for name in missing)} in {BASE}/metrics: "
            "it has had no event of a node yet, or this is another program"
        )
    print(*(line for line in metrics.splitlines() if line.startswith(WANTED[0])), sep="\n")
    return ""


end = time.monotonic() + SECONDS
while (wrong := main()) and time.monotonic() < end:
    print(wrong, flush=True)
    time.sleep(2)
sys.exit(wrong or None)
