"""Promise: what a framework's user configured goes on after a kill as it would have, or it is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.test_frameworks import needed
from tests.lives import Lives, Said

pytestmark = pytest.mark.timeout(400)

HERE = Path(__file__).parent
HUGGINGFACE = {
    # case: where lives end; without workers 4 steps are an epoch
    "batch-size-found": (6, 11),
    "stream": (4, 7),  # two steps are a pass
    "epochs-of-stream": (4, 6),
    "persistent-workers": (3, 6, 9),
    "own-generator": (7, 10),
    "by-length": (4, 6),
    "drop-last": (6, 9),
    "best": (5, 11),
    "averaging": (5, 7),
}
LIGHTNING = {
    # case: where lives end; 6 batches are an epoch
    "averaging": (4, 10, 13),
    "averaging-with-statistics": (10, 13),
    "averaging-each-step": (10,),
    "rate-found": (4, 10),
    "finetuning": (4, 7, 10),
    "pruning": (7, 10),
    "accumulation": (9, 16),
    "metrics": (4, 10),
    "plateau-of-steps": (4, 9),
    "loader": (7, 13),  # restored at the end of an epoch, and again at the end of the next
    "plain-loader": (7, 13),
}


BEGIN_AGAIN = ("accumulation", "metrics", "loader", "rate-found", "plateau-of-steps")
"""Those whose processes outlive the loss of another rank."""
EVERY_TIME = ("stream", "own-generator", "best", "averaging")
"""The others take five minutes of a core: `make test-extended` has all."""


def extended(case: str) -> Any:
    return () if case in EVERY_TIME else pytest.mark.extended


def live(lives: Lives, kind: str, *argv: str | Path, kill_at: int | None = None) -> Said:
    script = HERE / f"configured_{kind}.py"
    (said,) = lives.run(needed(kind), [script, *argv], kill_at=kill_at)
    return said


def told(said: Said) -> str:
    return "\n".join(line["told"] for line in said if "told" in line)


def steps(said: Said) -> Said:
    return [line for line in said if "step" in line]


def samples(said: Said) -> list[Any]:
    return [each for line in said if "samples" in line for each in line["samples"]]


def assert_equal_after_kills(
    lives: Lives, kind: str, case: str, kills: tuple[int, ...], folder: Path, *more: str
) -> list[Said]:
    whole = steps(live(lives, kind, case, folder / "whole", *more))
    parts = []
    for kill in (*kills, None):
        parts.append(live(lives, kind, case, folder / "cut", *more, kill_at=kill))
        part = steps(parts[-1])
        begin = next(index for index, line in enumerate(whole) if line["step"] == part[0]["step"])
        assert part == whole[begin:][: len(part)], f"the life until {kill}"
        assert len(parts) == 1 or part[0]["step"] > 1, "it went on, and did not begin anew"
    assert parts[-1][-1] == whole[-1] or kind != "huggingface", "the end is the same, too"
    return parts


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=extended(case), id=case) for case in HUGGINGFACE],
)
def test_hugging_face_trainer_goes_on_in_its_data(case: str, lives: Lives, tmp_path: Path) -> None:
    for part in assert_equal_after_kills(lives, "huggingface", case, HUGGINGFACE[case], tmp_path)[1:]:
        assert not told(part)


@pytest.mark.parametrize(
    ("case", "arguments", "verdict"),
    [
        ("stream", "{}", "Differs"),  # resumed in the middle of its second pass
        # 16 do not fit, 4 do: what 16 would make the last step is behind it
        pytest.param(
            "batch-size-found",
            '{"per_device_train_batch_size": 16}',
            "NotComparable",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_place_that_is_computed_from_the_step_is_found_by_the_proof(
    case: str, arguments: str, verdict: str, lives: Lives, tmp_path: Path
) -> None:
    for how, found in (([], "Proven"), (["forget"], verdict)):
        argv = (case, tmp_path / found, arguments, "3", *how)
        live(lives, "huggingface", *argv, kill_at=5)
        after = live(lives, "huggingface", *argv)
        assert [line["resumed"] for line in after if "resumed" in line] == [found]


def test_changed_batch_size_takes_each_sample_once_and_is_told(lives: Lives, tmp_path: Path) -> None:
    """Six batches of four samples are behind it, then batches of 8, and of another accumulation, follow."""
    live(lives, "huggingface", "plain", tmp_path, kill_at=3)
    changed = {
        "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "learning_rate": 0.5,
        "num_train_epochs": 1,
    }  # fmt: skip
    after = live(lives, "huggingface", "plain", tmp_path, json.dumps(changed))
    whole = samples(live(lives, "huggingface", "plain", tmp_path / "whole", '{"num_train_epochs": 1}'))
    assert samples(after) == whole[24:]
    for change in (
        "per_device_train_batch_size 4 -> 8",
        "gradient_accumulation_steps 3 -> 2",
        "optimizer 0, group 0: lr is 0.5 here, it was 0.01",
    ):
        assert told(after).count(change) == 1
    assert steps(after)[-2]["epoch"] == 1.0


def test_finished_trainer_makes_no_step_again(lives: Lives, tmp_path: Path) -> None:
    arguments = '{"max_steps": 2}'
    first = steps(live(lives, "huggingface", "plain", tmp_path, arguments))
    again = steps(live(lives, "huggingface", "plain", tmp_path, arguments))
    assert again == first[-1:], "also the loss of the whole training"


def test_second_training_of_a_process_is_one_of_its_own(lives: Lives, tmp_path: Path) -> None:
    """Killed in the second, the script makes no step of the first again, and goes on in the second."""
    whole = steps(live(lives, "huggingface", "twice", tmp_path / "whole"))
    assert [line["step"] for line in whole] == [1, 2, 3, 4, 1000, 11, 12, 13, 14, 1000]
    assert steps(live(lives, "huggingface", "twice", tmp_path / "cut", kill_at=13)) == whole[:8]
    assert steps(live(lives, "huggingface", "twice", tmp_path / "cut")) == [whole[4], *whole[7:]]


def test_best_model_without_own_checkpoints_is_refused_at_the_start() -> None:
    from transformers import Trainer, TrainingArguments

    from tiercheck.integrations.huggingface import Resumable

    class MyTrainer(Resumable, Trainer):
        keeps_own_checkpoints = False

        def __init__(self) -> None:
            self.args = TrainingArguments(
                load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch"
            )

    with pytest.raises(ValueError, match="load_best_model_at_end=True needs the Trainer's own checkpoints"):
        MyTrainer().train()


@pytest.mark.parametrize(
    ("kind", "case", "strikes"),
    [
        *(pytest.param("huggingface", each, HUGGINGFACE[each], marks=extended(each)) for each in HUGGINGFACE),
        pytest.param("huggingface", "noisy", (2, 7), marks=pytest.mark.extended),
        ("huggingface", "evaluating", (5, -6, 9)),
        ("lightning", "accumulation", (8, 10)),
        ("lightning", "metrics", (4, 10)),
        ("lightning", "loader", (7, 13)),
        ("lightning", "plateau-of-steps", (4, 9)),
        ("lightning", "evaluating", (3, -4, 5)),
    ],
)
def test_trainer_that_begins_again_in_its_process_goes_on_as_it_would_have(
    kind: str, case: str, strikes: tuple[int, ...], lives: Lives, tmp_path: Path
) -> None:
    """A step that was left in the middle, or in its evaluation, is made again."""
    whole = steps(live(lives, kind, case, tmp_path / "whole"))
    argv = [HERE / f"configured_{kind}.py", case, tmp_path / "struck"]
    (said,) = lives.run(needed(kind), argv, env={"STRIKES": ",".join(map(str, strikes))})
    assert all(line in whole for line in steps(said))
    assert [line["step"] for line in whole] == sorted({line["step"] for line in steps(said)})
    assert [line["struck"] for line in said if "struck" in line] == list(strikes)


@pytest.mark.parametrize("case", LIGHTNING)
def test_lightning_callbacks_and_metrics_go_on(case: str, lives: Lives, tmp_path: Path) -> None:
    begun, *_ = assert_equal_after_kills(lives, "lightning", case, LIGHTNING[case], tmp_path)
    assert any("refused" in line for line in begun) == (case not in BEGIN_AGAIN), "and is told"
    assert ("Searched.on_save_checkpoint" in told(begun)) == (case == "rate-found")


def test_loader_that_cannot_go_on_in_mid_epoch_is_told(lives: Lives, tmp_path: Path) -> None:
    live(lives, "lightning", "plain-loader", tmp_path, kill_at=4)
    assert "only a loader with state_dict" in told(live(lives, "lightning", "plain-loader", tmp_path))


@pytest.mark.parametrize("kind", ["huggingface", "lightning"])
def test_evaluations_and_all_that_follows_from_them_go_on_too(
    kind: str, lives: Lives, tmp_path: Path
) -> None:
    """Killed after the steps that ended with an evaluation in mid-epoch: its metrics move the learning rate
    and stop the training."""
    parts = [steps(part) for part in assert_equal_after_kills(lives, kind, "evaluating", (5, 9), tmp_path)]
    assert [part[0]["step"] for part in parts] == [1, 5, 9]
    made = [line for part in parts for line in part if "rate" in line]
    assert len({line["rate"] for line in made}) > 1, "the learning rate moved"
    assert max(line["step"] for line in made) < 18, "training was stopped early"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "own"), [("huggingface", "trainer/checkpoint-4"), ("lightning", "own.ckpt")]
)
def test_training_that_began_from_a_checkpoint_of_the_frameworks_own_goes_on_from_ours(
    kind: str, own: str, lives: Lives, tmp_path: Path
) -> None:
    """The command that names the old checkpoint stays as it is: it is only where the first life begins."""
    live(lives, kind, "evaluating", tmp_path / "before", kill_at=8)
    old = str(tmp_path / "before" / own)
    if kind == "huggingface":
        old = json.dumps({"resume_from_checkpoint": old, "save_strategy": "no"})
    parts = assert_equal_after_kills(lives, kind, "evaluating", (9, 13), tmp_path, old)
    first, *others = (steps(part)[0]["step"] for part in parts)
    assert first in (5, 7), "it began from the old checkpoint"
    assert others == [9, 13]
