"""Pods of spares, and of workers with node memory, differ from a worker's in this alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.attach import attach_shapes as shapes
from tests.operator.manifests.test_pod_manifest import container, env, make_job, with_pod
from tests.operator.manifests.test_pod_resources import attached
from tiercheck.protocol import names
from tiercheck.protocol.directive import Phase
from tiercheck.protocol.report import SPARE
from tiercheck_operator.config import Config
from tiercheck_operator.controller.attempt.directives import build_directives
from tiercheck_operator.controller.members.spares import choose_spare
from tiercheck_operator.manifests.pod import build_pod, build_spare
from tiercheck_operator.manifests.pod_settings import NodeMemory, forbidden
from tiercheck_operator.model.observed import JobView, Observation, PodView
from tiercheck_operator.model.parsing import parse_pod
from tiercheck_operator.model.saved_placement import SavedMember, SavedPlacement
from tiercheck_operator.model.status import JobRecord
from tiercheck_operator.planning.topology import PRESETS, Topology

NODE_MEMORY = {"tiers": {"local": {"medium": "NodeMemory", "sizeLimit": "2Gi"}}}


def seen(pod: dict[str, Any]) -> Any:
    """As the operator's watch shows it."""
    return parse_pod({**pod, "metadata": {**pod["metadata"], "uid": "u", "resourceVersion": "7"}})


def test_spare_is_a_workers_pod_without_an_identity() -> None:
    spare, worker = build_spare(make_job(), 3, (), "sidecar:1"), build_pod(make_job(), 1, 0, (), "sidecar:1")
    kubernetes_validate.validate(spare, "1.33", strict=True)
    assert spare["metadata"]["name"] == "gpt-spare-3"
    view = seen(spare)
    assert (view.worker, view.spare, view.is_spare, view.resource_version) == (SPARE, 3, True, "7")
    for name in (names.SIDECAR_CONTAINER, names.TRAINER_CONTAINER):
        assert env(container(spare, name))[names.ENV_WORKER] == "spare"
        assert (
            container(spare, name)["resources" if name == names.SIDECAR_CONTAINER else "command"]
            == (container(worker, name)["resources" if name == names.SIDECAR_CONTAINER else "command"])
        )


def test_spare_with_the_label_of_a_worker_is_that_worker_and_remembers_that_it_was_one() -> None:
    spare = build_spare(make_job(), 3, (), "sidecar:1")
    spare["metadata"]["labels"] |= {names.LABEL_WORKER: "2", names.LABEL_INCARNATION: "5"}
    view = seen(spare)
    assert (view.worker, view.incarnation, view.spare, view.is_spare) == (2, 5, 3, False)


def test_template_cannot_give_a_spare_an_identity() -> None:
    job = make_job()
    template = {**job.spec.template, "metadata": {"labels": {names.LABEL_WORKER: "0", "team": "a"}}}
    job = replace(job, spec=replace(job.spec, template=template))
    labels = build_spare(job, 0, (), "sidecar:1")["metadata"]["labels"]
    assert names.LABEL_WORKER not in labels
    assert labels["team"] == "a"


def test_workers_are_spread_as_if_there_were_no_spares_and_spares_away_from_all() -> None:
    worker, spare = build_pod(make_job(), 1, 0, (), "sidecar:1"), build_spare(make_job(), 0, (), "sidecar:1")
    for constraint in worker["spec"]["topologySpreadConstraints"]:
        assert constraint["labelSelector"]["matchExpressions"] == [
            {"key": names.LABEL_WORKER, "operator": "Exists"}
        ]
    for constraint in spare["spec"]["topologySpreadConstraints"]:
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
        assert constraint["labelSelector"] == {"matchLabels": {names.LABEL_JOB_UID: "u-1"}}


def test_pod_memory_needs_no_privilege_and_is_the_default() -> None:
    pod = build_pod(make_job(), 1, 0, (), "sidecar:1")
    assert not any("hostPath" in volume for volume in pod["spec"]["volumes"])
    assert names.ENV_NODE_MEMORY_KEEP not in env(container(pod, names.SIDECAR_CONTAINER))


def test_node_memory_is_a_folder_of_the_job_that_root_without_capabilities_opens() -> None:
    settings = NodeMemory("/run/tiercheck", 60.0)
    pod = build_pod(make_job(**NODE_MEMORY), 1, 0, (), "sidecar:1", prefer="n7", node_memory=settings)
    kubernetes_validate.validate(pod, "1.33", strict=True)
    (memory,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "tiercheck-memory"]
    assert memory["hostPath"] == {"path": "/run/tiercheck/u-1", "type": "DirectoryOrCreate"}
    order = [entry["name"] for entry in pod["spec"]["initContainers"]]
    assert order.index(names.NODE_MEMORY_CONTAINER) < order.index(names.SIDECAR_CONTAINER)
    preparing = container(pod, names.NODE_MEMORY_CONTAINER)
    assert preparing["command"][-2:] == ["u-1", "60"]
    assert preparing["securityContext"]["runAsUser"] == 0
    assert preparing["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for name in (names.SIDECAR_CONTAINER, names.TRAINER_CONTAINER):
        mounted = [mount["name"] for mount in container(pod, name)["volumeMounts"]]
        assert "tiercheck-memory" in mounted
        assert "tiercheck-node-memory" not in mounted, "no worker sees another job's folder"
    assert env(container(pod, names.SIDECAR_CONTAINER))[names.ENV_NODE_MEMORY_KEEP] == "60"
    (liking,) = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert liking["preference"]["matchExpressions"][0]["values"] == ["n7"]


def test_refusal_of_a_host_path_is_told_with_what_to_do_about_it_and_other_refusals_are_not() -> None:
    said = (
        'pods "gpt-1-0" is forbidden: violates PodSecurity "baseline:latest": hostPath volumes '
        '(volume "tiercheck-memory")'
    )
    advice = forbidden(make_job(**NODE_MEMORY), said)
    assert "pod-security.kubernetes.io/enforce=privileged" in advice
    assert said in advice
    assert forbidden(make_job(), said) == "", "it is the user's own volume"
    assert forbidden(make_job(**NODE_MEMORY), "exceeded quota: gpus") == ""


def test_operators_settings_of_node_memory() -> None:
    env = {"TIERCHECK_NODE_MEMORY_PATH": "/run/tc/", "TIERCHECK_NODE_MEMORY_KEEP_SECONDS": "90"}
    assert Config.from_env(env).node_memory == NodeMemory("/run/tc", 90.0)
    assert Config.from_env({}).node_memory == NodeMemory("/dev/shm/tiercheck", 3600.0)
    assert Config.from_env({"TIERCHECK_CAPACITY_SECONDS": "60"}).patience.capacity == 60.0
    for wrong in ("run/tc", "/", "/dev", "/dev/../etc"):
        with pytest.raises(ValueError, match="TIERCHECK_NODE_MEMORY_PATH"):
            Config.from_env({"TIERCHECK_NODE_MEMORY_PATH": wrong})


NODES = {
    f"r{rack}-n{index}": {
        "topology.kubernetes.io/rack": f"r{rack}",
        "kubernetes.io/hostname": f"r{rack}-n{index}",
    }
    for rack in range(3)
    for index in range(4)
}


@given(
    survivors=st.lists(st.sampled_from(sorted(NODES)), max_size=12),
    spares=st.dictionaries(st.integers(0, 8), st.sampled_from(sorted(NODES)), max_size=5),
)
def test_spare_that_is_chosen_crowds_its_rack_least_and_the_choice_is_the_same_every_time(
    survivors: list[str], spares: dict[int, str]
) -> None:
    topology = Topology.build(NODES, PRESETS["generic"])
    chosen = choose_spare(survivors, spares, topology, "rack")
    assert chosen == choose_spare(
        list(reversed(survivors)), dict(sorted(spares.items(), reverse=True)), topology, "rack"
    )
    if chosen is None:
        assert not spares
        return

    def crowd(number: int) -> tuple[int, int]:
        rack, node = NODES[spares[number]]["topology.kubernetes.io/rack"], spares[number]
        there = [name for name in survivors if NODES[name]["topology.kubernetes.io/rack"] == rack]
        return len(there), there.count(node)

    assert crowd(chosen) == min(crowd(number) for number in spares)


def test_spare_on_a_node_whose_rack_is_not_known_is_the_last_choice() -> None:
    topology = Topology.build({**NODES, "bare": {"kubernetes.io/hostname": "bare"}}, PRESETS["generic"])
    assert choose_spare(["r0-n0", "r0-n1", "r1-n0"], {0: "bare", 1: "r0-n2"}, topology, "rack") == 1


# With hostNetwork each pod has ports of its own, which all who need them know.


Object = dict[str, Any]


def on_host(**spec: Any) -> JobView:
    return with_pod(make_job(**spec), hostNetwork=True)


def ports(pod: Object) -> dict[str, int]:
    return {
        entry["name"]: entry["containerPort"] for entry in container(pod, names.SIDECAR_CONTAINER)["ports"]
    }


def seen_at(pod: Object, ip: str, uid: str) -> PodView:
    metadata = {**pod["metadata"], "uid": uid}
    found = parse_pod({**pod, "metadata": metadata, "status": {"podIP": ip, "phase": "Running"}})
    assert found is not None
    return found


def test_pods_outside_of_the_hosts_network_have_the_usual_ports() -> None:
    pod = build_pod(make_job(), 1, 2, (), "s:1")
    assert set(ports(pod).values()) == {names.CONTROL_PORT, names.EXCHANGE_PORT, names.METRICS_PORT}
    assert names.ENV_FIRST_PORT not in env(container(pod, names.SIDECAR_CONTAINER))
    assert seen_at(pod, "10.0.0.1", "u").address == "10.0.0.1"
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
    members = {worker: seen_at(pod, "10.0.0.1", f"u{worker}") for worker, pod in enumerate(made)}
    saved = (SavedMember(worker, "p", f"u{worker}", 0, "n1", (1 - worker,)) for worker in range(2))
    placement = SavedPlacement(1, tuple(saved))
    obs = Observation(
        now=0.0, job=job, pods=tuple(members.values()), nodes={}, reports={}, placement=placement
    )
    told = build_directives(obs, JobRecord(attempt=1), members, placement, phase=Phase.HOLD)
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
