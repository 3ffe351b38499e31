"""Nodes' clocks differ from ours. What a sidecar dates by its own clock is dated by ours before anybody subtracts the two."""

from __future__ import annotations

import email.utils
from dataclasses import replace

from tiercheck.protocol.report import Report

FORGIVEN = 2.0
"""Seconds: an answer's Date is precise to one, and the answer was under way for a moment."""


class ClockSkew:
    """Of the sidecars of one job, by host."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def heard(self, host: str, date: str | None, now: float) -> float:
        """Seconds by which the host's clock is ahead of ours, by the Date of an answer that has just come.

        The same as before while it is about the same, so that a report does not look new only for that.
        """
        known = self._seconds.get(host, 0.0)
        if date is None:
            return known
        try:
            found = email.utils.parsedate_to_datetime(date).timestamp() + 0.5 - now
        except ValueError:
            return known
        if abs(found) <= FORGIVEN:
            found = 0.0
        if abs(found - known) > FORGIVEN:
            self._seconds[host] = known = found
        return known

    def forget(self, host: str) -> None:
        self._seconds.pop(host, None)


def by_our_clock(report: Report, ahead: float) -> Report:
    """`report` with its times moved by what its sender's clock is ahead."""
    if not ahead:
        return report
    trainer = report.trainer

    def moved(moment: float | None) -> float | None:
        return None if moment is None else moment - ahead

    return replace(
        report,
        trainer=replace(
            trainer,
            started_at=moved(trainer.started_at),
            first_step_at=moved(trainer.first_step_at),
            ended_at=moved(trainer.ended_at),
        ),
        unreachable=tuple(replace(each, since=each.since - ahead) for each in report.unreachable),
        proofs=tuple(replace(each, at=each.at - ahead) for each in report.proofs),
    )
