"""Which environment variables may still be set once torch has been imported, and which may not.

Between preparing and starting, only variables of the first kind may differ; anything else means a cold start.
And a script that sets a variable of the second kind before its own `import torch` must find that it has an
effect.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_LATE = frozenset(
    {
        "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING",
    }
)  # fmt: skip
_LATE_PREFIXES = ("TIERCHECK_", "PET_", "TORCHELASTIC_")
"""Read when a process group begins: an attempt sets them."""

_EARLY = re.compile(
    r"\b(?:(?:OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|BLIS|DNNL|ONEDNN|MKLDNN|ATEN|PYTORCH|LD|TRITON|NPY|NUMPY|SYMPY|MALLOC|TBB)_[A-Z0-9_]+|PYTHON[A-Z0-9_]+"
    r"|TORCH(?!ELASTIC_|_NCCL_)[A-Z0-9_]+)\b"
)
"""Read by torch, and by the libraries that it loads, while it is imported: by OpenMP, MKL, OpenBLAS, the
dynamo ..."""


def may_differ(name: str) -> bool:
    """Whether an attempt may set `name` after torch was imported."""
    return name in _LATE or name.startswith(_LATE_PREFIXES)


def cannot_be_applied(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """A variable that differs and would have had to be there before the imports; empty if there is none."""
    return next((name for name in _different(before, now) if not may_differ(name)), "")


def set_too_late(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """A variable that the user's own code has changed before it imported torch, and that torch reads at
    import."""
    return next(
        (name for name in _different(before, now) if not may_differ(name) and _EARLY.fullmatch(name)), ""
    )


def _different(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))
