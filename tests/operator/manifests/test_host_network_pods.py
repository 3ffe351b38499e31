"""Each pod with hostNetwork has ports of its own, which all who need them know."""

from __future__ import annotations

from typing import Any

import kubernetes_validate

from tests.operator.attach import attach_shapes as shapes
from tests.operator.manifests.test_pod_manifest import container, env, make_job, with_pod
from tests.operator.manifests.test_pod_resources import attached
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck_operator.controller.attempt.directives import build_directives
from tiercheck_operator.manifests.pod import build_pod, build_spare
from tiercheck_operator.model.observed import JobView, Observation, PodView
from tiercheck_operator.model.parsing import parse_pod
from tiercheck_operator.model.saved_placement import SavedMember, SavedPlacement
from tiercheck_operator.model.status import JobRecord

Object = dict[str, Any]


def on_host(**spec: Any) -> JobView:
    return with_pod(make_job(**spec), hostNetwork=True)


def ports(pod: Object) -> dict[str, int]:
    return {
        entry["name"]: entry["containerPort"] for entry in container(pod, names.SIDECAR_CONTAINER)["ports"]
    }


def seen(pod: Object, ip: str, uid: str) -> PodView:
    metadata = {**pod["metadata"], "uid": uid}
    found = parse_pod({**pod, "metadata": metadata, "status": {"podIP": ip, "phase": "Running"}})
    assert found is not None
    return found


def test_pods_outside_of_the_hosts_network_have_the_usual_ports() -> None:
    pod = build_pod(make_job(), 1, 2, (), "s:1")
    assert set(ports(pod).values()) == {names.CONTROL_PORT, names.EXCHANGE_PORT, names.METRICS_PORT}
    assert names.ENV_FIRST_PORT not in env(container(pod, names.SIDECAR_CONTAINER))
    assert seen(pod, "10.0.0.1", "u").address == "10.0.0.1"
    assert "dnsPolicy" not in pod["spec"]


def test_no_two_pods_of_a_job_ask_for_the_same_port_of_a_node() -> None:
    job = on_host(workers=64)
    pods = [build_pod(job, worker, life, (), "s:1") for worker in range(64) for life in range(2)]
    pods += [build_spare(job, number, (), "s:1") for number in range(8)]
    taken = [port for pod in pods for port in ports(pod).values()]
    assert len(taken) == len(set(taken)), "a new pod may meet the old one of its worker, too"
    assert all(12000 <= port < 20000 for port in taken), (
        "rendezvous, NodePorts and outgoing connections are above"
    )


def test_sidecar_is_told_its_ports_and_asked_for_its_health_there() -> None:
    pod = build_pod(on_host(), 1, 0, (), "s:1")
    kubernetes_validate.validate(pod, "1.33", strict=True)
    sidecar, mine = container(pod, names.SIDECAR_CONTAINER), ports(pod)
    assert env(sidecar)[names.ENV_FIRST_PORT] == str(mine["control"])
    assert [mine["exchange"], mine["tc-metrics"]] == [mine["control"] + 1, mine["control"] + 2]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert sidecar[probe]["httpGet"]["port"] == mine["tc-metrics"]


def test_names_of_the_cluster_are_found_unless_the_user_says_otherwise() -> None:
    """Such as that of an S3 server in the cluster. In the node's network a pod has the node's DNS by
    default.
    """
    assert build_pod(on_host(), 0, 0, (), "s:1")["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
    theirs = with_pod(on_host(), dnsPolicy="Default")
    assert build_pod(theirs, 0, 0, (), "s:1")["spec"]["dnsPolicy"] == "Default"


def test_everybody_is_told_where_the_others_are_by_port_and_trainers_by_address_alone() -> None:
    job = on_host()
    made = [build_pod(job, worker, 0, (), "s:1") for worker in range(2)]
    members = {worker: seen(pod, "10.0.0.1", f"u{worker}") for worker, pod in enumerate(made)}
    saved = (SavedMember(worker, "p", f"u{worker}", 0, "n1", (1 - worker,)) for worker in range(2))
    placement = SavedPlacement(1, tuple(saved))
    obs = Observation(
        now=0.0, job=job, pods=tuple(members.values()), nodes={}, reports={}, placement=placement
    )
    told = build_directives(obs, JobRecord(attempt=1), members, placement, phase=Phase.HOLD, sources={})
    first, second = (f"10.0.0.1:{ports(pod)['control']}" for pod in made)
    assert [peer.host for peer in told[0].holders] == [second]
    assert [peer.host for peer in told[1].hosted] == [first]
    assert told[1].coordinator.host == first
    assert told[1].master_host == "10.0.0.1"


def test_attached_pod_in_the_hosts_network_gets_ports_of_its_own_too() -> None:
    taken = []
    for index in range(4):
        pod = shapes.job_pod(index)
        pod["spec"]["hostNetwork"] = True
        taken += ports(attached(pod)).values()
    assert len(set(taken)) == 12
    assert names.CONTROL_PORT not in taken
