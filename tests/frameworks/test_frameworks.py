"""Promise: each framework's example comes back from SIGKILL, wherever in an epoch, with the same losses bit for bit."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

CASES = {
    # example: (what it needs, modules worth importing once, last step, kills: in mid-epoch, at the end of one, in the next)
    "huggingface": (
        ["transformers", "accelerate"],
        "transformers,transformers.models.llama,accelerate",
        18,
        (4, 7, 12),
    ),
    "lightning": (["lightning", "torchdata"], "lightning,torchdata.stateful_dataloader", 36, (5, 13, 24)),
    "accelerate": (["accelerate"], "accelerate", 18, (4, 7, 12)),
    "plain-loop": (["torchdata"], "torchdata.stateful_dataloader", 18, (4, 7, 12)),
}


@pytest.mark.parametrize("name", CASES)
def test_example_comes_back_from_kills_with_equal_losses(name: str, tmp_path: Path) -> None:
    needs, modules, last, kills = CASES[name]
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -c constraints.txt -e '.[frameworks]'")
    script = ROOT / "examples" / "frameworks" / name / "train.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("lives.py")),
            modules,
            str(script),
            str(tmp_path),
            *map(str, kills),
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    whole, *lives = map(json.loads, done.stdout.splitlines())
    assert [line["step"] for line in whole] == list(range(1, last + 1))
    assert len({line["loss_hex"] for line in whole}) == last  # so that a step told for another would be seen
    for life, kill in zip(lives, (*kills, None), strict=True):
        first = life[0]["step"]
        assert life == whole[first - 1 : kill]
    assert lives[-1][0]["step"] > kills[0]  # it went on, and did not begin anew
