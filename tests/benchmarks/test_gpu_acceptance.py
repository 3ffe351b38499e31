"""The GPU acceptance hides nothing, and no speed decides, as far as it runs without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_acceptance import runner
from benchmarks.gpu_acceptance.checks import (
    CHECKS,
    Check,
    Found,
    Result,
    Setting,
    Status,
    judge,
    page,
    summary,
)
from benchmarks.harness import ROOT, Figure

NAMES = [*(f"C{number}" for number in range(1, 11)), *(f"P{number}" for number in range(1, 9))]
ABSENT = ("msgspec", "rich", "aiohttp", "xxhash", "kubernetes", "numpy")
"""What a plain image of torch may lack."""
SLOW, FAST = Figure("slow", ratio=3.0, bound=2.0), Figure("fast", ratio=1.0, bound=2.0)
CORRECT, SPEED = Check("promise", "module.function"), Check("promise", "module.function", speed=True)


def accept(folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Its exit code and results, in a plain image of torch."""
    for name in ABSENT:
        (folder / f"{name}.py").write_text(f"raise ModuleNotFoundError('{name} is not in this image')\n")
    out = folder / "found.json"
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_acceptance",
        "--cpu",
        "--quick",
        "--json",
        str(out),
        *flags,
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert out.exists(), done.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    assert "| check | promise |" in done.stdout
    return done.returncode, found


@pytest.mark.timeout(3600)  # a busy machine may be slow
def test_without_a_gpu_every_check_passes_or_says_why_it_was_not_run(tmp_path: Path) -> None:
    code, found = accept(tmp_path)
    checks = found["checks"]
    assert {name: check["text"] for name, check in checks.items() if check["status"] == "failed"} == {}
    assert code == 0
    assert list(checks) == NAMES
    ends = {name: check["status"] for name, check in checks.items()}
    assert [name for name in NAMES if ends[name] == "passed"] == ["C1", "C2", "C3", "C7", "C8", "C10", "P6"]
    assert [name for name in NAMES if ends[name] == "measured"] == ["P2", "P3", "P4", "P5", "P7"]
    assert all("needs a GPU: " in check["text"] for check in checks.values() if check["status"] == "skipped")
    assert all(checks[name]["figures"] for name in ("P2", "P3", "P4", "P5", "P7"))
    assert "21 of 21 exact" in checks["C2"]["text"]
    assert found["machine"]["packages"]["torch"]
    assert found["machine"]["commit"]


@pytest.mark.timeout(1800)
def test_bit_that_flips_in_what_is_restored_fails_the_checks_that_restore_and_no_other(
    tmp_path: Path,
) -> None:
    code, found = accept(tmp_path, "--only", "C8,P5,C7", "--spoil")
    ends = {name: check["status"] for name, check in found["checks"].items()}
    assert ends == {"C8": "failed", "P5": "measured", "C7": "failed"}
    assert code == 2


def test_check_whose_process_dies_has_failed_and_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first process reports C1 and dies in C2."""
    begun: list[list[str]] = []

    def command(names: Sequence[str], setting: Setting, out: Path) -> list[str]:
        begun.append(list(names))
        ok = [json.dumps(Result(name, "", Status.PASSED, "").plain()) for name in names]
        reported = "\n".join(ok[:1] if "C1" in names else ok)
        end = "os.abort()" if "C1" in names else "pass"
        return [sys.executable, "-c", f"import os; open({str(out)!r}, 'w').write({reported!r}); {end}"]

    monkeypatch.setattr(runner, "command_of", command)
    told: list[str] = []
    results = runner.run_all(
        ["C1", "C2", "C3", "C4", "C7"],
        Setting("cpu", True, tmp_path),
        lambda result: told.append(result.name),
    )
    ends = [(result.name, result.status.value) for result in results]
    assert ends == [("C1", "passed"), ("C2", "failed"), ("C3", "passed"), ("C4", "skipped"), ("C7", "passed")]
    assert "SIGABRT" in results[1].text
    assert begun == [["C1", "C2", "C3", "C7"], ["C3", "C7"]]
    assert sorted(told) == ["C1", "C2", "C3", "C4", "C7"]
    assert not list(tmp_path.iterdir()), "what a process has left behind goes with it"


def test_on_a_gpu_each_check_has_a_process_of_its_own_and_none_begins_when_time_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun: list[Sequence[str]] = []

    def one(names: Sequence[str], setting: Setting) -> list[Result]:
        begun.append(names)
        return [Result(name, "", Status.PASSED, "") for name in names]

    monkeypatch.setattr(runner, "run_apart", one)
    setting = Setting("cuda", False, tmp_path)
    runner.run_all(["C1", "C4", "P1"], setting, lambda result: None)
    assert begun == [["C1"], ["C4"], ["P1"]]
    late = runner.run_all(["C1", "P1"], setting, lambda result: None, budget=-1.0)
    assert [(result.status, "no time left" in result.text) for result in late] == [(Status.SKIPPED, True)] * 2


def test_check_that_raises_is_a_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    setting = Setting("cpu", True, tmp_path)
    result = runner.run_one("C1", Check("promise", "copies.no_such_function"), setting)
    assert result.status is Status.FAILED
    assert "no_such_function" in result.text


@pytest.mark.parametrize(
    ("check", "found", "gpu", "status"),
    [
        (CORRECT, Found(""), False, Status.PASSED),
        (CORRECT, Found("", good=False), True, Status.FAILED),
        (SPEED, Found("", figures=(FAST,)), True, Status.PASSED),
        (SPEED, Found("", figures=(FAST, SLOW)), True, Status.FAILED),
        (SPEED, Found("", figures=(SLOW,)), False, Status.MEASURED),
        (SPEED, Found("wrong bytes", good=False, figures=(FAST,)), False, Status.FAILED),
        (SPEED, Found("no bound", figures=(Figure("a", ratio=1.0),)), True, Status.MEASURED),
    ],
)
def test_speeds_are_judged_on_a_gpu_alone_and_wrong_bytes_everywhere(
    check: Check, found: Found, gpu: bool, status: Status
) -> None:
    assert judge(check, found, gpu) is status


def test_table_shows_each_failure_and_the_bound_of_each_figure() -> None:
    machine: Mapping[str, Any] = {
        "gpu": "a GPU",
        "processor": "a processor",
        "cores": 2,
        "memory_bytes": 4 << 30,
        "system": "Linux",
        "python": "3.11",
        "packages": {"torch": "2.13"},
        "commit": "abc",
    }
    results = [
        Result(
            "P1",
            "fast",
            Status.FAILED,
            "found | this",
            (Figure("rate", ratio=3.0, bound=2.0, unit=" ms"),),
            1.0,
        ),
        Result("C4", "right", Status.SKIPPED, "no GPU"),
    ]
    text = page(machine, "command", results)
    assert "| P1 | fast | **FAILED** | found \\| this | rate 3 ms (must be ≤ 2 ms) | 1 s |" in text
    assert "of commit abc" in text
    assert "torch 2.13" in text
    assert summary(results) == "2 checks: 1 failed, 1 skipped."


@pytest.mark.parametrize("figures", [(), (Figure("rate", ratio=3.0, bound=2.0),)])
def test_result_survives_the_file_between_processes(figures: tuple[Figure, ...]) -> None:
    result = Result("P1", "fast", Status.MEASURED, "found", figures, 1.5)
    assert Result.read(json.loads(json.dumps(result.plain()))) == result


def test_page_of_the_docs_names_every_check_and_nothing_else() -> None:
    text = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    rows = re.findall(r"^\| ([CP]\d+) \| (.*?) \|", text, re.MULTILINE)
    # Some are named again below, with what is expected of them.
    assert dict(reversed(rows)) == {name: check.promise for name, check in CHECKS.items()}
    assert list(CHECKS) == NAMES
