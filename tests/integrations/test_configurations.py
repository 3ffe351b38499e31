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
}
LIGHTNING = {
    # case: where lives end; 6 batches are an epoch
    "averaging": (4, 10, 13),
    "averaging-with-statistics": (10, 13),
    "averaging-each-step": (10,),
    "finetuning": (4, 7, 10),
    "pruning": (7, 10),
    "accumulation": (9, 16),
    "metrics": (4, 10),
    "loader": (7, 13),  # restored at the end of an epoch, and again at the end of the next
    "plain-loader": (7, 13),
}


EVERY_TIME = ("stream", "own-generator", "best")
"""The others take five minutes of a core: `make test-extended` has all."""


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
    lives: Lives, kind: str, case: str, kills: tuple[int, ...], folder: Path
) -> list[Said]:
    whole = steps(live(lives, kind, case, folder / "whole"))
    parts = []
    for kill in (*kills, None):
        parts.append(live(lives, kind, case, folder / "cut", kill_at=kill))
        part = steps(parts[-1])
        begin = next(index for index, line in enumerate(whole) if line["step"] == part[0]["step"])
        assert part == whole[begin:][: len(part)], f"the life until {kill}"
        assert len(parts) == 1 or part[0]["step"] > 1, "it went on, and did not begin anew"
    assert parts[-1][-1] == whole[-1] or kind != "huggingface", "the end is the same, too"
    return parts


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in EVERY_TIME else pytest.mark.extended, id=case)
        for case in HUGGINGFACE
    ],
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


@pytest.mark.parametrize("case", LIGHTNING)
def test_lightning_callbacks_and_metrics_go_on(case: str, lives: Lives, tmp_path: Path) -> None:
    assert_equal_after_kills(lives, "lightning", case, LIGHTNING[case], tmp_path)


def test_loader_that_cannot_go_on_in_mid_epoch_is_told(lives: Lives, tmp_path: Path) -> None:
    live(lives, "lightning", "plain-loader", tmp_path, kill_at=4)
    assert "only a loader with state_dict" in told(live(lives, "lightning", "plain-loader", tmp_path))
