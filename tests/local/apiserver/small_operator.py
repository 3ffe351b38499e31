"""Runs twenty lines of kopf, to see that an operator lives on a control plane.

It is a process of test_kopf.
"""

from __future__ import annotations

from typing import Any

import kopf


@kopf.on.startup()
def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    settings.persistence.finalizer = "conformance.test/kopf"


@kopf.on.create("conformance.test", "v1", "widgets")
@kopf.on.update("conformance.test", "v1", "widgets", field="spec")
def observed(meta: kopf.Meta, patch: kopf.Patch, body: kopf.Body, **_: Any) -> None:
    patch.status["observedGeneration"] = meta["generation"]
    kopf.event(body, type="Normal", reason="Observed", message="seen by the operator")


@kopf.on.delete("conformance.test", "v1", "widgets")
def farewell(**_: Any) -> None:
    """Its existence makes kopf hold a finalizer."""
