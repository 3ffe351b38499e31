"""Runs checks in processes of their own: after a CUDA error a process is of no use.

On a GPU each has one. Without one they share a process for as long as it lives, because importing torch takes
longer than they do.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu_acceptance.checks import CHECKS, Check, Found, Result, Setting, Skip, Status, judge
from benchmarks.harness import ROOT

BUDGET = 540.0
"""Seconds after which no check is begun on a GPU."""
LIMIT, LIMIT_WITHOUT_GPU = 150, 1800
"""Seconds of one check; then its process writes where it stands, and ends. On a GPU time is short, and the
machine our own."""

Tell = Callable[[Result], None]


def run_all(names: Sequence[str], setting: Setting, tell: Tell, budget: float = BUDGET) -> list[Result]:
    """One result for each name, in their order, whatever happens. `tell` hears each as soon as it is
    known.
    """
    found: dict[str, Result] = {}

    def hear(result: Result) -> None:
        found[result.name] = result
        tell(result)

    end = time.monotonic() + budget if setting.gpu else math.inf
    for name in names:
        if CHECKS[name].needs_gpu and not setting.gpu:
            hear(_result(name, Status.SKIPPED, f"needs a GPU: {CHECKS[name].needs_gpu}"))
    while waiting := [name for name in names if name not in found]:
        if time.monotonic() > end:
            for name in waiting:
                hear(_result(name, Status.SKIPPED, f"no time left: {budget:.0f} s were over"))
            break
        for result in run_apart(waiting[:1] if setting.gpu else waiting, setting):
            hear(result)
    return [found[name] for name in names]


def command_of(names: Sequence[str], setting: Setting, out: Path) -> list[str]:
    """The command whose process runs these checks, and writes a line into `out` for each."""
    flags = [*(["--quick"] if setting.quick else []), *(["--spoil"] if setting.spoil else [])]
    module = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_acceptance"]
    return [*module, "--child", ",".join(names), "--out", str(out), "--device", setting.device, *flags]


def run_apart(names: Sequence[str], setting: Setting) -> list[Result]:
    """Results of the first of these checks, at least of one: that in which the process ended, if it did, has
    failed."""
    folder = Path(tempfile.mkdtemp(prefix="tiercheck-acceptance-", dir=setting.memory))
    out = folder / "results"
    command = command_of(names, replace(setting, memory=folder), out)
    began = time.monotonic()
    try:
        code = _wait(command, (len(names) + 1) * (_limit(setting) + 1))
        lines = out.read_text().splitlines() if out.exists() else []
        results = [Result.read(json.loads(line)) for line in lines]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if len(results) < len(names):
        seconds = time.monotonic() - began - sum(result.seconds for result in results)
        results.append(_result(names[len(results)], Status.FAILED, _end(code, setting), seconds))
    return results


def run_here(names: Sequence[str], setting: Setting, out: Path) -> None:
    """In the process of the checks."""
    if not setting.gpu:
        import torch

        torch.set_num_threads(1)  # threads that wait for each other get nowhere on a busy machine
    for name in names:
        faulthandler.dump_traceback_later(_limit(setting))
        signal.alarm(_limit(setting) + 1)  # ends the process, wherever it hangs
        result = run_one(name, CHECKS[name], setting)
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()
        with out.open("a") as file:
            file.write(json.dumps(result.plain()) + "\n")
    sys.stderr.flush()
    os._exit(0)  # what a failed check has left open must not hold up the next one


def run_one(name: str, check: Check, setting: Setting) -> Result:
    """Whatever it raises is a result too."""
    module, function = check.run.rsplit(".", 1)
    began = time.monotonic()
    try:
        found: Found = getattr(importlib.import_module(f"{__package__}.{module}"), function)(setting)
        status = judge(check, found, setting.gpu)
    except Skip as skip:
        found, status = Found(str(skip)), Status.SKIPPED
    except Exception as error:  # the others go on
        traceback.print_exc()
        found, status = Found(f"{type(error).__name__}: {error}"[:500]), Status.FAILED
    return Result(name, check.promise, status, found.text, found.figures, time.monotonic() - began)


def _result(name: str, status: Status, text: str, seconds: float = 0.0) -> Result:
    return Result(name, CHECKS[name].promise, status, text, seconds=seconds)


def _wait(command: Sequence[str], limit: float) -> int:
    """The exit code, negative for a signal. Whatever the process has started ends with it."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return -signal.SIGALRM
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _limit(setting: Setting) -> int:
    return LIMIT if setting.gpu else LIMIT_WITHOUT_GPU


def _end(code: int, setting: Setting) -> str:
    if code == -signal.SIGALRM:
        return f"it did not end within {_limit(setting)} s; its output says where it stood"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"its process ended by {how}; its output may say why"
