"""Reads the levels of failure domains from a Kueue `Topology`, so that who has defined them for queues need not do so again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tiercheck_operator.planning.topology import HOST, HOSTNAME_LABEL

_LONGEST = 32


def levels_of(topology: Mapping[str, Any]) -> tuple[dict[str, str], ...]:
    """As in `spec.topology.levels`, widest first. A level is named by the last part of its label, the host as ever.

    `spec.levels[].nodeLabel`: https://kueue.sigs.k8s.io/docs/concepts/topology_aware_scheduling/, the same in v1beta1 and v1beta2.
    Raises ValueError if it has none.
    """
    entries = (topology.get("spec") or {}).get("levels") or []
    labels = [str(entry["nodeLabel"]) for entry in entries if isinstance(entry, Mapping) and entry.get("nodeLabel")]
    if not labels:
        raise ValueError("it has no levels with a nodeLabel")
    found: list[dict[str, str]] = []
    for label in labels:
        found.append({"name": _name(label, {level["name"] for level in found}), "label": label})
    return tuple(found)


def _name(label: str, taken: set[str]) -> str:
    if label == HOSTNAME_LABEL:
        return HOST.name
    words = re.sub(r"[^a-z0-9]+", "-", label.rpartition("/")[2].lower()).strip("-")
    name = re.sub(r"^[^a-z]+", "", words)[:_LONGEST].strip("-") or "level"
    number = 1
    while name in taken or name == HOST.name:
        number += 1
        name = f"{name.rstrip('0123456789').rstrip('-')[: _LONGEST - 4]}-{number}"
    return name
