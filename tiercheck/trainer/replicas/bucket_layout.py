"""Keeps the layout of DistributedDataParallel's gradient buckets, which decides how sums round.

After its first backward pass DDP lays its buckets out anew, in the order in which gradients became ready. A new
process begins with the first layout again, and how a sum over more than two ranks rounds depends on its place.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("tiercheck")

_NEEDED = attrgetter(
    "_ddp_init_helper", "_build_params_for_reducer", "_build_debug_param_to_name_mapping", "_comm_hooks",
    "_has_rebuilt_buckets", "_join_config", "reducer._rebuild_buckets", "reducer._push_all_rebuilt_params",
    "reducer._get_zeros_like_grad_buckets", "reducer._remove_autograd_hooks", "logger._set_comm_hook_name",
)  # fmt: skip
_BEGUN = "begun"
"""The layout of a static graph that has made its first backward pass, and chooses after the second."""


class BucketLayouts:
    """Reads and puts back the layouts of the DDP modules of one rank."""

    def __init__(self, replicated: Iterable[tuple[str, DistributedDataParallel]]) -> None:
        self.modules: dict[str, Any] = {}
        """The modules by their place in the model. `Any`: what is needed of them is private."""
        for path, module in replicated:
            if module.process_group.size() > 1:
                try:
                    _NEEDED(module)
                    self.modules[path] = module
                except AttributeError as error:
                    _warn(path, f"does not show its gradient buckets ({error})")
        self.facts = dict.fromkeys(self.modules, "")
        """What a version holds: `5 4,3` is a bucket of two parameters, by their numbers, and one of one.
        Empty until DDP has chosen."""
        self._orders: dict[str, tuple[list[int], list[Any]]] = {}

    def follow(self) -> None:
        """Reads at the end of a step what DDP has chosen. In the step in which it does, a collective call."""
        for path, module in self.modules.items():
            if self.facts[path] not in ("", _BEGUN) or module._join_config.enable:
                continue  # of uneven inputs: a rank that has none left makes no steps
            with contextlib.suppress(RuntimeError):  # of an incomplete backward pass; DDP raises it again
                # Without this call DDP would choose in the next forward pass, after the version was taken.
                if module.reducer._rebuild_buckets():
                    module._has_rebuilt_buckets = True
                if module._has_rebuilt_buckets or not _rebuilds(module):
                    self.facts[path] = _read(module)
                elif module.static_graph and module._static_graph_delay_allreduce_enqueued:
                    self.facts[path] = _BEGUN
                    if path in self._orders:
                        self._choose(path, module)

    def put_back(self, facts: Mapping[str, str]) -> None:
        """Lays buckets out as they were when `facts` were stored. A collective call."""
        for path, module in self.modules.items():
            stored = facts.get(path, "")
            everywhere: list[str] = [""] * module.process_group.size()
            dist.all_gather_object(everywhere, stored, group=module.process_group)
            if {*everywhere} != {stored}:
                _warn(path, "had other gradient buckets on another rank when it was saved")
            elif stored == _BEGUN:
                self._orders[path] = _note_order(module)
            elif stored:
                if _rebuilds(module) and {*_numbers(_read(module))} == {*_numbers(stored)}:
                    _lay_out(module, _numbers(stored))
                self.facts[path] = now = _read(module)
                if {*now.split(",")} != {*stored.split(",")}:
                    _warn(path, "has other gradient buckets than when it was saved: make it with the same options")

    def _choose(self, path: str, module: Any) -> None:
        """Lays buckets out in the order of the pass that was the process's first and the training's second."""
        noted, hooks = self._orders.pop(path)
        for hook in hooks:
            hook.remove()
        order = list(dict.fromkeys(reversed(noted)))[::-1]
        chosen = [[*order, *sorted({*_numbers(_read(module))} - {*order})]]
        group = module.process_group
        dist.broadcast_object_list(chosen, dist.get_global_rank(group, 0), group=group)
        _lay_out(module, chosen[0])
        self.facts[path] = _read(module)


def _warn(path: str, message: str) -> None:
    module = f"DistributedDataParallel ({path or 'the model'})"
    log.warning(
        "BucketLayout: %s %s. Resumed on more than two ranks, losses may round otherwise (docs/use/exactness.md)",
        module,
        message,
    )


def _rebuilds(module: Any) -> bool:
    return bool(module.static_graph or not module.find_unused_parameters)


def _numbers(layout: str) -> list[int]:
    return [int(number) for number in layout.replace(",", " ").split()]


def _read(module: Any) -> str:
    numbers = {id(parameter): number for number, parameter in enumerate(module.module.parameters())}
    buckets = module.reducer._get_zeros_like_grad_buckets()
    return ",".join(" ".join(str(numbers.get(id(p), -1)) for p in each.parameters()) for each in buckets)


def _note_order(module: Any) -> tuple[list[int], list[Any]]:
    """The numbers of parameters whose gradients became ready, from now on, and the hooks that note them."""
    every, noted = list(module.module.parameters()), list[int]()
    numbers = {id(parameter): number for number, parameter in enumerate(every)}

    def note(parameter: Tensor) -> None:
        noted.append(numbers[id(parameter)])

    return noted, [each.register_post_accumulate_grad_hook(note) for each in every if each.requires_grad]


def _lay_out(module: Any, order: Sequence[int]) -> None:
    """Makes DDP's reducer anew, and has it choose at once, as if gradients had become ready in this order. A
    collective call."""
    every = list(module.module.parameters())
    ordered = [every[number] for number in order]
    frozen = [parameter for parameter in ordered if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_()  # as it was when DDP was made
    sparse = dict(zip(*module._build_params_for_reducer(), strict=True))
    names = module._build_debug_param_to_name_mapping(ordered)
    hook = module._get_ddp_logging_data().get("comm_hook", "")
    module.reducer._remove_autograd_hooks()
    module.reducer = module.logger = None  # its buckets are as large as all gradients
    module._ddp_init_helper(ordered, [sparse.get(each, False) for each in ordered], names, module.static_graph)
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
