"""How fast bytes get into slots and back, and what they cost meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu_acceptance.checks import Found, Setting
from benchmarks.gpu_acceptance.station import slot_of
from benchmarks.harness import GIB, MIB, Figure, Sense, rate_text
from tiercheck.protocol.artifacts.slot import SlotLayout
from tiercheck.protocol.version import Version
from tiercheck.trainer.save import staging
from tiercheck.trainer.save.staging import DeviceCopy
from tiercheck.trainer.state.slot_file import SlotReader, SlotWriter
from tiercheck.trainer.tensors.accelerator import accelerator_of


@dataclass(frozen=True)
class CopyRates:
    """Bytes per second of the trainer's own copy into a slot, many tensors as a model has them."""

    pinned: float
    """Of the same tensors into pinned memory, by torch."""
    quiet: float
    busy: float
    """Beside a thread that keeps the interpreter as a training loop between launches does."""
    processor: float
    """Seconds of processor time for a GB."""
    right: bool
    """Whether the slot holds what was copied."""


def page_locking(setting: Setting) -> Found:
    """P1. A slot is registered in the saver's thread, while training goes on."""
    size = (1 if setting.small else 8) * GIB
    x = torch.zeros(1, device=setting.device)
    with slot_of(setting, size) as path:
        writer = SlotWriter(path)
        took = [0.0]

        def pin() -> None:
            began = time.perf_counter()
            writer.pin()
            took[0] = time.perf_counter() - began

        launches = _beside(pin, lambda: x.add_(1))
        pinned = writer.pinned
        writer.close()
    return Found(
        f"{size // GIB} GiB, {len(launches)} launches meanwhile; "
        + ("registered" if pinned else "NOT registered"),
        good=pinned,
        figures=(
            Figure("page-locking", ratio=took[0] / size * 1e9, bound=0.15, unit=" s/GB"),
            Figure("longest launch", ratio=max(launches, default=0.0) * 1e3, bound=20, unit=" ms"),
        ),
    )


def into_a_slot(setting: Setting) -> Found:
    """P2."""
    rates = copy_rates(setting)
    return Found(
        f"pinned {rate_text(rates.pinned)}, ours {rate_text(rates.quiet)}, "
        + ("what was copied is right" if rates.right else "WHAT WAS COPIED IS WRONG"),
        good=rates.right,
        figures=(
            Figure(
                "of a pinned copy",
                ratio=rates.quiet / rates.pinned,
                bound=0.9,
                sense=Sense.AT_LEAST,
                unit="%",
            ),
            Figure(
                "beside a busy interpreter",
                ratio=rates.busy / rates.pinned,
                bound=0.75,
                sense=Sense.AT_LEAST,
                unit="%",
            ),
            Figure("processor", ratio=rates.processor, bound=0.02, unit=" s/GB"),
        ),
    )


def out_of_a_slot(setting: Setting) -> Found:
    """P4."""
    sources = _sources(setting)
    size = sum(source.nbytes for source in sources)
    with _written(setting, sources) as (path, views, _):
        for name, source in _named(sources):
            views[name].copy_(source)
        targets = _named([torch.empty_like(source) for source in sources])
        ours = size / best(setting, lambda: SlotReader.open(path).tensors().read_into(targets), 3)
        right = all(map(torch.equal, sources, (target for _, target in targets)))
    pinned = torch.empty(sources[0].numel(), dtype=torch.uint8, pin_memory=setting.gpu)
    limit = size / best(setting, lambda: [target.copy_(pinned, non_blocking=True) for _, target in targets])
    return Found(
        f"{rate_text(ours)}, pinned {rate_text(limit)}, what came back is {'right' if right else 'WRONG'}",
        good=right,
        figures=(Figure("of a pinned copy", ratio=ours / limit, bound=0.5, sense=Sense.AT_LEAST, unit="%"),),
    )


def sanity_gate(setting: Setting) -> Found:
    """P5. With one thread, as the saver has. On a GPU the copy comes off the device, which looks itself; both
    are of the same bytes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures = [_gate(setting, dtype) for dtype in (torch.float32, torch.bfloat16)]
    finally:
        torch.set_num_threads(before)
    return Found("looking and copying, in turn", figures=tuple(figures))


def small_reads_beside_a_copy(setting: Setting) -> Found:
    """P8."""
    source = torch.zeros((1 if setting.small else 4) * GIB, dtype=torch.uint8, device=setting.device)
    x = torch.ones(1, device=setting.device)
    with _written(setting, [source]) as (_, views, writer):
        writer.pin()
        x.item()
        alone = sorted(_seconds(setting, x.item) for _ in range(50))
        beside = sorted(_beside(lambda: _copy([("t0", source)], views), x.item))
        writer.close()
    worst = beside[int(0.99 * len(beside))] if beside else 0.0
    return Found(
        f"{len(beside)} reads; alone {alone[len(alone) // 2] * 1e6:.0f} µs",
        good=bool(beside),
        figures=(Figure("99 % within", ratio=worst * 1e3, bound=5, unit=" ms"),),
    )


def copy_rates(setting: Setting) -> CopyRates:
    """Of as many bytes as a rank's artifact may have. Raises Skip if there is no room."""
    sources = _sources(setting)
    size = sum(source.nbytes for source in sources)
    pinned = [torch.empty_like(source, device="cpu", pin_memory=setting.gpu) for source in sources[:64]]
    pairs = [(pinned[number % len(pinned)], source) for number, source in enumerate(sources)]
    limit = size / best(
        setting, lambda: [target.copy_(source, non_blocking=True) for target, source in pairs]
    )
    items = _named(sources)
    with _written(setting, sources) as (_, views, writer):
        if setting.gpu:
            writer.pin()
        for view in views.values():
            view.fill_(1)  # so that no page is touched for the first time
        quiet = size / best(setting, lambda: _copy(items, views))
        spent = time.thread_time()
        _copy(items, views)
        spent = time.thread_time() - spent
        with _busy_interpreter(setting):
            busy = size / best(setting, lambda: _copy(items, views), 3)
        right = all(torch.equal(views[name], source.cpu()) for name, source in items)
        writer.close()
    return CopyRates(limit, quiet, busy, spent / size * 1e9, right)


def _copy(items: list[tuple[str, Tensor]], views: dict[str, Tensor]) -> None:
    """As the saver does, whatever the tensors lie on."""
    device = accelerator_of(tensor for _, tensor in items)
    if device is None:
        for name, tensor in items:
            staging.copy_tensor(views[name], tensor)
        return
    before = torch.cuda.current_stream()
    try:
        device.follow(device.final())
        flight = DeviceCopy(device)
        flight.begin(items, views)
        flight.land()
    finally:
        torch.cuda.set_stream(before)


def best(setting: Setting, work: Callable[[], object], times: int = 5) -> float:
    """The shortest seconds of several turns: what else runs on a machine only ever adds."""
    return min(_seconds(setting, work) for _ in range(times))


def _seconds(setting: Setting, work: Callable[[], object]) -> float:
    if setting.gpu:
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if setting.gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _gate(setting: Setting, dtype: torch.dtype) -> Figure:
    size = (32 * MIB) if setting.small else GIB
    source = torch.zeros(size // dtype.itemsize, dtype=dtype, device=setting.device)
    target = torch.empty_like(source, device="cpu", pin_memory=setting.gpu)
    copy = best(setting, lambda: target.copy_(source, non_blocking=True))
    if setting.gpu:
        look = best(setting, lambda: torch.stack(torch.aminmax(source)).isfinite(), 3)
    else:
        look = best(setting, lambda: staging.non_finite([("x", target)]), 3)
    rates = f"looking {rate_text(size / look)}, copying {rate_text(size / copy)}"
    return Figure(
        f"looking, as a share of copying {dtype}", against=rates, ratio=look / copy, bound=1.0, unit="%"
    )


def _sources(setting: Setting) -> list[Tensor]:
    size, parts = (64 * MIB, 16) if setting.small else (4 * GIB, 256)
    part = size // parts
    return [torch.randint(0, 255, (part,), dtype=torch.uint8, device=setting.device) for _ in range(parts)]


def _named(tensors: list[Tensor]) -> list[tuple[str, Tensor]]:
    return [(f"t{number}", tensor) for number, tensor in enumerate(tensors)]


@contextmanager
def _written(setting: Setting, sources: list[Tensor]) -> Iterator[tuple[str, dict[str, Tensor], SlotWriter]]:
    """A readable slot for tensors of bytes: its path, where each is to go, and its writer."""
    layout = SlotLayout.plan(
        [(name, "U8", tuple(source.shape), source.nbytes) for name, source in _named(sources)]
    )
    with slot_of(setting, layout.size) as path:
        writer = SlotWriter(path)
        views = writer.begin(layout)
        writer.finish(layout, 0, Version(1, 1), 1, {})
        yield path, views, writer


@contextmanager
def _busy_interpreter(setting: Setting) -> Iterator[None]:
    stop = threading.Event()

    def work() -> None:
        x = torch.zeros(1, device=setting.device)
        while not stop.is_set():
            sum(number * number for number in range(300))
            x.add_(1)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _beside(work: Callable[[], object], often: Callable[[], object]) -> list[float]:
    """Seconds of each call of `often` while `work` goes on in another thread. Raises what `work` raises."""
    often()
    failed: list[Exception] = []

    def guarded() -> None:
        try:
            work()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=guarded)
    found = []
    thread.start()
    while thread.is_alive():
        began = time.perf_counter()
        often()
        found.append(time.perf_counter() - began)
    thread.join()
    if failed:
        raise failed[0]
    return found
