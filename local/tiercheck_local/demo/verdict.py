"""Decides whether the interrupted run and the uninterrupted one were the same, bit for bit. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercheck_local.demo.training_log import Digest, Step


@dataclass(frozen=True)
class Verdict:
    """`equal` only if every step was trained, every loss ever printed for a step (steps trained again included)
    has the reference's bits, and the final parameters have the same digest."""

    equal: bool
    sentence: str
    first_difference: int | None = None
    """The first step whose loss differs."""
    trained_again: int = 0
    """Steps printed more than once: the price of the failures."""


def compare(
    run: Sequence[Step], run_digest: Digest | None, reference: Sequence[Step], wanted: Digest | None
) -> Verdict:
    """The verdict on `run`. Missing evidence is never equality."""
    expected = {step.step: step.loss_hex for step in reference}
    seen = {step.step for step in run}
    trained_again = len(run) - len(seen)
    if not expected or wanted is None:
        return Verdict(False, "the uninterrupted run did not finish, so there is nothing to compare with")
    missing = sorted(set(expected) - seen)
    if missing:
        return Verdict(False, f"step {missing[0]} was never trained ({len(missing)} of {len(expected)} missing)")
    for step in sorted(run, key=lambda step: step.step):
        if step.loss_hex != expected.get(step.step):
            return Verdict(
                False,
                f"the loss of step {step.step} (attempt {step.attempt}) is {step.loss_hex}, "
                f"the uninterrupted run had {expected.get(step.step)}",
                first_difference=step.step,
                trained_again=trained_again,
            )
    if run_digest is None:
        return Verdict(False, "the run printed no digest of its final parameters", trained_again=trained_again)
    if run_digest != wanted:
        return Verdict(
            False,
            f"all losses agree, but the final parameters have digest {run_digest.value[:16]}, not {wanted.value[:16]}",
            trained_again=trained_again,
        )
    return Verdict(
        True,
        f"all {len(expected)} losses and the digest of the final parameters are bitwise equal to an uninterrupted run",
        trained_again=trained_again,
    )
