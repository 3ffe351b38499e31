"""What is said when memory is too small: with every number, and with what to do about it."""

from __future__ import annotations

from tiercheck.protocol.sizing import SPARE_DELTAS
from tiercheck_sidecar.vault.demand import Demand

_REMEDY = "Raise tiers.local.sizeLimit and the sidecar's memory limit"


def saving_refused(demand: Demand) -> str:
    """Why nothing can be saved; empty if memory is large enough."""
    fits = demand.plan()
    if fits.fits:
        return ""
    return (
        f"tiers.local.sizeLimit is {demand.limit}, needed {fits.minimum} bytes ({fits.needed} to never skip anything): "
        f"two slots for each of {_those(demand)}. {_REMEDY}"
    )


def deltas_refused(demand: Demand) -> str:
    """Why no deltas are taken although ranks want to; empty if memory holds enough of them."""
    fits = demand.plan()
    if not fits.lacks_deltas:
        return ""
    fewest = demand.cadence + SPARE_DELTAS
    return (
        f"tiers.local.sizeLimit is {demand.limit}, deltas need {fits.delta_minimum} bytes ({fits.needed} to never skip anything): "
        f"{fewest} deltas of {fits.delta} bytes, beside snapshots of {fits.snapshot}, for each of {_those(demand)}. "
        f"Until then there are snapshots only. {_REMEDY}"
    )


def _those(demand: Demand) -> str:
    own, hosted, lanes = demand.ranks
    text = f"{own} ranks here and of {hosted} ranks hosted for other workers"
    return f"{text}, and of {lanes} parity blocks" if lanes else text
