#!/usr/bin/python3
"""runc, for a machine that may not lower OOM scores or raise limits: asks for neither."""

import contextlib
import json
import os
import sys
from pathlib import Path

words = sys.argv[1:]
if "create" in words:
    bundle = next((words[i + 1] for i, word in enumerate(words) if word == "--bundle"), ".")
    path = Path(bundle, "config.json")
    config = json.loads(path.read_text())
    process = config["process"]
    process["oomScoreAdj"] = max(0, process.get("oomScoreAdj") or 0)
    with contextlib.suppress(KeyError):
        del process["rlimits"]
    path.write_text(json.dumps(config))
os.execv("/usr/sbin/runc", ["runc", *words])
