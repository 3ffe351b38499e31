"""A parity group as the planner sees it: whose artifacts are coded together, and who keeps the blocks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CodeGroup:
    """Workers by index. Block j of the members' artifacts lies at holders[j]; no holder is a member."""

    members: tuple[int, ...]
    """In coding order."""
    holders: tuple[int, ...]

    @property
    def workers(self) -> tuple[int, ...]:
        """All that the group rests on. As many of them as it has holders may be lost at once."""
        return self.members + self.holders


@dataclass(frozen=True)
class OldGroup:
    """Ranks that are no more, whose artifacts were coded together: at which worker each lies now, and where each block. None: nowhere."""

    ranks: tuple[int, ...]
    """In coding order."""
    members: tuple[int | None, ...]
    """Who has the artifact of each rank."""
    holders: tuple[int | None, ...]
    """Who has block j."""
