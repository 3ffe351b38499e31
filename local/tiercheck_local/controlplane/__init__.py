"""Opens a control plane by one interface: embedded, real, or an existing one of a kubeconfig."""

from __future__ import annotations

import os
from pathlib import Path

from tiercheck_local.controlplane.planes import (
    ControlPlane,
    ControlPlaneFailed,
    EmbeddedControlPlane,
    ExistingControlPlane,
)
from tiercheck_local.controlplane.real import RealControlPlane

__all__ = [
    "ControlPlane",
    "ControlPlaneFailed",
    "EmbeddedControlPlane",
    "ExistingControlPlane",
    "RealControlPlane",
    "open_control_plane",
]


def open_control_plane(
    kind: str, directory: Path, assets: Path | None = None, kubeconfig: Path | None = None
) -> ControlPlane:
    """The control plane of this kind ("embedded", "real" or "existing"), not started yet.

    `assets` defaults to KUBEBUILDER_ASSETS, `kubeconfig` to KUBECONFIG. Raises ValueError if one is needed
    and neither is given, or the kind is unknown.
    """
    if kind == "embedded":
        return EmbeddedControlPlane(directory)
    if kind == "real":
        found = assets or os.environ.get("KUBEBUILDER_ASSETS")
        if not found:
            raise ValueError(
                "a real control plane needs etcd and kube-apiserver: set KUBEBUILDER_ASSETS to their folder"
            )
        return RealControlPlane(directory, Path(found))
    if kind == "existing":
        found = kubeconfig or os.environ.get("KUBECONFIG")
        if not found:
            raise ValueError("an existing control plane needs a kubeconfig: set KUBECONFIG")
        return ExistingControlPlane(Path(found))
    raise ValueError(f"unknown kind of control plane: {kind!r} (embedded, real, existing)")
