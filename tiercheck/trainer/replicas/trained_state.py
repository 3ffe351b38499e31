"""Holds the objects that a script gave to a Checkpointer: model, optimizers and other state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tiercheck.trainer.backends.backend import log, rank_and_world
from tiercheck.trainer.replicas.arithmetic import Arithmetic
from tiercheck.trainer.replicas.replicas import Partitions, Shares
from tiercheck.trainer.state import user_state
from tiercheck.trainer.state.aliasing import Wrapped, WrapperState, is_final, refuse_unfit_modules, unwrap
from tiercheck.trainer.state.frozen import OmittedWeights
from tiercheck.trainer.state.inventories import Inventories
from tiercheck.trainer.state.loaders import LOADERS, LoaderPositions
from tiercheck.trainer.state.optimizer_state import refuse_inner
from tiercheck.trainer.tensors.accelerator import accelerator_of
from tiercheck.trainer.tensors.tensor_parts import NotCapturable


class TrainedState:
    """The state of one rank, shared by saving and restoring."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        state: user_state.State | None,
        leave_out: Sequence[str] = (),
    ) -> None:
        """Takes the arguments of `Checkpointer`. Raises NotCapturable, TypeError if they can never be saved.

        Raises ValueError for a pattern of `leave_out` without a match."""
        if not isinstance(model, nn.Module) or not isinstance(state or {}, Mapping):
            raise TypeError(
                f"Checkpointer needs a torch.nn.Module and a dict as state, not {type(model).__name__} and "
                f"{type(state).__name__}"
            )
        self.given_model = model
        """The model as given by the script, with wrappers."""
        wrapped = Wrapped.look(model)
        self.model = wrapped.model
        refuse_unfit_modules(self.model)
        listed = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
        unwrapped = [unwrap(each) for each in listed]
        self.partitions = Partitions([inner for inner, _ in unwrapped])
        self.optimizers = self.partitions.inner
        refuse_inner(self.optimizers, self.model)
        given = state or {}
        modules = {name: each for name, each in given.items() if isinstance(each, nn.Module)}
        inner = {name: Wrapped.look(each).model for name, each in modules.items()}
        self.beside = {name: each for name, each in inner.items() if _has_tensors(name, each)}
        """The modules in the script's `state`. Their tensors are stored as the model's are."""
        self.given_modules = {name: modules[name] for name in self.beside}
        self.state: dict[str, Any] = {name: each for name, each in given.items() if name not in modules}
        for index, (wrapped_one, outer) in enumerate(unwrapped):
            if outer is not None:
                self.state[f"tiercheck.optimizer{index}"] = WrapperState(outer, wrapped_one)
        metrics = user_state.MetricStates(
            {"model": self.model, **{f"state[{name!r}]": each for name, each in inner.items()}}
        )
        if metrics.found():
            self.state["tiercheck.metrics"] = metrics
        if leave_out:
            self.state["tiercheck.leave_out"] = OmittedWeights(self.model, leave_out, self.optimizers)
        self.rank, self.world_size = rank_and_world()
        self.arithmetic = arithmetic = Arithmetic(wrapped, given.values())
        self.loaders = loaders = LoaderPositions()
        self.inventories = Inventories(
            self.model,
            self.optimizers,
            self.beside,
            lambda: {**arithmetic.facts(), LOADERS: loaders.facts()},  # not of `self`: no cycle
        )
        self.inventories.outer = self.partitions.outer
        self.shares = Shares(wrapped, self.partitions)

    @property
    def modules(self) -> list[nn.Module]:
        return [self.model, *self.beside.values()]

    def check(self) -> None:
        """Raises NotCapturable early if it can already be seen that the state cannot be saved."""
        if not all(map(is_final, self.modules)):
            return
        try:
            entries = self.inventories.take().entries
            accelerator_of(entry.tensor for entry in entries)
            self.inventories.first = {entry.name for entry in entries}
        except TypeError:
            raise
        except Exception as error:  # from the script's own state_dict
            raise NotCapturable(f"the state cannot be listed: {type(error).__name__}: {error}") from error


def _has_tensors(name: str, module: nn.Module) -> bool:
    """Returns whether a module in the script's state has tensors that are not of metrics."""
    try:
        shown = module.state_dict().keys() - user_state.keys_of_metrics(module)
    except Exception:  # from the script's own state_dict; the inventory reports it
        return True
    if shown or any(True for _ in module.buffers()):
        return True
    if not any(map(user_state.is_metric, module.modules())):
        log.warning(
            "state[%r] is a module whose state_dict is empty: nothing of it is saved; register its tensors as"
            " buffers, or give an object with state_dict and load_state_dict",
            name,
        )
    return False
