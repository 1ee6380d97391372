"""HTTP connections to the hosts of signed URLs, each of which serves many GETs.

Owns: which connection a GET gets, and what becomes of it afterwards.  One is kept only after an
answer that was read to its end, and given out again only for a while: servers close what is idle.
If it was closed all the same, the GET fails before any answer and is sent again on a new one; no
other failure is tried again here.  What is asked of a host, and what its answers mean, is not known
here.

Thread-safe.  A process that was forked opens its own.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import SplitResult

MOST_IDLE_S = 3.0  # common servers keep an idle one for five seconds or more
MOST_IDLE = 32  # that are kept
# What befalls a GET on a connection that its server has closed.
_CLOSED = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)


class Patience(NamedTuple):
    """How long connecting may take, and each silence afterwards."""

    connect_s: float
    silence_s: float


class _Kept(NamedTuple):
    where: tuple[str, str]  # scheme, and host with its port
    since: float
    connection: http.client.HTTPConnection


class _Idle:
    """Those that wait for their next GET."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[_Kept] = []  # in the order in which they were used last

    def give(self, where: tuple[str, str], connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._kept.append(_Kept(where, time.monotonic(), connection))
            too_many = self._kept[:-MOST_IDLE]
            del self._kept[:-MOST_IDLE]
        for kept in too_many:
            kept.connection.close()

    def take(self, where: tuple[str, str]) -> http.client.HTTPConnection | None:
        """One to this place; those that are too old are closed."""
        oldest = time.monotonic() - MOST_IDLE_S
        with self._lock:
            old = [kept for kept in self._kept if kept.since < oldest]
            del self._kept[: len(old)]
            found = next((kept for kept in reversed(self._kept) if kept.where == where), None)
            if found is not None:
                self._kept.remove(found)
        for kept in old:
            kept.connection.close()
        return None if found is None else found.connection


_idle = _Idle()


def _forget() -> None:
    global _idle
    _idle = _Idle()


os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def answer(
    url: SplitResult, headers: Mapping[str, str], patience: Patience
) -> Iterator[http.client.HTTPResponse]:
    """The answer to a GET of `url`, while its body is read.  OSError or HTTPException where there
    is none."""
    connection, response = _ask(url, headers, patience)
    try:
        yield response
    except BaseException:
        connection.close()
        raise
    if response.isclosed() and not response.will_close:  # nothing of it is left to be read
        _idle.give((url.scheme, url.netloc), connection)
    else:
        connection.close()


def _ask(
    url: SplitResult, headers: Mapping[str, str], patience: Patience
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    used = _idle.take((url.scheme, url.netloc))
    if used is not None:
        try:
            return used, _send(used, url, headers, patience)
        except _CLOSED:
            pass
    fresh = _connection(url, patience)
    return fresh, _send(fresh, url, headers, patience)


def _send(
    connection: http.client.HTTPConnection,
    url: SplitResult,
    headers: Mapping[str, str],
    patience: Patience,
) -> http.client.HTTPResponse:
    target = f"{url.path}?{url.query}" if url.query else url.path
    try:
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(patience.silence_s)
        connection.request("GET", target, headers=dict(headers))
        return connection.getresponse()
    except BaseException:
        connection.close()
        raise


def _connection(url: SplitResult, patience: Patience) -> http.client.HTTPConnection:
    if url.scheme == "https":
        return http.client.HTTPSConnection(url.netloc, timeout=patience.connect_s, context=_tls())
    return http.client.HTTPConnection(url.netloc, timeout=patience.connect_s)


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all: making it reads the certificates of the system."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


__all__ = ["Patience", "answer"]
