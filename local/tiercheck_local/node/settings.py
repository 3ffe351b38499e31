"""What one agent is told when it is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tiercheck_local import markers
from tiercheck_local.node.process import FIRST_BACK_OFF
from tiercheck_local.node.volumes import Roots
from tiercheck_local.nodespec import NodeSpec


@dataclass(frozen=True)
class Settings:
    """Travels as JSON on the agent's command line."""

    node: NodeSpec
    cluster: str
    kubeconfig: str
    directory: str
    """Logs go to `directory`/logs/<pod>/<container>.log."""
    address_prefix: str
    """Three octets; the node is .1, its pods follow."""
    image_paths: dict[str, str] = field(default_factory=dict)
    """Paths inside the images that stand for folders of the host, as if every container mounted them."""
    back_off: float = FIRST_BACK_OFF
    """Seconds for which a container that ended twice is held back; all further waits follow from it."""
    cuts: str | None = None
    """File that names the links that are cut; None: none can be."""
    failpoints: str | None = None
    """Folder with a file per container, <pod>.<container>, that arms its failpoints; None: none can be
    armed."""

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def address(self) -> str:
        return f"{self.address_prefix}.1"

    @cached_property
    def roots(self) -> Roots:
        memory, scratch = (folder / self.name for folder in markers.folders(self.cluster))
        return Roots(memory, scratch, claims=Path(self.directory) / "claims")
