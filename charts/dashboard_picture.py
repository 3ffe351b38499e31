"""Draws the Grafana dashboard without Grafana, from what a real Prometheus answers.

Prometheus watches a laptop cluster.

    python -m charts.dashboard_picture [SECONDS]

A job of two workers trains, a trainer crashes, a pod is evicted; Prometheus scrapes operator and sidecars as
the chart's monitors would have it do. Needs `prometheus` on PATH or in PROMETHEUS (Debian: prometheus).
Written to docs/images/dashboard.png.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

import yaml
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from tests.cluster.jobs import Job, Jobs
from tiercheck.protocol import names
from tiercheck_local.cluster import LocalCluster
from tiercheck_local.markers import free_ports
from tiercheck_local.nodespec import NodeSpec

ROOT = Path(__file__).resolve().parents[1]
BOARD = ROOT / "charts" / "tiercheck" / "files" / "dashboards" / "tiercheck.json"
TARGET = ROOT / "docs" / "images" / "dashboard.png"
SETTLE = {
    "TIERCHECK_SETTLE_SECONDS": "0.5",
    "TIERCHECK_LEASE": "default/tiercheck",
    "TIERCHECK_IDENTITY": "operator-0",
}
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#000000", "#999999"]


def targets(cluster: LocalCluster, job: Job) -> list[dict[str, Any]]:
    """As the PodMonitor and the ServiceMonitor would find them."""
    found = [
        {
            "targets": [cluster.metrics_address],
            "labels": {"namespace": "tiercheck-system", "pod": "operator-0"},
        }
    ]
    for pod in job.pods():
        address = (pod.get("status") or {}).get("podIP")
        if address:
            labels = {"namespace": "default", "tiercheck_job": job.name, "pod": pod["metadata"]["name"]}
            found.append({"targets": [f"{address}:{names.METRICS_PORT}"], "labels": labels})
    return found


def query(base: str, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
    expression = expression.replace("$__rate_interval", "10s").replace("$__range", f"{int(end - begin)}s")
    expression = expression.replace("$namespace", ".*").replace("$job", ".*")
    asked = urllib.parse.urlencode({"query": expression, "start": begin, "end": end, "step": 1})
    with urllib.request.urlopen(f"{base}/api/v1/query_range?{asked}", timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def named(legend: str, labels: dict[str, str]) -> str:
    for key, value in labels.items():
        legend = legend.replace("{{" + key + "}}", value)
    return legend


def spelled(unit: str) -> Callable[[float, int], str]:
    """How Grafana spells values of a unit on an axis, roughly."""
    if unit == "s":
        return lambda value, _: f"{value:g} s"
    if unit == "bytes":
        return lambda value, _: f"{value / 2**20:g} MiB"
    if unit == "percentunit":
        return lambda value, _: f"{value:.1%}"
    return lambda value, _: f"{value:g}"


def draw(base: str, begin: float, end: float) -> None:
    """The panels that a person sees first: those of folded rows are left out."""
    panels = [panel for panel in json.loads(BOARD.read_text())["panels"] if not panel.get("panels")]
    height = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    sheet = plt.figure(figsize=(18, height * 0.42))
    for panel in panels:
        place = panel["gridPos"]
        left, width = place["x"] / 24, place["w"] / 24
        bottom, tall = 1 - (place["y"] + place["h"]) / height, place["h"] / height
        if panel["type"] == "row":
            sheet.text(0.012, bottom + tall * 0.3, panel["title"], fontsize=14, fontweight="bold")
            continue
        lines = [
            (named(target.get("legendFormat", ""), series["metric"]), series["values"])
            for target in panel["targets"]
            for series in query(base, target["expr"], begin, end)
        ]
        defaults = panel["fieldConfig"]["defaults"]
        if panel["type"] == "stat":
            axes = sheet.add_axes((left + 0.012, bottom + tall * 0.06, width - 0.024, tall * 0.8))
            axes.set(xticks=[], yticks=[], facecolor="#F6F7F9")
            axes.spines[:].set_visible(False)
            value = round(float(lines[0][1][-1][1]), defaults["decimals"]) if lines else 0.0
            steps = defaults["thresholds"]["steps"]
            colour = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
            shade = {"green": COLOURS[2], "red": COLOURS[1]}.get(colour, COLOURS[0])
            axes.text(0.03, 0.95, panel["title"], ha="left", va="top", fontsize=10, fontweight="bold")
            axes.text(0.5, 0.42, f"{value:g}", ha="center", va="center", fontsize=30, color=shade)
            continue
        axes = sheet.add_axes((left + 0.04, bottom + tall * 0.24, width - 0.055, tall * 0.6))
        axes.set_title(panel["title"], loc="left", fontsize=10, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.yaxis.set_major_formatter(FuncFormatter(spelled(defaults["unit"])))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
        axes.set_ylabel(defaults.get("custom", {}).get("axisLabel", ""), fontsize=8)
        lines = [(label, values) for label, values in lines if any(float(value) for _, value in values)]
        for number, (label, values) in enumerate(lines):
            xs, ys = [float(at) - begin for at, _ in values], [float(value) for _, value in values]
            axes.plot(xs, ys, label=label or None, color=COLOURS[number % len(COLOURS)], linewidth=1.5)
        axes.set_xlim(0, end - begin)
        if lines:
            axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
            axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.13), frameon=False, ncols=4)
        else:
            axes.set_yticks([])
            axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", fontsize=9, color="#999999")
    TARGET.parent.mkdir(exist_ok=True)
    sheet.savefig(TARGET, dpi=70)


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    prometheus = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
    if not prometheus:
        print("no prometheus on PATH or in PROMETHEUS (Debian: prometheus)", file=sys.stderr)
        return 1
    nodes = NodeSpec.load(ROOT / "examples" / "clusters" / "two-racks.yaml")
    with tempfile.TemporaryDirectory() as name, LocalCluster(Path(name) / "cluster", nodes) as cluster:
        folder = Path(name)
        cluster.apply_crds(ROOT / "crds")
        cluster.start_operator(SETTLE)
        jobs = Jobs(cluster, folder, SETTLE)
        job = jobs.start(workers=2, env={"TAIL": "100000"}, spares=1)
        job.wait_trained(1, "local")
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {
                    "job_name": "all",
                    "honor_labels": True,
                    "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        (port,) = free_ports(1)
        base = f"http://127.0.0.1:{port}"
        command = [
            prometheus,
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with open(folder / "prometheus.log", "wb") as log:
            process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        try:
            begin = time.time()
            faults = [(0.3, lambda: cluster.faults.kill_container_process(job.pod_of(1)))]
            faults += [(0.6, lambda: cluster.faults.evict_pod(job.pod_of(1)) or 0)]
            while (passed := time.time() - begin) < seconds:
                written = folder / "targets.tmp"
                written.write_text(json.dumps(targets(cluster, job)))
                written.rename(folder / "targets.json")
                if faults and passed > faults[0][0] * seconds:
                    faults.pop(0)[1]()
                time.sleep(1)
            draw(base, begin, time.time())
        finally:
            process.terminate()
            process.wait(30)
        jobs.clean_up()
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
