"""The guide for new users is true: its script goes on after a stop, and its job is accepted."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from tests.crd.crd_api import ROOT, Api
from tests.lives import Lives

GUIDE = (ROOT / "docs" / "start" / "first-job.md").read_text()


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)
    assert found is not None
    return found[1]


def run(lives: Lives, folder: Path, steps: int) -> tuple[int, str]:
    """Where the guide's script starts in this folder, and where its weights are after so many steps."""
    script = folder / "train.py"
    script.write_text(
        f"import json, os\nos.chdir({str(folder)!r})\n"
        + block("python").replace("range(start, 200)", f"range(start, {steps})")
        + "\nend = sum(p.double().sum().item() for p in model.parameters()).hex()"
        + "\nprint(json.dumps({'start': start, 'end': end}))\n"
    )
    ((said,),) = lives.run(["tiercheck"], [script])
    return said["start"], said["end"]


def test_script_of_the_guide_goes_on_after_a_stop_with_the_same_result(lives: Lives, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "halves").mkdir()
    start, end = run(lives, tmp_path / "whole", 110)
    assert start == 0
    run(lives, tmp_path / "halves", 70)
    assert run(lives, tmp_path / "halves", 110) == (50, end)


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
