"""How many steps lie between two snapshots: as many as it takes for deltas to cost what a snapshot costs.

More often, and snapshots would cost most of the traffic; less often, and a restore would read and replay more than it has to.
One cadence for all ranks: snapshots of different steps would never be complete anywhere.
"""

from __future__ import annotations

SHORTEST = 2
LONGEST = 32
"""However small deltas are, a replay of more steps than this costs more time than it saves memory."""
WITHOUT_DELTAS = 50


def auto(snapshot_bytes: int, delta_bytes: int) -> int:
    """Steps, from the bytes of one snapshot and of one delta of all ranks; 0 if either is not known or there are no deltas."""
    if snapshot_bytes <= 0 or delta_bytes <= 0:
        return 0
    return min(LONGEST, max(SHORTEST, snapshot_bytes // delta_bytes))
