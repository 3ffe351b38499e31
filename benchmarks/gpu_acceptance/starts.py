"""Checks that a warm start stays possible with a CUDA build of torch.

A driver that was opened before a fork is lost to the child.
"""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.amounts import MIB, bytes_text, seconds_text
from benchmarks.gpu_acceptance.checks import Found, Setting
from benchmarks.scale import ROOT

_WARM = """
import json, os, sys, time
began = time.perf_counter()
import torch, torch.distributed, torch.distributed.run, torch._dynamo
import tiercheck.trainer.checkpointer
from tiercheck.warm.ranks import _cuda_is_spoilt
found = {"imports": time.perf_counter() - began}
reading, writing = os.pipe()
if os.fork() == 0:
    began = time.perf_counter()
    told = {"spoilt": _cuda_is_spoilt(), "works": False, "error": ""}
    try:
        told["works"] = float(torch.ones(1, device=sys.argv[1]).sum()) == 1
    except Exception as error:
        told["error"] = str(error)[:200]
    os.write(writing, json.dumps({**told, "kernel": time.perf_counter() - began}).encode())
    os._exit(0)
os.close(writing)
found["threads"] = len(os.listdir("/proc/self/task"))
private = [l for l in open("/proc/self/smaps_rollup") if l.startswith("Private")]
found["private"] = 1024 * sum(int(l.split()[1]) for l in private)
print(json.dumps({**found, **json.loads(os.read(reading, 4096))}))
"""


def warm(setting: Setting) -> Found:
    """P6. What the launcher imports beside a running command, and what a rank does that torchrun starts from
    it."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WARM, setting.device],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return Found(f"it ended with {done.returncode}: {done.stderr[-200:]}", good=False)
    found = json.loads(done.stdout)
    alone = found["threads"] == 1
    told = "driver touched" if found["spoilt"] else "no driver touched"
    works = "the child computes" if found["works"] else f"the child fails: {found['error']}"
    return Found(
        f"imports {seconds_text(found['imports'])}, {found['threads']} threads after the fork, {told}, "
        f"{works}, its first kernel after "
        f"{seconds_text(found['kernel'])}, {bytes_text(max(found['private'], MIB))} of private memory",
        good=found["works"] and not found["spoilt"] and alone,
    )
