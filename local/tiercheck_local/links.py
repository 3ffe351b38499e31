"""Writes which links between pods and operator are cut, for every process of the cluster to read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

CUTS = "TIERCHECK_LOCAL_CUTS"
"""Environment variable with the file's path; processes that have it load `link_hook`."""
_HOOK = Path(__file__).with_name("link_hook")
OPERATOR = "127.0.0.1"
"""Where the operator's connections start."""


def hooked_environment(env: Mapping[str, str], cuts: str | None) -> dict[str, str]:
    """`env` for a process whose links can be cut; as it is if `cuts` is None."""
    if not cuts:
        return dict(env)
    path = os.pathsep.join([str(_HOOK), *filter(None, [env.get("PYTHONPATH")])])
    return {**env, CUTS: cuts, "PYTHONPATH": path}


def write(path: Path, pairs: Iterable[frozenset[str]]) -> None:
    """Replace what is cut: pairs of addresses."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(" ".join(sorted(pair)) + "\n" for pair in pairs))
    os.replace(fresh, path)
