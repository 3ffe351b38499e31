"""A resume proves itself by fingerprints: what is trained again is compared with the life before."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.trainer.lazy_device import LazyDevice
from tests.trainer.small_runs import Run
from tiercheck import Checkpointer
from tiercheck.protocol.report import Exact
from tiercheck.trainer.process import StepSuspected
from tiercheck.trainer.proof.fingerprints import CAPACITY, Journal, StepRecord
from tiercheck.trainer.proof.resume import OTHER_HISTORY, first_difference
from tiercheck.trainer.proof.state_hash import fingerprints, state_of_turn, turns
from tiercheck.trainer.proof.state_hash import first_difference as first_unlike
from tiercheck.trainer.save.saver import Saver
from tiercheck.trainer.state import slot_file
from tiercheck.trainer.tensors import accelerator
from tiercheck.trainer.tensors.samples import Sampler

EVERY, KILLED = 4, 7
Verdicts = list[tuple[int, Exact, int, str]]


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Verdicts:
    found: Verdicts = []
    monkeypatch.setattr(
        Saver, "report", lambda _, each: each.op == "resume" and found.append((*vars(each).values(),)[:4])
    )
    return found


def adam(model: nn.Module, rate: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate)


def killed(run: Run, folder: Path) -> Path:
    """What a SIGKILL after the last step would leave."""
    assert run.checkpointer.wait()
    left = folder.with_name(folder.name + "-left")
    shutil.copytree(folder, left)
    run.checkpointer.close()
    return left


def first_life(folder: Path, steps: int = KILLED) -> Path:
    run = Run(adam, folder, every=EVERY)
    assert run.checkpointer.restore() == 0
    run.train(steps)
    return killed(run, folder)


def second_life(
    left: Path, steps: int = KILLED - EVERY, **options: Callable[..., torch.optim.Optimizer]
) -> Run:
    run = Run(options.get("make", adam), left, seed=99, every=EVERY)
    assert run.checkpointer.restore() == EVERY
    return run


def test_steps_that_are_trained_again_prove_the_resume(
    tmp_path: Path, verdicts: Verdicts, capfd: pytest.CaptureFixture[str]
) -> None:
    second_life(first_life(tmp_path / "a")).train(5)
    assert verdicts == [(EVERY, Exact.PROVEN, 3, "")]
    said = capfd.readouterr().err
    assert f"tiercheck: starts at step 0: no version in {tmp_path / 'a'}\n" in said
    assert f"tiercheck: continues after step 4 from {tmp_path / 'a-left'}\n" in said
    assert "tiercheck: resumed at step 4 from" in said
    assert "; 3 steps trained again, bitwise equal\n" in said


def test_script_that_makes_no_step_although_there_were_more_is_told_and_ends_no_training(
    tmp_path: Path, verdicts: Verdicts, capfd: pytest.CaptureFixture[str]
) -> None:
    left = first_life(tmp_path / "a")
    second_life(left).checkpointer.close()
    why = "the script made no step, and the life before made step 5"
    assert verdicts == [(EVERY, Exact.NOT_COMPARABLE, 0, why)]
    second_life(left).train(3)
    assert "the training had ended there" not in capfd.readouterr().err
    assert verdicts[1:] == [(EVERY, Exact.PROVEN, 3, "")]


def draw(run: Run) -> None:
    torch.rand(1)


def draw_elsewhere(run: Run) -> None:
    random.random()
    numpy.random.rand()


def skip_a_batch(run: Run) -> None:
    run.data["position"] += 1


def change_the_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] *= 1.5


def write_a_buffer(run: Run) -> None:
    run.model.norm.running_mean += 1.0
    run.model.norm.eps *= 2


@pytest.mark.parametrize(
    ("spoil", "first"),
    [
        (draw, "torch's random generators"),
        (draw_elsewhere, "the generators of Python or numpy"),
        (skip_a_batch, "the data position"),
        (change_the_rate, "hyper-parameters"),
        (write_a_buffer, "the loss"),
    ],
)
def test_first_step_that_differs_is_told_with_its_losses_and_what_differs_first(
    spoil: Callable[[Run], None],
    first: str,
    tmp_path: Path,
    verdicts: Verdicts,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = second_life(first_life(tmp_path / "a"))
    spoil(run)
    run.train(3)
    ((step, exact, _, message),) = verdicts
    assert (step, exact) == (EVERY, Exact.DIFFERS)
    assert f"what differs first: {first}" in message
    assert "step 5 differs" in message
    (warned,) = [each for each in caplog.messages if "resumed" in each]
    assert message in warned
    assert "docs/use/resume-proof.md" in warned


def test_other_rounding_of_an_update_is_found_though_no_loss_was_given(
    tmp_path: Path, verdicts: Verdicts
) -> None:
    left = first_life(tmp_path / "a")
    run = second_life(left)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(1 + 2**-22)  # the last bits
    run.update()
    run.checkpointer.step()
    assert [verdict[1] for verdict in verdicts] == [Exact.DIFFERS]


def test_script_that_differs_in_the_same_way_at_each_resume_is_warned_of_once(
    tmp_path: Path, verdicts: Verdicts, caplog: pytest.LogCaptureFixture
) -> None:
    run = second_life(first_life(tmp_path / "a"))
    draw(run)
    run.train(3)
    run = second_life(killed(run, tmp_path / "a-left"))
    draw(run)
    draw(run)
    run.train(2)
    assert [verdict[1] for verdict in verdicts] == [Exact.DIFFERS, Exact.NOT_COMPARABLE]
    assert len([each for each in caplog.messages if "resumed" in each]) == 1


def test_nothing_is_proven_where_no_step_is_trained_again(tmp_path: Path, verdicts: Verdicts) -> None:
    second_life(first_life(tmp_path / "a", EVERY)).train(3)
    assert verdicts == [(EVERY, Exact.NOT_COMPARABLE, 0, "no step is trained again")]


def test_journal_of_another_history_is_not_compared(tmp_path: Path, verdicts: Verdicts) -> None:
    left, other = first_life(tmp_path / "a"), Run(adam, tmp_path / "b", seed=5, every=EVERY)
    other.checkpointer.restore()
    other.train(KILLED)
    shutil.copy(killed(other, tmp_path / "b") / "journal-0", left / "journal-0")
    second_life(left).train(3)
    assert verdicts == [
        (
            EVERY,
            Exact.NOT_COMPARABLE,
            0,
            OTHER_HISTORY,
        )
    ]


def test_journal_that_cannot_be_kept_costs_the_proof_and_nothing_else(
    tmp_path: Path, verdicts: Verdicts, caplog: pytest.LogCaptureFixture
) -> None:
    left = first_life(tmp_path / "a")
    (left / "journal-0").unlink()
    (left / "journal-0").mkdir()
    assert len(second_life(left).train(3)) == 3
    assert verdicts == [(EVERY, Exact.NOT_COMPARABLE, 0, "the journal cannot be read")]
    assert any("no resume can be proven" in each for each in caplog.messages)


numbers = st.integers(0, 2**32 - 1)
records = st.builds(
    StepRecord,
    st.integers(1, 3 * CAPACITY),
    st.none() | st.floats(),
    st.none() | numbers,
    *[numbers] * 5,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(records, max_size=8), st.integers(0, 3 * CAPACITY))
def test_journal_gives_the_newest_record_of_a_step_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, written: list[StepRecord], asked: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "journal-0"
    journal = Journal(path, 7, 2)
    newest: dict[int, StepRecord] = {}
    for record in written:
        journal.write(record)
        newest[record.step % CAPACITY] = record
    again = Journal(path, 7, 2)
    for step in (asked, *[record.step for record in written]):
        found, wanted = again.read(step), newest.get(step % CAPACITY)
        if wanted is None or wanted.step != step:
            assert found is None
        else:
            assert found is not None
            assert found[2:] == wanted[2:]
            assert first_difference(found, wanted) == 0
    assert Journal(path, 7, 3).other == "it was trained by 2 ranks, here are 3"
    assert all(Journal(path, 8, 3).read(record.step) is None for record in written)


@given(records, records)
def test_a_difference_is_symmetric_and_no_record_differs_from_itself(
    one: StepRecord, two: StepRecord
) -> None:
    assert bool(first_difference(one, two)) == bool(first_difference(two, one))
    assert first_difference(one, one) == 0


def test_checkpointer_without_a_step_leaves_no_trace_in_the_journal(tmp_path: Path) -> None:
    left = first_life(tmp_path / "a")
    model = nn.Linear(2, 2)
    Checkpointer(model, adam(model), folder=left, run="another").close()
    assert Journal(left / "journal-0", 0, 1).read(KILLED) is None


@pytest.mark.parametrize(("ahead", "of_an_epoch"), [(False, 0), (True, 0), (False, 5)])
def test_batch_fetched_ahead_is_told_though_no_step_is_trained_again(
    ahead: bool, of_an_epoch: int, tmp_path: Path, verdicts: Verdicts, caplog: pytest.LogCaptureFixture
) -> None:
    """The life before ended right after its last version, so that no loss is there to compare with."""
    data = torch.randn(100, 8)

    def live(last: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 1), nn.Dropout(0.1))
        optimizer = adam(model)
        with Checkpointer(model, optimizer, folder=tmp_path, every=5) as checkpointer:
            done = checkpointer.restore()
            batch = data[torch.randint(100, (16,))] if ahead else data
            for step in range(done, last):
                if of_an_epoch and step % of_an_epoch == 0:  # earlier epochs began with that order, too
                    torch.randperm(100)
                now, batch = batch, data[torch.randint(100, (16,))]
                loss = model(now if ahead else batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                checkpointer.step(loss)

    live(10)
    live(20)
    told = [verdict for verdict in verdicts if "step 11 drew another number" in verdict[3]]
    assert [verdict[:2] for verdict in told] == [(10, Exact.NOT_COMPARABLE)] * ahead
    assert len([line for line in caplog.messages if "resume-proof.md" in line]) == ahead


@pytest.mark.parametrize("count", [1, 7, 1000, 16_384, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_one_bit_anywhere_changes_it(count: int, dtype: torch.dtype) -> None:
    values = torch.rand(count).gt(0.5) if dtype == torch.bool else torch.randn(count, dtype=dtype)
    before = fingerprints([values])
    assert fingerprints([values.clone()]) == before
    for at in {0, count // 2, count - 1}:
        changed = values.clone()
        changed.view(torch.uint8)[at * values.element_size()] ^= 1
        assert fingerprints([changed]) != before


@given(st.integers(0, 2**31), st.integers(0, 99_999), st.integers(0, 99_999))
def test_neighbouring_roundings_that_cancel_in_a_sum_are_seen(seed: int, up: int, down: int) -> None:
    values = torch.rand(100_000, generator=torch.Generator().manual_seed(seed)) + 1
    changed = values.clone()
    changed.view(torch.int32)[up] += 1
    changed.view(torch.int32)[down] -= 1
    assert (fingerprints([changed]) == fingerprints([values])) == (up == down)


def test_odd_places_and_orders_in_memory_do_not_matter() -> None:
    values = torch.randn(300, 301)
    shifted = torch.empty(300 * 301 + 1)[1:].view(300, 301).copy_(values)
    turned = values.t().contiguous().t()
    assert fingerprints([values]) == fingerprints([shifted]) == fingerprints([turned])


def test_difference_is_named() -> None:
    places = [(0, 0, ""), (0, 1, "exp_avg")]
    tensors = [torch.randn(4), torch.randn(50_000)]
    wanted = fingerprints(tensors)
    assert first_unlike(places, tensors, wanted) == ""
    tensors[1][3] = 0
    assert first_unlike(places, tensors, wanted) == (0, 1, "exp_avg")


def test_all_tensors_have_their_turn() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert turns(40 * 4, 0) == 3
    seen = [{place for place, _ in state_of_turn([optimizer], step)} for step in range(3)]
    assert len(set.union(*seen)) == sum(map(len, seen)) == 40 * 4


def test_small_state_is_checked_whole_and_a_large_one_in_eight_turns() -> None:
    assert turns(16, 10_000) == 1
    assert turns(16, 2 * 2**26) == 2
    assert turns(10_000, 2**40) == 8


MIB = 2**20


@given(
    shape=st.lists(st.integers(1, 70), max_size=3),
    dtype=st.sampled_from(
        [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.complex64]
    ),
)
def test_small_tensor_is_seen_whole(shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    if tensor.nbytes >= 2048:
        return
    sampler = Sampler()
    before = sampler.take([tensor])
    for at in range(tensor.numel()):
        tensor.data.view(-1)[at] = 1
        assert not before.equals(sampler.take([tensor]))
        tensor.data.view(-1)[at] = 0
    assert before.equals(sampler.take([tensor]))


@given(begin=st.integers(0, 39 * MIB), seed=st.integers(0, 9))
def test_any_mebibyte_of_a_large_tensor_is_seen(begin: int, seed: int) -> None:
    tensor = torch.full((40 * MIB,), seed, dtype=torch.uint8)
    sampler = Sampler()
    before = sampler.take([tensor])
    tensor.data[begin : begin + MIB + 128] = seed + 1
    assert before.sums != sampler.take([tensor]).sums


@pytest.mark.parametrize("shape", [(5, 7), (64, 3, 9, 9)])
def test_same_values_give_the_same_sums_however_they_lie_in_memory(shape: tuple[int, ...]) -> None:
    plain = torch.randn(shape)
    turned = plain.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    assert Sampler().take([plain, turned]).sums[0] == Sampler().take([turned]).sums[0]


def test_a_tensor_in_new_memory_is_looked_at_there() -> None:
    tensor, sampler = torch.nn.Parameter(torch.ones(1000)), Sampler()
    before = sampler.take([tensor])
    tensor.data = torch.full((1000,), 2.0)
    assert not before.equals(sampler.take([tensor]))
    tensor.data = torch.ones(1000)
    assert before.equals(sampler.take([tensor]))


def test_nothing_is_seen_of_what_has_no_bytes() -> None:
    nothing: list[Tensor] = [torch.empty(0), torch.empty(3, device="meta"), torch.eye(3).to_sparse()]
    assert Sampler().take(nothing).sums == [0, 0, 0]


def suspect(run: Run, monkeypatch: pytest.MonkeyPatch) -> str:
    """The last step of a life, which is suspected; what the job is told of it."""
    monkeypatch.setattr(run.checkpointer._backend, "is_folder", False)  # as in a cluster
    run.checkpointer.suspect("two runs of it\ndiffer")
    with pytest.raises(StepSuspected) as given_up:
        run.train(1)
    return str(given_up.value)


def spoil_a_bit(run: Run) -> None:
    """In the next update, of a gradient that no sample contains the place of."""

    def flip(*_: object) -> None:
        assert run.model.first.weight.grad is not None
        run.model.first.weight.grad.view(-1).view(torch.int32)[-1] ^= 1 << 20

    run.optimizer.register_step_pre_hook(flip)


@pytest.mark.parametrize("late", [False, True], ids=["in host memory", "on a device"])
@pytest.mark.parametrize(("suspected", "exact"), [(True, Exact.DIFFERS), (False, Exact.PROVEN)])
def test_of_a_suspected_step_every_bit_is_compared_and_not_a_sample(
    late: bool, suspected: bool, exact: Exact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if late:
        device = LazyDevice()
        monkeypatch.setattr(accelerator, "_HOST", {"meta"})
        monkeypatch.setattr(accelerator, "_accelerator", lambda _: device)
        monkeypatch.setattr(slot_file, "page_lock", lambda address, size: ((address,), ""))
        monkeypatch.setattr(slot_file, "release", lambda pieces: None)
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        Saver, "report", lambda _, each: each.op == "resume" and found.append((*vars(each).values(),))
    )
    run = Run(adam, tmp_path / "a", every=EVERY)
    run.checkpointer.restore()
    run.train(KILLED - 1)
    spoil_a_bit(run)
    if suspected:
        assert suspect(run, monkeypatch) == "step 7 is suspected: two runs of it differ"
    else:
        run.train(1)
    second = second_life(killed(run, tmp_path / "a"))
    second.train(3)
    second.checkpointer._resume.end(finished=True)  # what is late has arrived
    ((step, verdict, _, message, named),) = found
    assert (step, verdict, named) == (EVERY, exact, suspected)
    if suspected:
        assert "step 7 was suspected, and differs" in message
        assert "what differs first: what the step wrote" in message
        third = second_life(killed(second, tmp_path / "a-left"))
        third.train(3)
        third.checkpointer._resume.end(finished=True)
        assert found[1][1:] == (Exact.PROVEN, 3, "", False), "it is compared as any other from then on"


def test_suspected_step_that_gives_the_same_again_is_the_scripts_arithmetic(
    tmp_path: Path, verdicts: Verdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = Run(adam, tmp_path / "a", every=EVERY), tmp_path / "a"
    run.checkpointer.restore()
    run.train(KILLED - 1)
    suspect(run, monkeypatch)
    for _ in range(2):
        run = second_life(killed(run, folder))
        folder = folder.with_name(folder.name + "-left")
        run.train(2)
        said = suspect(run, monkeypatch)
        assert said.endswith(
            "made again, it gave the same bits: look at the script's arithmetic, not at the machine"
        )
    assert [exact for _, exact, _, _ in verdicts] == [Exact.PROVEN, Exact.PROVEN]


def test_outside_a_cluster_nobody_can_make_a_suspected_step_again(tmp_path: Path) -> None:
    run = Run(adam, tmp_path / "a", every=EVERY)
    run.checkpointer.restore()
    with pytest.raises(RuntimeError, match="needs a TierCheckJob"):
        run.checkpointer.suspect("a bit differs")
    assert len(run.train(1)) == 1, "and training goes on"
