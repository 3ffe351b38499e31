"""The demo's last line is a promise; these are the ways it could be wrong."""

from __future__ import annotations

from pathlib import Path

from tiercheck_local.demo.result import FaultRecord, add_resumes, with_resumes
from tiercheck_local.demo.training_log import Digest, Step, TrainingLog, compare, parse


def a_run(*losses: tuple[int, int, str]) -> list[Step]:
    return [
        Step(step, attempt, 1.0, loss, float(index)) for index, (step, attempt, loss) in enumerate(losses)
    ]


REFERENCE = a_run((1, 0, "0x1p+0"), (2, 0, "0x1p-1"), (3, 0, "0x1p-2"))
DIGEST = Digest(3, "abc")


def test_equal_only_with_every_loss_and_the_digest() -> None:
    verdict = compare(REFERENCE, DIGEST, REFERENCE, DIGEST)
    assert verdict.equal
    assert "bitwise equal" in verdict.sentence


def test_steps_trained_again_must_agree_too() -> None:
    again = [*REFERENCE[:2], *a_run((2, 1, "0x1.8p-1"), (3, 1, "0x1p-2"))]
    verdict = compare(again, DIGEST, REFERENCE, DIGEST)
    assert not verdict.equal
    assert verdict.first_difference == 2
    assert verdict.trained_again == 1


def test_a_missing_step_is_no_equality() -> None:
    assert (
        "step 2 was never trained"
        in compare([REFERENCE[0], REFERENCE[2]], DIGEST, REFERENCE, DIGEST).sentence
    )


def test_a_missing_or_other_digest_is_no_equality() -> None:
    assert not compare(REFERENCE, None, REFERENCE, DIGEST).equal
    assert not compare(REFERENCE, Digest(3, "abd"), REFERENCE, DIGEST).equal


def test_without_a_reference_there_is_no_equality() -> None:
    assert not compare(REFERENCE, DIGEST, [], None).equal
    assert not compare([], None, [], None).equal


def test_the_log_survives_half_lines_noise_and_new_pods(tmp_path: Path) -> None:
    first = tmp_path / "job-0-0" / "trainer.log"
    first.parent.mkdir()
    line = '{"step": 1, "attempt": 1, "rank": 0, "loss": 1.0, "loss_hex": "0x1p+0", "time": 1.0}\n'
    first.write_text("Traceback: not ours\n" + line[:20])
    log = TrainingLog(tmp_path, "job-0-*/trainer.log")
    assert log.poll() == []
    with first.open("a") as file:
        file.write(line[20:])
    assert [step.step for step in log.poll()] == [1]
    second = tmp_path / "job-0-1" / "trainer.log"
    second.parent.mkdir()
    second.write_text(line.replace('"step": 1', '"step": 2').replace('"time": 1.0', '"time": 2.0'))
    assert [step.step for step in log.poll()] == [2]
    assert log.last is not None
    assert log.last.step == 2


def test_only_our_lines_are_read() -> None:
    assert parse("{broken") is None
    assert parse('{"other": 1}') is None
    assert parse("plain") is None
    assert parse('{"digest": "ab", "steps": 5}') == Digest(5, "ab")


def test_one_resume_that_differs_is_no_equality_and_the_verdict_says_which() -> None:
    verdict = compare(REFERENCE, DIGEST, REFERENCE, DIGEST)
    faults = [
        FaultRecord("node", "a node dies", "n", 1.0, 2.0, 3.0, 4.0, number, 5, 1, {}) for number in (2, 3)
    ]
    proven = {"exact": "Proven", "exactMessage": "1 step"}
    told = with_resumes(faults, {2: proven, 3: {}})
    assert [fault.exact for fault in told] == ["Proven", ""]
    assert add_resumes(verdict, told) == verdict
    told = with_resumes(faults, {2: proven, 3: {"exact": "Differs", "exactMessage": "attempt 3, loss 2.5"}})
    found = add_resumes(verdict, told)
    assert not found.equal
    assert "attempt 3, loss 2.5" in found.sentence
