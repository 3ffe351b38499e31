"""What the chart has from elsewhere is what is there: definition, rights, version, settings, ports."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from tests.chart.releases import (
    CASES,
    CHART,
    ROOT,
    granted,
    of_kind,
    only,
    operators_environment,
    rendered,
    values_of,
)
from tests.operator.kubernetes.proxy import asked_for
from tiercheck.about import __version__
from tiercheck.protocol import names
from tiercheck_operator.config import Config
from tiercheck_operator.model.parsing import parse_signs

REGENERATE = "run: make chart"


def generator() -> Any:
    """charts/ is no package, so the script is loaded by its path."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "charts" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_files_are_up_to_date() -> None:
    generated = generator().generated()
    assert len(generated) >= 3
    for path, text in generated.items():
        assert path.read_text() == text, f"{path.relative_to(ROOT)} is out of date; {REGENERATE}"


def test_no_generated_file_has_lost_its_source() -> None:
    generated = {path for path in generator().generated() if path.parent == CHART / "templates" / "crds"}
    assert set((CHART / "templates" / "crds").iterdir()) == generated, REGENERATE


def test_definition_that_is_installed_is_the_one_in_crds() -> None:
    """Rendered, so that nothing is lost between the file and the cluster."""
    for path in (ROOT / "crds").glob("*.yaml"):
        source = yaml.load(path.read_text(), yaml.CSafeLoader)
        (installed,) = yaml.load_all(rendered()[f"crds/{path.name}"], yaml.CSafeLoader)
        assert installed["spec"] == source["spec"]
        assert installed["metadata"]["name"] == source["metadata"]["name"]


def test_versions_are_those_of_the_code() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__


# Rights


def shipped_roles() -> dict[str, list[dict[str, Any]]]:
    documents = yaml.safe_load_all((ROOT / "deploy" / "operator.yaml").read_text())
    roles = [entry for entry in documents if entry and entry["kind"] in ("Role", "ClusterRole")]
    return {kind: [role for role in roles if role["kind"] == kind] for kind in ("Role", "ClusterRole")}


def operators_roles(
    values: Mapping[str, Any] | None = None, kind: str = "ClusterRole"
) -> list[dict[str, Any]]:
    return [role for role in of_kind(kind, values) if "-operator" in role["metadata"]["name"]]


@pytest.mark.parametrize("kind", ["ClusterRole", "Role"])
def test_operator_of_the_whole_cluster_has_the_rights_of_the_plain_manifests(kind: str) -> None:
    shipped = granted(shipped_roles()[kind])
    assert granted(operators_roles(kind=kind)) == shipped
    assert kind == "Role" or shipped


def test_every_role_is_bound_to_the_operators_account_and_to_nobody_else() -> None:
    for values in ({}, {"watchNamespaces": ["a", "b"]}):
        account = only("Deployment", values)["spec"]["template"]["spec"]["serviceAccountName"]
        bindings = [*of_kind("ClusterRoleBinding", values), *of_kind("RoleBinding", values)]
        for binding in bindings:
            (subject,) = binding["subjects"]
            assert subject == {"kind": "ServiceAccount", "name": account, "namespace": "tiercheck-system"}
        bound = {binding["roleRef"]["name"] for binding in bindings}
        assert bound == {
            role["metadata"]["name"] for role in operators_roles(values) + operators_roles(values, "Role")
        }


def test_operator_of_some_namespaces_may_only_look_at_nodes_and_at_what_names_the_cluster_elsewhere() -> None:
    values = {"watchNamespaces": ["training", "research"]}
    roles = {role["metadata"]["name"]: role for role in operators_roles(values)}
    (everywhere,) = [binding["roleRef"]["name"] for binding in of_kind("ClusterRoleBinding", values)]
    nodes = {("", "nodes", "list"), ("", "nodes", "watch"), ("coordination.k8s.io", "leases", "get")}
    assert granted([roles[everywhere]]) == nodes | {("", "namespaces", "get")}
    named = [
        rule["resourceNames"] for rule in roles[everywhere]["rules"] if rule["resources"] == ["namespaces"]
    ]
    assert named == [["kube-system"]]
    there = {
        binding["metadata"]["namespace"]: granted([roles[binding["roleRef"]["name"]]])
        for binding in of_kind("RoleBinding", values)
        if binding["roleRef"]["kind"] == "ClusterRole"
    }
    assert set(there) == {"training", "research"}
    (jobs,) = [role for role in shipped_roles()["ClusterRole"] if role["metadata"]["name"].endswith("-jobs")]
    assert all(rights == granted([jobs]) for rights in there.values())


def test_no_role_of_the_operator_has_a_wildcard() -> None:
    assert not [right for right in granted(operators_roles()) if "*" in right]


def test_people_who_may_edit_get_jobs_and_people_who_may_view_can_look() -> None:
    roles = {role["metadata"]["name"]: role for role in of_kind("ClusterRole")}
    editor, viewer = roles["tiercheck-editor"], roles["tiercheck-viewer"]
    aggregate = "rbac.authorization.k8s.io/aggregate-to-"
    assert {key for key in editor["metadata"]["labels"] if key.startswith(aggregate)} == {
        aggregate + "admin",
        aggregate + "edit",
    }
    assert {key for key in viewer["metadata"]["labels"] if key.startswith(aggregate)} == {aggregate + "view"}
    assert {verb for _, _, verb in granted([viewer])} == {"get", "list", "watch"}
    assert granted([viewer]) < granted([editor])
    # The status is the operator's: whoever writes it decides what is restored.
    assert {verb for _, resource, verb in granted([editor]) if "/" in resource} == {"get"}
    ours = {(names.API_GROUP, names.PLURAL), (names.API_GROUP, names.POLICY_PLURAL)}
    # What `tiercheck status`, `plan`, `explain` and `events` read, and no Secret among it.
    looking = {
        ("", kind, verb) for kind in ("pods", "configmaps", "events") for verb in ("get", "list", "watch")
    }
    looking |= {("", "pods/log", "get")}
    for role in (editor, viewer):
        everything = granted([role])
        others = {right for right in everything if (right[0], right[1].partition("/")[0]) not in ours}
        assert others == looking
        assert ours <= {right[:2] for right in everything}


# Settings


class Asked(Mapping[str, str]):
    """An environment that remembers what it was asked for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def test_every_setting_of_the_operator_can_be_set_and_no_other() -> None:
    asked = Asked()
    Config.from_env(asked)
    set_by_the_chart = {
        name for name in operators_environment(values_of("everything")) if name != "HTTPS_PROXY"
    } | {
        "TIERCHECK_IDENTITY"  # the pod's name
    }
    assert set_by_the_chart == asked.names, (
        "operator/tiercheck_operator/config.py and the chart differ: add the setting to "
        "values.schema.json, values.yaml "
        "and ci/everything-values.yaml"
    )


SIGNS = ("leavingTaints", "badNodeConditions", "cordon")
"""Settings that are read together."""


def flattened(config: Config) -> dict[str, Any]:
    """Every value by the name that its setting has, in snake case."""
    memory = {f"node_memory_{key}": value for key, value in dataclasses.asdict(config.node_memory).items()}
    return {
        **dataclasses.asdict(config),
        **dataclasses.asdict(config.patience),
        **memory,
        "lease_seconds": config.terms.duration,
    }


def test_settings_reach_the_operator_as_they_are_written() -> None:
    config = Config.from_env(
        {**operators_environment(values_of("everything")), "TIERCHECK_METRICS_ADDRESS": ""}
    )
    written = dict(values_of("everything")["settings"])
    flat = flattened(config)
    taints, conditions, cordon = (written.pop(key) for key in SIGNS)
    assert config.signs == parse_signs(taints, conditions, cordon) != Config().signs
    for key, value in written.items():
        snake = re.sub(r"([A-Z])", lambda found: "_" + found[1].lower(), key)
        assert flat.get(snake, flat.get(snake.removesuffix("_seconds"))) == value, key


def test_left_out_settings_keep_the_operators_own_defaults() -> None:
    environment = operators_environment()
    assert set(environment) == {
        "TIERCHECK_SIDECAR_IMAGE", "TIERCHECK_NAMESPACES", "TIERCHECK_METRICS_ADDRESS", "TIERCHECK_LEASE",
        "TIERCHECK_SIDECAR_PULL_POLICY", "TIERCHECK_SIDECAR_PULL_SECRETS",
    }  # fmt: skip
    config = Config.from_env({**environment, "TIERCHECK_METRICS_ADDRESS": ""})
    own = {"sidecar_image": "", "lease": None}
    assert dataclasses.replace(config, **own) == dataclasses.replace(Config(), **own)


def test_defaults_that_values_yaml_tells_in_comments_are_the_operators() -> None:
    told = dict(re.findall(r"^#  (\w+): +(\S+)", (CHART / "values.yaml").read_text(), re.MULTILINE))
    settings = json.loads((CHART / "values.schema.json").read_text())["properties"]["settings"]["properties"]
    assert set(told) == set(settings)
    default = flattened(Config())
    taints, conditions, cordon = (told.pop(key).strip('"') for key in SIGNS)
    assert parse_signs(taints, conditions, cordon) == Config().signs
    for key, value in told.items():
        snake = re.sub(r"([A-Z])", lambda found: "_" + found[1].lower(), key)
        known = default.get(snake, default.get(snake.removesuffix("_seconds")))
        assert (value if isinstance(known, str) else float(value)) == known, key


def test_namespaces_and_sidecar_image_reach_the_operator() -> None:
    environment = operators_environment(values_of("namespaced"))
    config = Config.from_env({**environment, "TIERCHECK_METRICS_ADDRESS": ""})
    assert config.namespaces == ("training", "research")
    assert config.sidecar_image == f"registry.example.com/me/tiercheck-sidecar:{__version__}"


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::7"])
def test_operator_listens_where_probes_and_service_look(address: str) -> None:
    values = {"metrics": {"port": 9090}}
    given = operators_environment(values)["TIERCHECK_METRICS_ADDRESS"].replace("$(POD_IP)", address)
    config = Config.from_env({"TIERCHECK_METRICS_ADDRESS": given})
    assert (config.metrics_host, config.metrics_port) == (address, 9090)
    (container,) = only("Deployment", values)["spec"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": 9090}]


def test_probes_ask_for_pages_that_the_operator_serves() -> None:
    (container,) = only("Deployment")["spec"]["template"]["spec"]["containers"]
    app = (ROOT / "operator" / "tiercheck_operator" / "metrics.py").read_text()
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert f'"{container[probe]["httpGet"]["path"]}"' in app
        assert container[probe]["httpGet"]["port"] == "metrics"


# What ArtifactHub shows


def test_example_on_artifacthub_is_the_smallest_one() -> None:
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    smallest = yaml.safe_load((ROOT / "examples" / "smallest.yaml").read_text())
    assert yaml.safe_load(annotations["artifacthub.io/crdsExamples"]) == [smallest]


def test_kinds_on_artifacthub_are_those_that_are_installed() -> None:
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    told = {(e["kind"], e["version"], e["name"]) for e in yaml.safe_load(annotations["artifacthub.io/crds"])}
    assert told == {
        (crd["spec"]["names"]["kind"], version["name"], crd["metadata"]["name"])
        for crd in of_kind("CustomResourceDefinition")
        for version in crd["spec"]["versions"]
    }
    assert all(isinstance(value, str) for value in annotations.values())
    assert annotations["artifacthub.io/license"] == "Apache-2.0"


def test_every_value_is_described_and_every_default_fits() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    readme = (CHART / "README.md").read_text()
    for key in yaml.safe_load((CHART / "values.yaml").read_text()):
        assert key in schema["properties"]
        assert f"`{key}" in readme
    rows = re.findall(r"^\| `(\S+)` \| .* \| (.*) \|$", readme, re.MULTILINE)
    assert len(rows) > 60
    assert [key for key, text in rows if not text.strip()] == []


@pytest.mark.parametrize("case", CASES)
def test_network_policy_names_the_port_that_sidecars_listen_on(case: str) -> None:
    for policy in of_kind("NetworkPolicy", values_of(case)):
        if "egress" not in policy["spec"]:
            continue
        (sidecars,) = [
            rule for rule in policy["spec"]["egress"] if "podSelector" in (rule.get("to") or [{}])[0]
        ]
        assert [port["port"] for port in sidecars["ports"]] == [names.CONTROL_PORT]
        (peer,) = sidecars["to"]
        assert peer["podSelector"]["matchExpressions"][0]["key"] == names.LABEL_JOB_UID


def test_replicas_of_one_deployment_share_a_lease_that_they_may_hold() -> None:
    for case in CASES:
        deployment, environment = only("Deployment", values_of(case)), operators_environment(values_of(case))
        namespace, name = environment["TIERCHECK_LEASE"].split("/")
        assert (namespace, name) == (deployment["metadata"]["namespace"], deployment["metadata"]["name"])
        (role,) = [
            role
            for role in operators_roles_in(namespace, values_of(case))
            if role["metadata"]["name"] == name
        ]
        named = [rule["resourceNames"] for rule in role["rules"] if rule.get("resourceNames")]
        assert named == [[name], [name]], "the lease, and the Deployment that it belongs to"
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}


def operators_roles_in(namespace: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [role for role in of_kind("Role", values) if role["metadata"]["namespace"] == namespace]


JOBS = "/apis/tiercheck.io/v1alpha1/namespaces/a/tiercheckjobs"


@pytest.mark.parametrize(
    ("method", "path", "query", "right"),
    [
        ("GET", "/api/v1/nodes", {}, ("", "nodes", "list")),
        ("GET", "/api/v1/nodes", {"watch": "true"}, ("", "nodes", "watch")),
        ("GET", "/api/v1/namespaces", {}, ("", "namespaces", "list")),
        ("GET", "/api/v1/namespaces/a", {}, ("", "namespaces", "get")),
        ("GET", "/api/v1/namespaces/a/secrets/b", {}, ("", "secrets", "get")),
        ("POST", "/api/v1/namespaces/a/pods", {"fieldValidation": "Strict"}, ("", "pods", "create")),
        ("DELETE", "/api/v1/namespaces/a/pods/b", {}, ("", "pods", "delete")),
        ("DELETE", "/api/v1/namespaces/a/pods", {}, ("", "pods", "deletecollection")),
        ("PUT", "/api/v1/namespaces/a/configmaps/b", {}, ("", "configmaps", "update")),
        ("PATCH", f"{JOBS}/b/status", {}, ("tiercheck.io", "tiercheckjobs/status", "patch")),
        ("GET", "/apis/tiercheck.io/v1alpha1/tiercheckjobs", {}, ("tiercheck.io", "tiercheckjobs", "list")),
        ("GET", "/apis/tiercheck.io/v1alpha1", {}, None),
        ("GET", "/apis", {}, None),
        ("GET", "/api/v1", {}, None),
        ("GET", "/readyz", {}, None),
    ],
)
def test_request_is_named_as_rbac_names_it(
    method: str, path: str, query: dict[str, str], right: tuple[str, str, str] | None
) -> None:
    assert asked_for(method, path, query) == right
