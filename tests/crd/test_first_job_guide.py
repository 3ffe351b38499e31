"""The guide for new users is true: its script goes on after a stop, and its job is accepted."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import yaml

from tests.crd.crd_api import ROOT, Api

GUIDE = (ROOT / "docs" / "start" / "first-job.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    return found[1]


def run(script: Path, steps: int) -> str:
    """Runs the guide's script up to `steps`, and has it print where it started and where its weights
    ended.
    """
    text = block("python").replace("range(start, 200)", f"range(start, {steps})")
    script.write_text(
        text + "\nprint(start, sum(p.double().sum().item() for p in model.parameters()).hex())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_script_of_the_guide_goes_on_after_a_stop_with_the_same_result(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "halves").mkdir()
    with ThreadPoolExecutor() as side_by_side:  # most of their time is torch's start
        undisturbed = side_by_side.submit(run, tmp_path / "whole" / "train.py", 110)
        run(tmp_path / "halves" / "train.py", 70)
        second = run(tmp_path / "halves" / "train.py", 110).split()
        whole = undisturbed.result().split()
    assert whole[0] == "0"
    assert second[0] == "50"
    assert second[1] == whole[1]


def test_job_of_the_guide_is_accepted_as_it_stands(api: Api) -> None:
    api.create(yaml.safe_load(block("yaml")), dryRun="All", fieldValidation="Strict")


def test_sentences_of_the_guide_are_those_of_the_api() -> None:
    crd = re.sub(r"\s+", " ", (ROOT / "crds" / "tiercheckjobs.yaml").read_text())
    table = GUIDE.partition("| it says | do |")[2].partition("Trouble while it runs")[0]
    said = [
        line.split("|")[1].strip()
        for line in table.splitlines()
        if line.startswith("| ") and "---" not in line
    ]
    assert len(said) > 5
    for sentence in said:
        for part in sentence.split("..."):
            if part.strip() and not sentence.startswith("unknown field"):
                assert part.strip(" ,") in crd, part
