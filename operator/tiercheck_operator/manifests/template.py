"""What is wrong with a user's pod template, said before a pod is made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercheck.protocol import names


def template_problem(template: Mapping[str, Any]) -> str:
    """A sentence that says what to change, or the empty string."""
    containers = (template.get("spec") or {}).get("containers") or []
    trainer = next((entry for entry in containers if entry.get("name") == names.TRAINER_CONTAINER), None)
    if trainer is None:
        return (
            f"spec.template has no container named {names.TRAINER_CONTAINER!r}; "
            "give the container that runs the training command this name"
        )
    if not trainer.get("command"):
        return (
            f"container {names.TRAINER_CONTAINER!r} of spec.template has no command; set `command` explicitly, "
            "because the entrypoint of the image cannot be wrapped"
        )
    reserved = {names.SIDECAR_CONTAINER, names.LIBRARY_CONTAINER, names.NODE_MEMORY_CONTAINER}
    for entry in [*containers, *((template.get("spec") or {}).get("initContainers") or [])]:
        if entry.get("name") in reserved:
            return f"container name {entry['name']!r} in spec.template is reserved; choose another"
    return ""
