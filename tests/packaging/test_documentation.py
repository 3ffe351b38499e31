"""Links resolve, pages stay short, and what they draw and say of rights and places is true."""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GLOSSARY = DOCS / "understand" / "glossary.md"
SHELVES = ("start", "use", "operate", "understand")
MOST_WORDS = 35_020
MOST_TERMS = 40
REPLACED = ("pulse", "laggard", "homeless", "shunned", "overtaken")
"""Words of our own, in whose place the glossary has the field's."""

_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(([^)\s]+)\)|^\[[^]^]+\]:\s*(\S+)$", re.MULTILINE)


def pages() -> list[Path]:
    """Every Markdown page of the repository, those included that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in sorted(set(listed)) if (ROOT / name).is_file()]


PAGES = pages()
USER_PAGES = [
    DOCS / "index.md",
    *(page for shelf in SHELVES for page in sorted((DOCS / shelf).rglob("*.md"))),
]
ALL_DOCS = sorted(DOCS.rglob("*.md"))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return _CODE.sub("", page.read_text())


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    found: Counter[str] = Counter()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found[re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-")] += 1
    return {
        anchor if number == 0 else f"{anchor}-{number}"
        for anchor, times in found.items()
        for number in range(times)
    }


def dead(page: Path, link: str) -> bool:
    """Whether a link of the page leads nowhere; links to other sites are not asked."""
    if re.match(r"[a-z]+:", link):
        return False
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return True
    return bool(anchor) and target.suffix == ".md" and anchor not in anchors(target)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    links = [first or second for first, second in _LINK.findall(_SPAN.sub("", prose(page)))]
    assert [link for link in links if dead(page, link)] == []


@pytest.mark.parametrize("page", ALL_DOCS, ids=lambda page: str(page.relative_to(DOCS)))
def test_lines_are_short(page: Path) -> None:
    """Commands, outputs and the tables of the benchmarks stay as they are typed and printed."""
    generated = "|" if page.parent.name == "benchmarks" else "\0"
    lines = prose(page).splitlines()
    assert [line for line in lines if len(line) > 160 and not line.startswith(generated)] == []


def test_docs_are_few_words() -> None:
    words = {str(page.relative_to(DOCS)): len(page.read_text().split()) for page in ALL_DOCS}
    assert sum(words.values()) <= MOST_WORDS, words


def test_every_user_page_is_on_the_index() -> None:
    linked = {
        (DOCS / link).resolve() for link in re.findall(r"\]\(([^)#]+)", (DOCS / "index.md").read_text())
    }
    assert set(USER_PAGES) - {DOCS / "index.md"} <= linked


DEFINED: list[tuple[str, str]] = re.findall(r"^- \*\*(.+?)\*\*: (.+)$", GLOSSARY.read_text(), re.MULTILINE)
TERMS = dict(DEFINED)


def test_glossary_is_short_and_defines_each_term_once_in_one_sentence() -> None:
    assert len(DEFINED) == len(TERMS)
    assert 20 < len(TERMS) <= MOST_TERMS
    bullets = re.findall(r"^- ", GLOSSARY.read_text(), re.MULTILINE)
    assert len(bullets) == len(TERMS)
    for term, sentence in TERMS.items():
        assert sentence.endswith("."), term
        assert not re.search(r"[.;] ", sentence), term


@functools.cache
def used() -> str:
    """All words of the other pages, of class and file names, and of the API's fields, in lower case."""
    sources = [
        path
        for room in ("tiercheck", "operator", "sidecar", "cli", "local")
        for path in (ROOT / room).rglob("*.py")
    ]
    classes = [
        name for path in sources for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    ]
    names = [*classes, *(path.stem for path in sources), *fields()]
    words = " ".join(re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", name) for name in names)
    others = " ".join(prose(page) for page in sorted(DOCS.rglob("*.md")) if page != GLOSSARY)
    return " ".join(f"{words} {others}".lower().split())


def fields() -> set[str]:
    """The names of all fields of the custom resources."""

    def walk(schema: object) -> set[str]:
        if isinstance(schema, list):
            return set().union(*map(walk, schema))
        if not isinstance(schema, dict):
            return set()
        properties = schema.get("properties")
        names = set(properties) if isinstance(properties, dict) else set()
        return names.union(*map(walk, schema.values()))

    return set().union(
        *(walk(yaml.load(path.read_text(), yaml.CSafeLoader)) for path in (ROOT / "crds").glob("*.yaml"))
    )


@pytest.mark.parametrize("term", TERMS)
def test_term_of_the_glossary_is_used(term: str) -> None:
    assert re.search(rf"\b{re.escape(term.lower())}s?\b", used())


@pytest.mark.parametrize("page", USER_PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_pages_use_the_words_of_the_field(page: Path) -> None:
    text = _SPAN.sub("", prose(page)).lower()
    assert [word for word in REPLACED if re.search(rf"\b{word}s?\b", text)] == []


def test_picture_of_the_tiers_is_what_its_script_draws() -> None:
    drawn = subprocess.run(
        [sys.executable, DOCS / "images" / "tiers.py"], capture_output=True, text=True, check=True
    ).stdout
    assert drawn == (DOCS / "images" / "tiers.svg").read_text()


# python docs/images/journeys.py

FOLDER = ROOT / "docs" / "images"


def test_committed_drawings_are_what_the_script_draws(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("journeys", FOLDER / "journeys.py")
    assert spec is not None
    assert spec.loader is not None
    journeys = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(journeys)
    journeys.main(tmp_path)
    drawn = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert len(drawn) == 4
    assert {file.name: file.read_bytes() for file in FOLDER.glob("journey-*.svg")} == drawn


def granted() -> set[tuple[str, str, str]]:
    """(API group, resource, verb) by the manifest."""
    found = set()
    for document in yaml.safe_load_all((ROOT / "deploy" / "operator.yaml").read_text()):
        if document["kind"] in ("ClusterRole", "Role"):
            for rule in document["rules"]:
                found |= {
                    (g, r, v) for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]
                }
    return found


def told() -> set[tuple[str, str, str]]:
    page = (
        (ROOT / "docs" / "operate" / "security.md")
        .read_text()
        .partition("\n## The operator's rights\n")[2]
        .partition("\n## ")[0]
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("| ")
    ]
    assert rows[0][:3] == ["API", "resources", "verbs"]
    return {
        ("" if api == "core" else api, resource, verb)
        for api, resources, verbs, *_ in rows[2:]
        for resource in re.split(r", *", resources)
        for verb in re.split(r", *", verbs)
    }


def test_table_of_rights_is_what_the_manifest_grants() -> None:
    assert told() == granted()


WALK = (ROOT / "docs/understand/how-it-works.md").read_text().partition("\n## A stranger's walk\n")[2]
ROWS = re.findall(r"^\| (.*\?)? \| (`.+`) \| `(.+)` \|$", WALK, re.MULTILINE)
NAMES = [(name, path) for _, names, path in ROWS for name in re.findall(r"`([\w.]+)`", names)]


def test_ten_questions_are_answered() -> None:
    assert len([question for question, _, _ in ROWS if question]) == 10
    assert len(ROWS) == len(re.findall(r"^\| ", WALK, re.MULTILINE)) - 2  # the table's head


@pytest.mark.parametrize(("name", "path"), NAMES)
def test_name_is_defined_in_its_file(name: str, path: str) -> None:
    text = (ROOT / path).read_text()
    for part in name.split("."):
        assert re.search(rf"^ *(class|def|async def) {part}\b", text, re.MULTILINE), (
            f"{part} is not in {path}"
        )
