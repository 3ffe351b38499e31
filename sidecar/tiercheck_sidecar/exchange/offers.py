"""Refuses an offer of an artifact that is of another attempt, badly described or not the caller's."""

from __future__ import annotations

from typing import NamedTuple

from tiercheck.protocol.directive import Directive
from tiercheck.protocol.manifest import Digests
from tiercheck.protocol.version import Artifact
from tiercheck_sidecar.exchange.handshake import CallerClaim
from tiercheck_sidecar.model.fence import Fence
from tiercheck_sidecar.vault.tags import Tags, is_well_described


class Unwanted(NamedTuple):
    """How an offer is answered that is not taken."""

    state: str
    """"busy": offer it again later. "refused": do not."""
    message: str


def refuse_offer(
    fence: Fence,
    directive: Directive | None,
    claim: CallerClaim,
    artifact: Artifact | None,
    *,
    digests: Digests | None,
    tags: Tags | None,
) -> Unwanted | None:
    """Why the proven caller's offer is not taken; None if nothing here speaks against it."""
    early = fence.refuse_future(claim.attempt, directive)
    if early or directive is None:
        return Unwanted("busy", early)
    late = fence.refuse_past(claim.attempt, directive)
    if late:
        return Unwanted("refused", late)
    if artifact is None or not is_well_described(digests, tags):
        return Unwanted("refused", "the offer is malformed")
    if artifact.rank // directive.procs_per_worker != claim.worker:
        return Unwanted("refused", f"rank {artifact.rank} is not of worker {claim.worker}")
    if not directive.history.accepts(artifact.version):
        return Unwanted("refused", f"{artifact.version} is not of the accepted history")
    return None
