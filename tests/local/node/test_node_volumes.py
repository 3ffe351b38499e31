"""A simulated node keeps hostPath volumes on one machine's disk, in memory of its own."""

from __future__ import annotations

from pathlib import Path

from tiercheck_local.node.environment import Roots


def roots(tmp_path: Path, node: str) -> Roots:
    return Roots(memory=tmp_path / node, scratch=tmp_path / "scratch" / node, claims=tmp_path / "claims")


def test_node_memory_is_each_nodes_own_and_gone_when_it_is_killed(tmp_path: Path) -> None:
    one, other = roots(tmp_path, "one"), roots(tmp_path, "other")
    for path in (Path("/dev/shm/tiercheck/job"), Path("/run/tiercheck/job")):
        assert one.on_node(path) != other.on_node(path)
        assert one.on_node(path).is_relative_to(one.memory)
        one.on_node(path).mkdir(parents=True)
    one.remove_all()
    assert not one.on_node(Path("/run/tiercheck/job")).exists()


def test_node_memory_outlives_the_pods_of_a_node(tmp_path: Path) -> None:
    node = roots(tmp_path, "one")
    folder = node.on_node(Path("/dev/shm/tiercheck/job"))
    folder.mkdir(parents=True)
    node.remove("0b0e1b9e-6ad5-4a43-9d0c-6b2c4d9f7a10")
    assert folder.exists()


def test_any_other_host_path_is_the_machines(tmp_path: Path) -> None:
    node = roots(tmp_path, "one")
    for path in (tmp_path / "store", Path("/srv/data"), Path("/dev/shmx"), Path("/running")):
        assert node.on_node(path) == path
