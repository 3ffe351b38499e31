"""TierCheck's trainer side: what a training script imports.

`Checkpointer` and `ResumableSampler` are loaded lazily: the launcher and the protocol live in this package
too, and must start before, and without, torch.
"""

from typing import TYPE_CHECKING, Any

from tiercheck.about import __version__

__all__ = ["Checkpointer", "ResumableSampler", "__version__"]

if TYPE_CHECKING:
    from tiercheck.trainer.checkpointer import Checkpointer
    from tiercheck.trainer.resumable_sampler import ResumableSampler


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        from tiercheck.trainer.checkpointer import Checkpointer

        return Checkpointer
    if name == "ResumableSampler":
        from tiercheck.trainer.resumable_sampler import ResumableSampler

        return ResumableSampler
    raise AttributeError(f"module 'tiercheck' has no attribute {name!r}")
