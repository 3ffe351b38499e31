"""TierCheck's trainer side: what a training script imports.

All but the version is loaded lazily: the launcher and the protocol live in this package too, and must start
before, and without, torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tiercheck.about import __version__

__all__ = [
    "Checkpointer",
    "DifferentState",
    "Found",
    "NotCapturable",
    "RestoreError",
    "ResumableSampler",
    "State",
    "__version__",
    "find",
]

if TYPE_CHECKING:
    from tiercheck.trainer.backends.backend import RestoreError
    from tiercheck.trainer.checkpointer import Checkpointer, Found, find
    from tiercheck.trainer.restore.load import DifferentState
    from tiercheck.trainer.resumable_sampler import ResumableSampler
    from tiercheck.trainer.state.leaves import NotCapturable
    from tiercheck.trainer.state.user_state import State
else:  # a type checker would take every name for Any
    _MODULES = {
        "Checkpointer": "checkpointer",
        "DifferentState": "restore.load",
        "Found": "checkpointer",
        "NotCapturable": "state.leaves",
        "RestoreError": "backends.backend",
        "ResumableSampler": "resumable_sampler",
        "State": "state.user_state",
        "find": "checkpointer",
    }

    def __getattr__(name: str) -> Any:
        if (module := _MODULES.get(name)) is None:
            raise AttributeError(f"module 'tiercheck' has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"tiercheck.trainer.{module}"), name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            message = f"tiercheck.{name} needs torch, which is not installed; run: pip install torch"
            raise ModuleNotFoundError(message, name="torch") from None
