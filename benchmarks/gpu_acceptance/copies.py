"""Whether copies beside training are whole, and leave training alone."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.gpu_acceptance.checks import Found, Setting
from benchmarks.gpu_acceptance.station import Station, ensure_room
from benchmarks.harness import GIB, MIB
from tiercheck import Checkpointer
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.local import CompleteSlot
from tiercheck.protocol.version import Kind
from tiercheck.trainer.state.slot_file import SlotReader


def torn(setting: Setting) -> Found:
    """C1. Every tensor holds one number that tells its step, so that each stored element can be looked at."""
    sizes = 3 * ([1 << 10, 1 << 14, 3 << 16] if setting.small else [1 << 14, 1 << 20, 3 << 22, 1 << 25])
    steps = 24 if setting.small else 120
    looked = dict.fromkeys(Kind, 0)

    def look(request: CompleteSlot) -> None:
        snapshot = request.kind is Kind.SNAPSHOT
        wanted = sum(map(_amount, range(1, request.step + 1))) if snapshot else -_amount(request.step)
        for name, value in SlotReader.open(request.path).tensors().items():
            if name.startswith(("model/", "gradient")):
                _ensure_all(name, value, wanted)
                looked[request.kind] += 1

    slots = {Kind.SNAPSHOT: 3, Kind.DELTA: 6}
    ensure_room(setting, 10 * 4 * sum(sizes))
    model = nn.ParameterList(nn.Parameter(torch.zeros(size, device=setting.device)) for size in sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with Station(setting, every=2, slots=slots, look=look) as station:
        with Checkpointer(model, optimizer) as checkpointer:
            checkpointer.restore()
            _train_and_scribble(setting, model, optimizer, checkpointer, steps)
        taken = f"{checkpointer.captured} snapshots and {checkpointer.deltas} deltas of {steps} steps"
        return Found(
            f"{taken}, {sum(looked.values())} tensors looked at; wrong: {station.wrong[:2] or 'none'}",
            good=not station.wrong and min(looked.values()) > 0,
        )


def captured_update(setting: Setting) -> Found:
    """C5."""

    def look(request: CompleteSlot) -> None:
        for name, value in SlotReader.open(request.path).tensors().items():
            if request.kind is Kind.SNAPSHOT and name.startswith("model/"):
                _ensure_all(name, value, request.step + 1)  # and the update before the capture

    elements = 1 << (24 if setting.small else 27)
    ensure_room(setting, 10 * 16 * elements)
    model, optimizer = _large(setting, elements)
    for parameter in model:
        parameter.grad = torch.full_like(parameter, -1.0)
    with Station(setting, every=2, slots={Kind.SNAPSHOT: 3, Kind.DELTA: 6}, look=look) as station:
        with Checkpointer(model, optimizer) as checkpointer:
            checkpointer.restore()
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                optimizer.step()
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                optimizer.step()
            for _ in range(40):
                graph.replay()
                checkpointer.step(0.0)
        taken = (
            f"{checkpointer.captured} snapshots, {checkpointer.skipped} skipped, {checkpointer.deltas} deltas"
        )
        told = f"deltas refused: {station.no_deltas or 'no'}; cannot save: {station.cannot_save or 'no'}"
        return Found(
            f"{taken}; {told}; wrong: {station.wrong[:2] or 'none'}",
            good=not station.wrong and checkpointer.captured > 0,
        )


def captures_beside_copies(setting: Setting) -> Found:
    """C6."""
    elements = 1 << (26 if setting.small else 28)
    ensure_room(setting, 4 * 16 * elements)
    model, optimizer = _large(setting, elements)
    x, failed = torch.zeros(MIB, device=setting.device), []
    with Station(setting, every=1, slots={Kind.SNAPSHOT: 3}, delta=DeltaMode.NONE):
        with Checkpointer(model, optimizer) as checkpointer:
            checkpointer.restore()
            for number in range(12):
                for parameter in model:
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                checkpointer.step(0.0)
                graph = torch.cuda.CUDAGraph()
                try:
                    with torch.cuda.graph(graph):
                        for _ in range(200):
                            x = x + 1
                    graph.replay()
                except RuntimeError as error:
                    failed.append(f"{number}: {str(error)[:80]}")
        taken = f"{checkpointer.captured} snapshots, {checkpointer.skipped} skipped"
    good = not failed and checkpointer.captured > 0
    return Found(f"{len(failed)} of 12 captures failed {failed[:1] or ''}; {taken}", good=good)


def memory_full(setting: Setting) -> Found:
    """C9."""
    elements = 1 << (26 if setting.small else 28)
    ensure_room(setting, 8 * 16 * elements)
    model, optimizer = _large(setting, elements)
    with Station(setting, every=2) as station, Checkpointer(model, optimizer) as checkpointer:
        checkpointer.restore()
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        torch.cuda.empty_cache()
        left = min(GIB // 2, 8 * elements)  # less than the gradients have
        hog = torch.empty(
            max(0, torch.cuda.mem_get_info()[0] - left), dtype=torch.uint8, device=setting.device
        )
        try:
            for _ in range(4):
                optimizer.step()
                checkpointer.step(0.0)
        except torch.OutOfMemoryError as error:
            return Found(f"training died of ours: {str(error)[:80]}", good=False)
        checkpointer.wait()
        del hog
        told = station.no_deltas or station.cannot_save
        taken = f"{checkpointer.captured} snapshots and {checkpointer.deltas} deltas were taken"
        good = bool(told) or checkpointer.deltas > 0
        return Found(f"training went on; {taken}; told: {told or 'nothing'}", good=good)


def _train_and_scribble(
    setting: Setting,
    model: nn.ParameterList,
    optimizer: torch.optim.Optimizer,
    checkpointer: Checkpointer,
    steps: int,
) -> None:
    """Whoever is given the memory of a gradient before it was copied writes NaN into it, on two streams."""
    side = torch.cuda.Stream() if setting.gpu else None
    width = 4096 if setting.gpu else 32
    work = torch.randn(width, width, device=setting.device)
    for step in range(1, steps + 1):
        for parameter in model:
            parameter.grad = torch.empty_like(parameter).fill_(-_amount(step))
        for _ in range(step % 4 * 10):
            work = (work @ work).clamp_(-1, 1)  # so that the update is far behind the host
        optimizer.step()
        checkpointer.step(0.0)
        optimizer.zero_grad()
        for parameter in model:
            torch.empty_like(parameter).fill_(float("nan"))
        if side is not None:
            with torch.cuda.stream(side):
                for parameter in model:
                    torch.empty_like(parameter).fill_(float("nan"))


def _amount(step: int) -> float:
    """What the update of `step` adds to every element."""
    return float(step % 7 + 1)


def _ensure_all(name: str, value: torch.Tensor, wanted: float) -> None:
    low, high = torch.aminmax(value)
    if not low == high == wanted:
        raise AssertionError(f"{name} holds {float(low)} to {float(high)}, not {wanted}")


def _large(setting: Setting, elements: int) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    """Four parameters of so many elements."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(elements, device=setting.device)) for _ in range(4))
    return model, torch.optim.SGD(model.parameters(), lr=1.0)
