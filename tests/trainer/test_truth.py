"""What comes back is what was there and nothing poisoned, or the script is refused, or its owner told.

The idioms are those of public training scripts. Each is run, killed by leaving it, and resumed by a new life
of the script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.fsdp import FullyShardedDataParallel

from tiercheck import Checkpointer
from tiercheck.trainer.backends.backend import RestoreError
from tiercheck.trainer.restore import restoring as module
from tiercheck.trainer.save import staging
from tiercheck.trainer.save.slot_context import Sanity
from tiercheck.trainer.tensors.tensor_parts import NotCapturable

WIDTH = 512


def build(seed: int = 0, layers: int = 2, width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = WIDTH) -> None:
    optimizer.zero_grad()
    model(torch.randn(2, width)).square().mean().backward()
    optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@contextmanager
def swapped(model: nn.Module, how: str) -> Iterator[None]:
    """Other weights for an evaluation, and the old ones back, as helpers for averaged weights do it."""
    kept = values(model)
    parameters = list(model.parameters())
    if how == "pointers":
        data = [parameter.data for parameter in parameters]
        for parameter in parameters:
            parameter.data = torch.full_like(parameter, 7.0)
        yield
        for parameter, old in zip(parameters, data, strict=True):
            parameter.data = old
        return
    with torch.no_grad():
        for parameter in parameters:
            (parameter.data if how == "data" else parameter).fill_(7.0)
        yield
        for parameter, old in zip(parameters, kept, strict=True):
            (parameter.data if how == "data" else parameter).copy_(old)


@pytest.mark.parametrize("how", ["data", "pointers", "in place"])
def test_weights_swapped_for_an_evaluation_are_never_restored_for_those_of_the_step(
    tmp_path: Path, how: str
) -> None:
    """The slot is large enough for the copy to be under way when the weights are swapped, most often."""
    for life in range(3):
        folder = tmp_path / str(life)
        model = build(layers=6, width=1024)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        truth: dict[int, list[Tensor]] = {}
        with Checkpointer(model, optimizer, folder=folder, every=1, keep=9) as checkpointer:
            checkpointer.restore()
            for step in (1, 2, 3):
                train(model, optimizer, 1024)
                truth[step] = values(model)
                checkpointer.step()
                with swapped(model, how):
                    model(torch.randn(2, 1024))
                assert checkpointer.wait(60)
        again = build(1, layers=6, width=1024)
        with Checkpointer(
            again, torch.optim.AdamW(again.parameters(), lr=1e-3), folder=folder
        ) as checkpointer:
            step = checkpointer.restore()
            assert step in truth, "what is copied at once is always right"
            assert all(map(torch.equal, again.parameters(), truth[step]))


def test_torn_copy_is_counted_and_the_next_one_is_made_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic: the saver's thread reads while the weights are the others."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Checkpointer(model, optimizer, folder=tmp_path, every=1) as checkpointer:
        checkpointer.restore()
        real = staging.copy_tensor

        def late(target: Tensor, source: Tensor) -> None:
            changed = source.data_ptr() == model[0].weight.data_ptr()
            if changed:
                source.data.add_(1)
            real(target, source)
            if changed:
                source.data.sub_(1)

        monkeypatch.setattr(staging, "copy_tensor", late)
        train(model, optimizer)
        model[0].weight.data.round_()  # so that what is added and subtracted leaves it as it was
        checkpointer._deltas.give_up("of no interest")
        checkpointer.step()
        assert checkpointer.wait(30)
        assert (checkpointer.captured, checkpointer.skipped) == (0, 1)
        assert "CopyDiffers" in caplog.text
        monkeypatch.setattr(staging, "copy_tensor", real)
        train(model, optimizer)
        checkpointer.step()
        assert checkpointer.wait(30)
        assert checkpointer.captured == 1


@pytest.mark.parametrize("turned", [False, True], ids=["in order", "transposed"])
def test_one_torn_byte_that_no_sample_sees_is_found_where_every_byte_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turned: bool
) -> None:
    model = build(layers=1)
    if turned:
        model[0].weight = nn.Parameter(model[0].weight.detach().t())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    real = staging.copy_tensor

    def torn(target: Tensor, source: Tensor) -> None:
        real(target, source)
        if target.numel() > WIDTH:
            target.view(-1)[WIDTH * WIDTH // 2 + 3] += 1

    with Checkpointer(model, optimizer, folder=tmp_path, every=1, verify_all=True) as checkpointer:
        checkpointer.restore()
        train(model, optimizer)
        monkeypatch.setattr(staging, "copy_tensor", torn)
        checkpointer.step()
        train(model, optimizer)  # waits until all is compared
        assert checkpointer.wait(30)
        assert (checkpointer.captured, checkpointer.skipped) == (0, 1)


def test_script_that_writes_other_tensors_each_time_is_protected_after_one_copy_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As weights that are swapped for an evaluation are met at another place by each copy under way."""
    model = build(layers=4, width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    real = staging.copy_tensor
    with Checkpointer(model, optimizer, folder=tmp_path, every=1) as checkpointer:
        checkpointer.restore()
        for layer in model:

            def late(target: Tensor, source: Tensor, bias: Tensor = layer.bias) -> None:
                if source.data_ptr() == bias.data_ptr():
                    source.data.add_(1)
                real(target, source)

            monkeypatch.setattr(staging, "copy_tensor", late)
            train(model, optimizer, 32)
            checkpointer.step()
            assert checkpointer.wait(30)
        assert (checkpointer.captured, checkpointer.skipped) == (3, 1)


def copies(model: nn.Module) -> None:
    model._register_state_dict_hook(
        lambda module, state, *_: state.update({k: v.clone() for k, v in state.items()})
    )


def left_out(model: nn.Module) -> None:
    def drop(module: nn.Module, state: dict[str, Tensor], *_: object) -> None:
        del state["0.weight"]

    model._register_state_dict_hook(drop)


@pytest.mark.parametrize("how", [copies, left_out], ids=lambda how: how.__name__)
def test_state_dict_that_is_not_the_state_is_refused_at_once(
    tmp_path: Path, how: Callable[[nn.Module], None]
) -> None:
    model = build()
    how(model)
    with pytest.raises(NotCapturable, match=r"0\.weight"):
        Checkpointer(model, torch.optim.AdamW(model.parameters()), folder=tmp_path)


def test_fsdp1_is_refused_by_name_with_what_to_use_instead(tmp_path: Path) -> None:
    init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        model = nn.Sequential(FullyShardedDataParallel(build(width=8), device_id=torch.device("cpu")))
        with pytest.raises(NotCapturable, match="FSDP2"):
            Checkpointer(model, torch.optim.AdamW(model.parameters()), folder=tmp_path)
    finally:
        destroy_process_group()


class Keeps(nn.Module):
    """Keeps a tensor that it has not registered, and one that its state_dict only computes."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.kept, self.computed = torch.zeros(3), computed

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}kept"] = self.kept + 1 if self.computed else self.kept


def test_tensor_that_a_module_keeps_without_registering_it_comes_back(tmp_path: Path) -> None:
    model = Keeps(computed=False)
    with Checkpointer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path, every=1
    ) as checkpointer:
        checkpointer.restore()
        model.kept.fill_(5.0)
        checkpointer.step()
        assert checkpointer.wait(30)
    again = Keeps(computed=False)
    with Checkpointer(again, torch.optim.SGD(again.parameters(), lr=0.1), folder=tmp_path) as checkpointer:
        assert checkpointer.restore() == 1
    assert again.kept.tolist() == [5.0] * 3


def test_tensor_that_a_state_dict_computes_is_refused(tmp_path: Path) -> None:
    model = Keeps(computed=True)
    with pytest.raises(NotCapturable, match="kept"):
        Checkpointer(model, torch.optim.SGD(model.parameters(), lr=0.1), folder=tmp_path)


def test_frozen_parameter_may_be_left_out_of_the_state_dict(tmp_path: Path) -> None:
    model = build()
    model[0].weight.requires_grad_(False)
    left_out(model)
    Checkpointer(model, torch.optim.AdamW(model[1].parameters()), folder=tmp_path).close()


def test_script_that_trains_with_an_optimizer_made_anew_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(width=32)
    old = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer(model, old, folder=tmp_path, every=1) as checkpointer:
        checkpointer.restore()
        train(model, old, 32)
        checkpointer.step()
        new = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(3):
            train(model, new, 32)
            checkpointer.step()
        assert checkpointer.wait(30)
        assert checkpointer.captured <= 2
    assert "hand over all optimizers" in caplog.text


@pytest.mark.parametrize("how", ["load_all", "load_resharded"])
def test_load_that_does_not_reach_the_live_state_is_no_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    model = build(width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Checkpointer(model, optimizer, folder=tmp_path, every=1) as checkpointer:
        checkpointer.restore()
        train(model, optimizer, 32)
        checkpointer.step()
        assert checkpointer.wait(30)
    real, again = getattr(module, how), build(1, width=32)

    def spoilt(*arguments: Any, **named: Any) -> Any:
        loaded = real(*arguments, **named)
        again[0].weight.data.add_(1)
        return loaded

    monkeypatch.setattr(module, how, spoilt)
    found = module.find(tmp_path)
    assert found.offer is not None
    if how == "load_resharded":  # as ranks of another mesh read it: by its parts
        found = replace(found, offer=replace(found.offer, path=""))
    other = Checkpointer(again, torch.optim.AdamW(again.parameters(), lr=1e-2), found=found)
    with pytest.raises(RestoreError, match=r"0\.weight is not what it was"):
        other.restore()
    other.close()


@pytest.mark.parametrize(("gate", "captured"), [(True, 0), (False, 1)])
def test_infinite_loss_is_refused_only_with_the_gate(tmp_path: Path, gate: bool, captured: int) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(model, optimizer, every=1, folder=tmp_path, sanity_gate=gate) as checkpointer:
        checkpointer.restore()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        checkpointer.step(loss=float("inf"))
        assert checkpointer.wait(60)
        assert (checkpointer.captured, checkpointer.skipped) == (captured, 1 - captured)


def test_a_good_step_ends_the_row() -> None:
    sanity = Sanity()
    for step in (3, 4, 5):
        sanity.refused(step)
    assert sanity.in_a_row == 3
    sanity.good(6)
    assert sanity.in_a_row == 0


def test_steps_that_nobody_looked_at_do_not_end_it() -> None:
    sanity = Sanity()
    sanity.refused(4)
    sanity.refused(8)  # a state that is not finite does not heal
    assert sanity.in_a_row == 5


def test_a_step_counts_once_and_a_good_gradient_does_not_outweigh_its_loss() -> None:
    sanity = Sanity()
    sanity.refused(3)
    sanity.refused(3)
    sanity.good(3)
    sanity.good(2)
    assert sanity.in_a_row == 1
