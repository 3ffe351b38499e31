"""Lists what a person may ask "what if" about: a node, pod, worker, domain, all, or a crash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiercheck_cli.failure import USAGE, CannotDo, program
from tiercheck_cli.layout import JobLayout
from tiercheck_cli.terminal import plural
from tiercheck_operator.planning.topology import short_name


@dataclass(frozen=True)
class LostMemory:
    """`name`: what would be lost, for a sentence. `workers`: whose memory goes with it; none: a crash."""

    name: str
    workers: frozenset[int]


def losses(
    asked: Sequence[str], layout: JobLayout, pods: Mapping[str, int] | None = None
) -> tuple[LostMemory, ...]:
    """What `--if` says, all of it at once; or, for the bare name of a level, each of its domains by itself.
    `pods`: worker by name of the pod. Raises CannotDo.
    """
    if len(asked) == 1 and asked[0] in layout.topology.level_names:
        return _each_domain(asked[0], layout)
    parts = [_loss(entry, layout, pods or {}) for entry in asked]
    return (
        LostMemory(
            " and ".join(part.name for part in parts), frozenset().union(*(part.workers for part in parts))
        ),
    )


def _each_domain(level: str, layout: JobLayout) -> tuple[LostMemory, ...]:
    found: dict[str, set[int]] = {}
    for site in layout.sites:
        domain = layout.topology.domain(site.node, level)
        if domain is not None:
            found.setdefault(domain, set()).add(site.worker)
    if not found:
        raise CannotDo(f"the labels of the nodes do not say which {level} they are in")
    shared = len({short_name(domain) for domain in found}) < len(found)
    return tuple(
        LostMemory(f"{level} {domain if shared else short_name(domain)}", frozenset(found[domain]))
        for domain in sorted(found)
    )


def _loss(asked: str, layout: JobLayout, pods: Mapping[str, int]) -> LostMemory:
    kind, equals, name = asked.partition("=")
    workers = [site.worker for site in layout.sites]
    if not equals:
        if kind == "crash":
            return LostMemory("one training process", frozenset())
        if kind == "all":
            return LostMemory("every pod", frozenset(workers))
        raise CannotDo(_usage(asked, layout), USAGE)
    if kind == "worker":
        if not name.isdigit() or int(name) not in workers:
            raise CannotDo(f"there is no worker {name}: workers are 0 to {len(workers) - 1}", USAGE)
        return LostMemory(f"worker {int(name)}", frozenset({int(name)}))
    if kind == "pod":
        if name not in pods:
            raise CannotDo(
                f'the job has no pod "{name}"; see: {program()} status {layout.name} --wide', USAGE
            )
        return LostMemory(f"pod {name}", frozenset({pods[name]}))
    if kind == "node":
        found = frozenset(site.worker for site in layout.sites if site.node == name)
        if not found:
            raise CannotDo(f'no worker is on a node "{name}"; see: {program()} plan {layout.name}', USAGE)
        return LostMemory(f"node {name}", found)
    if kind in layout.topology.level_names:
        return _domain(kind, name, layout)
    raise CannotDo(_usage(asked, layout), USAGE)


def _domain(level: str, name: str, layout: JobLayout) -> LostMemory:
    """By the whole path or by its last part, if that is only one's."""
    found: dict[str, set[int]] = {}
    for site in layout.sites:
        path = layout.topology.domain(site.node, level)
        if path is not None and name in (path, short_name(path)):
            found.setdefault(path, set()).add(site.worker)
    if len(found) > 1:
        raise CannotDo(
            f"there are several of the name {name}: say which of {', '.join(sorted(found))}", USAGE
        )
    if not found:
        known = sorted(
            {short_name(path) for site in layout.sites if (path := layout.topology.domain(site.node, level))}
        )
        there = (
            f"there are {', '.join(known[:8])}{' ...' if len(known) > 8 else ''}"
            if known
            else "the labels name none"
        )
        raise CannotDo(f'no worker is in a {level} "{name}": {there}', USAGE)
    ((_, workers),) = found.items()
    return LostMemory(f"{level} {name}", frozenset(workers))


def _usage(asked: str, layout: JobLayout) -> str:
    levels = ", ".join(f"{level}=NAME" for level in layout.topology.level_names)
    return f'"{asked}" is nothing that can be lost: say node=NAME, pod=NAME, worker=N, {levels}, all or crash'


def hit(loss: LostMemory, layout: JobLayout) -> str:
    """How much that is: "2 nodes, 2 workers, 16 ranks"."""
    if not loss.workers:
        return "no pod, no memory"
    nodes = {site.node for site in layout.sites if site.worker in loss.workers}
    ranks = len(loss.workers) * layout.spec.procs_per_worker
    parts = [plural(len(nodes), "node"), plural(len(loss.workers), "worker")]
    return ", ".join([*parts, plural(ranks, "rank")] if ranks != len(loss.workers) else parts)
