"""Finds what to do about a reason in the troubleshooting guide, for people and commands alike."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tiercheck.protocol import names

_ITEM = re.compile(r"^- `(\w+)`: .+?(?:\s\*\*Do:\*\*\s(.+?))?(?=\n- |\n\n|\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")
_QUIET = ("Nothing", "As you wish", "Normal", "See ", "Read ")
_PATIENCE = "Nothing for a minute."
_MINUTE = 90.0
_WITH_REMOTE = re.compile(r" *With tiers\.remote, [^.]*\.")
_PLACEHOLDER = re.compile(r"\b(?:NAMESPACE|NAME|POD)\b")


@dataclass(frozen=True)
class GuideEntry:
    """An item of the guide."""

    advice: str

    def calls_for_action(self, seconds: float) -> bool:
        """Whether a person should do something about it, if it has been so for `seconds`."""
        if self.advice.startswith(_PATIENCE):
            return seconds > _MINUTE
        return not self.advice.startswith(_QUIET)

    def advise(self, namespace: str, job: str, message: str, *, remote: bool) -> str:
        """Returns the advice about a job: with its names in place of the guide's, without the call for
        patience, and without a remote tier that it lacks. `message`: the condition's, which may name a pod.
        """
        text = self.advice.removeprefix(_PATIENCE).removeprefix(" Then ").strip()
        if not remote:
            text = _WITH_REMOTE.sub("", text)
        named = {"NAMESPACE": namespace, "NAME": job, "POD": f"-n {namespace} {_pod(job, message)}"}
        return _PLACEHOLDER.sub(lambda word: named[word[0]], text)


def entry(reason: str) -> GuideEntry | None:
    """None for a reason that the guide of this version does not know."""
    return _entries().get(reason)


@functools.cache
def _entries() -> dict[str, GuideEntry]:
    conditions = _text().partition("\n## Events\n")[0]
    found: dict[str, GuideEntry] = {}
    for item in _ITEM.finditer(conditions):
        found.setdefault(item[1], GuideEntry(_plain(item[2] or "Nothing.")))
    return found


def _pod(job: str, message: str) -> str:
    """The pod that `message` is about, for kubectl: by its name, else by the labels of its worker."""
    if pod := re.search(rf"(?<![\w.-]){re.escape(job)}-(?:spare-)?\d+-\d+(?![\w-])", message):
        return pod[0]
    worker = re.search(r"\bworkers? (\d+)", message)
    return f"-l {names.LABEL_JOB}={job}" + (f",{names.LABEL_WORKER}={worker[1]}" if worker else "")


def _plain(text: str) -> str:
    """`text` in one line, without Markdown."""
    return " ".join(_LINK.sub(r"\1", re.sub(r"\*\*([^*]*)\*\*", r"\1", text)).replace("`", "").split())


def _text() -> str:
    packed = resources.files("tiercheck_cli").joinpath("troubleshooting.md")
    if packed.is_file():
        return packed.read_text()
    # In a checkout the guide is where people look for it.
    return (Path(__file__).parents[2] / "docs" / "operate" / "troubleshooting.md").read_text()
