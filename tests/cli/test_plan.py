"""`plan` draws who keeps whose copies, by domain, of a real job and of one that is only a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cluster import FakeCluster
from golden import matches, rendered

from tiercheck_cli.failure import CannotDo
from tiercheck_cli.files import made_up_nodes, read_job, read_nodes
from tiercheck_cli.layout import Layout, layout_of
from tiercheck_cli.plan.links import links
from tiercheck_cli.plan.screen import group_name, screen
from tiercheck_cli.planned import planned

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(job: str, nodes: str) -> Layout:
    found = read_nodes(str(EXAMPLES / "clusters" / nodes)) if nodes.endswith(".yaml") else made_up_nodes(nodes)
    return planned(read_job(str(EXAMPLES / job)), found)


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize(
    ("job", "nodes"), [("gke.yaml", "gke-blocks.yaml"), ("parity.yaml", "4x4"), ("smallest.yaml", "two-racks.yaml")]
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
    shown = rendered(screen(planned(job, made_up_nodes(shape)), 100), 100)
    assert max(map(len, shown.splitlines())) <= 100
    matches(f"plan-{name}", shown)


def test_the_plan_of_a_running_job_is_what_the_operator_saved() -> None:
    cluster = FakeCluster()
    layout = layout_of(cluster, cluster.job("gpt-large"))
    assert layout.placement.tolerates == ("any one rack", "any one host")
    assert layout.placement.holders == ((1,), (0,), (3,), (2,), (5,), (4,), (7,), (6,))
    matches("plan-running-80", rendered(screen(layout, 80), 80))


def test_without_the_right_to_read_nodes_hosts_are_still_told_apart_and_it_is_said() -> None:
    cluster = FakeCluster(may_read_nodes=False)
    layout = layout_of(cluster, cluster.job("gpt-large"))
    assert layout.level == "host"
    assert layout.placement.tolerates == ("any one host",)
    assert "you may not read nodes" in rendered(screen(layout, 80), 80)


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
    job["spec"].setdefault("tiers", {}).setdefault("peer", {})["spread"] = {"level": "zone", "mode": "Required"}
    with pytest.raises(CannotDo, match=r"the job would wait: .* all 8 workers are in zone"):
        planned(job, read_nodes(str(EXAMPLES / "clusters" / "gke-blocks.yaml")))


def test_too_few_nodes_are_refused_with_the_numbers() -> None:
    job = read_job(str(EXAMPLES / "parity.yaml"))
    with pytest.raises(CannotDo, match=r"16 workers do not fit: the 6 nodes .* room for 6"):
        planned(job, made_up_nodes("2x3"))
