"""Sets up a virtual environment and says what it installs and how far it is: `set_up.py VENV EXTRA`.

Runs with the standard library alone, before anything is installed. `TORCH_INDEX` in the environment is the
URL of an index that has torch without CUDA; it is asked for torch only.
"""

import os
import subprocess
import sys
import time
import venv
from collections import deque
from pathlib import Path

NEEDS = {
    "demo": "what `make demo` needs, about 1.5 GB, most of it torch",
    "dev": "what tests and benchmarks need, about 2.4 GB, with the training frameworks",
}
EVERY = 5.0
"""Seconds between two lines about progress."""


def install(python: Path, *arguments: str) -> None:
    """pip install, with a line now and then. Ends this process with pip's last lines if it fails."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--constraint", "constraints.txt", *arguments]
    packages, said, last = 0, time.monotonic(), deque[str](maxlen=15)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            last.append(line)
            verb, _, rest = line.strip().partition(" ")
            if line.startswith("Installing collected packages"):
                print(f"  {packages} packages found; installing", flush=True)
            elif verb == "Collecting":
                packages += 1
                if time.monotonic() - said > EVERY:
                    said = time.monotonic()
                    print(f"  {packages} packages found; looking for {rest.partition(' (')[0]}", flush=True)
    if pip.returncode:
        sys.exit(f"pip failed. Its last lines:\n{''.join(last)}")


def main(folder: Path, extra: str) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - runs with whatever Python is here
        sys.exit("TierCheck needs Python 3.11 or newer; set PYTHON=, as in `make demo PYTHON=python3.12`")
    print(f"Installs into {folder}: {NEEDS[extra]}. This takes some minutes, once.", flush=True)
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    if index := os.environ.get("TORCH_INDEX"):
        install(python, "--index-url", index, "--no-deps", "torch")
    install(python, "--editable", f".[{extra}]")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
