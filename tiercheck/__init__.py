"""Exports the public API that a training script imports.

Everything except the version is loaded lazily, because the launcher and the protocol are in this package
too and must start without torch.
"""

import importlib
import os
import sys
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
    "reenter",
]

if TYPE_CHECKING:
    from tiercheck.trainer.backends.backend import RestoreError
    from tiercheck.trainer.checkpointer import Checkpointer, Found, find, reenter
    from tiercheck.trainer.restore.load import DifferentState
    from tiercheck.trainer.resumable_sampler import ResumableSampler
    from tiercheck.trainer.state.user_state import State
    from tiercheck.trainer.tensors.tensor_parts import NotCapturable
else:  # a type checker would infer Any for every name
    _MODULES = {
        "DifferentState": "restore.load",
        "NotCapturable": "tensors.tensor_parts",
        "RestoreError": "backends.backend",
        "ResumableSampler": "resumable_sampler",
        "State": "state.user_state",
    }

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module 'tiercheck' has no attribute {name!r}")
        try:
            module = importlib.import_module(f"tiercheck.trainer.{_MODULES.get(name, 'checkpointer')}")
            return getattr(module, name)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            message = f"tiercheck.{name} needs torch, which is not installed; run: pip install torch"
            raise ModuleNotFoundError(message, name="torch") from None

    if "TIERCHECK_ATTEMPT" in os.environ and "torch.distributed" in sys.modules:
        importlib.import_module("tiercheck.trainer.inprocess.groups").groups()  # before the script makes any
