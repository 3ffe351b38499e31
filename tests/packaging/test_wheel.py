"""What is installed: complete, and nothing more than each part needs."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.dockerfile import build_wheel
from tiercheck.about import __version__

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "tiercheck": "tiercheck",
    "tiercheck_operator": "operator/tiercheck_operator",
    "tiercheck_sidecar": "sidecar/tiercheck_sidecar",
    "tiercheck_cli": "cli/tiercheck_cli",
    "tiercheck_local": "local/tiercheck_local",
}


def modules(folder: Path, package: str) -> list[str]:
    """Dotted names of every module of a package; what is only ever run as a script is left out."""
    names = []
    for path in sorted((folder / package).rglob("*.py")):
        dotted = ".".join(path.relative_to(folder).with_suffix("").parts)
        if not dotted.endswith(("__main__", "warm.entry")):
            names.append(dotted.removesuffix(".__init__"))
    return names


def run_isolated(code: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-I", *options, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def is_shipped(path: Path) -> bool:
    """Whether it is no trace of a test that has imported it."""
    return path.is_file() and "__pycache__" not in path.parts


ADDED = {"tiercheck_cli": {"troubleshooting.md"}}
"""From docs: `tiercheck status` gives its advice."""


@pytest.mark.parametrize("package", PACKAGES)
def test_wheel_holds_every_file_of_the_package(unpacked: Path, package: str) -> None:
    source = ROOT / PACKAGES[package]
    wanted = {str(path.relative_to(source)) for path in source.rglob("*") if is_shipped(path)}
    held = {
        str(path.relative_to(unpacked / package))
        for path in (unpacked / package).rglob("*")
        if is_shipped(path)
    }
    assert held == wanted | ADDED.get(package, set())


def test_wheel_brings_the_command_under_both_of_its_names(unpacked: Path) -> None:
    """kubectl takes an executable on the PATH called kubectl-tiercheck for its subcommand tiercheck."""
    (info,) = unpacked.glob("*.dist-info")
    scripts = (info / "entry_points.txt").read_text()
    for name in ("tiercheck", "kubectl-tiercheck"):
        assert f"\n{name} = tiercheck_cli.main:main" in scripts
    assert "\nkubectl_complete-tiercheck = tiercheck_cli.commands:print_completions" in scripts


def test_wheel_carries_the_troubleshooting_guide_as_it_is(unpacked: Path) -> None:
    guide = (ROOT / "docs" / "operate" / "troubleshooting.md").read_text()
    assert (unpacked / "tiercheck_cli" / "troubleshooting.md").read_text() == guide
    code = (
        f"import sys; sys.path[:0] = [{str(unpacked)!r}]; from tiercheck_cli.status.view import guide; "
        "print(guide()['RemoteForbidden'].advice)"
    )
    assert run_isolated(code).startswith("Allow ")


def test_wheel_puts_nothing_else_on_the_import_path(unpacked: Path) -> None:
    """A top-level `operator` would shadow the standard library's."""
    top = {path.name for path in unpacked.iterdir() if not path.name.endswith(".dist-info")}
    assert top == set(PACKAGES)


def test_trainers_wheel_holds_the_library_alone(unpacked: Path, tmp_path: Path) -> None:
    """And asks for nothing, as every training image brings its own torch."""
    with zipfile.ZipFile(build_wheel(ROOT / "packages" / "trainer", tmp_path)) as archive:
        names = set(archive.namelist())
        (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
        metadata = archive.read(f"{info}/METADATA").decode()
    library = {
        str(path.relative_to(unpacked)) for path in (unpacked / "tiercheck").rglob("*") if is_shipped(path)
    }
    assert {name for name in names if not name.startswith(info)} == library
    assert f"{info}/licenses/LICENSE" in names
    assert f"{info}/entry_points.txt" not in names
    assert f"\nVersion: {__version__}\n" in metadata
    assert "Requires-Dist" not in metadata


def test_wheel_carries_its_licence_and_its_extras(unpacked: Path) -> None:
    (info,) = unpacked.glob("*.dist-info")
    assert (info / "licenses" / "LICENSE").is_file()
    metadata = (info / "METADATA").read_text()
    for extra in ("operator", "sidecar", "cli", "local", "demo", "dev"):
        assert f"Provides-Extra: {extra}" in metadata


@pytest.mark.parametrize("package", ["tiercheck_operator", "tiercheck_sidecar"])
def test_every_module_imports_where_torch_is_not_installed(unpacked: Path, package: str) -> None:
    code = f"""
import importlib, sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("torch is not installed here", name="torch")
sys.meta_path.insert(0, NoTorch())
sys.path.insert(0, {str(unpacked)!r})
for name in {modules(unpacked, package)!r}:
    module = importlib.import_module(name)
    assert (module.__file__ or "").startswith({str(unpacked)!r}), module
print("imported")
"""
    assert run_isolated(code) == "imported"


def test_library_copied_by_the_sidecar_imports_with_the_standard_library_alone(
    unpacked: Path, tmp_path: Path
) -> None:
    """As in the init container, and then in a training image that has nothing of ours installed."""
    site = sysconfig.get_path("purelib")
    copied = run_isolated(
        f"import sys; sys.path[:0] = [{str(unpacked)!r}]; sys.path.append({site!r}); "
        f"from tiercheck_sidecar.install_library import main; main([{str(tmp_path)!r}])"
    )
    assert copied.startswith("installed")
    plain = [
        name
        for name in modules(tmp_path, "tiercheck")
        if not name.startswith(("tiercheck.trainer", "tiercheck.integrations", "tiercheck.dcp"))
    ]
    assert "tiercheck.protocol.version" in plain
    code = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
assert not any("site-packages" in entry for entry in sys.path)
for name in {plain!r}:
    importlib.import_module(name)
foreign = {{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names)
foreign -= {{"tiercheck", "__main__"}}
print(sorted(name for name in foreign if not name.startswith("_")))
"""
    assert run_isolated(code, "-S") == "[]"


def imported_by_all_that_loads(package: Path) -> dict[str, Path]:
    """Top-level name -> a file that imports it: all that the package's modules import, late imports included,
    and what the modules of ours import that are loaded with them.
    """
    found: dict[str, Path] = {}
    waiting, seen = list(package.rglob("*.py")), set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        found |= dict.fromkeys(imported_names_in(path, late=package in path.parents), path)
        for node in (each for each in ast.parse(path.read_text()).body if isinstance(each, ast.ImportFrom)):
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            waiting += [module for name in names if (module := _module_of_ours(name)) is not None]
    return found


def _module_of_ours(name: str) -> Path | None:
    """Its file; None: it is no module of ours that is a file."""
    top = name.partition(".")[0]
    if top not in PACKAGES:
        return None
    path = (ROOT / PACKAGES[top]).parent / Path(*name.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)


def imported_names_in(path: Path, *, late: bool = True) -> set[str]:
    """Top-level names of what is not of the standard library; `late`: also where functions import it."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if late else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names)


def test_library_asks_for_nothing_but_torch_and_each_integration_for_its_own_framework() -> None:
    allowed = {"lightning": {"lightning", "pytorch_lightning"}, "huggingface": set()}
    for path in (ROOT / "tiercheck").rglob("*.py"):
        own = allowed.get(path.stem, set()) if path.parent.name == "integrations" else set()
        assert set(imported_names_in(path)) <= {"tiercheck", "torch"} | own, path


BROUGHT_ALONG = {"botocore": "boto3", "click": "typer", "urllib3": "kubernetes"}
"""Names that are imported but come with another requirement, on purpose."""
OPTIONAL = {("cli", "torch"), ("sidecar", "ucxx")}
"""Without torch a command says what to install (`NEEDS_TORCH`): most users of `tiercheck` want no gigabyte of
it. Without ucxx TCP carries copies, and the status says so."""


@pytest.mark.parametrize(
    ("extra", "part"), [("operator", "operator"), ("sidecar", "sidecar"), ("cli", "cli"), ("demo", "local")]
)
def test_extra_names_everything_that_its_part_imports_or_starts(
    unpacked: Path, extra: str, part: str
) -> None:
    """Each is all that is installed somewhere; the last is what `make demo` installs. What it imports of the
    other parts counts with what those modules import."""
    required = _requirements(unpacked, extra)
    distributions = importlib.metadata.packages_distributions()
    folder = ROOT / PACKAGES[f"tiercheck_{part}"]
    for name, path in (imported_by_all_that_loads(folder) | started_by(folder)).items():
        if name.startswith("tiercheck") or (extra, name) in OPTIONAL:
            continue
        providers = {_normal(provider) for provider in distributions.get(name, [name])}
        providers.add(_normal(BROUGHT_ALONG.get(name, name)))
        assert providers & required, (
            f"{path.relative_to(ROOT)} needs {name}, which tiercheck[{extra}] does not bring"
        )


def started_by(package: Path) -> dict[str, Path]:
    """Top-level name of a module that is started as `python -m` -> a file that starts it."""
    found = {}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            words = [getattr(word, "value", None) for word in node.elts] if isinstance(node, ast.List) else []
            started = (after for word, after in itertools.pairwise(words) if word == "-m")
            found.update({str(module).partition(".")[0]: path for module in started})
    return found


@pytest.mark.parametrize("extra", ["operator", "sidecar"])
def test_every_package_of_an_image_is_pinned(unpacked: Path, extra: str) -> None:
    pinned = {
        _normal(line.partition("==")[0])
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    waiting, seen = list(_requirements(unpacked, extra)), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        waiting += [
            _normal(requirement.name)
            for requirement in map(Requirement, importlib.metadata.requires(name) or ())
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
    assert "torch" not in seen
    assert seen - pinned == set()


def _requirements(unpacked: Path, extra: str) -> set[str]:
    """Distributions that `tiercheck[extra]` asks for, normalised, by way of other extras of ours as well."""
    (info,) = unpacked.glob("*.dist-info")
    lines = re.findall(r"(?m)^Requires-Dist: (.*)$", (info / "METADATA").read_text())
    asked = [
        requirement
        for requirement in map(Requirement, lines)
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
    ]
    inner = {more for requirement in asked if requirement.name == "tiercheck" for more in requirement.extras}
    return {_normal(requirement.name) for requirement in asked}.union(
        *(_requirements(unpacked, more) for more in inner)
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
