"""Promise: what lies on a device comes back bit by bit; saving and page-locking disturb nothing.

With a runtime that stands in for CUDA's.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tests.trainer.deltas.replaying import (
    EQUAL,
    TOLD,
    Script,
    loop,
    mean_square,
    outcome,
    started,
    survives,
    train,
    trained,
)
from tests.trainer.lazy_device import LazyDevice
from tiercheck.protocol.version import Kind
from tiercheck.trainer.deltas import watch
from tiercheck.trainer.deltas.unseen import PATIENCE
from tiercheck.trainer.save import staging
from tiercheck.trainer.state import slot_file
from tiercheck.trainer.state.slot_file import SlotWriter
from tiercheck.trainer.tensors import accelerator, buffers
from tiercheck.trainer.tensors.accelerator import accelerator_of
from tiercheck.trainer.tensors.tensor_parts import NotCapturable, have_same_bits

WIDTH = 160
"""A weight of 100 KiB, which travels alone, beside biases that are packed."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> LazyDevice:
    found = LazyDevice()
    monkeypatch.setattr(accelerator, "_HOST", {"meta"})
    monkeypatch.setattr(accelerator, "_accelerator", lambda _: found)
    monkeypatch.setattr(slot_file, "page_lock", lambda address, size: ((address,), ""))
    monkeypatch.setattr(slot_file, "release", lambda pieces: None)
    return found


def build() -> Script:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return loop(model, optimizer, loss_of=mean_square(8, WIDTH))


def test_snapshots_and_deltas_come_back_exactly(delta_sidecar: ScriptedSidecar, device: LazyDevice) -> None:
    survives(delta_sidecar, build)
    assert device.done > 0


def test_training_waits_for_no_copy_and_its_updates_come_after_them(
    delta_sidecar: ScriptedSidecar, device: LazyDevice
) -> None:
    script, checkpointer = started(build)
    with checkpointer:
        checkpointer.restore()
        device.waits.clear()
        train(script, checkpointer, 11, wait=True)
        device.running.clear()
        train(script, checkpointer, 1)
        script.update()  # both artifacts of the step before are still to be copied
        assert device.done == device.given > 0
        device.running.set()
        assert set(device.waits) <= {"tiercheck-saver"}
        assert device.holds > 0
        assert checkpointer.wait(DEADLINE)


def test_every_update_waits_for_a_copy_that_is_still_on_its_way_because_each_may_be_in_a_stream_of_its_own(
    delta_sidecar: ScriptedSidecar, device: LazyDevice
) -> None:
    script, checkpointer = trained(build, 11)
    with checkpointer:
        assert checkpointer.wait(DEADLINE)
        device.streams = 2
        device.running.clear()
        train(script, checkpointer, 1)
        for _ in range(3):
            before = device.holds
            script.update()
            assert device.holds > before
        device.running.set()


def test_every_snapshot_is_the_state_after_its_step(tmp_path: Path, device: LazyDevice) -> None:
    script, checkpointer = started(build, folder=tmp_path, every=1, keep=99)
    truth: dict[int, dict[str, Tensor]] = {}
    with checkpointer:
        for step in range(1, 9):
            loss = script.update()
            truth[step] = {name: value.clone() for name, value in script.model.state_dict().items()}
            checkpointer.step(loss)
    assert (checkpointer.captured, checkpointer.skipped) == (8, 0)
    assert device.follows == 8, "each was copied after what the training stream had been given before it"
    for step, state in truth.items():
        saved = load_file(tmp_path / "rank-0-of-1" / f"{step:012d}-0.safetensors")
        for name, value in state.items():
            assert have_same_bits(saved[f"model/{name}"], value), (step, name)


def test_no_value_of_a_device_is_asked_for_in_any_hook_or_in_step(delta_sidecar: ScriptedSidecar) -> None:
    """But in the updates that a probe makes again."""
    script, checkpointer = started(build)
    asked: list[str] = []
    with checkpointer:
        checkpointer.restore()
        train(script, checkpointer, 5)
        optimizer = script.optimizers[0]
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            for key, hook in hooks.items():
                hooks[key] = listened_to(hook, asked)
        end = listened_to(checkpointer.step, asked)
        for _ in range(9):
            script.update()
            end()
            assert checkpointer.wait(DEADLINE)
    assert {8, 12} <= set(delta_sidecar.completed(Kind.SNAPSHOT))
    assert not asked


ASKING = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.nonzero,
    torch.ops.aten.equal,
}
"""Operations that wait for a device, because the program goes on with what they found."""


class Listener(TorchDispatchMode):
    def __init__(self, asked: list[str]) -> None:
        super().__init__()
        self._asked = asked

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in ASKING:
            self._asked.append(str(func))
        return func(*args, **(kwargs or {}))


def listened_to(call: Callable[..., Any], asked: list[str]) -> Callable[..., Any]:
    def listened(*arguments: Any, **named: Any) -> Any:
        with Listener(asked):
            return call(*arguments, **named)

    return listened


def test_parameter_changed_behind_the_optimizers_back_is_never_stored(
    tmp_path: Path, device: LazyDevice
) -> None:
    script, checkpointer = started(build, folder=tmp_path, every=1, keep=9)
    with checkpointer:
        script.update()
        device.running.clear()
        checkpointer.step()
        with torch.no_grad():  # what it was in the end, but the device may read it in between
            script.model[0].weight.mul_(0.5).mul_(2)
        script.update()
        device.running.set()
        checkpointer.step()
        assert checkpointer.wait(DEADLINE)
        assert (checkpointer.captured, checkpointer.skipped) == (1, 1)


@pytest.mark.parametrize("where", ["0.weight", "0.bias"], ids=["alone", "packed"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_poisoned_state_never_becomes_a_snapshot(tmp_path: Path, where: str, value: float) -> None:
    script, checkpointer = started(build, folder=tmp_path, every=1)
    with checkpointer:
        script.update()
        with torch.no_grad():
            script.model.get_parameter(where).view(-1)[1] = value
        checkpointer.step()
        assert checkpointer.wait(DEADLINE)
        assert (checkpointer.captured, checkpointer.skipped) == (0, 1)


def test_poisoned_gradient_never_becomes_a_delta(delta_sidecar: ScriptedSidecar) -> None:
    script, checkpointer = trained(build, 5)
    with checkpointer:
        assert checkpointer.wait(DEADLINE)
        hook = script.model[0].weight.register_hook(lambda gradient: gradient.clone().fill_(float("nan")))
        script.update()
        checkpointer.step(1.0)
        hook.remove()
        assert checkpointer.wait(DEADLINE)
        assert 6 not in delta_sidecar.completed(Kind.DELTA)


def test_every_byte_is_compared_where_that_is_wanted(tmp_path: Path, device: LazyDevice) -> None:
    script, checkpointer = started(build, folder=tmp_path, every=1, verify_all=True)

    def torn(target: Tensor) -> None:
        if target.shape == (WIDTH, WIDTH):
            target.view(-1)[WIDTH * WIDTH // 2 + 3] += 1  # where no sample looks
            device.landed = lambda target: None

    device.landed = torn
    with checkpointer:
        for _ in range(2):
            script.update()
            checkpointer.step()
        assert checkpointer.wait(DEADLINE)
        assert (checkpointer.captured, checkpointer.skipped) == (1, 1)


@pytest.mark.parametrize("window", [1, 1000, 4096, 2**20])
def test_restore_brings_every_byte_through_windows_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    width = 8 if window == 1 else WIDTH

    def small() -> Script:
        model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width).bfloat16())
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        return loop(model, optimizer, loss_of=lambda model: mean_square(4, width)(model[0]))

    script, checkpointer = started(small, folder=tmp_path, every=1)
    with checkpointer:
        script.update()
        checkpointer.step()
    monkeypatch.setattr(slot_file, "_WINDOW", window)
    again, checkpointer = started(small, seed=5, folder=tmp_path)
    with checkpointer:
        assert checkpointer.restore() == 1
    for name, value in script.tensors().items():
        assert have_same_bits(again.tensors()[name], value), name


def test_slot_is_never_given_back_while_a_device_may_write_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: LazyDevice
) -> None:
    script, checkpointer = started(build, folder=tmp_path, every=1)
    with checkpointer:
        script.update()
        monkeypatch.setattr(
            staging.DeviceCopy, "_pack", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory"))
        )
        checkpointer.step()
        assert checkpointer.wait(DEADLINE)
        assert (checkpointer.captured, checkpointer.skipped) == (0, 1)
        assert device.done == device.given


def look_at_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the training thread does where all lies on a device."""
    monkeypatch.setattr(watch._Part, "bytes", lambda _: 0)
    monkeypatch.setattr(buffers.Buffers, "_written", lambda *_: set())


def beside(moved: Callable[[nn.Module], Tensor], when: Callable[[int], bool]) -> Callable[[], Script]:
    """A part of the model that no optimizer has, and that follows the rest through `.data`, which no counter
    of torch's tells of."""

    def build() -> Script:
        model = nn.ModuleDict({"online": nn.Linear(WIDTH, WIDTH), "target": nn.Linear(WIDTH, WIDTH)})
        model["target"].register_buffer("codes", torch.zeros(WIDTH, WIDTH))
        optimizer = torch.optim.AdamW(model["online"].parameters(), lr=1e-2)

        def difference(model: Any) -> Tensor:
            batch = torch.randn(4, WIDTH)
            wanted = model["target"](batch) + batch @ model["target"].codes
            return (model["online"](batch) - wanted.detach()).square().mean()

        def after(step: int) -> None:
            if when(step):
                moved(model["target"]).data.add_(model["online"].weight.data, alpha=0.1)

        return loop(model, optimizer, loss_of=difference, after=after)

    return build


@pytest.mark.parametrize(
    "moved", [lambda target: target.weight, lambda target: target.codes], ids=["parameter", "buffer"]
)
@pytest.mark.parametrize(
    "when", [lambda _: True, lambda step: step == 6, lambda step: step == 8], ids=["always", "once", "last"]
)
def test_what_no_optimizer_has_is_not_silently_otherwise_after_deltas(
    delta_sidecar: ScriptedSidecar,
    monkeypatch: pytest.MonkeyPatch,
    moved: Callable[[nn.Module], Tensor],
    when: Callable[[int], bool],
) -> None:
    look_at_no_bytes(monkeypatch)
    assert outcome(delta_sidecar, beside(moved, when)) in ((EQUAL, TOLD) if when(1) else (EQUAL,))


def test_deltas_end_where_they_would_never_tell_all(
    delta_sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_at_no_bytes(monkeypatch)
    script, checkpointer = started(beside(lambda target: target.weight, lambda _: True), every=2)
    with checkpointer:
        checkpointer.restore()
        for _ in range(2 * PATIENCE + 4):
            train(script, checkpointer, 1, wait=True)
        (told,) = delta_sidecar.asked("no-deltas")
        assert (
            "model/target.weight, which no optimizer updates, is changed behind torch's counters"
            in told.message
        )


def test_state_on_several_devices_is_refused() -> None:
    here, there = (cast(Tensor, SimpleNamespace(device=torch.device(f"cuda:{number}"))) for number in (0, 1))
    with pytest.raises(NotCapturable, match="cuda:0, cuda:1"):
        accelerator_of([here, there])


MIB = 2**20


class Runtime:
    def __init__(self, room: int) -> None:
        self.room, self.registered, self.calls = room, dict[int, int](), 0

    def cudaHostRegister(self, begin: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls += 1
        if sum(self.registered.values()) + size > self.room:
            return 2  # cudaErrorMemoryAllocation
        self.registered[begin] = size
        return 0

    def cudaHostUnregister(self, begin: int) -> int:  # noqa: N802
        del self.registered[begin]
        return 0


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    told: list[bool] = []
    monkeypatch.setattr(accelerator, "_clear_error", lambda: told.append(True))
    monkeypatch.setattr(slot_file, "page_lock", accelerator.page_lock)
    monkeypatch.setattr(slot_file, "release", accelerator.release)
    return told


def slot(folder: Path, size: int) -> SlotWriter:
    path = folder / "slot"
    path.write_bytes(b"")
    with path.open("r+b") as file:
        file.truncate(size)
    return SlotWriter(str(path))


@pytest.fixture
def memory_volume() -> Iterator[Path]:
    """Where slots lie. Other file systems are mapped at such addresses anyway."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        pytest.skip("there is no memory volume here")
    with tempfile.TemporaryDirectory(dir=shared, prefix="tiercheck-test-") as folder:
        yield Path(folder)


def test_slots_are_mapped_where_the_huge_pages_of_their_files_fit(
    memory_volume: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere each of them is mapped as hundreds of small pages: to touch a slot, or to register it, takes
    that much longer."""
    monkeypatch.setattr("tiercheck.protocol.artifacts.slot.huge_page", lambda: 2 * MIB)
    sizes = [size * MIB + 4096 for size in (2, 5, 9, 3)]
    writers = []
    for number, size in enumerate(sizes):
        (memory_volume / str(number)).mkdir()
        writers.append(slot(memory_volume / str(number), size))
    addresses = [torch.frombuffer(writer.buffer, dtype=torch.uint8).data_ptr() for writer in writers]
    assert [address % (2 * MIB) for address in addresses] == [0] * 4
    assert [len(writer.buffer) for writer in writers] == sizes


def test_slot_is_registered_in_pieces_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleared: list[bool]
) -> None:
    runtime = Runtime(room=10**12)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    writer = slot(tmp_path, 600 * MIB)
    writer.pin()
    writer.pin()
    assert writer.pinned
    assert sorted(runtime.registered.values()) == [88 * MIB, 256 * MIB, 256 * MIB]
    writer.close()
    assert runtime.registered == {}
    assert not writer.pinned
    assert not cleared


def test_registration_that_fails_is_told_undone_and_leaves_no_error_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleared: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(room=300 * MIB)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    writer = slot(tmp_path, 600 * MIB)
    writer.pin()
    assert not writer.pinned
    assert runtime.registered == {}
    assert cleared
    assert "failed with error 2 after 256 of 600 MiB" in caplog.text
    calls = runtime.calls
    writer.pin()
    assert runtime.calls == calls, "it is not tried at every artifact"
