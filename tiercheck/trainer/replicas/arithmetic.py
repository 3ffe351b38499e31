"""Saves settings that determine rounding, and warns of unsaved state that affects the next step.

After its first backward pass DDP rebuilds its buckets in the order in which gradients became ready. A new
process starts with the first layout, and the rounding of a sum over more than two ranks depends on its
position in the layout. Therefore the layout is saved.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from tiercheck.trainer.backends.backend import log
from tiercheck.trainer.state.aliasing import Wrapped
from tiercheck.trainer.state.plain_attributes import AttributeWatch
from tiercheck.trainer.state.readable import attributes_of_object
from tiercheck.trainer.tensors.tensor_parts import NotCapturable, local_shard

c10d: Any = dist
"""The module with untyped access to its private parts."""

_BEGUN = "begun"
"""The saved value of a static graph after its first backward pass; it chooses after the second."""


class BucketLayout:
    """Reads and restores the bucket layout of one module, through its private parts."""

    def __init__(self, path: str, module: Any) -> None:
        """Raises AttributeError, KeyError if this version of torch does not expose the layout."""
        self._path, self.module = path, module
        self.known = ""
        """The layout to save: `5 4, 3` is a bucket of parameters 5, 4 and one of 3. Empty: none chosen."""
        self._parameters, self._sparse = module._build_params_for_reducer()
        if len(self._parameters) != module._get_ddp_logging_data()["num_parameter_tensors"]:
            raise KeyError("parameters that were frozen before Checkpointer was made")
        self._order: Sequence[int] = range(len(self._parameters))
        """The numbers of the parameters in the reducer's order."""
        self._ready: dict[int, None] = {}
        self._hooks: list[Any] = []

    def follow(self) -> None:
        """Reads DDP's choice at the end of a step. A collective call in the step in which DDP chooses."""
        module = self.module
        if self.known not in ("", _BEGUN):
            return
        # Otherwise DDP would choose in the next forward pass, after the snapshot. With uneven inputs only
        # the choice there is a collective call.
        if not module._join_config.enable and module.reducer._rebuild_buckets():
            module._has_rebuilt_buckets = True
        if module._has_rebuilt_buckets:
            self._read()
        elif module.static_graph and module._static_graph_delay_allreduce_enqueued:
            self.known = _BEGUN
            if self._hooks:
                self._choose()

    def put_back(self, saved: str) -> None:
        """Restores the saved buckets. A collective call."""
        group = self.module.process_group
        everywhere = [saved] * group.size()
        dist.all_gather_object(everywhere, saved, group=group)
        numbers = [int(number) for number in saved.replace(",", "").split() if saved != _BEGUN]
        if {*everywhere} != {saved}:
            warn_of(self._path, "had other gradient buckets on another rank")
        elif saved == _BEGUN:
            self._note_order()
        elif saved:
            if sorted(numbers) == sorted(self._order):
                self._lay_out(numbers)
            if {*self.known.split(", ")} != {*saved.split(", ")}:
                warn_of(
                    self._path, "had other gradient buckets: make it with the same options and parameters"
                )

    def _read(self) -> None:
        self.module._set_ddp_runtime_logging_sample_rate(1)
        self.module.logger.set_runtime_stats_and_log()
        self.module._set_ddp_runtime_logging_sample_rate(100)  # the default
        shown = self.module._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        buckets = [[str(self._order[int(index)]) for index in bucket.split()] for bucket in shown.split(",")]
        self.known = ", ".join(map(" ".join, buckets))

    def _note_order(self) -> None:
        """Notes the gradients' order, because a static graph chooses by its second backward pass.

        A new process would take that pass for its first."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}

        def note(parameter: Tensor) -> None:
            self._ready.pop(numbers[id(parameter)], None)
            self._ready[numbers[id(parameter)]] = None

        self._hooks = [
            p.register_post_accumulate_grad_hook(note) for p in self._parameters if p.requires_grad
        ]

    def _choose(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
        chosen = [[*self._ready, *sorted({*self._order} - {*self._ready})]]
        group = self.module.process_group
        dist.broadcast_object_list(chosen, dist.get_global_rank(group, 0), group=group)
        self._lay_out(chosen[0])

    def begin_anew(self) -> None:
        """Makes the next step begin as in a new process: with the first layout, and no partial step."""
        for parameter in self._parameters:
            parameter.requires_grad_()  # the step may have frozen it until its end
        self.module.require_forward_param_sync, self.module._has_rebuilt_buckets = True, False
        self._make_reducer(range(len(self._parameters)))

    def _lay_out(self, order: Sequence[int]) -> None:
        """Recreates DDP's reducer, which chooses at once, as if gradients became ready in this order."""
        self._make_reducer(order)
        reducer = self.module.reducer
        reducer._push_all_rebuilt_params()
        self.module._has_rebuilt_buckets = reducer._rebuild_buckets()
        reducer.prepare_for_forward()  # without it, nothing is logged
        self._order = order
        self._read()

    def _make_reducer(self, order: Sequence[int]) -> None:
        module, parameters = self.module, [self._parameters[number] for number in order]
        trained = [parameter.requires_grad for parameter in parameters]
        for parameter in parameters:
            parameter.requires_grad_()  # as it was when DDP was made
        names = module._build_debug_param_to_name_mapping(parameters)
        hook = module._get_ddp_logging_data().get("comm_hook", "")
        module.reducer._remove_autograd_hooks()
        module.reducer = module.logger = None  # its buckets are as large as all gradients
        module._ddp_init_helper(parameters, [self._sparse[n] for n in order], names, module.static_graph)
        for parameter, was in zip(parameters, trained, strict=True):
            parameter.requires_grad_(was)
        reducer = module.reducer
        if module.static_graph:
            module._static_graph_delay_allreduce_enqueued = False
            reducer._set_static_graph()
            module.logger._set_static_graph()
        if module.mixed_precision is not None:
            reducer._set_mixed_precision_param_dtype(module.mixed_precision.param_dtype)
        for function, state in module._comm_hooks:
            c10d._register_comm_hook(reducer, state, function)
        if (builtin := hook.removeprefix("BuiltinCommHookType.")) != hook:
            c10d._register_builtin_comm_hook(reducer, getattr(c10d.BuiltinCommHookType, builtin))
        module.logger._set_comm_hook_name(hook)


def bucket_layouts(replicated: Iterable[tuple[str, DistributedDataParallel]]) -> dict[str, BucketLayout]:
    found = {}
    for path, module in replicated:
        if module.process_group.size() > 1:
            try:
                found[path] = BucketLayout(path, module)
            except (AttributeError, KeyError) as error:
                warn_of(path, f"does not show its gradient buckets ({error})")
    return found


def reset_bucket_layouts(model: nn.Module, known: Iterable[BucketLayout]) -> None:
    """Makes each module of a wrapped model begin with its first layout, as in a new process.

    `known`: layouts of the model, read when no step was half done. Raises AttributeError, KeyError if this
    version of torch does not expose another one."""
    found = {id(layout.module): layout for layout in known}
    for path, module in Wrapped.look(model).replicated:
        if module.process_group.size() > 1:
            (found.get(id(module)) or BucketLayout(path, module)).begin_anew()


def warn_of(path: str, what: str) -> None:
    """Warns that sums of this module may round differently after a restart."""
    where = path or "the model"
    log.warning(
        "BucketLayout: DistributedDataParallel (%s) %s. On more than two ranks, losses round otherwise after "
        "a restart (docs/use/exactness.md)",
        where,
        what,
    )


_SHOWN = {
    "": ("__version__", "get_float32_matmul_precision", "are_deterministic_algorithms_enabled"),
    "cpu": ("get_num_threads", "backends.cpu.get_cpu_capability", "backends.mkldnn.enabled"),
    "cuda": (
        "cuda.get_device_name", "backends.cudnn.version", "backends.cuda.matmul.allow_tf32",
        "backends.cudnn.allow_tf32", "backends.cudnn.benchmark", "backends.cudnn.deterministic",
    ),
}  # fmt: skip
"""The settings of torch that affect rounding, by the type of device."""
_BY_SPEED = ("backends.cudnn.benchmark", "_inductor.config.max_autotune")


class Arithmetic:
    """Tracks the settings that determine the order and rounding of one rank's sums."""

    def __init__(self, wrapped: Wrapped, stored: Iterable[object]) -> None:
        """`stored`: the objects with state in the versions."""
        self._model, self._stored = wrapped.model, list(stored)
        self.layouts = bucket_layouts(wrapped.replicated)
        self._saved: Mapping[str, str] = {}
        self._steps, self._failed = 0, False
        self._hook_states: dict[int, AttributeWatch | None] = {}
        self.unsaved = ""
        """The message about a communication hook with state that is in no version; empty: there is none."""
        self._watch: Any = None
        self._adds: Any = None
        self._kept = ""
        self._clears = False
        """True if the script is known to set gradients to None before each step, as `zero_grad` does."""

    def facts(self) -> dict[str, Any]:
        layouts = {path: layout.known for path, layout in self.layouts.items()}
        # Where they are zeroed in place, the optimizer also updates parameters that a step does not use.
        zeroed = [] if self._clears else [name for name, each in self._named if each.grad is not None]
        return {"buckets": layouts, "computed": self._computed(), "gradients": zeroed}

    def put_back(self, facts: Mapping[str, Any]) -> None:
        """Restores saved settings. A collective call before the first backward pass."""
        for path, layout in self.layouts.items():
            layout.put_back(facts["buckets"].get(path, ""))
        self._saved = facts["computed"]
        zeroed = {*facts.get("gradients", ())}
        for name, parameter in self._named:
            if name in zeroed and parameter.grad is None and parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    def end_step(self) -> None:
        """Reads the settings after a step, and warns once of each one that a resume would not reproduce."""
        try:
            for layout in self.layouts.values():
                layout.follow()
                for hook, state in layout.module._comm_hooks:
                    self._follow_hook(hook, state)
            if self._watch is not None:
                self._watch = self._watch.remove()
                if self._kept:
                    log.warning(
                        "Gradients: that of %s is kept from one step to the next, and is in no version. Zero "
                        "it at least once in each step",
                        self._kept,
                    )
            self._steps += 1
            if self._steps == 1:  # the script has changed settings by now
                self._compare()
            # Gradients may be kept later: where a script accumulates more of them as it goes on.
            if not self._kept and self._steps & (self._steps - 1) == 0:
                self._watch = self._watch_gradient()
        except Exception as error:  # invariant: no error of TierCheck stops training
            if not self._failed:
                log.warning("Arithmetic: a resume may round otherwise: %r", error)
            self._failed = True

    @functools.cached_property
    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self._model.named_parameters())

    @functools.cached_property
    def _names(self) -> list[str]:
        kinds = {parameter.device.type for parameter in self._model.parameters()}
        return [name for kind in ("", *sorted(kinds)) for name in _SHOWN.get(kind, ())]

    def _computed(self) -> dict[str, str]:
        found = {}
        for name in self._names:
            try:
                value = attrgetter(name)(torch)
                found[name] = str(value() if callable(value) else value)
            except (AttributeError, RuntimeError):
                pass  # another version of torch, or set under another name
        inductor = sys.modules.get("torch._inductor.config")
        return {**found, _BY_SPEED[1]: str(getattr(inductor, "max_autotune", False))}

    def _compare(self) -> None:
        now = self._computed()
        other = [
            f"{name} is {now.get(name)}, was {was}"
            for name, was in self._saved.items()
            if now.get(name) != was
        ]
        if other:
            log.warning(
                "Arithmetic: losses may round otherwise since the restart: torch.%s", "; torch.".join(other)
            )
        for name in _BY_SPEED:
            if now.get(name) == "True":
                log.warning(
                    "Arithmetic: torch.%s chooses kernels by their speed. Switch it off to resume exactly",
                    name,
                )

    def _follow_hook(self, hook: Any, state: object) -> None:
        items = state if isinstance(state, dict) else attributes_of_object(state)
        watch = self._hook_states.setdefault(id(state), AttributeWatch())
        if watch is None or not watch.find(items.items()):
            return
        self._hook_states[id(state)] = None
        stored = (part for each in self._stored for part in (each, *attributes_of_object(each).values()))
        if not any(part is state for part in stored):
            self.unsaved = (
                f"the state of {getattr(hook, '__qualname__', hook)} changes, and is in no version. Give "
                "`state` an object with state_dict and load_state_dict that has it"
            )
            log.warning("CommHook: %s", self.unsaved)

    def _watch_gradient(self) -> Any:
        """Lets a hook of one parameter check whether the next step adds to this step's gradient."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                before = [parameter]

                def look(_: object, name: str = name, before: list[nn.Parameter] = before) -> None:
                    if not before:
                        return
                    kept = before.pop().grad
                    self._clears = kept is None
                    if kept is None or (kept.is_cuda and torch.cuda.is_current_stream_capturing()):
                        return
                    with contextlib.suppress(NotCapturable, RuntimeError):  # of a type that cannot be counted
                        self._kept = name if local_shard(kept).count_nonzero() else ""

                if type(parameter) is nn.Parameter:  # its own hook is called by autograd.grad, too
                    self._adds = get_gradient_edge(parameter).node  # it ends if nothing refers to it
                    return self._adds.register_prehook(look)
                return parameter.register_hook(look)  # type: ignore[no-untyped-call,unused-ignore]
        return None
