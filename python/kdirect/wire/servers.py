"""What `bootstrap.servers` says: addresses of brokers, without asking any of them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kdirect.errors import BrokerUnavailableError, ConfigError, KdirectError

_SERVER = re.compile(r"(?:([a-zA-Z_]+)://)?\[?([0-9a-zA-Z\-%._:]*[^\]:])\]?:([0-9]+)\Z")


def parse_servers(servers: Iterable[str]) -> list[tuple[str, int]]:
    """``(host, port)`` of each ``host:port``, also ``[ipv6]:port`` and ``PLAINTEXT://host:port``;
    ConfigError names a wrong one."""
    out = []
    for server in servers:
        found = _SERVER.match(server.strip())
        if not found or not 0 < int(found[3]) < 65536:
            raise ConfigError(
                f"option bootstrap.servers: {server!r} is not host:port",
                hint="give for example localhost:9092",
            )
        if found[1] and found[1].upper() != "PLAINTEXT":
            raise ConfigError(
                f"option bootstrap.servers: {server!r} asks for {found[1]}",
                hint="only PLAINTEXT listeners are supported",
            )
        out.append((found[2], int(found[3])))
    if not out:
        raise ConfigError(
            "option bootstrap.servers is empty",
            hint="give host:port of a broker, for example localhost:9092",
        )
    return out


def error_of_all(errors: list[KdirectError]) -> KdirectError:
    """The error to show of one attempt on each server: that of the only one, or all together."""
    if len(errors) == 1:
        return errors[0]
    text = "; ".join(e.message for e in errors)
    return BrokerUnavailableError(
        f"none of the bootstrap servers answers: {text}",
        hint="start a broker, or correct bootstrap.servers",
    )
