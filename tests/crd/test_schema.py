"""Definitions are described and bounded; attached jobs and the guide's first job are accepted."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.crd.conftest import CRD, ROOT, Api
from tests.crd.jobs import changed, full_status, job
from tests.lives import Lives
from tests.local.apiserver.api_client import Refused, refused_with
from tests.operator.attach.test_attach_admission import made_job
from tiercheck.protocol import names
from tiercheck_operator.model import conditions
from tiercheck_operator.planning.topology import PRESETS

VERSION = CRD["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema under `schema` with its path; items of lists as `[]`, values of maps as `{}`."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from fields(inner, f"{path}.{name}")
    if "items" in schema:
        yield from fields(schema["items"], f"{path}[]")
    if isinstance(schema.get("additionalProperties"), dict):
        yield from fields(schema["additionalProperties"], f"{path}{{}}")


def field(path: str) -> dict[str, Any]:
    return dict(fields(SCHEMA))[path]


def test_names_are_those_of_the_protocol() -> None:
    assert CRD["spec"]["group"] == names.API_GROUP
    assert VERSION["name"] == names.API_VERSION
    assert CRD["spec"]["names"]["kind"] == names.KIND
    assert CRD["spec"]["names"]["plural"] == names.PLURAL
    assert CRD["metadata"]["name"] == f"{names.PLURAL}.{names.API_GROUP}"
    assert field(".spec.managedBy")["default"] == names.CONTROLLER


def test_every_field_says_what_it_means() -> None:
    undescribed = [
        path
        for path, schema in fields(SCHEMA)
        if not schema.get("description") and not path.startswith(".metadata") and not path.endswith("{}")
        and not (path.endswith("[]") and schema.get("type") == "string")
    ]  # fmt: skip
    assert undescribed == []


def test_descriptions_are_sentences() -> None:
    for path, schema in fields(SCHEMA):
        if "description" in schema:
            assert schema["description"][0] == schema["description"][0].upper() or path == ".apiVersion", path
            assert schema["description"].endswith("."), path


def test_every_list_and_every_string_that_a_rule_reads_is_bounded() -> None:
    lists = [
        path for path, schema in fields(SCHEMA) if schema.get("type") == "array" and "maxItems" not in schema
    ]
    assert lists == []
    strings = [
        path
        for path, schema in fields(SCHEMA["properties"]["spec"])
        if "x-kubernetes-validations" in schema
        and schema.get("type") == "string"
        and "maxLength" not in schema
    ]
    assert strings == []


def test_unknown_fields_are_kept_only_where_they_belong_to_kubernetes() -> None:
    kept = [path for path, schema in fields(SCHEMA) if schema.get("x-kubernetes-preserve-unknown-fields")]
    theirs = (".spec.template.spec", ".spec.tiers.remote.directory.volume", ".spec.sidecar.env[].valueFrom")
    assert all(path.startswith(theirs) for path in kept), kept


def test_every_rule_has_a_sentence() -> None:
    rules = [
        (path, rule) for path, schema in fields(SCHEMA) for rule in schema.get("x-kubernetes-validations", ())
    ]
    assert len(rules) > 25
    for path, rule in rules:
        assert len(rule["message"].split()) >= 5, (path, rule)


def test_presets_have_the_levels_that_the_planner_knows() -> None:
    assert set(field(".spec.topology.preset")["enum"]) == set(PRESETS)
    rule = next(
        rule
        for rule in field(".spec")["x-kubernetes-validations"]
        if "spread.level" in rule.get("fieldPath", "")
    )
    listed = {
        preset: re.findall(r"'([^']+)'", levels)
        for preset, levels in re.findall(r"preset == '([\w-]+)' \? \S+ in \[([^\]]*)\]", rule["rule"])
    }
    listed["generic"] = re.findall(r"'([^']+)'", re.findall(r"\[([^\]]*)\]", rule["rule"])[-1])
    assert listed == {preset: [level.name for level in levels] for preset, levels in PRESETS.items()}
    for preset, levels in PRESETS.items():
        assert f"{preset} has {', '.join(level.name for level in levels)}" in rule["message"]
    description = field(".spec.topology.preset")["description"]
    for level in (level for levels in PRESETS.values() for level in levels):
        # The description writes a family of labels as "prefix-2, -1, -0".
        stem = level.label.rpartition("-")[0] if level.label[-1].isdigit() else level.label
        assert stem in description, level


def test_columns_point_at_fields_of_the_status() -> None:
    known = {path for path, _ in fields(SCHEMA)} | {".metadata.creationTimestamp"}
    columns = VERSION["additionalPrinterColumns"]
    by_type = re.compile(r'\[\?\(@\.type=="(\w+)"\)\]')
    asked = [by_type.search(column["jsonPath"]) for column in columns]
    assert {match[1] for match in asked if match} <= {conditions.PROTECTED}
    assert {by_type.sub("[]", column["jsonPath"]) for column in columns} <= known
    normal = [column["name"] for column in columns if not column.get("priority")]
    assert normal == ["Phase", "Reason", "Protected", "Step", "Peer-lag", "Remote-step", "Restarts", "Age"]
    assert [column["name"] for column in columns if column.get("priority")] == [
        "Tolerates",
        "Smaller",
        "Attempt",
        "Last-cause",
    ]


def test_conditions_are_a_list_map_by_type() -> None:
    listed = field(".status.conditions")
    assert listed["x-kubernetes-list-type"] == "map"
    assert listed["x-kubernetes-list-map-keys"] == ["type"]


def test_controller_writes_no_field_that_would_be_pruned() -> None:
    assert unknown(full_status(), SCHEMA["properties"]["status"], "status") == []


def test_every_moment_that_the_controller_writes_is_a_time_for_the_api() -> None:
    """And a number only where it is a duration, a count or a size."""
    moments = [
        path for path, kind in leaves(SCHEMA["properties"]["status"]) if kind.get("format") == "date-time"
    ]
    numbers = [path for path, kind in leaves(SCHEMA["properties"]["status"]) if kind.get("type") == "number"]
    assert [path for path in numbers if not path.endswith("Seconds")] == []
    for name in (
        "recovery.failedAt",
        "recovery.releasedAt",
        "size.roomSince",
        "lastRecovery.time",
        "startTime",
    ):
        assert name in moments


def leaves(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    inner = schema.get("properties") or {}
    found = [leaf for name, each in inner.items() for leaf in leaves(each, f"{path}.{name}".lstrip("."))]
    return found or [(path, schema)]


def unknown(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    """Paths in `value` that the schema does not declare."""
    if isinstance(value, list):
        return [found for entry in value for found in unknown(entry, schema["items"], f"{path}[]")]
    if not isinstance(value, dict):
        return []
    declared = schema.get("properties", {})
    return [f"{path}.{name}" for name in value if name not in declared] + [
        found
        for name, inner in value.items()
        if name in declared
        for found in unknown(inner, declared[name], f"{path}.{name}")
    ]


ROOTS = "spec|tiers|checkpoint|failurePolicy|restore|topology|sidecar|elastic|attach|gang"
NAMED = re.compile(rf"(?<![\w./$-])(?:{ROOTS})(?:\.[a-z]\w*)+(?![\w(/-]|\.\w)")
OF_OTHERS = {
    "spec.containers",
    "spec.levels",
    "spec.nodeName",
    "spec.resources",
    "spec.schedulingGroup",
    "spec.schedulingGroup.podGroupName",
    "spec.schedulingPolicy",
    "restore.load",
    "sidecar.sock",
    "sidecar.tiercheck.io",
}
"""Fields of pods, pod groups and Kueue's Topology; a module, a socket and a name."""


def definition(name: str) -> dict[str, Any]:
    (version,) = yaml.load(Path(f"crds/{name}.yaml").read_text(), yaml.CSafeLoader)["spec"]["versions"]
    return dict(version["schema"]["openAPIV3Schema"])


def is_defined(path: str, spec: dict[str, Any]) -> bool:
    node = spec
    for part in path.removeprefix("spec.").split("."):
        while "items" in node:
            node = node["items"]
        if node.get("x-kubernetes-preserve-unknown-fields"):
            return True
        if part not in node.get("properties", {}):
            return False
        node = node["properties"][part]
    return True


def texts() -> Iterator[tuple[str, str]]:
    """Pages, and every text in the code."""
    for page in [*Path("docs").rglob("*.md"), *Path().glob("*.md"), Path("charts/tiercheck/README.md")]:
        if "design" not in page.parts and page.name != "CHANGELOG.md":
            yield str(page), page.read_text()
    for name in ("crds/tiercheckjobs.yaml", "charts/tiercheck/values.schema.json"):
        yield name, Path(name).read_text()
    for room in ("tiercheck", "operator", "sidecar", "cli"):
        for file in Path(room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield f"{file}:{node.lineno}", node.value


def test_every_field_that_is_named_anywhere_is_defined() -> None:
    job = definition("tiercheckjobs")["properties"]
    chart = json.loads(Path("charts/tiercheck/values.schema.json").read_text())
    missing = {
        (where, found[0])
        for where, text in texts()
        for found in NAMED.finditer(text)
        if found[0] not in OF_OTHERS
        and not found[0].endswith((".md", ".py", ".yaml"))
        and not any(is_defined(found[0], root) for root in (job["spec"], job["status"], chart))
    }
    assert missing == set()


@pytest.mark.parametrize("name", ["tiercheckjobs", "tiercheckpolicies"])
def test_no_entry_of_a_list_has_a_default(name: str) -> None:
    """What compares an applied object with the live one calls it changed for ever."""

    def defaults(node: dict[str, Any], path: str, *, listed: bool) -> Iterator[str]:
        if listed and "default" in node:
            yield path
        for key, child in node.get("properties", {}).items():
            yield from defaults(child, f"{path}.{key}", listed=listed)
        if isinstance(node.get("items"), dict):
            yield from defaults(node["items"], f"{path}[]", listed=True)

    assert list(defaults(definition(name), "", listed=False)) == []


_POLICIES = "/apis/tiercheck.io/v1alpha1/namespaces/default/tiercheckpolicies"
DEFINITION = yaml.load((ROOT / "crds" / "tiercheckpolicies.yaml").read_text(), yaml.CSafeLoader)
EXAMPLE = ROOT / "examples" / "attach" / "policy.yaml"


@pytest.fixture(scope="session")
def policies(api: Api) -> Api:
    """The API server, which knows policies too."""
    api.install(DEFINITION, _POLICIES)
    return api


def create(api: Api, raw: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = api.http.create(_POLICIES, raw, dryRun="All", fieldValidation="Strict")
    return made


def policy(**spec: Any) -> dict[str, Any]:
    kind = {"apiVersion": "tiercheck.io/v1alpha1", "kind": "TierCheckPolicy"}
    return {**kind, "metadata": {"name": "careful"}, "spec": spec}


def attached(**changes: Any) -> dict[str, Any]:
    raw = made_job()
    raw["metadata"] = {"name": f"job-{uuid.uuid4().hex[:8]}", "namespace": "default"}
    raw["spec"] |= changes
    return raw


def test_policy_has_the_jobs_own_fields() -> None:
    policies = definition("tiercheckpolicies")["properties"]["spec"]
    ours, theirs = policies["properties"], SCHEMA["properties"]["spec"]["properties"]
    assert set(ours) == {
        "procsPerWorker",
        "recovery",
        "topology",
        "checkpoint",
        "tiers",
        "restore",
        "failurePolicy",
        "sidecar",
    }
    assert all(ours[name] == theirs[name] for name in ours if name != "procsPerWorker")
    assert len(policies["x-kubernetes-validations"]) >= 3


def test_policy_gets_the_jobs_defaults(policies: Api) -> None:
    given = create(policies, policy())["spec"]
    wanted = policies.create(job(), dryRun="All")["spec"]
    assert given == {name: wanted[name] for name in given}
    assert {"checkpoint", "tiers", "topology", "failurePolicy"} <= set(given)


def test_example_is_accepted(policies: Api) -> None:
    create(policies, yaml.safe_load(Path(EXAMPLE).read_text()))


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("metadata.name", "p" * 64, "at most 63 characters long"),
        ("spec.procsPerWorker", 0, "greater than or equal to 1"),
        ("spec.tiers.peer.spread.level", "row", "must be the name of a level"),
        ("spec.tiers.remote", {"s3": {"bucket": "b"}, "everySteps": 7}, "must be a multiple of"),
        ("spec.failurePolicy.rollbackAfterNonFinite", 3, "needs checkpoint.sanityGate Finite"),
        ("spec.tiers.peer", {"copies": 1, "parity": {"data": 2, "parity": 1}}, "copies or parity, not both"),
    ],
)
def test_mistake_in_a_policy_is_refused_with_the_jobs_sentence(
    policies: Api, path: str, value: Any, said: str
) -> None:
    raw = policy(checkpoint={"snapshot": {"everySteps": 5}, "sanityGate": "Off"})
    with refused_with(said):
        create(policies, changed(raw, path, value))


def test_what_belongs_to_the_owner_is_no_field_of_a_policy(policies: Api) -> None:
    for field in ("workers", "template", "suspend", "spares"):
        with pytest.raises(Refused, match=f'unknown field "spec.{field}"'):
            create(policies, policy(**{field: 1}))


def test_job_that_the_operator_makes_for_an_owner_is_accepted(api: Api) -> None:
    raw = api.create(attached(), dryRun="All", fieldValidation="Strict")
    assert "template" not in raw["spec"]
    assert raw["spec"]["attach"]["owner"]["uid"] == "job-uid"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (attached(template=job()["spec"]["template"]), "needs either a template"),
        (attached(suspend=True), "suspend the Job, JobSet, TrainJob or PyTorchJob"),
        (attached(spares=1), "cannot have spares"),
        (changed(attached(), "spec.attach.owner.kind", "Deployment"), "supported values"),
    ],
    ids=["template", "suspend", "spares", "kind"],
)
def test_attached_job_cannot_have_what_is_its_owners(api: Api, raw: dict[str, Any], said: str) -> None:
    with refused_with(said):
        api.create(raw, dryRun="All")


def test_job_needs_a_template_or_an_owner(api: Api) -> None:
    raw = job()
    del raw["spec"]["template"]
    with pytest.raises(Refused, match="needs either a template"):
        api.create(raw, dryRun="All")


def test_attachment_is_for_life(api: Api) -> None:
    raw = attached()
    name = api.create(raw)["metadata"]["name"]
    with pytest.raises(Refused, match="attach cannot change"):
        api.patch(name, {"spec": {"attach": {"container": "another"}}})
    with pytest.raises(Refused, match="between template and attach"):
        api.patch(name, {"spec": {"attach": None, "template": job()["spec"]["template"]}})


GUIDE = (ROOT / "docs" / "start" / "first-job.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    return found[1]


def run(lives: Lives, folder: Path, steps: int) -> tuple[int, str]:
    """Where the guide's script starts in this folder, and where its weights are after so many steps."""
    script = folder / "train.py"
    script.write_text(
        f"import json, os\nos.chdir({str(folder)!r})\n"
        + block("python").replace("range(start, 200)", f"range(start, {steps})")
        + "\nend = sum(p.double().sum().item() for p in model.parameters()).hex()"
        + "\nprint(json.dumps({'start': start, 'end': end}))\n"
    )
    ((said,),) = lives.run(["tiercheck"], [script])
    return said["start"], said["end"]


def test_script_of_the_guide_goes_on_after_a_stop_with_the_same_result(lives: Lives, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "halves").mkdir()
    start, end = run(lives, tmp_path / "whole", 110)
    assert start == 0
    run(lives, tmp_path / "halves", 70)
    assert run(lives, tmp_path / "halves", 110) == (50, end)


def test_job_of_the_guide_is_accepted_as_it_stands(api: Api) -> None:
    api.create(yaml.safe_load(block("yaml")), dryRun="All", fieldValidation="Strict")


def test_sentences_of_the_guide_are_those_of_the_api() -> None:
    crd = re.sub(r"\s+", " ", (ROOT / "crds" / "tiercheckjobs.yaml").read_text())
    table = GUIDE.partition("| it says | do |\n")[2].partition("\n\n")[0]
    said = [
        line.split("|")[1].strip()
        for line in table.splitlines()
        if line.startswith("| ") and "---" not in line
    ]
    assert len(said) > 5
    for sentence in said:
        for part in sentence.split("..."):
            if part.strip() and not sentence.startswith("unknown field"):
                assert part.strip(" ,") in crd, part
