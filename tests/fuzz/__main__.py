"""Fuzzes every target for its part of the time, longer than the suite does.

`python -m tests.fuzz SECONDS [TARGET ...]`; `make fuzz` runs it.

With atheris (https://github.com/google/atheris), if it is installed, coverage leads the mutations, and a
target runs in a process of its own; else they are random. What fails is written into a file, and its name
said.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from tests.fuzz.targets import TARGETS

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, -(10**18), 1.5, float("inf"), float("nan"), "", "x",
    "9" * 5000, "٣", "\ud800", "../../x",
    [], [[]], {}, {"a": 1}, [0], [1, 2, 3], [-1, 5], ["a", "b"], [None, None], "1_0", " 1",
)  # fmt: skip
_DEEP = (b"[", b'{"a":', b'[{"a":', b'{"version":')


def mutate(text: bytes, numbers: random.Random) -> bytes:
    """Another text; of most kinds, one that is still JSON."""
    kind = numbers.random()
    if kind < 0.6:
        return _of_value(text, numbers)
    if kind < 0.9:
        return _of_bytes(text, numbers)
    if kind < 0.95:
        at = numbers.randrange(len(text) + 1)
        return text[:at] + numbers.choice(_DEEP) * numbers.choice((10, 150, 5000)) + text[at:]
    return numbers.randbytes(numbers.randrange(60))


def _of_value(text: bytes, numbers: random.Random) -> bytes:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return _of_bytes(text, numbers)
    return json.dumps(_value(value, numbers, 0)).encode()


def _value(value: Any, numbers: random.Random, depth: int) -> Any:
    if numbers.random() < 0.1 or depth > 9:
        return numbers.choice(ODD)
    if isinstance(value, dict) and value:
        kept = {name: entry for name, entry in value.items() if numbers.random() > 0.06}
        changed = {
            name: _value(entry, numbers, depth + 1) if numbers.random() < 0.35 else entry
            for name, entry in kept.items()
        }
        if numbers.random() < 0.05:
            changed[numbers.choice(("__metadata__", "pieces", "__pad1", "x"))] = numbers.choice(ODD)
        return changed
    if isinstance(value, list) and value:
        entries = [_value(entry, numbers, depth + 1) if numbers.random() < 0.4 else entry for entry in value]
        return entries[: numbers.randrange(len(entries) + 1)] if numbers.random() < 0.2 else entries
    return numbers.choice(ODD) if numbers.random() < 0.7 else value


def _of_bytes(text: bytes, numbers: random.Random) -> bytes:
    changed = bytearray(text)
    for _ in range(numbers.randrange(1, 6)):
        at = numbers.randrange(len(changed) + 1)
        kind = numbers.random()
        if kind < 0.5 and at < len(changed):
            changed[at] ^= 1 << numbers.randrange(8)
        elif kind < 0.75:
            del changed[at : at + numbers.randrange(1, 9)]
        else:
            changed[at:at] = numbers.randbytes(numbers.randrange(1, 5))
    return bytes(changed)


_MEMORY = 4 << 30
"""Bytes of address space beyond which a target fails."""
_LONGEST = 10.0
"""Seconds for one text."""


def fuzz(name: str, seconds: float, seed: int) -> int:
    """How many texts were tried. Raises what the target raises, or TimeoutError; the text is in a file."""
    target, numbers, tried = TARGETS[name], random.Random(seed), 0
    corpus = list(target.samples)
    until = time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        text = mutate(numbers.choice(corpus), numbers)
        try:
            target.run(text)
            if time.monotonic() - began > _LONGEST:
                raise TimeoutError(f"{time.monotonic() - began:.0f} s")
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                path = Path(tempfile.gettempdir()) / f"fuzz-{hashlib.sha256(text).hexdigest()[:12]}"
                path.write_bytes(text)
                print(f"{name}: {path} ends in {type(error).__name__}")
            raise
        tried += 1
        if len(corpus) < 500 and tried % 50 == 0 and len(text) < 20_000:
            corpus.append(text)  # so that mutations add up
    return tried


def fuzz_by_coverage(name: str, seconds: float) -> None:
    """Ends the process."""
    import atheris

    atheris.instrument_all()
    folder = Path(tempfile.mkdtemp(prefix="tiercheck-corpus-"))
    for number, sample in enumerate(TARGETS[name].samples):
        (folder / str(number)).write_bytes(sample)
    atheris.Setup(
        [
            sys.argv[0],
            f"-max_total_time={max(1, int(seconds))}",
            "-rss_limit_mb=4096",
            "-timeout=10",
            str(folder),
        ],
        TARGETS[name].run,
    )
    atheris.Fuzz()


def main(arguments: list[str]) -> int:
    """0; 1 if a target failed; 2 if the command line is wrong."""
    by_coverage = arguments[:1] == ["--by-coverage"]
    try:
        seconds = float(arguments[by_coverage])
        names = arguments[by_coverage + 1 :] or list(TARGETS)
        each = seconds / len([TARGETS[name] for name in names])
    except (IndexError, ValueError, KeyError):
        print(
            f"usage: python -m tests.fuzz SECONDS [TARGET ...]\ntargets: {', '.join(TARGETS)}",
            file=sys.stderr,
        )
        return 2
    if by_coverage:
        fuzz_by_coverage(names[0], each)
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    failed = 0
    for name in names:
        if importlib.util.find_spec("atheris") is not None:
            command = [sys.executable, "-m", "tests.fuzz", "--by-coverage", str(each), name]
            failed += subprocess.run(command, check=False).returncode != 0
            continue
        try:
            print(f"{name}: {fuzz(name, each, random.randrange(2**32)):,} texts")
        except Exception:
            traceback.print_exc()
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
