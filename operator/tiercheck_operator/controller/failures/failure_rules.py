"""Finds whose fault a failure is and what follows: the user's rules first, then what is usual.

Without a rule, what training did itself counts against maxRestarts (crash, hang, out of memory, divergence),
and what was done to it does not (eviction, lost pod, node, rack). The facts that rules look at are gathered
when the failure is noticed and kept in the status, because a lost pod is gone by the time a decision is due.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tiercheck_operator.model.causes import Cause
from tiercheck_operator.model.observed import NodeView, Observation
from tiercheck_operator.model.spec import FailureRule, RuleAction
from tiercheck_operator.model.status import Facts, Recovery

_KEPT = 16
"""Reasons and nodes kept in the status."""
_LONGEST = 64
"""Characters of a reason; rules cannot name longer ones."""


@dataclass(frozen=True)
class MatchedRule:
    action: RuleAction
    rule: str = ""
    """Name of the rule that fired; empty: none did."""

    @property
    def counts(self) -> bool:
        """Whether the restart counts against maxRestarts."""
        return self.action is RuleAction.RESTART


def match_rule(obs: Observation, recovery: Recovery) -> MatchedRule:
    """Of the failure behind `recovery`."""
    cause = Cause.parse(recovery.cause)
    if (
        not cause.planned and cause is not Cause.RESTORE_FAILED
    ):  # TierCheck's own trouble is no matter for rules
        rule = first_match(obs.job.spec.rules, cause, recovery.facts, obs.nodes)
        if rule is not None:
            return MatchedRule(rule.action, rule.name)
    return MatchedRule(RuleAction.RESTART if cause.own_fault else RuleAction.RESTART_IGNORING_LIMIT)


def first_match(
    rules: Iterable[FailureRule], cause: Cause, facts: Facts, nodes: Mapping[str, NodeView]
) -> FailureRule | None:
    """The first rule that the failure satisfies."""
    reasons = {cause.value, *facts.reasons}
    found = [nodes[name] for name in facts.nodes if name in nodes]
    for rule in rules:
        if rule.exit_codes is not None and rule.exit_codes.match(facts.exit_code):
            return rule
        if rule.reasons & reasons:
            return rule
        if any(
            node.conditions.get(kind) == status for kind, status in rule.node_conditions for node in found
        ):
            return rule
    return None


def merge_facts(before: Facts, after: Facts) -> Facts:
    """What is known of one failure once more was seen of it."""
    return Facts(
        after.exit_code if after.exit_code is not None else before.exit_code,
        tuple(dict.fromkeys(reason[:_LONGEST] for reason in (*before.reasons, *after.reasons)))[:_KEPT],
        tuple(dict.fromkeys((*before.nodes, *after.nodes)))[:_KEPT],
    )
