"""During an upgrade, operator and sidecars of two versions understand each other.

`first_release/` holds a directive and a report as the first release wrote them, with something in every
field. They stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tiercheck.protocol.directive import Directive
from tiercheck.protocol.encoding import from_json, to_builtins
from tiercheck.protocol.report import Report

FOLDER = Path(__file__).with_name("first_release")
MESSAGES = [(Directive, "directive.json"), (Report, "report.json")]


def by_msgspec(text: bytes, kind: type[Any]) -> Any:
    return msgspec.json.Decoder(kind).decode(text)


DECODERS = {"msgspec": by_msgspec, "our own": from_json}


def with_more(value: Any) -> Any:
    """As somebody newer would say it: a field more in every object."""
    if isinstance(value, dict):
        return {**{key: with_more(entry) for key, entry in value.items()}, "fromTheFuture": {"a": [1]}}
    return [with_more(entry) for entry in value] if isinstance(value, list) else value


def assert_tells_all(said: Any, wanted: Any, path: str = "$") -> None:
    """`said` has everything that `wanted` has."""
    if isinstance(wanted, dict):
        for key, entry in wanted.items():
            assert key in said, f"{path}.{key} is not said any more, and older neighbours need it"
            assert_tells_all(said[key], entry, f"{path}.{key}")
    elif isinstance(wanted, list):
        assert len(said) == len(wanted), path
        for number, (one, other) in enumerate(zip(said, wanted, strict=True)):
            assert_tells_all(one, other, f"{path}[{number}]")
    else:
        assert said == wanted, path


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("kind", "file"), MESSAGES)
def test_what_the_first_release_wrote_is_understood_and_what_it_reads_is_still_written(
    kind: type[Any], file: str, decoder: str
) -> None:
    text = (FOLDER / file).read_bytes()
    decode: Callable[[bytes, type[Any]], Any] = DECODERS[decoder]
    assert_tells_all(to_builtins(decode(text, kind)), json.loads(text))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(("kind", "file"), MESSAGES)
def test_fields_of_a_newer_neighbour_are_passed_over(kind: type[Any], file: str, decoder: str) -> None:
    text = (FOLDER / file).read_bytes()
    decode: Callable[[bytes, type[Any]], Any] = DECODERS[decoder]
    more = json.dumps(with_more(json.loads(text))).encode()
    assert decode(more, kind) == decode(text, kind)
