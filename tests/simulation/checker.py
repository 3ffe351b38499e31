"""Checks the promises by a history, and knows nothing of how anything was decided.

It imports none of the code under test, and does its own arithmetic: which version lies on the line that the
job came, what can be rebuilt from a snapshot and deltas, what was in whose memory and in the bucket when.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Entry = tuple[float, str, dict[str, Any]]
Step = tuple[int, int]
"""A version: step, attempt."""

BOUND = 900.0
"""Seconds after everything is well in which training must go on."""
FRESH = bytes(8)
_HEALTHY = 2.5
"""Seconds since its last step in which a rank counts as training."""
_HEARD_OF = 2.0
"""Seconds until a loss is known to everybody."""
_TOLD = 15.0
"""Seconds in which a job that lost its protection must say so."""
_WORTH = {"memory": 9, "everything": 119}
"""Steps that may be given up for a restore that takes so many seconds less, at a second a step."""
_LOOKS = 2.0
"""Seconds until a launcher has ended what did not leave its step in time."""
_ENDS_PODS = {"evict", "delete", "vanish", "node", "rack", "cordon", "scale"}


@dataclass(frozen=True)
class Broken:
    """A promise that was not kept."""

    promise: str
    why: str
    at: float

    def __str__(self) -> str:
        return f"{self.at:.1f} s: {self.promise}: {self.why}"


@dataclass
class Checker:
    """Reads entries one after the other. `broken` has what it found."""

    workers: int = 0
    copies: int = 0
    keep: int = 0
    prove: int = 0
    """Steps that may be given up to be compared."""
    broken: list[Broken] = field(default_factory=list)
    now: float = 0.0
    attempt: int = 0
    line: int = 0
    """The attempt before it whose line counts: the last in which training was released."""
    released: set[int] = field(default_factory=set)
    healed: float | None = None
    trained: dict[tuple[int, Step], bytes] = field(default_factory=dict)
    from_: dict[int, Step | None] = field(default_factory=dict)
    """What each attempt came back from."""
    bases: dict[int, Any] = field(default_factory=dict)
    """The snapshot from which all ranks of an attempt are to begin; None: each from its own."""
    memory: dict[str, set[Any]] = field(default_factory=dict)
    """By pod: (tier, rank, kind, version)."""
    counted: dict[str, tuple[int, frozenset[Any]]] = field(default_factory=dict)
    """By pod: the attempt, and the snapshots that its coordinator takes to be there and to stay."""
    homes: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Node and worker of each pod."""
    marks: dict[tuple[str, int, str], dict[str, Step]] = field(default_factory=dict)
    said: tuple[str, int, str] = ("", 0, "")
    """Of which of them the last verdict was."""
    announced: dict[str, Step] = field(default_factory=dict)
    """By tier, in this attempt."""
    objects: dict[str, int] = field(default_factory=dict)
    manifests: dict[str, list[str]] = field(default_factory=dict)
    stepped: dict[int, tuple[float, int]] = field(default_factory=dict)
    """When each rank stepped last, and in which attempt."""
    began: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    crews: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    ended: set[int] = field(default_factory=set)
    """Attempts of which a rank ended by itself, or with its pod."""
    interrupted: dict[int, tuple[str, int]] = field(default_factory=dict)
    """By rank that knows that its attempt is over: its pod, and the newest attempt that it knows of."""
    leaves: dict[str, float] = field(default_factory=dict)
    """By pod whose launcher knows that the attempt of its command is over: until when that has to have left
    its step, or to be ended."""
    faults: list[tuple[float, str]] = field(default_factory=list)
    neighbours: set[str] = field(default_factory=set)
    """Pods of others that look like the job's."""
    lost: list[tuple[float, str, set[Any]]] = field(default_factory=list)
    """When a pod was gone, or a fault took copies from it, and what that had held."""
    flipped: bool = False
    told: tuple[bool | None, str] = (None, "")
    bare: int = 0
    """Workers of which the status says that nobody keeps copies."""
    bare_since: float | None = None
    """Since when some rank that trains has no copy elsewhere."""
    lives: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Steps made since everything is well, by rank."""
    newest: dict[str, Step] = field(default_factory=dict)
    """Marks announced since then."""

    def read(self, history: Iterable[Entry]) -> list[Broken]:
        for at, what, fields in history:
            self.now = at
            for pod in [pod for pod, end in self.leaves.items() if at > end]:
                until = self.leaves.pop(pod)
                late = f"the command of {pod} had until {until:.1f} s to leave its step, and runs"
                self._say("who does not leave is ended", late)
            reader = getattr(self, f"_{what}", None)
            if reader is not None:
                reader(fields)
        return self.broken

    def _say(self, promise: str, why: str) -> None:
        self.broken.append(Broken(promise, why, self.now))

    def _had(self, *names: str) -> bool:
        return any(name in names for _, name in self.faults)

    # The line

    def _owner(self, step: int, attempt: int) -> int:
        """Which attempt made the step on the way to `attempt`; 0: none."""
        while attempt:
            base = self.from_.get(attempt)
            if base is None:
                return attempt if step > 0 and attempt in self.from_ else 0
            if step > base[0]:
                return attempt
            if base[1] >= attempt:
                return 0  # a number was given twice, which is said where that happens
            attempt = base[1]
        return 0

    def _on_line(self, version: Step, attempt: int) -> bool:
        return self._owner(version[0], attempt) == version[1]

    def _rebuildable(self, snapshots: set[Step], deltas: set[Step], attempt: int) -> set[Step]:
        found: set[Step] = set()
        for base in snapshots:
            link = base
            while link not in found and self._on_line(link, attempt):
                found.add(link)
                after = (link[0] + 1, self._owner(link[0] + 1, attempt))
                if after not in deltas:
                    break
                link = after
        return found

    def _held(
        self, pods: Iterable[str], rank: int, tiers: Sequence[str], together: bool, attempt: int
    ) -> set[Step]:
        """What can be rebuilt of the rank: by all these pods together, or by one of them."""
        found: set[Step] = set()
        both: tuple[set[Step], set[Step]] = (set(), set())
        for pod in pods:
            here: tuple[set[Step], set[Step]] = (set(), set())
            for tier, whose, kind, version in self.memory.get(pod, ()):
                if whose == rank and tier.value in tiers:
                    here[kind.value == "delta"].add((version.step, version.attempt))
            if together:
                both = both[0] | here[0], both[1] | here[1]
            else:
                found |= self._rebuildable(*here, attempt)
        return found | self._rebuildable(*both, attempt) if together else found

    def _common(
        self, pods: Iterable[str], tiers: Sequence[str], attempt: int, together: bool = False
    ) -> set[Step]:
        pods = list(pods)
        sets = [self._held(pods, rank, tiers, together, attempt) for rank in range(self.workers)]
        return set.intersection(*sets)

    def _whole(self) -> set[Step]:
        """Snapshots on the line that every rank has in its own memory."""
        held = [artifact for pod in self.memory.values() for artifact in pod]
        sets: list[set[Step]] = [set() for _ in range(self.workers)]
        for tier, rank, kind, version in held:
            if (tier.value, kind.value) == ("local", "snapshot") and rank < self.workers:
                sets[rank].add((version.step, version.attempt))
        return {each for each in set.intersection(*sets) if self._on_line(each, self.attempt)}

    def _stored(self) -> set[Step]:
        return {_version_of(key) for key in self.manifests}

    # What happened

    def _begins(self, f: Mapping[str, Any]) -> None:
        self.workers, self.copies, self.keep = f["workers"], f["copies"], f["keep"]
        self.prove = f["prove"]

    def _pod(self, f: Mapping[str, Any]) -> None:
        self.homes[f["pod"]] = (f["node"], f["worker"])
        self.memory[f["pod"]] = set()

    def _gone(self, f: Mapping[str, Any]) -> None:
        self._forget(f["pod"])
        self.lost.append((self.now, f["pod"], self.memory.pop(f["pod"], set())))
        self.ended |= {attempt for attempt, crew in self.crews.items() if f["pod"] in crew}

    def _inventory(self, f: Mapping[str, Any]) -> None:
        self.memory[f["pod"]] = set(f["held"])

    def _sealed(self, f: Mapping[str, Any]) -> None:
        self.memory.setdefault(f["pod"], set()).add(f["what"])

    def _flipped(self, _: Mapping[str, Any]) -> None:
        self.flipped = True  # it counts as held until somebody reads it: before that nobody can tell

    def _counted(self, f: Mapping[str, Any]) -> None:
        self.counted[f["pod"]] = f["attempt"], frozenset(f["held"])
        lacking = self.counted[f["pod"]][1] - self.memory.get(f["pod"], set())
        if lacking and f["pod"] in self.memory:
            self._say("what counts is there", f"{f['pod']} does not have {_names(lacking)}, which count")

    def _freed(self, f: Mapping[str, Any]) -> None:
        held = self.memory.get(f["pod"], set())
        attempt, counted = self.counted.get(f["pod"], (0, frozenset()))
        early = {
            each
            for each in counted.intersection(f["what"])
            if f["by"] == "reclaim" and attempt == self.attempt and each[0].value == "local"
            if (each[3].step, each[3].attempt) > self.announced.get("local", (0, 0))
            if self._on_line((each[3].step, each[3].attempt), attempt)
        }
        if early:
            self._say(
                "what counts is there", f"{f['pod']} freed {_names(early)}, which count and may be announced"
            )
        watched = [
            (name, self.announced[name], tiers)
            for name, tiers in (("local", ("local",)), ("peer", ("peer",)))
            if f["by"] == "reclaim"
            and not self.flipped
            and name in self.announced
            and not (name == "peer" and self.bare)
        ]
        before = [
            max(self._common(self.memory, tiers, self.attempt), default=(0, 0)) for _, _, tiers in watched
        ]
        held -= set(f["what"])
        if f["by"] == "fault":
            self.lost.append((self.now, f["pod"], set(f["what"])))
        known, self.memory = self.memory, dict(self.memory)
        # Whoever gives something up for what a pod has cannot know yet that it is gone.
        for at, pod, lost in self.lost:
            if self.now - at < _HEARD_OF:
                self.memory[pod] = self.memory.get(pod, set()) | lost
        for (name, mark, tiers), had in zip(watched, before, strict=True):
            left = max(self._common(self.memory, tiers, self.attempt), default=(0, 0))
            if had >= mark > left:
                self._say(
                    "committed is kept",
                    f"{f['pod']} freed {_names(f['what'])}; {name} {mark} was complete, {left} is left",
                )
        self.memory = known

    def _step(self, f: Mapping[str, Any]) -> None:
        rank, version = f["rank"], (f["step"], f["attempt"])
        if rank in self.interrupted:
            _, newer = self.interrupted[rank]
            self._say(
                "an attempt that is over is left",
                f"rank {rank} makes step {version}, and knows of attempt {newer}",
            )
        known = self.trained.get((rank, version))
        if known is not None and known != f["state"]:
            self._say("one history", f"rank {rank} made step {version} twice, with different results")
        self.trained[rank, version] = f["state"]
        self.stepped[rank] = (self.now, f["attempt"])
        if self.healed is not None:
            self.lives[rank].add(f["step"])
        if rank == 0:
            self._look_at_protection()

    # Processes that outlive their attempt

    def _superseded(self, f: Mapping[str, Any]) -> None:
        self.leaves.setdefault(f["pod"], self.now + f["within"] + _LOOKS)

    def _interrupted(self, f: Mapping[str, Any]) -> None:
        _, known = self.interrupted.get(f["rank"], ("", f["attempt"]))
        if f["by"] <= known:
            self._say(
                "an order counts once",
                f"rank {f['rank']}, which knows of attempt {known}, is interrupted by {f['by']}",
            )
        self.interrupted[f["rank"]] = f["pod"], f["by"]

    def _left(self, f: Mapping[str, Any]) -> None:
        self.leaves.pop(f["pod"], None)

    def _joined(self, f: Mapping[str, Any]) -> None:
        self._forget(f["pod"])

    def _forget(self, pod: str) -> None:
        """Its process is of a newer attempt, or ended."""
        self.leaves.pop(pod, None)
        self.interrupted = {rank: each for rank, each in self.interrupted.items() if each[0] != pod}

    def _ended(self, f: Mapping[str, Any]) -> None:
        self._forget(f["pod"])
        if f["code"] is not None:
            self.ended.add(f["attempt"])

    def _fault(self, f: Mapping[str, Any]) -> None:
        self.faults.append((self.now, f["name"]))

    def _attempt(self, f: Mapping[str, Any]) -> None:
        number, version = f["number"], f["version"]
        self.bases[number] = f.get("base")
        before, chosen = self.attempt, None if version is None else (version.step, version.attempt)
        if number <= before:
            self._say("one history", f"attempt {number} follows attempt {before}")
        if before:
            self._look_for_health(before, f"attempt {number} begins")
        self.line = before if before in self.released else self.line
        if chosen is not None:
            if not self._on_line(chosen, self.line):
                self._say(
                    "one history", f"attempt {number} goes back to {chosen}, which the job had left before"
                )
            if any((rank, chosen) not in self.trained for rank in range(self.workers)):
                self._say(
                    "restored was committed",
                    f"attempt {number} goes back to {chosen}, which not every rank reached",
                )
        if before:
            self._look_at_loss(number, chosen, f["heard"])
        if chosen is not None and self.bases[number] is None:
            self._look_for_a_common_snapshot(number, f["heard"])
        self.attempt, self.from_[number] = number, chosen
        self.announced = {}
        self.bare_since = None

    def _released(self, f: Mapping[str, Any]) -> None:
        self.released.add(f["number"])

    def _look_at_loss(self, number: int, chosen: Step | None, heard: Sequence[str]) -> None:
        if self.flipped:
            return  # what is bad is left out once that is known, and so is a version that failed
        step = chosen[0] if chosen else 0
        own = self._common(heard, ("local",), self.line)
        memory = self._common(heard, ("local", "peer"), self.line, together=True)
        for name, best, worth in (("own memory", own, 0), ("memory", memory, _WORTH["memory"])):
            newest = max(best, default=(0, 0))
            if newest[0] - worth - self.prove > step:
                self._say(
                    "no more is lost",
                    f"attempt {number} goes back to {chosen}; {newest} can be had from {name}",
                )

    def _look_for_a_common_snapshot(self, number: int, heard: Sequence[str]) -> None:
        """Replicas can begin from no other; where chains to the newest version begin from several, there has
        to be one to an older version."""
        if self.flipped:
            return
        held = [artifact for pod in heard for artifact in self.memory.get(pod, ())]
        of_each = [
            {(v.step, v.attempt) for _, whose, kind, v in held if whose == rank and kind.value == "snapshot"}
            for rank in range(self.workers)
        ]
        if not any(self._on_line(each, self.line) for each in set.intersection(*of_each) | self._stored()):
            self._say("one snapshot", f"attempt {number} begins from several; none is common to all")

    def _look_for_health(self, attempt: int, what: str) -> None:
        """Whether what trains well is stopped."""
        if attempt in self.ended or self._had(*_ENDS_PODS):
            return
        ranks = range(self.workers)
        if all(rank in self.stepped for rank in ranks) and all(
            self.now - self.stepped[rank][0] <= _HEALTHY and self.stepped[rank][1] == attempt
            for rank in ranks
        ):
            self._say(
                "the healthy are left alone", f"{what} although all ranks of attempt {attempt} make steps"
            )

    def _neighbour(self, f: Mapping[str, Any]) -> None:
        self.neighbours.add(f["pod"])

    def _deletes(self, f: Mapping[str, Any]) -> None:
        if f["pod"] in self.neighbours:
            self._say("what is others' is left alone", f"{f['pod']} is deleted ({f['why']})")
        if self.homes.get(f["pod"], ("", 0))[1] >= self.workers:
            self._say("what is others' is left alone", f"{f['pod']}, beyond the job's size, is deleted")
        if f["pod"] in self.crews.get(self.attempt, ()):
            self._look_for_health(self.attempt, f"{f['pod']} is deleted ({f['why']})")

    def _started(self, f: Mapping[str, Any]) -> None:
        rank, attempt, version = f["rank"], f["attempt"], f["version"]
        loaded = None if version is None else (version.step, version.attempt)
        self.began[attempt].add(rank)
        self.released.add(attempt)
        self.crews[attempt].add(f["pod"])
        if loaded != self.from_.get(attempt):
            self._say(
                "all or none",
                f"rank {rank} begins attempt {attempt} from {loaded}, not {self.from_.get(attempt)}",
            )
        base = self.bases.get(attempt)
        if base is not None and f["first"] != base.step:
            self._say(
                "one snapshot",
                f"rank {rank} begins attempt {attempt} from step {f['first']}, not from {base}",
            )
        right = FRESH if loaded is None else self.trained.get((rank, loaded))
        if f["state"] != right:
            self._say(
                "never another history",
                f"rank {rank} of attempt {attempt} loaded what it never was in at {loaded}",
            )

    # Watermarks

    def _verdict(self, f: Mapping[str, Any]) -> None:
        if f["attempt"] != self.attempt:
            return  # said by one who has not heard yet
        said = (f["by"], f["attempt"], f["placement"])
        if said != self.said:  # protection begins anew, also where holders are those of before
            self.marks.pop(said, None)
        self.said = said
        before = self.marks.setdefault(said, {})
        for name in ("local", "peer", "snapshot", "remote"):
            mark = f[name]
            known = before.get(name)
            lags = name == "remote" and self._had("store behind")
            if known is not None and not lags and (mark is None or (mark.step, mark.attempt) < known):
                self._say("watermarks never fall", f"{name} of {f['by']} falls from {known} to {mark}")
            if mark is not None:
                version = (mark.step, mark.attempt)
                if version != known:
                    self._look_at_mark(name, version)
                before[name] = version
                self.announced[name] = version
                if self.healed is not None:
                    self.newest[name] = version

    def _look_at_mark(self, name: str, version: Step) -> None:
        """Whether what is said to be complete is."""
        if name == "remote":
            if version not in self._stored() and not self._had("store behind"):
                self._say(
                    "complete is complete",
                    f"remote {version} is announced; there are {sorted(self._stored())}",
                )
            return
        if self.flipped or (name == "peer" and self.bare):
            return
        tier = "local" if name == "snapshot" else name
        holders = {
            rank: bool(self._held(self.memory, rank, (tier,), False, self.attempt))
            for rank in range(self.workers)
        }
        if not all(holders.values()):
            return  # somebody's pod has just been lost
        all_have = self._whole() if name == "snapshot" else self._common(self.memory, (tier,), self.attempt)
        newest = max(all_have, default=(0, 0))
        if newest < version and not self._lost_lately():
            self._say(
                "complete is complete", f"{name} {version} is announced, {newest} is the newest that all have"
            )

    def _lost_lately(self) -> bool:
        return self.attempt in self.ended or any(
            self.now - at < 10.0 for at, name in self.faults if name not in ("flip", "rot")
        )

    # The bucket

    def _put(self, f: Mapping[str, Any]) -> None:
        key = f["key"]
        self.objects[key] = f["bytes"]
        if not key.startswith("manifests/"):
            return
        named = {each["key"]: each for each in json.loads(f["body"])["artifacts"]}
        if key in self.manifests and sorted(named) != self.manifests[key]:
            self._say("a version is written once", f"{key} was written again with other content")
        lacking = [one for one, each in named.items() if self.objects.get(one) != each["size"]]
        if lacking or len(named) != self.workers:
            self._say(
                "nothing named is gone",
                f"{key} is written, and names {lacking or 'too few'} that are not there",
            )
        if any((rank, _version_of(key)) not in self.trained for rank in range(self.workers)):
            self._say("stored was trained", f"{key} was never reached by every rank")
        self.manifests[key] = sorted(named)

    def _removed(self, f: Mapping[str, Any]) -> None:
        key = f["key"]
        self.objects.pop(key, None)
        if key not in self.manifests:
            named = [manifest for manifest, keys in self.manifests.items() if key in keys]
            if named:
                self._say("nothing named is gone", f"{key} was deleted, and {named[0]} names it")
            return
        del self.manifests[key]
        version, left = _version_of(key), self._stored()
        line = {each for each in left if self._on_line(each, self.attempt)}
        if not self._had("store behind"):
            if len(left) < self.keep:
                self._say(
                    "the newest are kept", f"{key} was deleted, and {len(left)} of {self.keep} are left"
                )
            if self._on_line(version, self.attempt) and version > max(line, default=(0, 0)):
                self._say(
                    "the newest are kept", f"{key} was deleted, the newest that the job could come back to"
                )

    # What is told

    def _told(self, f: Mapping[str, Any]) -> None:
        self.told, self.bare = (f["protected"], f["reason"]), f["bare"]

    def _look_at_protection(self) -> None:
        """While it trains, every rank is to have a copy on another node, or the job says that it has not."""
        bare = self.copies > 0 and any(not self._covered(rank) for rank in range(self.workers))
        if not bare:
            self.bare_since = None
            return
        self.bare_since = self.now if self.bare_since is None else self.bare_since
        if self.told[0] and self.now - self.bare_since > _TOLD:
            self._say(
                "protected or reported",
                f"for {_TOLD:.0f} s a rank has no copy elsewhere, and Protected is true",
            )
            self.bare_since = self.now

    def _covered(self, rank: int) -> bool:
        own = {
            pod
            for pod, held in self.memory.items()
            if any(t.value == "local" and r == rank for t, r, _, _ in held)
        }
        nodes = {self.homes[pod][0] for pod in own if pod in self.homes}
        others = [pod for pod in self.memory if pod not in own or len(own) > 1]
        away = [pod for pod in others if self.homes.get(pod, ("", 0))[0] not in nodes or len(nodes) > 1]
        return bool(self._held(away, rank, ("peer",), False, self.attempt))

    # In the end

    def _healed(self, f: Mapping[str, Any]) -> None:
        self.healed = self.now

    def _over(self, f: Mapping[str, Any]) -> None:
        assert self.healed is not None
        passed = f"{self.now - self.healed:.0f} s after everything was well"
        common = set.intersection(*(self.lives[rank] for rank in range(self.workers)))
        if not common:
            self._say("it goes on", f"{passed} no step had been made by all ranks")
            return
        # No node is left for copies, or none are wanted.
        bare = self.told[1] in ("NoCopies", "UnprotectedWorkers")
        for name in ("local", *(() if bare else ("peer",)), *(("remote",) if self.keep else ())):
            if self.newest.get(name, (0, 0))[0] < min(common):
                self._say("it is protected again", f"{passed} {name} was at {self.newest.get(name)}")
        if not (self.told[0] or bare):
            self._say("it is protected again", f"{passed} Protected was false: {self.told[1]}")


def _version_of(key: str) -> Step:
    step, _, attempt = key.removeprefix("manifests/").removesuffix(".json").partition("-")
    return int(step), int(attempt)


def _names(what: Iterable[Any]) -> str:
    return ", ".join(
        f"{tier.value} {kind.value} {rank}@{version.step}/{version.attempt}"
        for tier, rank, kind, version in what
    )


def check(history: Sequence[Entry]) -> list[Broken]:
    """Every promise that was not kept; nothing if all were."""
    return Checker().read(history)
