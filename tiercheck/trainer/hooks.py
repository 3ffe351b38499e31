"""The order of an optimizer's hooks."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


def innermost(optimizer: Optimizer, before: int, after: int) -> None:
    """Make our hooks, given by their handles' numbers, the last before and the first after the update.

    Then what other hooks change - clipping before, averaging after - is seen as what it is.
    """
    hooks: Any = getattr(optimizer, "_optimizer_step_pre_hooks", {})
    if before in hooks and next(reversed(hooks)) != before:
        hooks.move_to_end(before)
    hooks = getattr(optimizer, "_optimizer_step_post_hooks", {})
    if after in hooks and next(iter(hooks)) != after:
        hooks.move_to_end(after, last=False)
