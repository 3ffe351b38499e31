"""Promise: what cannot be replayed exactly has snapshots only; stored gradients have the same bits."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from operator import attrgetter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.scripted_sidecar import DEADLINE, ScriptedSidecar
from tests.trainer.deltas.replaying import (
    Build,
    Script,
    by_closure,
    loop,
    mean_square,
    saved,
    started,
    survives,
    train,
    trained,
)
from tiercheck.protocol.directive import DeltaMode
from tiercheck.protocol.version import Kind
from tiercheck.trainer.deltas.encoding import (
    Encoded,
    decode,
    encode,
    look_sparse,
    may_be_sparse,
)
from tiercheck.trainer.deltas.watch import VersionCounters
from tiercheck.trainer.tensors.tensor_parts import have_same_bits


class Lion(Optimizer):
    """Exact, but unknown to us."""

    def __init__(self, params: object, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.sub_(self.direction(parameter.grad, momentum, group["beta"]), alpha=group["lr"])
                momentum.lerp_(parameter.grad, 1 - group["beta"])

    def direction(self, gradient: Tensor, momentum: Tensor, beta: float) -> Tensor:
        return momentum.lerp(gradient, 1 - beta).sign()


class Dithering(Lion):
    """Draws random numbers, as stochastic rounding does."""

    def direction(self, gradient: Tensor, momentum: Tensor, beta: float) -> Tensor:
        return super().direction(gradient, momentum, beta) + torch.rand_like(gradient) * 0.1


class Counting(Lion):
    """Keeps something outside of its state, which no checkpoint holds."""

    def __init__(self, params: object) -> None:
        super().__init__(params)
        self.calls = 0

    def direction(self, gradient: Tensor, momentum: Tensor, beta: float) -> Tensor:
        self.calls += 1
        return super().direction(gradient, momentum, beta) * (1 + 1 / self.calls)


class Restless(torch.optim.SGD):
    """Draws random numbers, and never has a state: that there is none must not hide it."""

    def __init__(self, params: object) -> None:
        super().__init__(params, lr=0.1)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        super().step(closure)


class Closed(Lion):
    """Is given a closure."""


def script(make: type[Optimizer], closure: bool = False) -> Build:
    def build() -> Script:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
        optimizer = make(model.parameters())
        if isinstance(optimizer, torch.optim.LBFGS):
            return by_closure(model, optimizer, mean_square(5, 6))
        step = partial(optimizer.step, lambda: torch.zeros(())) if closure else None
        return loop(model, optimizer, loss_of=mean_square(5, 6), step=step)

    return build


def test_unknown_optimizer_is_believed_once_clones_gave_the_same_bits(delta_sidecar: ScriptedSidecar) -> None:
    survives(delta_sidecar, script(Lion))
    assert not delta_sidecar.asked("no-deltas")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Dithering, "random"),
        (Restless, "random"),
        (Counting, "other bits"),
        (torch.optim.LBFGS, "several times"),
        (Closed, "closure"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_optimizer_that_cannot_be_replayed_is_refused_and_reported_once(
    delta_sidecar: ScriptedSidecar, make: type[Optimizer], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    _, checkpointer = trained(script(make, closure=make is Closed), 6)
    checkpointer.close()
    (said,) = delta_sidecar.asked("no-deltas")
    assert reason in said.message
    assert caplog.text.count("only snapshots are taken") == 1
    assert delta_sidecar.completed(Kind.DELTA) == {}
    assert checkpointer.every == 50  # nothing was decided, and snapshots alone are expensive


class Decayed(torch.optim.SGD):
    """Exact, and calls the step of its base class, which runs the hooks once more."""

    def __init__(self, params: object) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.999)
        super().step(closure)


def test_step_inside_a_step_is_one_update(delta_sidecar: ScriptedSidecar) -> None:
    survives(delta_sidecar, script(Decayed))
    assert not delta_sidecar.asked("no-deltas")


def test_rank_whose_optimizer_is_still_probed_does_not_say_that_it_takes_no_deltas(
    delta_sidecar: ScriptedSidecar,
) -> None:
    """The job would stop asking all ranks for them, and name a cadence without."""
    _, checkpointer = trained(script(Lion), 6, every=1)
    checkpointer.close()
    told = [request.delta_bytes for request in delta_sidecar.asked("reserve")]
    assert told[0] is None
    assert 0 not in told
    assert told[-1]


def test_rank_that_takes_no_deltas_says_so_when_it_reserves(delta_sidecar: ScriptedSidecar) -> None:
    _, checkpointer = trained(script(Dithering), 6, every=1)
    checkpointer.close()
    assert delta_sidecar.asked("reserve")[-1].delta_bytes == 0


def test_probing_does_not_disturb_training(delta_sidecar: ScriptedSidecar) -> None:
    losses = {}
    for mode in (DeltaMode.NONE, DeltaMode.AUTO):
        delta_sidecar.welcome = dataclasses.replace(delta_sidecar.welcome, delta=mode)
        running, checkpointer = started(script(Lion))
        checkpointer.restore()
        losses[mode] = train(running, checkpointer, 6)
        checkpointer.close()
    assert losses[DeltaMode.NONE] == losses[DeltaMode.AUTO]


def test_user_may_vouch_for_an_optimizer(delta_sidecar: ScriptedSidecar) -> None:
    delta_sidecar.welcome = dataclasses.replace(
        delta_sidecar.welcome, delta=DeltaMode.REPLAY, snapshot_every=1
    )
    _, checkpointer = trained(script(Dithering), 3)
    checkpointer.close()
    assert sorted(delta_sidecar.completed(Kind.DELTA)) == [2, 3]
    assert not delta_sidecar.asked("no-deltas")


def test_job_that_wants_none_gets_none(delta_sidecar: ScriptedSidecar) -> None:
    delta_sidecar.welcome = dataclasses.replace(delta_sidecar.welcome, delta=DeltaMode.NONE, snapshot_every=2)
    _, checkpointer = trained(script(torch.optim.SGD), 5)
    checkpointer.close()
    assert delta_sidecar.completed(Kind.DELTA) == {}
    assert sorted(delta_sidecar.completed(Kind.SNAPSHOT)) == [2, 4]
    assert {request.delta_bytes for request in delta_sidecar.asked("reserve")} == {0}
    assert not delta_sidecar.asked("no-deltas")


@pytest.mark.parametrize(
    "where",
    [
        "_deltas._recorder._event",
        "_deltas._recorder.after",
        "_deltas._listed.watch.read",
        "_deltas._delta",
        "_trained.inventories.take",
    ],
)
def test_no_failure_of_ours_ends_an_update(
    delta_sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """As when a device's memory is full."""
    delta_sidecar.welcome = dataclasses.replace(delta_sidecar.welcome, snapshot_every=2)
    running, checkpointer = trained(script(torch.optim.SGD), 3)

    def full(*_: object, **__: object) -> Any:
        raise torch.OutOfMemoryError("no memory for a copy")

    owner, name = where.rsplit(".", 1)
    with monkeypatch.context() as patch:
        patch.setattr(attrgetter(owner)(checkpointer), name, full)
        train(running, checkpointer, 4)
    train(running, checkpointer, 8)
    checkpointer.close()
    told = delta_sidecar.asked("cannot-save" if "inventories" in where else "no-deltas")
    assert "no memory for a copy" in told[0].message
    assert 8 in delta_sidecar.completed(Kind.SNAPSHOT)


@pytest.mark.parametrize("how", ["in place", "data"])
def test_parameters_that_move_outside_the_optimizer_end_deltas(
    delta_sidecar: ScriptedSidecar, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    delta_sidecar.welcome = dataclasses.replace(delta_sidecar.welcome, snapshot_every=2)
    running, checkpointer = started(script(torch.optim.SGD))
    checkpointer.restore()
    for step in range(1, 9):
        running.update()
        if step in (4, 6, 8):
            bias = running.model[0].bias
            with torch.no_grad():  # torch's counters do not see what is written by way of `.data`
                (bias.data if how == "data" else bias).mul_(0.5)
        checkpointer.step()
        checkpointer.wait(DEADLINE)
    checkpointer.close()
    assert sorted(delta_sidecar.completed(Kind.DELTA)) == [3, 5, 7]
    (said,) = delta_sidecar.asked("no-deltas")
    assert "something else than the optimizer" in said.message
    assert "the delta of step 4 is skipped: something else than the optimizer changes" in caplog.text


def of_each_parameter(count: int) -> Build:
    """As where an optimizer updates its parameter during the backward pass."""

    def build() -> Script:
        model = nn.ParameterList(torch.randn(4) for _ in range(count))
        optimizers = [torch.optim.SGD([each], lr=1e-2, momentum=0.9) for each in model]
        return loop(model, *optimizers, loss_of=lambda model: sum(each.square().sum() for each in model))

    return build


def test_optimizers_of_each_parameter_read_every_parameter_a_few_times(
    delta_sidecar: ScriptedSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    known = VersionCounters.read

    def counted(counters: VersionCounters) -> list[int]:
        found = known(counters)
        read.append(len(found))
        return found

    running, checkpointer = trained(of_each_parameter(40), 6, every=3)
    monkeypatch.setattr(VersionCounters, "read", counted)
    train(running, checkpointer, 1, wait=True)
    monkeypatch.undo()
    checkpointer.close()
    assert 7 in delta_sidecar.completed(Kind.DELTA)
    assert 0 < sum(read) < 40 * 2 * 10  # parameters, each with a tensor of state


def test_parameter_of_another_optimizer_that_moves_between_two_updates_ends_deltas(
    delta_sidecar: ScriptedSidecar,
) -> None:
    def build() -> Script:
        script = of_each_parameter(2)()

        def decay(*_: object) -> None:
            script.model[1].data.mul_(0.9)  # type: ignore[index, union-attr, operator]

        script.optimizers[0].register_step_post_hook(decay)
        return script

    saved(build, 8, every=2)
    assert delta_sidecar.completed(Kind.DELTA) == {}
    (said,) = delta_sidecar.asked("no-deltas")
    assert "something else than the optimizer" in said.message


def test_frozen_average_kept_in_the_model_is_seen_too(delta_sidecar: ScriptedSidecar) -> None:
    def build() -> Script:
        model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False)])
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)

        @torch.no_grad()
        def after(step: int) -> None:
            model[1].weight.lerp_(model[0].weight, 0.1)

        return loop(
            model, optimizer, after=after, loss_of=lambda model: model[0](torch.ones(1, 3)).square().sum()
        )

    saved(build, 5, every=1)
    assert delta_sidecar.completed(Kind.DELTA) == {}
    assert len(delta_sidecar.asked("no-deltas")) == 1


def test_what_cannot_be_saved_is_told_when_it_was_due_and_taken_back(delta_sidecar: ScriptedSidecar) -> None:
    running, checkpointer = trained(script(torch.optim.SGD), 2)
    running.model.register_buffer("odd", torch.ones(3).to_sparse())
    train(running, checkpointer, checkpointer.every, wait=True)
    (said,) = delta_sidecar.asked("cannot-save")
    assert "sparse" in said.message
    del running.model.odd
    train(running, checkpointer, checkpointer.every)
    checkpointer.close()
    assert [each.message for each in delta_sidecar.asked("cannot-save")] == [said.message, ""]


CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def back(encoded: Encoded) -> Tensor | None:
    return decode(encoded.parts.get, encoded.about, CPU)


@given(
    rows=st.integers(200, 3000),
    width=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    kept=st.floats(0, 1),
    by_row=st.booleans(),
    minus_zeros=st.integers(0, 5),
    seed=st.integers(0, 2**31),
)
def test_every_form_is_lossless(
    *, rows: int, width: int, dtype: torch.dtype, kept: float, by_row: bool, minus_zeros: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(rows, width, generator=generator).to(dtype)
    gradient *= torch.rand(rows, 1 if by_row else width, generator=generator) < kept
    gradient.abs_()  # the product left signed zeros behind
    for at in torch.randint(0, rows, (minus_zeros,), generator=generator).tolist():
        gradient[at, 0] = -0.0
    encoded = encode(gradient)
    restored = back(encoded)
    assert restored is not None
    assert have_same_bits(restored, gradient)
    assert encoded.nbytes <= gradient.nbytes


def test_few_rows_few_elements_and_nothing_are_small() -> None:
    embedding = torch.zeros(10_000, 64)
    embedding[[7, 4711]] = 1.5
    top_k = torch.zeros(512, 512)
    top_k.view(-1)[torch.arange(0, 512 * 512, 997)] = 2.0
    nothing = torch.zeros(512, 512)
    assert look_sparse([embedding, top_k, nothing, torch.randn(512, 512)]) == [True, True, True, False]
    assert encode(embedding).nbytes == 2 * (64 * 4 + 4)
    assert encode(top_k).nbytes < top_k.nbytes / 400
    assert encode(nothing).nbytes == 0
    for gradient in (embedding, top_k, nothing):
        restored = back(encode(gradient))
        assert restored is not None
        assert have_same_bits(restored, gradient)


def test_absent_gradient_stays_absent() -> None:
    assert decode(lambda suffix: None, None, CPU) is None


def test_order_in_memory_is_kept() -> None:
    for gradient in (
        torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
        torch.randn(300, 70).t(),
        torch.randn(6, 5, 4).permute(2, 0, 1),
    ):
        restored = back(encode(gradient))
        assert restored is not None
        assert restored.stride() == gradient.stride()
        assert have_same_bits(restored, gradient)


def test_sparse_tensor_is_kept_as_it_is() -> None:
    indices = torch.tensor([[3, 1, 3]])
    gradient = torch.sparse_coo_tensor(indices, torch.randn(3, 8), (10, 8))
    for wanted in (gradient, gradient.coalesce()):
        assert not may_be_sparse(wanted)
        restored = back(encode(wanted))
        assert restored is not None
        assert restored.is_coalesced() == wanted.is_coalesced()
        assert have_same_bits(restored._values(), wanted._values())
        assert torch.equal(restored._indices(), wanted._indices())
