"""Reads from a Node whether it is lost already, or will be emptied soon and should be left.

Sources of the taints: kubernetes/autoscaler `utils/taints`, Karpenter's "Disruption" page,
aws-node-termination-handler's configuration (TAINT_NODE), and what GKE's maintenance handler sets. Soft ones
(DeletionCandidateOfClusterAutoscaler, rebalance-recommendation) are left out: most of them are taken back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEAVING_TAINTS = frozenset(
    {
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",  # before Karpenter 1.0
        "ToBeDeletedByClusterAutoscaler",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
    }
)
"""Whoever sets one will end the node's pods, after a while or at a deadline."""


@dataclass(frozen=True)
class NodeSigns:
    """The operator's settings about nodes."""

    taints: frozenset[str] = frozenset()
    """Keys that count like LEAVING_TAINTS."""
    conditions: frozenset[tuple[str, str]] = frozenset()
    """(type, status) of node conditions that mean that a node is bad, such as ("KernelDeadlock", "True")."""
    cordon_moves: bool = False
    """Whether a cordon alone makes the pods leave. Otherwise it keeps new pods and copies away, until
    evictions follow."""

    def leaving(self, spec: Mapping[str, Any], status: Mapping[str, Any]) -> str:
        """Why pods had better leave the node, as a clause; empty: they may stay."""
        for taint in spec.get("taints") or []:
            if taint.get("key") in LEAVING_TAINTS | self.taints and taint.get("effect") != "PreferNoSchedule":
                return f"it is tainted {taint['key']}"
        for entry in status.get("conditions") or []:
            if (entry.get("type"), entry.get("status")) in self.conditions:
                said = f" ({entry['message']})" if entry.get("message") else ""
                return f"it has the condition {entry['type']}={entry['status']}{said}"[:300]
        return "it is cordoned" if self.cordon_moves and spec.get("unschedulable") else ""


NO_SETTINGS = NodeSigns()


def parse_signs(taints: str, conditions: str, cordon: str) -> NodeSigns:
    """From settings: `taints` and `conditions` with commas between, a condition as Type or Type=Status,
    `cordon` Avoid or Move.

    Raises ValueError with a sentence.
    """
    if cordon not in ("", "Avoid", "Move"):
        raise ValueError(f"{cordon!r} is neither Avoid nor Move")
    pairs = [entry.partition("=") for entry in _listed(conditions)]
    return NodeSigns(
        taints=frozenset(_listed(taints)),
        conditions=frozenset((kind, status or "True") for kind, _, status in pairs),
        cordon_moves=cordon == "Move",
    )


def _listed(text: str) -> Sequence[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]
