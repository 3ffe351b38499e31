"""Our hooks around the updates of a Checkpointer's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class UpdateHooks:
    """Until they are removed."""

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        before: Callable[[int, Optimizer, Any, Any], None],
        after: Callable[[int, Optimizer, Any, Any], None],
        after_any: Callable[..., None],
    ) -> None:
        """`before` and `after` are told the optimizer's index, and what hooks are told; `after_any` hears of every optimizer of the
        process."""
        self._optimizers = optimizers
        self._before = [
            optimizer.register_step_pre_hook(partial(before, index)) for index, optimizer in enumerate(optimizers)
        ]
        self._after = [
            optimizer.register_step_post_hook(partial(after, index)) for index, optimizer in enumerate(optimizers)
        ]
        self._after_any = register_optimizer_step_post_hook(after_any)

    def move_inside(self) -> None:
        """Make them the last before and the first after the update.

        Then what other hooks change - clipping before, averaging after - is seen as what it is.
        """
        for optimizer, before, after in zip(self._optimizers, self._before, self._after, strict=True):
            hooks: Any = getattr(optimizer, "_optimizer_step_pre_hooks", {})
            if before.id in hooks and next(reversed(hooks)) != before.id:
                hooks.move_to_end(before.id)
            hooks = getattr(optimizer, "_optimizer_step_post_hooks", {})
            if after.id in hooks and next(iter(hooks)) != after.id:
                hooks.move_to_end(after.id, last=False)

    def remove(self) -> None:
        for hook in (*self._before, *self._after, self._after_any):
            hook.remove()
