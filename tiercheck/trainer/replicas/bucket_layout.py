"""Keeps the layout of DistributedDataParallel's gradient buckets, which decides how sums round.

After its first backward pass DDP lays its buckets out anew, in the order in which gradients became ready. A new
process begins with the first layout again, and how a sum over more than two ranks rounds depends on its place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("tiercheck")

_NEEDED = attrgetter(
    "_ddp_init_helper", "_build_debug_param_to_name_mapping", "_comm_hooks", "_has_rebuilt_buckets",
    "_join_config", "_get_ddp_logging_data", "_set_ddp_runtime_logging_sample_rate", "reducer._rebuild_buckets",
    "reducer._push_all_rebuilt_params", "reducer._remove_autograd_hooks", "logger._set_comm_hook_name",
)  # fmt: skip
_SAMPLE_RATE = 100
"""DDP's own."""
_UNKNOWN = "unknown"
_BEGUN = "begun"
"""Stored of a static graph that has made its first backward pass, and chooses after the second."""


class BucketLayouts:
    """Reads and puts back the layouts of the DDP modules of one rank."""

    def __init__(self, replicated: Iterable[tuple[str, DistributedDataParallel]]) -> None:
        self._layouts: dict[str, _Layout] = {}
        """By the module's place in the model."""
        for path, module in replicated:
            if module.process_group.size() > 1:
                try:
                    _NEEDED(module)
                    self._layouts[path] = _Layout(path, module)
                except (AttributeError, ValueError) as error:
                    _warn(path, f"does not show its gradient buckets ({error})")

    @property
    def modules(self) -> list[Any]:
        return [each.module for each in self._layouts.values()]

    def facts(self) -> dict[str, str]:
        """What versions hold: `5 4, 3` is a bucket of two parameters, by their numbers, and one of one. Empty
        until DDP has chosen."""
        return {path: each.known for path, each in self._layouts.items()}

    def follow(self) -> None:
        """Reads at the end of a step what DDP has chosen. In the step in which it does, a collective call."""
        for each in self._layouts.values():
            # While inputs may be uneven, a rank that has none left makes no steps.
            if each.known in ("", _BEGUN) and not each.module._join_config.enable:
                try:
                    each.follow()
                except RuntimeError:
                    pass  # of an incomplete backward pass: DDP raises it again
                except Exception as error:  # invariant: no failure of ours stops training
                    each.known = _UNKNOWN
                    _warn(each.path, f"does not show its gradient buckets ({error!r})")

    def put_back(self, facts: Mapping[str, str]) -> None:
        """Lays buckets out as they were when `facts` were stored. A collective call."""
        for path, each in self._layouts.items():
            each.put_back(facts.get(path, ""))


class _Layout:
    """Keeps the layout of one module. `module`: private parts of it are used, hence `Any`."""

    def __init__(self, path: str, module: Any) -> None:
        self.path, self.module = path, module
        self.known = self._saved = ""
        self._parameters, self._sparse = module._build_params_for_reducer()
        if len(self._parameters) != module._get_ddp_logging_data()["num_parameter_tensors"]:
            raise ValueError("what is trained was changed before Checkpointer was made")
        self._order = list(range(len(self._parameters)))
        """The numbers of the reducer's parameters."""
        self._noted: dict[int, None] = {}
        self._hooks: list[Any] = []

    def follow(self) -> None:
        module = self.module
        # Without this call DDP would choose in the next forward pass, after the version was taken.
        if module.reducer._rebuild_buckets():
            module._has_rebuilt_buckets = True
        if module._has_rebuilt_buckets:
            self._read()
        elif module.static_graph and module._static_graph_delay_allreduce_enqueued:
            self.known = _BEGUN
            if self._hooks:
                self._choose()

    def put_back(self, saved: str) -> None:
        group = self.module.process_group
        everywhere = [saved] * group.size()
        dist.all_gather_object(everywhere, saved, group=group)
        numbers = [int(number) for number in saved.replace(",", "").split()] if saved not in (_BEGUN, _UNKNOWN) else []
        if {*everywhere} != {saved}:
            _warn(self.path, "had other gradient buckets on another rank when it was saved")
        elif saved == _BEGUN:
            self._note_order()
        elif sorted(numbers) == sorted(self._order):
            self._saved = saved
            self._lay_out(numbers)
        elif saved:
            _warn(self.path, "has other trained parameters than when it was saved")

    def _read(self) -> None:
        self.module._set_ddp_runtime_logging_sample_rate(1)
        self.module.logger.set_runtime_stats_and_log()
        self.module._set_ddp_runtime_logging_sample_rate(_SAMPLE_RATE)
        shown = self.module._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        buckets = [[self._order[int(index)] for index in bucket.split()] for bucket in shown.split(",")]
        self.known = ", ".join(" ".join(map(str, bucket)) for bucket in buckets)
        if self._saved and {*self._saved.split(", ")} != {*self.known.split(", ")}:
            _warn(self.path, "has other gradient buckets than when it was saved: make it with the same options")

    def _note_order(self) -> None:
        """A static graph chooses by its second backward pass, which is the first one of this process."""
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}

        def note(parameter: Tensor) -> None:
            self._noted.pop(numbers[id(parameter)], None)
            self._noted[numbers[id(parameter)]] = None

        self._hooks = [p.register_post_accumulate_grad_hook(note) for p in self._parameters if p.requires_grad]

    def _choose(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        chosen = [[*self._noted, *sorted({*self._order} - {*self._noted})]]
        group = self.module.process_group
        dist.broadcast_object_list(chosen, dist.get_global_rank(group, 0), group=group)
        self._lay_out(chosen[0])

    def _lay_out(self, order: Sequence[int]) -> None:
        """Makes DDP's reducer anew, and has it choose at once, as if gradients had become ready in this
        order."""
        module, parameters = self.module, [self._parameters[number] for number in order]
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        for parameter in frozen:
            parameter.requires_grad_()  # as it was when DDP was made
        names = module._build_debug_param_to_name_mapping(parameters)
        hook = module._get_ddp_logging_data().get("comm_hook", "")
        module.reducer._remove_autograd_hooks()
        module.reducer = module.logger = None  # its buckets are as large as all gradients
        module._ddp_init_helper(parameters, [self._sparse[n] for n in order], names, module.static_graph)
        for parameter in frozen:
            parameter.requires_grad_(False)
        if module.static_graph:
            module._static_graph_delay_allreduce_enqueued = False
            module.reducer._set_static_graph()
            module.logger._set_static_graph()
        if module.mixed_precision is not None:
            module.reducer._set_mixed_precision_param_dtype(module.mixed_precision.param_dtype)
        for function, state in module._comm_hooks:
            dist._register_comm_hook(module.reducer, state, function)
        if (builtin := hook.removeprefix("BuiltinCommHookType.")) != hook:
            dist._register_builtin_comm_hook(module.reducer, getattr(dist.BuiltinCommHookType, builtin))
        module.logger._set_comm_hook_name(hook)
        module.reducer._push_all_rebuilt_params()
        module._has_rebuilt_buckets = module.reducer._rebuild_buckets()
        self._order = list(order)


def _warn(path: str, message: str) -> None:
    log.warning(
        "BucketLayout: DistributedDataParallel (%s) %s. Resumed on more than two ranks, losses may round "
        "otherwise (docs/use/exactness.md)",
        path or "the model",
        message,
    )
