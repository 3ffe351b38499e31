"""The command line that every system of the comparison understands, and the file in which it answers."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.workload import Training, run_cycles, summary

AfterStep = Callable[[int], None]
Settle = Callable[[], object]
Setup = Callable[[Training, argparse.Namespace], tuple[AfterStep, Settle]]
"""Builds a system around a training: (what to call after each step, what waits for its background work)."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser()
    found.add_argument("--state-bytes", type=int, required=True)
    found.add_argument("--tokens", type=int, required=True)
    found.add_argument("--width", type=int, default=1024)
    found.add_argument("--cycles", type=int, required=True)
    found.add_argument("--half", type=int, required=True)
    found.add_argument("--threads", type=int, required=True)
    found.add_argument("--folder", required=True, help="a folder in memory")
    found.add_argument("--answer", required=True, help="the file for the result")
    found.add_argument("--mode", default="")
    return found


def staging() -> dict[str, bool]:
    """What torch's stagers can do here; page-locked memory and a thread of their own they have for CUDA
    only.
    """
    cuda = torch.cuda.is_available()
    return {
        "use_pinned_memory": cuda,
        "use_shared_memory": True,
        "use_async_staging": cuda,
        "use_non_blocking_copy": cuda,
    }


def one_at_a_time(arguments: argparse.Namespace, save: Callable[[Path], Any]) -> tuple[AfterStep, Settle]:
    """`save` begins one into a folder that does not exist, and gives its future. The next one waits for
    it.
    """
    folder = Path(arguments.folder) / "checkpoint"
    pending: list[Any] = []

    def settle() -> None:
        while pending:
            pending.pop().result()

    def after_step(number: int) -> None:
        if number % (2 * arguments.half):
            return
        settle()
        shutil.rmtree(folder, ignore_errors=True)
        pending.append(save(folder))

    return after_step, settle


def measure(setup: Setup) -> None:
    """Train as told by the command line with the system that `setup` builds; write down what it cost."""
    arguments = parser().parse_args()
    torch.set_num_threads(arguments.threads)
    training = Training(arguments.state_bytes, arguments.tokens, arguments.width)
    copies = training.copy_seconds()
    after_step, settle = setup(training, arguments)
    cycles = run_cycles(training, after_step, settle, cycles=arguments.cycles, half=arguments.half)
    Path(arguments.answer).write_text(json.dumps(summary(training, cycles, copies + training.copy_seconds())))
