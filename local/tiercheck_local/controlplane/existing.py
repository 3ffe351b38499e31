"""The control plane of a cluster that somebody else runs."""

from __future__ import annotations

from pathlib import Path

from tiercheck_local.controlplane.interface import ControlPlane, ControlPlaneFailed


class ExistingControlPlane(ControlPlane):
    """Nothing is started or stopped; the cluster has its own controllers."""

    needs_controllers = False

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig.expanduser().absolute()

    def start(self) -> None:
        if not self.kubeconfig.is_file():
            raise ControlPlaneFailed(f"no kubeconfig at {self.kubeconfig}")

    def stop(self) -> None:
        """The cluster is not ours to stop."""
