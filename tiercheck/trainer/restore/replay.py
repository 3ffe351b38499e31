"""Replays deltas after a snapshot: the optimizer itself makes the very updates again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tiercheck.trainer.deltas.delta_format import StoredDelta, StoredEvent
from tiercheck.trainer.deltas.gradients import set_hyper_parameters
from tiercheck.trainer.proof import state_hash
from tiercheck.trainer.replicas.replicas import Shares, exchange
from tiercheck.trainer.restore.load import sharded_like
from tiercheck.trainer.state.capture import named_parameters_of
from tiercheck.trainer.state.optimizer_state import put_attributes
from tiercheck.trainer.state.replayable import SCALING, plain_step
from tiercheck.trainer.tensors.buffers import Buffers
from tiercheck.trainer.tensors.tensor_parts import local_shard

Groups = Sequence[Mapping[str, Any]]
"""The parameter groups of an optimizer, without the parameters."""


class Mismatch(Exception):
    """The replay did not give the state that the delta was taken from; the message names the place."""


class Replay:
    """Replays deltas, one after the other, on a model and its optimizers as a snapshot left them."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        shares: Shares,
        saved: Sequence[Groups],
    ) -> None:
        """`saved`: the groups of each optimizer in the snapshot."""
        self._optimizers = optimizers
        self._named = [list(named_parameters_of(optimizer, model)) for optimizer in optimizers]
        self._replicas = shares.consumers_of(self._named)
        self._buffers = Buffers(model)
        self._groups = list(saved)
        """The groups of each optimizer after the last update."""

    @torch.no_grad()
    def apply(self, delta: StoredDelta, facts: Mapping[str, Any]) -> None:
        """Brings the state from before the delta's step to after it. Raises Mismatch."""
        self._redo(delta, facts)
        turn = state_hash.state_of_turn(self._optimizers, delta.step)
        places, tensors = [place for place, _ in turn], [tensor for _, tensor in turn]
        if where := state_hash.first_difference(places, tensors, delta.hashes):
            raise Mismatch(f"{self._spelled(where)} differs")

    def _redo(self, delta: StoredDelta, facts: Mapping[str, Any]) -> None:
        """Repeats its updates. Raises Mismatch if an optimizer raises, or something does not fit."""
        before = torch.get_num_threads()
        gradients_before = [[parameter.grad for _, parameter in named] for named in self._named]
        torch.set_num_threads(delta.threads)
        try:
            for event, told in zip(delta.events, facts["events"], strict=True):
                self._update(event.optimizer, self._gradients(delta, event), told)
            for name, value in delta.buffers().items():
                self._buffers.put_back(name, value)
            for name in facts.get("cleared", ()):
                self._buffers.clear(name)
            for index, attributes in enumerate(facts["attributes"]):
                self._set_groups(index, facts["groups"][index])
                put_attributes(self._optimizers[index], attributes)
        except Exception as error:  # the optimizer's own code runs here, on what may not fit it
            raise Mismatch(f"{type(error).__name__}: {error}") from error
        finally:
            torch.set_num_threads(before)
            # Memory that the script has set aside for gradients, for example.
            for named, before_each in zip(self._named, gradients_before, strict=True):
                for (_, parameter), gradient in zip(named, before_each, strict=True):
                    parameter.grad = gradient

    def _gradients(self, delta: StoredDelta, event: StoredEvent) -> list[Tensor | None]:
        replicas = self._replicas[event.optimizer]
        gradients = [
            event.gradient(delta.tensors, index, name, local_shard(parameter).device, replicas[index])
            for index, (name, parameter) in enumerate(self._named[event.optimizer])
        ]
        exchange(
            [
                (alike, gradient)
                for index, (alike, gradient) in enumerate(zip(replicas, gradients, strict=True))
                if gradient is not None and alike is not None and event.is_shared(index)
            ]
        )
        return gradients

    def _update(self, index: int, gradients: Sequence[Tensor | None], event: Mapping[str, Any]) -> None:
        optimizer, named = self._optimizers[index], self._named[index]
        for gradient, (_, parameter) in zip(gradients, named, strict=True):
            parameter.grad = None
            if gradient is not None:
                parameter.grad = sharded_like(gradient, parameter, parameter.shape, parameter.stride())
        self._set_groups(index, event["groups"])
        device = next((p.device for _, p in named), None)
        for name, value in event["scaling"].items():
            setattr(optimizer, name, value.to(device))
        try:
            with torch.enable_grad():  # as in a training loop; `step` turns it off itself
                plain_step(optimizer)()
        finally:
            for name in SCALING:
                if name in event["scaling"]:
                    delattr(optimizer, name)

    def _set_groups(self, index: int, groups: Groups) -> None:
        set_hyper_parameters(self._optimizers[index], groups, self._groups[index])
        self._groups[index] = groups

    def _spelled(self, where: tuple[int, int, str] | str) -> str:
        if isinstance(where, str):
            return where
        optimizer, number, key = where
        return f"{self._named[optimizer][number][0]}{f' ({key})' if key else ''}"
