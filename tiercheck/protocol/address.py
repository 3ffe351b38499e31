"""Where a sidecar is reached: an IP address, with its first port where that is not the usual one (pods in the host's network)."""

from __future__ import annotations

from tiercheck.protocol import names


def join_address(host: str, first_port: int | None) -> str:
    """`first_port` None: the usual ones."""
    if first_port is None:
        return host
    return f"[{host}]:{first_port}" if ":" in host else f"{host}:{first_port}"


def split_address(address: str) -> tuple[str, int | None]:
    """The IP address and the first port. Raises ValueError."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]:")
        return host, int(port)
    if address.count(":") == 1:
        host, _, port = address.partition(":")
        return host, int(port)
    return address, None


def endpoint(address: str, usual_port: int) -> tuple[str, int]:
    """Host and port to connect to for what usually listens at `usual_port`; a sidecar's ports follow one another. Raises ValueError."""
    host, first_port = split_address(address)
    return host, usual_port if first_port is None else first_port + usual_port - names.CONTROL_PORT
