"""What others wrote comes in through one door, and their files are opened by one module.

The door is `tiercheck.protocol.plain_json`, where the limits are; the module is `tiercheck.plain_files`.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("tiercheck", "operator/tiercheck_operator", "sidecar/tiercheck_sidecar", "cli/tiercheck_cli")
"""Not the laptop's cluster, which stands in for Kubernetes while somebody develops, and speaks to nobody
else."""
OTHER_DOORS = {
    "tiercheck/protocol/plain_json.py": "the door itself",
    "sidecar/tiercheck_sidecar/decoding.py": "keeps the decoders that go through it",
    "operator/tiercheck_operator/sidecars.py": "keeps the decoder of reports, which goes through it",
    "operator/tiercheck_operator/kubernetes/client.py": (
        "reads two words of each object in a list, which may be as deep as the API server takes them"
    ),
    "operator/tiercheck_operator/kubernetes/object_reader.py": (
        "takes objects apart, once they are cut to a depth, and gives the parts to the door; "
        "errors, which its framework reads"
    ),
    "tiercheck/warm/in_place_exec.py": (
        "an order of this process's own parent; its environment may hold what is no Unicode"
    ),
    "operator/tiercheck_operator/model/saved_placement.py": "types of values that came through the door",
    "operator/tiercheck_operator/model/parsing.py": (
        "one word of a pod's annotation, read with the rest of the pod"
    ),
    "cli/tiercheck_cli/layout.py": "YAML, of a file that the user names",
    "cli/tiercheck_cli/simulate/assumptions.py": "YAML, of a file of this package",
}
DECODERS = {
    ("json", "loads"), ("json", "load"), ("json", "JSONDecoder"), ("msgspec.json", "decode"),
    ("msgspec.json", "Decoder"), ("msgspec", "json"),
    ("msgspec", "convert"), ("msgspec", "yaml"), ("msgspec", "msgpack"), ("pickle", "load"),
    ("pickle", "loads"), ("marshal", "loads"),
    ("yaml", "load"), ("yaml", "load_all"), ("yaml", "safe_load"), ("yaml", "safe_load_all"),
    ("yaml", "full_load"), ("yaml", "unsafe_load"),
    ("ast", "literal_eval"), ("shelve", "open"),
    # Errors of theirs, which never come through the door: who catches them has another, or catches nothing.
    ("msgspec", "DecodeError"), ("msgspec", "ValidationError"), ("json", "JSONDecodeError"),
}  # fmt: skip


def decoders_in(path: Path) -> set[str]:
    """Names of decoders that a module takes from elsewhere, and `.json()` of HTTP answers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {
                f"{node.module}.{name.name}" for name in node.names if (node.module, name.name) in DECODERS
            }
        elif isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if (owner, node.attr) in DECODERS and (owner, node.attr) != ("msgspec", "json"):
                found.add(f"{owner}.{node.attr}")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "json"
            and not node.args
        ):
            found.add(f"{ast.unparse(node.func)}()")
    return found


MODULES = sorted(path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))


def test_modules_that_decode_by_themselves_are_few_and_say_why() -> None:
    doors = {str(path.relative_to(ROOT)): decoders_in(path) for path in MODULES}
    assert {name: found for name, found in doors.items() if found and name not in OTHER_DOORS} == {}


@pytest.mark.parametrize(
    "text",
    ["import json\njson.loads(x)", "from json import loads", "import msgspec\nmsgspec.json.decode(x)",
        "from msgspec.json import Decoder", "from msgspec import json", "(await request.json())",
        "import yaml\nyaml.safe_load(x)", "msgspec.DecodeError"],
)  # fmt: skip
def test_other_doors_are_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "module.py").write_text(text)
    assert decoders_in(tmp_path / "module.py")


OPENING = ("sidecar/tiercheck_sidecar", "cli/tiercheck_cli/checkpoint")
PLAIN = {"open_plain", "create_plain", "create_in"}
OTHERS = {
    "model/config.py": "the Secret, which the kubelet wrote",
    "tiercheck_sidecar/app.py": "the Secret, which the kubelet wrote",
    "remote/s3/s3_clients.py": "certificates of the image, or what the Secret names",
    "remote/directory.py": "files below a folder that was opened without links",
    "node_memory.py": "`.owner` of the own folder, made anew unless it is a plain file",
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
    modules = [path for folder in OPENING for path in (ROOT / folder).rglob("*.py")]
    assert len(modules) > 50
    odd = {str(path) for path in modules if openings_in(path)}
    assert {path for path in odd if not path.endswith(tuple(f"/{name}" for name in OTHERS))} == set()


@pytest.mark.parametrize("text", ["open(path)", "os.open(path, 0)", "path.read_text()", "open(path.open())"])
def test_other_openings_are_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "module.py").write_text(text)
    assert openings_in(tmp_path / "module.py")
