"""Files that others may have made are opened by `tiercheck.plain_files`, and by nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("sidecar/tiercheck_sidecar", "cli/tiercheck_cli/checkpoint")
PLAIN = {"open_plain", "create_plain", "create_in"}
OTHERS = {
    "model/config.py": "the Secret, which the kubelet wrote",
    "tiercheck_sidecar/app.py": "the Secret, which the kubelet wrote",
    "remote/s3/s3_clients.py": "certificates of the image, or what the Secret names",
    "remote/directory.py": "files below a folder that was opened without links",
    "node_memory.py": "`.owner` of the own folder, made anew unless it is a plain file",
    "rehearsal/routes.py": "/dev/null",
    "pacing.py": "the kernel's",
    "vault/slots.py": "the kernel's",
    "to_safetensors.py": "what the command itself makes, in a new folder",
}


def openings_in(path: Path) -> set[str]:
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = node.args[0] if node.args else None
        plain = isinstance(given, ast.Call) and ast.unparse(given.func).rpartition(".")[2] in PLAIN
        if name == "os.open" or (name == "open" and not plain):
            found.add(name)
        found |= {each for each in ("read_text", "read_bytes", "write_text") if name.endswith(f".{each}")}
    return found


def test_files_are_opened_otherwise_in_few_modules_that_say_why() -> None:
    modules = [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 50
    odd = {str(path) for path in modules if openings_in(path)}
    assert {path for path in odd if not path.endswith(tuple(f"/{name}" for name in OTHERS))} == set()


@pytest.mark.parametrize("text", ["open(path)", "os.open(path, 0)", "path.read_text()", "open(path.open())"])
def test_other_openings_are_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "module.py").write_text(text)
    assert openings_in(tmp_path / "module.py")
