"""What one agent is told when it is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tiercheck_local.node.process import FIRST_BACK_OFF
from tiercheck_local.node.volumes import Roots


@dataclass(frozen=True)
class Settings:
    name: str
    cluster: str
    kubeconfig: Path
    directory: Path
    """Logs go to `directory`/logs/<pod>/<container>.log."""
    address_prefix: str
    """Three octets; the node is .1, its pods follow."""
    roots: Roots
    labels: Mapping[str, str] = field(default_factory=dict)
    pods: int = 8
    resources: Mapping[str, str] = field(default_factory=dict)
    """Allocatable resources on top of (or instead of) the defaults."""
    image_paths: Mapping[str, str] = field(default_factory=dict)
    """Paths inside the images that stand for folders of the host, as if every container mounted them."""
    lease_seconds: float = 0.5
    back_off: float = FIRST_BACK_OFF
    """Seconds for which a container that ended twice is held back; all further waits follow from it."""
    cuts: str | None = None
    """File that names the links that are cut; None: none can be."""
    failpoints: Path | None = None
    """Folder with a file per container, <pod>.<container>, that arms its failpoints; None: none can be
    armed."""

    @property
    def address(self) -> str:
        return f"{self.address_prefix}.1"
