"""The rules of the house, on which a person who looks for something may rely."""

import ast
import collections
import functools
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = {
    "tiercheck": ROOT,
    "tiercheck_operator": ROOT / "operator",
    "tiercheck_sidecar": ROOT / "sidecar",
    "tiercheck_cli": ROOT / "cli",
    "tiercheck_local": ROOT / "local",
}
MOST_FILES = 20
SMALL, MOST_SMALL = 60, 40
LONGEST_FIRST_LINE = 100
MOST_FIELDS, MOST_METHODS = 20, 25
TESTS = {"tiercheck": "", **{part: part.removeprefix("tiercheck_") for part in PARTS if "_" in part}}
"""By part of the product, the folder in tests/ whose rooms are named like its own."""
ROOMS_OF_THEIR_OWN = {
    "benchmarks": "programs of benchmarks/",
    "chaos": "strikes on all processes of a job",
    "chart": "charts/",
    "cluster": "whole jobs on the laptop cluster",
    "crd": "crds/",
    "fuzz": "whatever reads what others wrote",
    "hostile": "neighbours of every part that mean harm",
    "images": "containers that were really built",
    "local/cluster": "the laptop cluster, whole",
    "packaging": "what is shipped, and this house",
    "real_cluster": "kubelets, on this machine",
    "redaction": "tiercheck/redaction.py",
    "sidecar/journeys": "what passes through several rooms of a sidecar",
    "simulation": "operator and sidecars in one thread",
}
"""Folders of tests that no room of the product is like: what they are about."""


def product() -> dict[str, Path]:
    """Every module of the product, by its dotted name."""
    found = {}
    for part, base in PARTS.items():
        for path in sorted((base / part).rglob("*.py")):
            dotted = ".".join(path.relative_to(base).with_suffix("").parts)
            found[dotted.removesuffix(".__init__")] = path
    return found


PRODUCT = product()


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Of the whole product. Seconds: only who asks pays for it, not every process that collects tests."""
    return {name: ast.parse(path.read_text()) for name, path in PRODUCT.items()}


def python_files() -> list[str]:
    """All of the repository, those included that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [path for path in listed if (ROOT / path).is_file()]


@functools.cache
def heads_of_files() -> dict[str, tuple[str, str, list[ast.ImportFrom]]]:
    """Of every file of the repository: text, docstring and imports. All trees would take much memory."""
    heads = {}
    for path in python_files():
        text = (ROOT / path).read_text()
        tree = ast.parse(text)
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        heads[path] = text, ast.get_docstring(tree) or "", imports
    return heads


def imports_of(name: str) -> Iterator[str]:
    """Modules of the product that a module imports outside its functions, for types only or not."""

    def executed(imported: str) -> Iterator[str]:
        """The module, and the packages around it that are not around the importing one as well."""
        while imported and not f"{name}.".startswith(f"{imported}."):
            if imported in PRODUCT:
                yield imported
            imported = imported.rpartition(".")[0]

    def visit(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(child, ast.ImportFrom) and child.module:
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield from executed(full if full in PRODUCT else child.module)
            yield from visit(child)

    return visit(trees()[name])


def circles() -> list[list[str]]:
    """Groups of modules that import each other (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        number[name] = lowest[name] = len(number)
        stack.append(name)
        for other in set(imports_of(name)) - {name}:
            if other not in number:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], number[other])
        if lowest[name] == number[name]:
            group = []
            while not group or group[-1] != name:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for name in PRODUCT:
        if name not in number:
            visit(name)
    return found


def test_no_two_classes_share_a_name() -> None:
    places = collections.defaultdict(list)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_large_classes_have_their_reason_in_the_design() -> None:
    large = {
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and (len(set(_fields_of(node))) > MOST_FIELDS or len(list(_methods_of(node))) > MOST_METHODS)
    }
    section = (ROOT / "docs/design/029-the-house.md").read_text().partition("**A class has at most")[2]
    reasons = set(re.findall(r"`(\w+)`", section.partition("\n- ")[0]))
    assert large == reasons


def _fields_of(node: ast.ClassDef) -> Iterator[str]:
    """Those of a dataclass, and those that methods set."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
    for each in ast.walk(node):
        match each:
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                yield name


def _methods_of(node: ast.ClassDef) -> Iterator[ast.stmt]:
    return (each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_modules_import_each_other_in_no_circle() -> None:
    assert circles() == []


@pytest.mark.parametrize("part", PARTS)
def test_folders_hold_what_a_person_can_overlook(part: str) -> None:
    files = collections.Counter(
        path.parent for path in PRODUCT.values() if path.is_relative_to(PARTS[part] / part)
    )
    inits = {path.parent for path in PRODUCT.values() if path.name == "__init__.py"}
    full = {
        str(folder.relative_to(ROOT)): count
        for folder, count in files.items()
        if count - (folder in inits) > MOST_FILES
    }
    assert full == {}


def test_few_modules_are_a_piece_of_an_idea() -> None:
    small = [
        name
        for name, path in PRODUCT.items()
        if path.name != "__init__.py" and len(path.read_text().splitlines()) < SMALL
    ]
    assert len(small) <= MOST_SMALL, small


def names_in(tree: ast.AST) -> set[str]:
    """What a module defines, assigns or imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_what_benchmarks_and_tests_import_of_the_product_is_there() -> None:
    known = {name: names_in(tree) for name, tree in trees().items()}
    missing = [
        f"{path}: {node.module}.{alias.name}"
        for path, (_, _, imports) in heads_of_files().items()
        for node in imports
        if node.module in known
        for alias in node.names
        if alias.name not in known[node.module] and f"{node.module}.{alias.name}" not in known
    ]
    assert missing == []


def test_the_first_line_of_a_module_is_a_whole_sentence() -> None:
    bad = {}
    for path, (text, words, _) in heads_of_files().items():
        first = words.partition("\n")[0]
        if text.strip() and (not first.endswith(".") or len(first) > LONGEST_FIRST_LINE):
            bad[path] = first
    assert bad == {}


FRAGMENTS = {
    "of", "what", "whether", "as", "by", "in", "for", "to", "with", "from", "on", "at", "how", "when",
    "where", "which", "who", "that", "until", "if", "so", "than", "but", "and", "or", "without",
    "since", "while", "after", "before", "per", "because", "into", "about", "between", "under", "over",
    "against", "once", "those", "these",
}  # fmt: skip
"""First words of a docstring that is no sentence."""
PEOPLE = re.compile(
    r"\b(he|him|his|she|who|whom|whose|whoever|nobody|somebody|tells|told|hears|owes)\b", re.I
)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yields the place and the text of every docstring of the product, fields and constants included."""
    for name, tree in trees().items():
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            for each in body if isinstance(body, list) else ():
                match each:
                    case ast.Expr(ast.Constant(str() as text)):
                        yield f"{name}:{each.lineno}", text


def test_docstrings_begin_like_sentences() -> None:
    first = {place: re.findall(r"\w+", text)[:1] for place, text in docstrings()}
    assert [place for place, words in first.items() if words and words[0].lower() in FRAGMENTS] == []


def test_docstrings_and_comments_are_about_processes_not_about_people() -> None:
    texts = [*docstrings(), *comments()]
    found = [(place, *PEOPLE.findall(text)) for place, text in texts if PEOPLE.search(text)]
    assert len(found) <= 10, found


def comments() -> Iterator[tuple[str, str]]:
    """Yields the place and the text of every comment of the product."""
    for name, path in PRODUCT.items():
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type == tokenize.COMMENT:
                    yield f"{name}:{token.start[0]}", token.string


def rooms_of_tests() -> dict[str, int]:
    """Folders with tests, and how many modules each holds."""
    base = ROOT / "tests"
    found = {path.parent for path in base.rglob("test_*.py")}
    return {folder.relative_to(base).as_posix(): len([*folder.glob("*.py")]) for folder in found}


def test_tests_are_in_rooms_named_like_those_that_they_test() -> None:
    rooms = {path.parent.relative_to(PARTS[name.partition(".")[0]]) for name, path in PRODUCT.items()}
    named = {str(Path(TESTS[room.parts[0]], *room.parts[1:])) for room in rooms}
    assert set(rooms_of_tests()) - named == set(ROOMS_OF_THEIR_OWN)


def test_folders_of_tests_hold_what_a_person_can_overlook() -> None:
    full = {room: count for room, count in rooms_of_tests().items() if count > MOST_FILES}
    assert full.keys() <= ROOMS_OF_THEIR_OWN.keys()
