"""An address says where a sidecar is, whether or not its ports are the usual ones."""

from __future__ import annotations

import pytest

from tiercheck.protocol import names
from tiercheck.protocol.names import endpoint, join_address, split_address


@pytest.mark.parametrize("host", ["10.1.2.3", "fd00::1", ""])
@pytest.mark.parametrize("port", [None, 12000])
def test_what_was_joined_is_split_again(host: str, port: int | None) -> None:
    if host or port is None:
        assert split_address(join_address(host, port)) == (host, port)


def test_address_with_the_usual_ports_is_what_it_always_was() -> None:
    assert join_address("10.1.2.3", None) == "10.1.2.3"
    assert join_address("fd00::1", 12000) == "[fd00::1]:12000"


def test_ports_of_its_own_follow_one_another_as_the_usual_ones_do() -> None:
    assert endpoint("10.1.2.3", names.EXCHANGE_PORT) == ("10.1.2.3", names.EXCHANGE_PORT)
    assert endpoint("10.1.2.3:12000", names.CONTROL_PORT) == ("10.1.2.3", 12000)
    assert endpoint("[fd00::1]:12000", names.EXCHANGE_PORT) == ("fd00::1", 12001)
