"""Opens a control plane by one interface: the embedded one, or a real one."""

from __future__ import annotations

import os
from pathlib import Path

from tiercheck_local.controlplane.planes import ControlPlane, ControlPlaneFailed, EmbeddedControlPlane
from tiercheck_local.controlplane.real import RealControlPlane

__all__ = [
    "ControlPlane",
    "ControlPlaneFailed",
    "EmbeddedControlPlane",
    "RealControlPlane",
    "open_control_plane",
]


def open_control_plane(kind: str, directory: Path) -> ControlPlane:
    """The control plane of this kind ("embedded" or "real"), not started yet. Raises ValueError if the kind
    is unknown, or KUBEBUILDER_ASSETS does not say where a real one's executables are."""
    if kind == "embedded":
        return EmbeddedControlPlane(directory)
    if kind != "real":
        raise ValueError(f"unknown kind of control plane: {kind!r} (embedded, real)")
    if not (assets := os.environ.get("KUBEBUILDER_ASSETS")):
        raise ValueError(
            "a real control plane needs etcd and kube-apiserver: set KUBEBUILDER_ASSETS to their folder"
        )
    return RealControlPlane(directory, Path(assets))
