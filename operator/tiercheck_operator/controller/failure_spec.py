"""What the user says about failures, `spec.failurePolicy` without its numbers of restarts, as decisions use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tiercheck.protocol.directive import HealthCheck


class RuleAction(str, Enum):
    """What a failure leads to."""

    RESTART = "Restart"
    """A restart that counts against maxRestarts."""
    RESTART_IGNORING_LIMIT = "RestartIgnoringLimit"
    """A restart that does not."""
    FAIL = "Fail"
    """The job is given up."""


@dataclass(frozen=True)
class ExitCodes:
    """`values` of exit codes other than 0, or, with `within` false, all but these."""

    values: frozenset[int]
    within: bool = True

    def match(self, code: int | None) -> bool:
        return bool(code) and (code in self.values) is self.within


@dataclass(frozen=True)
class FailureRule:
    """One entry of `failurePolicy.rules`. Exactly one of its three matchers is set, as in a Job's podFailurePolicy."""

    name: str
    action: RuleAction
    exit_codes: ExitCodes | None = None
    reasons: frozenset[str] = frozenset()
    node_conditions: tuple[tuple[str, str], ...] = ()
    """(type, status) pairs, any of which is enough."""


@dataclass(frozen=True)
class HangSpec:
    """`failurePolicy.hang`. The job counts as hung if a rank makes no step for `factor` times as long as a step usually takes,
    and for `least` seconds at least."""

    factor: float = 20.0
    least: float = 1800.0
    first_step: float | None = None
    """Seconds that the first step of an attempt may take; None: an hour if the attempt began from a version (so that its script is
    known to make steps), else any time."""


DEFAULT_RESET_SECONDS = 3600.0
DEFAULT_HANG = HangSpec()
_CHECK_SECONDS = 60.0


def parse_hang(raw: Mapping[str, Any] | None) -> HangSpec | None:
    """None: hangs are not looked for."""
    raw = raw or {}
    if raw.get("mode") == "Off":
        return None
    first = raw.get("firstStepSeconds")
    return HangSpec(
        factor=float(raw.get("stepFactor") or DEFAULT_HANG.factor),
        least=float(raw.get("minSeconds") or DEFAULT_HANG.least),
        first_step=None if first is None else float(first),
    )


def parse_health_check(raw: Mapping[str, Any] | None) -> HealthCheck | None:
    """None: every place is good enough. Raises KeyError, TypeError or ValueError on what the CRD would have refused."""
    if not raw:
        return None
    return HealthCheck(tuple(str(word) for word in raw["command"]), float(raw.get("timeoutSeconds") or _CHECK_SECONDS))


def parse_rules(raw: Any) -> tuple[FailureRule, ...]:
    """Of `failurePolicy.rules`, in the user's order. Raises KeyError, TypeError or ValueError on what the CRD would have refused."""
    return tuple(_rule(entry) for entry in raw or ())


def _rule(raw: Mapping[str, Any]) -> FailureRule:
    codes = raw.get("onExitCodes")
    return FailureRule(
        name=str(raw["name"]),
        action=RuleAction(raw["action"]),
        exit_codes=None
        if codes is None
        else ExitCodes(frozenset(int(value) for value in codes["values"]), codes["operator"] == "In"),
        reasons=frozenset(str(reason) for reason in raw.get("onReasons") or ()),
        node_conditions=tuple(
            (str(entry["type"]), str(entry.get("status") or "True")) for entry in raw.get("onNodeConditions") or ()
        ),
    )
