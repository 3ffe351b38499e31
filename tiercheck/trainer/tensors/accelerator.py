"""Provides streams, progress marks and page-locked memory for copies off a device.

The training thread never waits for the device, only its stream does. Torch's module for the device is used
(`torch.cuda`, which is ROCm's too, `torch.xpu`, …), and not `torch.accelerator`, because a `torch.Event`
waits by spinning (torch 2.13).

Page-locking must not fail unnoticed, nor let its failure surface in another call. A registration that fails
leaves its error on the thread, and torch reports it at the next kernel that it starts, as if that had failed
(vllm-project/vllm#51081). Very large ones always fail, and each holds a lock of the driver, so it is done in
pieces.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tiercheck.trainer.tensors.tensor_parts import NotCapturable

_HOST = {"cpu", "meta"}
_device = attrgetter("device")
_PCI = Path("/sys/bus/pci/devices")
_RELAXED = 2
"""The value of cudaStreamCaptureModeRelaxed."""


class Mark(Protocol):
    """A point in the work of a stream."""

    def query(self) -> bool:
        """Returns whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Waits until the device has passed it."""
        ...


class Accelerator:
    """One device, as the two threads of a rank use it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._side: Any = None

    def numa_node(self) -> int:
        """Returns the host's NUMA node; -1: not known, as on devices other than those of CUDA and ROCm."""
        if self._device.type != "cuda":
            return -1
        about = self._module.get_device_properties(self._device)
        try:
            place = f"{about.pci_domain_id:04x}:{about.pci_bus_id:02x}:{about.pci_device_id:02x}.0"
            return int((_PCI / place / "numa_node").read_text())
        except (AttributeError, OSError, ValueError):
            # A torch without these properties, or a container without /sys.
            return -1

    def has(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    # The training thread.

    def final(self) -> Mark:
        """Returns a mark that passes when all that the training stream was given so far is done."""
        return self._mark(self._module.current_stream(self._device))

    def hold(self, mark: Mark) -> None:
        """Makes later work of the training stream wait for the mark; this thread does not wait."""
        self._module.current_stream(self._device).wait_event(mark)

    # The saver's thread.

    def follow(self, mark: Mark) -> None:
        """Makes later work of this thread come after the mark, in a stream of its own."""
        if self._side is None:
            self._module.set_device(self._device)  # for this thread: else it would open the first one as well
            self._side = self._module.Stream(self._device)
            if self._device.type == "cuda":
                _leave_captures_alone()
        self._module.set_stream(self._side)
        self._side.wait_event(mark)

    def passed(self) -> Mark:
        """Returns a mark that passes when all that this thread gave the device so far is done."""
        return self._mark(self._side)

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """Begins a copy from the device to host memory."""
        target.copy_(source, non_blocking=True)

    # Both.

    def room(self, size: int) -> Tensor:
        """Returns `size` bytes of page-locked memory, which torch keeps for the next call."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def put(self, target: Tensor, source: Tensor) -> None:
        """Begins a copy from page-locked memory to the device, in the current stream."""
        target.copy_(source, non_blocking=True)

    def _mark(self, stream: Any) -> Mark:
        # Blocking: it waits without using a core. Only CUDA's events have this option.
        mark: Any = self._module.Event(blocking=True) if self._device.type == "cuda" else self._module.Event()
        mark.record(stream)
        found: Mark = mark
        return found


def on_host(device: torch.device) -> bool:
    """Returns whether reading what lies there needs no wait for a device."""
    return device.type in _HOST


def accelerator_of(tensors: Iterable[Tensor]) -> Accelerator | None:
    """Returns the tensors' accelerator; None: all are in host memory. Raises NotCapturable for several."""
    devices = {device for device in {*map(_device, tensors)} if not on_host(device)}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise NotCapturable(
            f"the state lies on several devices ({names}); TierCheck saves one for each process"
        )
    return _accelerator(devices.pop()) if devices else None


@cache
def _accelerator(device: torch.device) -> Accelerator:
    return Accelerator(device)


def _leave_captures_alone() -> None:
    """Keeps this thread from invalidating a CUDA graph that the script captures. torch has no call for it."""
    mode = ctypes.c_int(_RELAXED)
    for path in runtimes():
        ctypes.CDLL(path).cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def runtimes() -> set[str]:
    """Returns the files of CUDA's runtime in this process; none on ROCm."""
    return {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line
    }


PIECE = 256 * 1024 * 1024
_PORTABLE = 1
"""The value of cudaHostRegisterPortable: for every CUDA context of this process."""


def page_lock(address: int, size: int) -> tuple[Sequence[int], str]:
    """Registers host memory. Returns the pieces' addresses; on failure none, with the reason."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    done: list[int] = []
    for begin in range(address, address + size, PIECE):
        code = int(runtime.cudaHostRegister(begin, min(PIECE, address + size - begin), _PORTABLE))
        if code:
            release(done)
            _clear_error()
            return (
                (),
                f"cudaHostRegister failed with error {code} after {len(done) * PIECE // 2**20} of "
                f"{size // 2**20} MiB",
            )
        done.append(begin)
    return tuple(done), ""


def release(pieces: Sequence[int]) -> None:
    if not pieces:
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    failed = [code for begin in pieces if (code := int(runtime.cudaHostUnregister(begin)))]
    if failed:
        _clear_error()


def _clear_error() -> None:
    """Clears the error of this thread. torch has no call for it."""
    for path in runtimes():
        ctypes.CDLL(path).cudaGetLastError()


@dataclass(kw_only=True)
class Pending:
    """One artifact on its way into a slot, as the training thread and the saver's see it."""

    step: int
    device: Accelerator | None = None
    """The device that holds the artifact; None: host memory."""
    ready: Mark | None = None
    """A mark of the training stream: what is to be copied is final once the device has passed it."""
    granted: threading.Event = field(default_factory=threading.Event)
    """The copy has begun, or never will."""
    copied: threading.Event = field(default_factory=threading.Event)
    """No byte of the model is read any more, or, on a device, once that has passed `done`."""
    done: Mark | None = None
    """A mark, set before `copied` if a device still has something to read."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    moved: threading.Event = field(default_factory=threading.Event)
    """The next update may have begun: the model is not what was captured any more."""
    cancelled: bool = False
    """True if the barrier gave it up, and has counted it."""

    def start(self) -> bool:
        """Returns whether the copy may begin (saver's thread): False once the barrier has given up."""
        with self._lock:
            if not self.cancelled:
                self.granted.set()
            return not self.cancelled

    def cancel(self) -> bool:
        """Gives up unless the copy has begun (barrier), and returns whether it did."""
        with self._lock:
            self.cancelled = not self.granted.is_set()
            return self.cancelled

    def mark_moved(self) -> None:
        """Marks that the next update is about to begin (barrier)."""
        self.moved.set()

    def end(self) -> None:
        """Releases the model, whatever happened (saver's thread)."""
        self.granted.set()
        self.copied.set()
