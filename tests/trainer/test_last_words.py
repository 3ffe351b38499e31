"""Promise: the job's status tells why a rank ended, which changes nothing about the end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tiercheck.trainer.process import describe_error, exit_code_of, reason_of

SCRIPT = """
import sys
from tiercheck.trainer.process import LastWords
LastWords(lambda reason, message, code: sys.stdout.write(f"{reason}|{message}|{code}\\n"))
"""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad sample"), "UncaughtException"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), "OutOfGPUMemory"),
        (
            RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be"),
            "GPUFault",
        ),
        (
            RuntimeError("CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error"),
            "GPUFault",
        ),
        (RuntimeError("CUDA error: unspecified launch failure"), "GPUFault"),
        (RuntimeError("No CUDA-capable device is detected"), "GPUFault"),
        (OSError("GPU 0000:1b:00.0 has fallen off the bus"), "GPUFault"),
        (RuntimeError("NVRM: Xid (PCI:0000:1b:00): 79, GPU has failed"), "GPUFault"),
        (RuntimeError("driver reports Xid 94"), "GPUFault"),
        (RuntimeError("driver reports Xid 13"), "UncaughtException"),
        (RuntimeError("CUDA error: device-side assert triggered"), "UncaughtException"),
        (
            RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.3]:1"),
            "CollectiveFailed",
        ),
        (torch.distributed.DistBackendError("NCCL error in: unhandled system error"), "CollectiveFailed"),
        (ValueError("gloo is not a valid value"), "UncaughtException"),
        (SystemExit(42), "Exited"),
    ],
)
def test_exception_says_whose_fault_it_is_as_far_as_it_is_clear(error: BaseException, reason: str) -> None:
    assert reason_of(error) == reason


def test_words_are_one_short_line() -> None:
    assert describe_error(ValueError("a\n  b")) == "ValueError: a b"
    assert len(describe_error(ValueError("x" * 5000))) <= 500
    assert describe_error(ValueError()) == "ValueError"


@pytest.mark.parametrize(("code", "ends"), [(None, 0), (0, 0), (3, 3), (256 + 3, 3), ("no such file", 1)])
def test_exit_code_is_the_interpreters(code: object, ends: int) -> None:
    assert exit_code_of(SystemExit(code)) == ends
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.exit({code!r})"], stderr=subprocess.DEVNULL, check=False
    )
    assert run.returncode == ends


def test_uncaught_exception_is_told_once_and_its_traceback_is_still_printed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("\\\\n", "\\n") + "raise ValueError('bad sample')\n")
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert run.stdout.splitlines() == ["UncaughtException|ValueError: bad sample|1"]
    assert "Traceback" in run.stderr
    assert run.returncode == 1
