"""Why a promised figure is missed, as a profile showed it.

Published while such a figure is missed.
"""

from __future__ import annotations

from collections.abc import Iterable

_THREAD = "Python in the training thread"

CAUSES = {
    _THREAD: "tensors are read one by one and have left the cache; torch's counters alone take 26 to 38 %",
    "peer copy throughput": "iperf3's bytes stay in the cache; ours go to memory, and are read again",
    "peer copy authenticated": "a core tags 37 GB/s in its cache, 8 from memory",
    "verified local restore": "what is copied is read once more, to verify it",
    "verified peer restore": "new memory for slot and moments (what these cost: local restore's note)",
    "S3": "each byte is digested on the way (0.06 s/GB); an upload begins with four calls",
    "peak memory of the operator": "48 KiB for each worker's connection, half of it OpenSSL's; 62 MiB idle",
    "restore of another size": "for each worker a handshake (11 %), its reports (19 %), 436 KB enciphered",
    "coordinator, 4000": "words of uploads are decoded one by one",
}
"""By the beginning of a figure's name."""


def explain(missed: Iterable[str]) -> list[str]:
    """A line for each kind of these figures."""
    found = dict.fromkeys(_kind(name) for name in missed)
    return [f"- {kind}: {CAUSES.get(kind, 'not profiled')}." for kind in found]


def _kind(name: str) -> str:
    known = _THREAD if name.startswith("the same with") else name
    return next((begin for begin in CAUSES if known.startswith(begin)), name)
