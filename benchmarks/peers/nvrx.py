"""NVRx's local checkpoint, synchronous or asynchronous, without replication: its fastest ways.

It wants tensors on CUDA devices. Here they are on the CPU, so the check for CUDA and the calls of
`torch.cuda` are bridged, and the copy to the host is a real copy where it is needed (asynchronous: training
goes on) and none where NVRx writes before it returns.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import (
    BasicTensorAwareStateDict,
    dict_list_map_inplace,
)
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager
from torch import Tensor

from benchmarks.peers.arguments import AfterStep, Settle, measure
from benchmarks.workload import Training


class OnCpu(BasicTensorAwareStateDict):
    """NVRx's own container, for CPU tensors."""

    copies = False

    def __init__(self, state: dict[str, Any]) -> None:
        self.state_dict = state
        self._is_hollow = False

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        if self.copies:
            dict_list_map_inplace(
                lambda value: value.clone() if isinstance(value, Tensor) else value, self.state_dict
            )


def setup(training: Training, arguments: argparse.Namespace) -> tuple[AfterStep, Settle]:
    folder = Path(arguments.folder)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1, timeout=timedelta(seconds=120)
    )
    manager = LocalCheckpointManager(folder / "local")
    calls = AsyncCallsQueue(persistent=False)
    if not torch.cuda.is_available():
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: "cpu"
    OnCpu.copies = asynchronous = arguments.mode == "async"

    def after_step(number: int) -> None:
        if number % (2 * arguments.half):
            return
        calls.maybe_finalize_async_calls(blocking=True)
        request = manager.save(OnCpu(training.state_dict()), number, is_async=asynchronous)
        if request is not None:
            calls.schedule_async_request(request)

    return after_step, lambda: calls.maybe_finalize_async_calls(blocking=True)


if __name__ == "__main__":
    measure(setup)
