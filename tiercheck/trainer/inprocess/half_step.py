"""Clears what an interrupted step left: state of wrappers, gradients, the graph."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from tiercheck.trainer.replicas.arithmetic import reset_bucket_layouts
from tiercheck.trainer.replicas.trained_state import TrainedState

_OF_A_STEP = (
    "_all_gather_result",
    "_post_reduce_event",
    "_reshard_after_forward_event",
    "_partial_reduce_output",
    "_all_reduce_state",
)
"""The state of a step in FSDP2's groups of parameters (torch 2.6 to 2.13). No version has all of it."""

_OF_A_PIPELINE = (
    *("_internal_losses", "fwd_recv_ops", "bwd_recv_ops", "unshard_ops", "unsharded_stages"),
    *("bwd_cache", "backward_state", "dw_runner"),
)
"""The state of a step in a schedule and its stages. The next one would take a loss of it for its own."""


class CannotForget(RuntimeError):
    """A wrapper of the model keeps something of the step that is not known here."""


def forget_half_step(models: Sequence[nn.Module], trained: TrainedState) -> None:
    """Resets wrapped `models` as after a complete step. Raises CannotForget, or an error of the device."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    try:
        for model in models:
            for state in _fsdp_states(model):
                _reset_fsdp(state)
            reset_bucket_layouts(model, trained.arithmetic.layouts.values())
            for parameter in model.parameters():
                parameter.grad = None
        _reset_schedules()
    except (AttributeError, KeyError) as error:
        raise CannotForget(f"this torch keeps a half step elsewhere: {error}") from error
    for optimizer in trained.optimizers:
        optimizer.zero_grad(set_to_none=True)
    for each in trained.state.values():
        if isinstance(each, torch.amp.GradScaler):
            each._per_optimizer_states.clear()
    torch.clear_autocast_cache()


def free_graph(trace: TracebackType | None) -> None:
    """Cuts the graphs of tensors in an exception's frames, so that memory never holds two graphs at once."""
    for frame, _ in traceback.walk_tb(trace):
        for value in list(frame.f_locals.values()):
            if isinstance(value, Tensor) and value.grad_fn is not None and not value._is_view():
                with contextlib.suppress(RuntimeError):
                    value.detach_()
    traceback.clear_frames(trace)  # of functions that the exception has left


def collect_half_step() -> None:
    """Frees what only garbage holds of the step: all where memory is scarce, which takes a step's time."""
    gc.collect(2 if torch.cuda.is_initialized() else 1)  # type: ignore[no-untyped-call]


def _reset_schedules() -> None:
    """Makes a pipeline's schedule exchange shapes as at its first step, as the rank that joins does."""
    if (module := sys.modules.get("torch.distributed.pipelining.schedules")) is None:
        return
    for each in gc.get_objects():
        if not issubclass(type(each), module._PipelineSchedule):
            continue
        stages = getattr(each, "_stages", None) or [each._stage]
        for holder in (each, *stages):
            for name in _OF_A_PIPELINE:
                getattr(holder, name, set()).clear()
        for stage in stages:
            stage.clear_runtime_states()
        flags = [name for name in vars(each) if re.fullmatch(r"_stages?(_\w+)?_initialized", name)]
        if not flags:
            raise AttributeError(f"{type(each).__name__} does not say whether its stages were initialized")
        for name in flags:
            setattr(each, name, False)


def _fsdp_states(model: nn.Module) -> list[Any]:
    found = {}
    for module in model.modules():
        if (get := getattr(module, "_get_fsdp_state", None)) is not None:
            state = get()
            found[id(state)] = state
    return list(found.values())


def _reset_fsdp(state: Any) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state._training_state = TrainingState.IDLE
    state._modules_to_run_forward.clear()
    shared, streams = state._state_ctx, state._comm_ctx
    shared.iter_forward_root, shared.post_optim_event = None, None
    shared.post_backward_final_callback_queued, shared.is_last_backward = False, True
    streams.all_gather_state = None
    for name in ("reduce_scatter_states", "post_forward_order", "_last_post_reduce_events"):
        if hasattr(streams, name):
            getattr(streams, name).clear()
    if hasattr(streams, "reduce_scatter_state"):
        streams.reduce_scatter_state = None
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in groups if groups is not None else [state._fsdp_param_group]:
        if group is None:
            continue
        group._training_state = TrainingState.IDLE
        for name in _OF_A_STEP:
            if hasattr(group, name):
                setattr(group, name, None)
        group._post_forward_indices.clear()
        group._to_sharded()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
