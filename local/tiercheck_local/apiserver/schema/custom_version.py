"""How the objects of one version of a CRD are made and checked."""

from __future__ import annotations

from dataclasses import dataclass

from tiercheck_local.apiserver.errors import FieldCause, Object
from tiercheck_local.apiserver.schema import structural
from tiercheck_local.apiserver.schema.cel import Rules

_BLOCKING = frozenset(
    {
        "FieldValueRequired",
        "FieldValueNotSupported",
        "FieldValueTooLong",
        "FieldValueTooMany",
        "FieldValueTypeInvalid",
    }
)
_NOT_CHECKED = FieldCause(
    "<nil>",
    "Invalid value: null: some validation rules were not checked because the object was invalid; "
    "correct the existing errors to complete validation",
)


@dataclass(frozen=True, eq=False)
class CustomVersion:
    """What one version of a CRD says about its objects."""

    schema: Object
    rules: Rules
    columns: tuple[Object, ...]
    has_status: bool
    selectable: frozenset[str]

    def accept(self, value: Object) -> tuple[Object, list[str]]:
        """`value` pruned and with defaults, and the paths of the fields that were unknown."""
        pruned, unknown = structural.prune(value, self.schema, root=True)
        body = {k: v for k, v in pruned.items() if k not in ("apiVersion", "kind", "metadata")}
        own = {k: pruned[k] for k in ("apiVersion", "kind", "metadata") if k in pruned}
        return {**own, **structural.fill_defaults(body, self.schema)}, unknown

    def faults(self, value: Object, old: Object | None) -> list[FieldCause]:
        """What is wrong with `value`. Rules run only on a value of the right shape, as they may assume it."""
        body = {k: v for k, v in value.items() if k not in ("apiVersion", "kind", "metadata")}
        found = structural.faults(body, self.schema)
        if any(cause.reason in _BLOCKING for cause in found):
            return [*found, _NOT_CHECKED] if self.rules.any else found
        return found + list(self.rules.faults(value, old))
