"""TierCheck's trainer side: what a training script imports.

`Checkpointer` is loaded lazily: the launcher and the protocol live in this package too, and must start
before, and without, torch.
"""

from typing import TYPE_CHECKING, Any

from tiercheck.about import __version__

__all__ = ["Checkpointer", "__version__"]

if TYPE_CHECKING:
    from tiercheck.trainer.checkpointer import Checkpointer


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        from tiercheck.trainer.checkpointer import Checkpointer

        return Checkpointer
    raise AttributeError(f"module 'tiercheck' has no attribute {name!r}")
