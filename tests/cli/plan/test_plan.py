"""`plan` draws who keeps whose copies, by domain, of a real job and of one that is only a file."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from tests.cli import recorded
from tests.cli.shown import FakeCluster, matches, rendered
from tiercheck_cli.failure import CannotDo
from tiercheck_cli.layout import JobLayout, layout_of, made_up_nodes, plan_layout, read_job, read_nodes
from tiercheck_cli.plan.command import svg
from tiercheck_cli.plan.screen import group_name, links, screen

EXAMPLES = Path(__file__).parents[3] / "examples"


def example(job: str, nodes: str) -> JobLayout:
    found = (
        read_nodes(str(EXAMPLES / "clusters" / nodes)) if nodes.endswith(".yaml") else made_up_nodes(nodes)
    )
    return plan_layout(read_job(str(EXAMPLES / job)), found)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    ("job", "nodes"),
    [("gke.yaml", "gke-blocks.yaml"), ("parity.yaml", "4x4"), ("smallest.yaml", "two-racks.yaml")],
)
def test_small_jobs_are_drawn_worker_by_worker(job: str, nodes: str, width: int) -> None:
    shown = rendered(screen(example(job, nodes), width), width)
    assert max(map(len, shown.splitlines())) <= width
    matches(f"plan-{job.removesuffix('.yaml')}-{width}", shown)


@pytest.mark.parametrize(("shape", "name"), [("8x32", "matrix"), ("30x16", "list")])
def test_large_jobs_are_drawn_domain_by_domain(shape: str, name: str) -> None:
    job = read_job(str(EXAMPLES / "realistic.yaml"))
    racks, size = map(int, shape.split("x"))
    job["spec"]["workers"] = racks * size
    shown = rendered(screen(plan_layout(job, made_up_nodes(shape)), 100), 100)
    assert max(map(len, shown.splitlines())) <= 100
    matches(f"plan-{name}", shown)


def test_the_plan_of_a_running_job_is_what_the_operator_saved() -> None:
    cluster = FakeCluster()
    layout = layout_of(cluster, cluster.job("gpt-large"))
    assert layout.placement.tolerates == ("any one rack", "any one host")
    assert layout.placement.holders == ((1,), (0,), (3,), (2,), (5,), (4,), (7,), (6,))
    matches("plan-running-80", rendered(screen(layout, 80), 80))


@pytest.mark.parametrize("shape", ["4x4", "8x32", "25x40"])
def test_the_picture_has_every_domain_and_a_curve_for_every_copy_or_every_pair_of_domains(shape: str) -> None:
    job = read_job(str(EXAMPLES / "realistic.yaml"))
    racks, size = map(int, shape.split("x"))
    job["spec"]["workers"] = racks * size
    layout = plan_layout(job, made_up_nodes(shape))
    drawn = links(layout)
    content = svg(layout)
    root = xml.etree.ElementTree.fromstring(content)
    assert content == svg(layout)
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {domain.name for domain in drawn.domains} <= texts
    curves = [path for path in root.iter("{http://www.w3.org/2000/svg}path") if "Q" in path.attrib["d"]]
    assert len(curves) == (racks * size if racks * size <= 400 else len(drawn.between()))


def test_without_the_right_to_read_nodes_hosts_are_still_told_apart_and_it_is_said() -> None:
    cluster = FakeCluster(may_read_nodes=False)
    layout = layout_of(cluster, cluster.job("gpt-large"))
    assert layout.level == "host"
    assert layout.placement.tolerates == ("any one host",)
    assert "you may not read nodes" in rendered(screen(layout, 80), 80)


def test_without_that_right_the_domains_are_those_that_the_operator_wrote_down() -> None:
    cluster = FakeCluster(may_read_nodes=False, domains_saved=True)
    layout = layout_of(cluster, cluster.job("gpt-large"))
    assert (layout.level, layout.remarks) == ("rack", ())
    assert layout.placement.tolerates == ("any one rack", "any one host")


def test_levels_of_a_kueue_topology_are_those_that_the_operator_wrote_down() -> None:
    cluster, job = FakeCluster(may_read_nodes=False, domains_saved=True), recorded.job()
    job["spec"]["topology"] = {"kueueTopology": "default"}
    layout = layout_of(cluster, job)
    assert [level.name for level in layout.topology.levels] == ["zone", "rack", "host"]
    with pytest.raises(CannotDo, match=r"name them in topology\.levels"):
        plan_layout(job, made_up_nodes("4x2"))


def test_blocks_of_parity_are_counted_once_for_a_group() -> None:
    layout = example("parity.yaml", "4x4")
    kept = links(layout).kept()
    assert sum(kept.values()) == sum(len(group.holders) for group in layout.placement.groups)


def test_groups_have_names_that_never_run_out() -> None:
    names = [group_name(index) for index in range(800)]
    assert names[:3] == ["a", "b", "c"]
    assert names[25:28] == ["z", "aa", "ab"]
    assert len(set(names)) == 800


def test_a_required_spread_that_cannot_be_had_says_why_the_job_would_wait() -> None:
    job = read_job(str(EXAMPLES / "gke.yaml"))
    job["spec"].setdefault("tiers", {}).setdefault("peer", {})["spread"] = {
        "level": "zone",
        "mode": "Required",
    }
    with pytest.raises(CannotDo, match=r"the job would wait: .* all 8 workers are in zone"):
        plan_layout(job, read_nodes(str(EXAMPLES / "clusters" / "gke-blocks.yaml")))


def test_pods_that_take_whole_nodes_are_not_stacked_and_too_few_nodes_are_refused(tmp_path: Path) -> None:
    found = tmp_path / "nodes.json"
    cordoned = recorded.nodes()
    cordoned[3]["spec"] = {"unschedulable": True}
    found.write_text(json.dumps({"kind": "List", "items": cordoned}))
    job = recorded.job()
    with pytest.raises(CannotDo, match=r"8 workers do not fit on 7 nodes .*1 of 8 nodes left out: cordoned"):
        plan_layout(job, read_nodes(str(found)))
    job["spec"]["workers"] = 7
    assert len({site.node for site in plan_layout(job, read_nodes(str(found))).sites}) == 7


def test_nodes_without_the_accelerator_are_left_out_and_it_is_said(tmp_path: Path) -> None:
    nodes = recorded.nodes()
    for node in nodes[:4]:
        del node["status"]["allocatable"]["nvidia.com/gpu"]
    found = tmp_path / "nodes.json"
    found.write_text(json.dumps({"kind": "List", "items": nodes}))
    job = recorded.job()
    job["spec"]["workers"] = 4
    layout = plan_layout(job, read_nodes(str(found)))
    assert {site.node for site in layout.sites} == {"node-4", "node-5", "node-6", "node-7"}
    assert layout.remarks == ("4 of 8 nodes left out: lacks nvidia.com/gpu: 8",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "lists no nodes; make it with: kubectl get nodes -o json"),
        ("nodes: [{labels: {}}]", "not a list of nodes: a node has no name"),
        ("nodes: [{name: a}, {name: a}]", "node 'a' is listed twice"),
        ("nodes: 7", "not a list of nodes: expected"),
        ("nodes: [", "is not YAML"),
        ('{"items": [', "is not JSON"),
    ],
)
def test_files_that_list_no_nodes_are_refused_in_a_sentence(
    tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / "nodes").write_text(text)
    with pytest.raises(CannotDo, match=re.escape(complaint)) as refusal:
        read_nodes(str(tmp_path / "nodes"))
    assert "\n" not in str(refusal.value)
    assert refusal.value.status == 2
