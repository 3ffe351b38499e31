"""The release goes and comes back while a job trains, and at the end nothing is left of it."""

from __future__ import annotations

from play import Play, Report
from stage import SYSTEM, TRAINING, Stage, job, wait_until_gone
from training import LossReader, Training

_DEFINITIONS = "tiercheckjobs.tiercheck.io", "tiercheckpolicies.tiercheck.io"


def test_uninstalled_release_leaves_jobs_training_and_nothing_of_its_own(
    stage: Stage, losses: LossReader, report: Report
) -> None:
    training = Training(stage.testbed, losses, TRAINING, "orphan")
    training.apply(job("orphan", workers=2))

    def uninstall() -> None:
        stage.helm.uninstall("tiercheck")
        wait_until_gone(stage.testbed, SYSTEM, "pods")
        kinds = "leases.coordination.k8s.io,secrets,configmaps,services"
        left = stage.testbed.kubectl("-n", SYSTEM, "get", kinds, "-o", "name").split()
        assert not [name for name in left if "tiercheck" in name], left
        at = training.step
        training.wait_for_step(at + 10)
        stage.install()

    Play(training, report).leave_alone("helm uninstall (definitions are kept), then install", uninstall)
    stage.testbed.kubectl("-n", TRAINING, "delete", "tcj", "orphan")
    training.stop_watching()
    wait_until_gone(stage.testbed, TRAINING, "pods,tcj")


def test_definitions_go_when_they_are_deleted(stage: Stage) -> None:
    stage.helm.uninstall("tiercheck")
    stage.testbed.kubectl("delete", "crd", *_DEFINITIONS)
    left = stage.testbed.kubectl(
        "get", "crd,clusterroles,clusterrolebindings,validatingwebhookconfigurations", "-o", "name"
    )
    assert "tiercheck" not in left
