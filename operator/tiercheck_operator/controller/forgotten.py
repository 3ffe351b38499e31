"""Trainer containers that their kubelet, though well, never starts again: only another pod helps then.

Kubelets 1.35.0 to 1.35.3 do that with pods like ours, a native sidecar with a startup probe beside the trainer,
once the kubelet itself was restarted: kubernetes/kubernetes#136969, mended by #137146 (1.36.0) and #137885
(1.35.4).
"""

from __future__ import annotations

import re

from tiercheck.protocol.report import TrainerState
from tiercheck_operator.model.observed import ContainerState, Observation, PodView

_FAULTY = re.compile(r"v?1\.35\.[0-3](?!\d)")
_FAULTY_LIMIT = 60.0
"""Seconds. A kubelet that only waits says so: the container is in CrashLoopBackOff then."""
_LIMIT = 600.0
"""The same with any other kubelet, whose reason nobody knows: an image may be pulled anew."""


def forgotten(obs: Observation, pod: PodView) -> str:
    """What there is to say about it, as a clause; empty: the pod's trainer runs, or is going to."""
    container, node = pod.trainer, obs.nodes.get(pod.node or "")
    ended = container.state is ContainerState.ENDED and container.exit_code != 0 and container.restartable
    if not ended or container.since is None or pod.phase != "Running" or node is None or node.lost:
        return ""
    report = obs.report(pod)
    if report is not None and report.trainer.state is TrainerState.RUNNING:
        return ""
    faulty = _FAULTY.match(node.kubelet) is not None
    seconds = obs.now - container.since
    if seconds <= (_FAULTY_LIMIT if faulty else _LIMIT):
        return ""
    known = " (kubernetes/kubernetes#136969: upgrade it to 1.35.4 or newer)" if faulty else ""
    told = f"its trainer container ended {seconds:.0f} s ago"
    return f"{told}, and its kubelet {node.kubelet} does not start it again{known}"
