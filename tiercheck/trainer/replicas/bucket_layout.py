"""Keeps the layout of DistributedDataParallel's gradient buckets, which decides how sums round.

After its first backward pass DDP lays its buckets out anew, in the order in which gradients became ready. A
new process begins with the first layout, and a sum over more than two ranks rounds as its place in it says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("tiercheck")

c10d: Any = dist
"""With what is private in it."""

_BEGUN = "begun"
"""Saved of a static graph that has made its first backward pass, and chooses after the second."""


class BucketLayout:
    """Reads and puts back the layout of one module. `Any`: private parts of the module are used."""

    def __init__(self, path: str, module: Any) -> None:
        """Raises AttributeError, KeyError if this torch does not show it."""
        self._path, self.module = path, module
        self.known = ""
        """What versions hold: `5 4, 3` is a bucket of two parameters, by their numbers, and one of one. Empty
        until DDP has chosen."""
        self._parameters, self._sparse = module._build_params_for_reducer()
        if len(self._parameters) != module._get_ddp_logging_data()["num_parameter_tensors"]:
            raise KeyError("parameters that were frozen before Checkpointer was made")
        self._order: Sequence[int] = range(len(self._parameters))
        """The numbers of the reducer's parameters."""
        self._ready: dict[int, None] = {}
        self._hooks: list[Any] = []

    def follow(self) -> None:
        """Reads at the end of a step what DDP has chosen. In the step in which it does, a collective call."""
        module = self.module
        if self.known not in ("", _BEGUN):
            return
        # Else DDP would choose in the next forward pass, after the version was taken. With uneven inputs only
        # that is a collective call.
        if not module._join_config.enable and module.reducer._rebuild_buckets():
            module._has_rebuilt_buckets = True
        if module._has_rebuilt_buckets:
            self._read()
        elif module.static_graph and module._static_graph_delay_allreduce_enqueued:
            self.known = _BEGUN
            if self._hooks:
                self._choose()

    def put_back(self, saved: str) -> None:
        """Lays the buckets out as they were. A collective call."""
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
        self.module._set_ddp_runtime_logging_sample_rate(100)  # as it is by default
        shown = self.module._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        buckets = [[str(self._order[int(index)]) for index in bucket.split()] for bucket in shown.split(",")]
        self.known = ", ".join(map(" ".join, buckets))

    def _note_order(self) -> None:
        """A static graph chooses by its second backward pass, which a new process takes for its first."""
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

    def _lay_out(self, order: Sequence[int]) -> None:
        """Makes DDP's reducer anew. It chooses at once, as if gradients had become ready in this order."""
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
        reducer._push_all_rebuilt_params()
        module._has_rebuilt_buckets = reducer._rebuild_buckets()
        reducer.prepare_for_forward()  # before it, nothing is logged
        self._order = order
        self._read()


def bucket_layouts(replicated: Iterable[tuple[str, DistributedDataParallel]]) -> dict[str, BucketLayout]:
    """Returns those of all modules, by their places in the model."""
    found = {}
    for path, module in replicated:
        if module.process_group.size() > 1:
            try:
                found[path] = BucketLayout(path, module)
            except (AttributeError, KeyError) as error:
                warn_of(path, f"does not show its gradient buckets ({error})")
    return found


def warn_of(path: str, what: str) -> None:
    """Warns that sums of this module may round otherwise after a restart."""
    where = path or "the model"
    log.warning(
        "BucketLayout: DistributedDataParallel (%s) %s. On more than two ranks, losses round otherwise after "
        "a restart (docs/use/exactness.md)",
        where,
        what,
    )
