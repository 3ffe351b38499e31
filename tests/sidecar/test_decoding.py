"""A sidecar that starts decodes its launcher, ranks and neighbours at once, in threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALL_AT_ONCE = """
import sys, threading
from tiercheck.protocol.report import Report
from tiercheck_sidecar.decoding import Malformed, decode

sys.setswitchinterval(1e-6)
text = (
    b'{"restore": {"state": "Ready"}, "trainer": {"step": 1}, "holdings": [{"rank": 1}], '
    b'"problems": [{"reason": "x"}]}'
)
found, begin = [], threading.Barrier(8)

def hear():
    begin.wait()
    for _ in range(20):
        try:
            decode(text, Report)
        except Malformed as error:
            found.append(str(error))

threads = [threading.Thread(target=hear) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(found) == 160 and len(set(found)) == 1, found
"""


@pytest.mark.parametrize("life", range(8))
def test_first_messages_of_many_threads_are_all_judged_alike(life: int) -> None:
    """Decoders are made on first use, so each life is a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ALL_AT_ONCE], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr or f"ended by signal {-done.returncode}"
