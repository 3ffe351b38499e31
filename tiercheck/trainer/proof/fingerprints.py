"""Takes a step's fingerprints in about 15 microseconds, and records them in a file that persists.

This module neither calls the script's objects nor waits for a device: a sample of parameters on a device
arrives later, when the device has passed the step.

The restarted rank compares the steps that it trains again with the journal (`resume`). A record has the place
`step % CAPACITY`, so a repeated step replaces the earlier record. Writing is a copy into mapped memory: no
system call, no wait.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import struct
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from tiercheck.trainer.proof import state_hash
from tiercheck.trainer.tensors.accelerator import Accelerator, Mark, accelerator_of
from tiercheck.trainer.tensors.tensor_parts import PLAIN, NotCapturable, parameters_of
from tiercheck.trainer.tensors.tensor_parts import shard_or_self as _shard

CAPACITY = 4096
"""The number of records. A rank that repeats more steps compares only the newest of them."""
_HEADER = struct.Struct("<8sIIII")
_RECORD = struct.Struct("<Qd7I")
_CHECKED = struct.Struct("<I")
_MAGIC = b"TCJRNL01"
_RECORD_BYTES = 64
_BYTES = _RECORD_BYTES * (1 + CAPACITY)
_HAS_LOSS, _HAS_UPDATE, _WHOLE = 1, 2, 4


class StepRecord(NamedTuple):
    """The record of one step. Fingerprints are CRC-32 checksums; equal ones mean equal bytes."""

    step: int
    loss: float | None
    """The loss as given to `Checkpointer.step`; compared as 64 bits."""
    update: int | None
    """The fingerprint of a sample of the parameters after the update; None: not known (yet)."""
    generators: int
    """The fingerprint of torch's generators, including those in the script's `state`."""
    others: int
    """The fingerprint of the generators of Python and numpy."""
    position: int
    """The fingerprint of the plain numbers in the script's `state` that need no call of its objects."""
    hyper_parameters: int
    """The fingerprint of the numbers in the parameter groups."""
    drawn: int = 0
    """The positions of torch's generators: the CPU's in its 624 numbers (10 bits), the device's (22)."""
    whole: bool = False
    """True for a suspected step: `update` covers all parameters and optimizer state, not a sample."""


@dataclass(frozen=True)
class Header:
    """The identity of the journal's training, and how its runs ended."""

    training: int
    """The fingerprint of the name of the training (`run`)."""
    world_size: int
    ended: int = 0
    """The step at which a process ended because its script was finished; 0: none did."""
    differed: int = 0
    """The number of the field that differed first at the newest resume (`resume.FIELDS`); 0: none."""


class Journal:
    """The journal of one rank. Raises nothing after it is opened."""

    def __init__(self, path: Path, training: int, world_size: int) -> None:
        """Opens the file at `path`. Raises OSError, ValueError.

        Restarts it if it is of another training or another number of ranks."""
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size != _BYTES:
                os.ftruncate(file, 0)
                os.posix_fallocate(file, 0, _BYTES)  # a full disk is an error here, not a SIGBUS later
            self._memory = mmap.mmap(file, _BYTES)
        finally:
            os.close(file)
        self.other = ""
        """The reason why earlier records cannot be compared; empty: they can, if there are any."""
        found = self._read_header()
        if found is None or found.training != training:
            self._begin(Header(training, world_size))
        elif found.world_size != world_size:
            self._begin(Header(training, world_size))
            self.other = f"it was trained by {found.world_size} ranks, here are {world_size}"

    @property
    def header(self) -> Header:
        """Returns the header; an empty one if it is unreadable."""
        return self._read_header() or Header(0, 0)

    def change_header(self, **changed: int) -> None:
        self._write_header(replace(self.header, **changed))

    def write(self, record: StepRecord) -> None:
        flags = _HAS_LOSS * (record.loss is not None) | _HAS_UPDATE * (record.update is not None)
        loss = 0.0 if record.loss is None else record.loss
        flags |= _WHOLE * record.whole
        packed = _RECORD.pack(record.step, loss, flags, record.update or 0, *record[3:8])
        begin = _place_of(record.step)
        self._memory[begin : begin + _RECORD.size + _CHECKED.size] = packed + _checksum(packed)

    def read(self, step: int) -> StepRecord | None:
        """Returns the record of a step; None: none, or one cut off by the end of a process."""
        begin = _place_of(step)
        packed = self._memory[begin : begin + _RECORD.size]
        if self._memory[begin + _RECORD.size : begin + _RECORD.size + _CHECKED.size] != _checksum(packed):
            return None
        found, loss, flags, update, *rest = _RECORD.unpack(packed)
        if found != step:
            return None
        known = loss if flags & _HAS_LOSS else None, update if flags & _HAS_UPDATE else None
        return StepRecord(step, *known, *rest)._replace(whole=bool(flags & _WHOLE))

    def after(self, step: int) -> Iterator[StepRecord]:
        """Yields the records of the steps that follow `step` without a gap."""
        while (record := self.read(step := step + 1)) is not None:
            yield record

    def clear(self) -> None:
        """Deletes all records, because the training starts at its first step."""
        self._begin(replace(self.header, ended=0, differed=0))

    def close(self) -> None:
        self._memory.close()

    def _begin(self, header: Header) -> None:
        self._memory[:] = bytes(_BYTES)
        self._write_header(header)

    def _write_header(self, header: Header) -> None:
        packed = _HEADER.pack(_MAGIC, header.training, header.world_size, header.ended, header.differed)
        self._memory[: _HEADER.size + _CHECKED.size] = packed + _checksum(packed)

    def _read_header(self) -> Header | None:
        packed = self._memory[: _HEADER.size]
        if self._memory[_HEADER.size : _HEADER.size + _CHECKED.size] != _checksum(packed):
            return None
        magic, *values = _HEADER.unpack(packed)
        return Header(*values) if magic == _MAGIC else None


def _place_of(step: int) -> int:
    return _RECORD_BYTES * (1 + step % CAPACITY)


def _checksum(packed: bytes) -> bytes:
    return _CHECKED.pack(zlib.crc32(packed))


_T = TypeVar("_T")
_HOST_TENSORS, _DEVICE_TENSORS = 8, 2
"""The number of parameters in the sample: evenly spread, always the same."""
_HOST_OTHERS, _DEVICE_OTHERS = 4, 1
"""The number of other trained tensors in the sample: the loss may not depend on them for long."""
_RUN = 64
"""Bytes of each tensor in the sample."""
_NUMBERS = {int, float, bool}
_GROUPS = 16
"""The most parameter groups, and objects in the script's `state`, in the sample."""
WORDS = 624
"""The number of 32-bit words of a Mersenne Twister."""
_PLACE, _PLACE_AT = struct.Struct("=Q"), 16
"""The format and offset, in its state, of the number of words that torch's generator has used."""


class Fingerprints:
    """Takes the fingerprints of one rank's steps, in the training thread."""

    def __init__(
        self,
        model: nn.Module,
        beside: Iterable[nn.Module],
        optimizers: Sequence[Optimizer],
        state: Mapping[str, Any],
    ) -> None:
        """`beside`: modules that are not part of the model, such as averaged weights.

        `state`: the script's other saved objects."""
        self._model, self._beside = model, list(beside)
        self._optimizers = optimizers
        self._generators = [each for each in state.values() if isinstance(each, torch.Generator)]
        self._holders = [
            each if isinstance(each, MutableMapping) else vars(each)
            for each in list(state.values())[:_GROUPS]
            if isinstance(each, MutableMapping) or hasattr(each, "__dict__")
        ]
        self._others = [_python_state(), _numpy_state()]
        self._groups = -1
        self._chosen: list[Tensor] = []
        self._written: list[tuple[Mapping[str, Tensor | None], str]] = []
        self._sharded = False
        self._known: list[int] = []
        self._runs: list[tuple[int, int]] = []
        self._places: list[tuple[int, int]] = []
        self._device: Accelerator | None = None
        self._pending: deque[tuple[StepRecord, Tensor, Mark]] = deque()

    @property
    def late(self) -> bool:
        """Returns whether the update has to be fetched from a device."""
        return self._device is not None

    def take(self, step: int, loss: float | None) -> StepRecord:
        """Returns the record of the ending step, without `update` if that is on a device."""
        generators, drawn = self._drawn()
        return StepRecord(
            step,
            loss,
            self._update_on_host(),
            generators,
            zlib.crc32(b"".join([read() for read in self._others])),
            _numbers(*self._holders),
            _numbers(*[group for each in self._optimizers for group in each.param_groups[:_GROUPS]]),
            drawn,
        )

    def of_whole(self, record: StepRecord) -> StepRecord:
        """Returns `record` with a fingerprint of all parameters and optimizer state. Waits for the device."""
        found = "".join(state_hash.fingerprints(state_hash.whole_state(self._optimizers)))
        return record._replace(update=zlib.crc32(found.encode()), whole=True)

    def fetch_update(self, record: StepRecord) -> None:
        """Enqueues the fetch of the sample from a device."""
        if self._device is None:
            return
        looked_at = self._look()
        size = sum(length for _, length in self._runs)
        room, begin = self._device.room(size), 0
        for tensor, (offset, length) in zip(looked_at, self._runs, strict=True):
            shard = tensor.detach().view(-1).view(torch.uint8)
            self._device.fetch(room[begin : begin + length], shard[offset : offset + length])
            begin += length
        self._pending.append((record, room, self._device.final()))

    def arrived(self, *, wait: bool = False) -> list[StepRecord]:
        """Returns records with an arrived update. `wait`: waits for all, and so for the device."""
        found: list[StepRecord] = []
        while self._pending and (self._pending[0][2].query() or wait):
            record, room, mark = self._pending.popleft()
            if wait:
                mark.synchronize()
            found.append(record._replace(update=zlib.crc32(ctypes.string_at(room.data_ptr(), room.numel()))))
        return found

    def _update_on_host(self) -> int | None:
        groups = sum([len(each.param_groups) for each in self._optimizers])
        if groups != self._groups:
            self._groups = groups
            self._choose()
        if self._device is not None or not self._chosen:
            return None
        self._look()
        return zlib.crc32(b"".join(starmap(ctypes.string_at, self._places)))

    def _look(self) -> list[Tensor]:
        """Returns the sampled tensors, and updates their places, as a script may replace a buffer."""
        found = [*map(_shard, self._chosen)] if self._sharded else self._chosen
        known = [*map(Tensor.data_ptr, found)]
        host = self._device is None
        for holder, key in self._written:
            held = holder.get(key)
            if held is not None and (held := _shard(held)).is_cpu is host and held.is_contiguous():
                found = [*found, held]
                known += held.data_ptr(), held.nbytes
        if known != self._known:
            self._known, self._runs = known, [*map(_run, found)]
            self._places = [
                (tensor.data_ptr() + offset, length)
                for tensor, (offset, length) in zip(found, self._runs, strict=True)
            ]
        return found

    def _choose(self) -> None:
        listed = list(filter(_is_dense, parameters_of(*self._optimizers)))
        try:
            self._device = accelerator_of(map(_shard, listed))
        except NotCapturable:  # on several devices: the save will report it
            listed = []
        host = self._device is None
        self._known = []
        self._chosen = _spread(listed, _HOST_TENSORS if host else _DEVICE_TENSORS)
        beside = [
            (holder, key)
            for holder, key in _written_beside(self._model, self._beside)
            if (held := holder[key]) is not None
            and _is_dense(held)
            and listed
            and held.device == listed[0].device
        ]
        self._written = _spread(beside, _HOST_OTHERS if host else _DEVICE_OTHERS)
        self._sharded = any(_shard(tensor) is not tensor for tensor in self._chosen)

    def _drawn(self) -> tuple[int, int]:
        states = [torch.default_generator.get_state(), *[each.get_state() for each in self._generators]]
        drawn: int = _PLACE.unpack(ctypes.string_at(states[0].data_ptr() + _PLACE_AT, _PLACE.size))[0] % WORDS
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            states.append(torch.cuda.default_generators[torch.cuda.current_device()].get_state())
            offset: int = _PLACE.unpack(ctypes.string_at(states[-1].data_ptr() + 8, _PLACE.size))[0]
            drawn |= offset << 8 & 0xFFFFFC00  # in fours
        return zlib.crc32(b"".join([_ends(each.data_ptr(), each.numel()) for each in states])), drawn


def _written_beside(
    model: nn.Module, beside: Iterable[nn.Module]
) -> Iterator[tuple[Mapping[str, Tensor | None], str]]:
    """Yields the places of saved tensors that no optimizer updates.

    These are persistent buffers, and the parameters of the modules `beside`."""
    averaged = [module for each in beside for module in each.modules()]
    for module in (*model.modules(), *averaged):
        passing = module._non_persistent_buffers_set
        yield from ((module._buffers, key) for key in module._buffers if key not in passing)
    for module in averaged:
        yield from ((module._parameters, key) for key in module._parameters)


def _spread(listed: Sequence[_T], some: int) -> list[_T]:
    return [listed[len(listed) * number // some] for number in range(min(some, len(listed)))]


def _ends(address: int, length: int) -> bytes:
    """Returns the first and the last bytes of a generator's state.

    They have its seed, its position in the block of numbers, and a part of the block."""
    return ctypes.string_at(address, min(_RUN, length)) + ctypes.string_at(
        address + max(0, length - _RUN), min(_RUN, length)
    )


def _numbers(*holders: Mapping[str, Any]) -> int:
    found = [value for each in holders for value in each.values() if type(value) in _NUMBERS]
    return hash(tuple(found)) & 0xFFFFFFFF


def _is_dense(parameter: Tensor) -> bool:
    if is_lazy(parameter) or parameter.is_meta:
        return False
    shard = _shard(parameter)
    return bool(
        type(shard) in PLAIN and shard.layout is torch.strided and shard.nbytes and shard.is_contiguous()
    )


def _run(shard: Tensor) -> tuple[int, int]:
    """Returns the offset and length of the sampled bytes."""
    size = shard.nbytes
    return max(0, size - _RUN) // 3 // 16 * 16, min(_RUN, size)


def _python_state() -> Callable[[], bytes]:
    """Returns a function that reads the state of Python's generator.

    `random.getstate` makes a tuple of 625 numbers each time, so the words are read in memory, if found."""
    drawn = getattr(random, "_inst", None)
    if drawn is not None:
        words = struct.pack(f"={WORDS}I", *drawn.getstate()[1][:WORDS])
        at = ctypes.string_at(id(drawn), drawn.__sizeof__()).find(words)
        if at > 0:  # the number of used words precedes them
            address, length = id(drawn) + at - 4, len(words) + 4
            return lambda: _ends(address, length)
    return lambda: repr(random.getstate()[1][-1]).encode()


def _numpy_state() -> Callable[[], bytes]:
    """Returns a function that reads the state of numpy's global generator, if numpy is imported."""
    numpy = sys.modules.get("numpy")
    bits: Any = getattr(getattr(numpy, "random", None), "get_bit_generator", lambda: None)()
    if type(bits).__name__ != "MT19937":
        return lambda: b""
    address, length = bits.ctypes.state_address, 4 * (WORDS + 1)
    return lambda: _ends(address, length)
