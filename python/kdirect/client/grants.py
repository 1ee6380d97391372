"""What a grant of write access must look like before anything is written under it.

The broker's answer comes from outside of the process: an address, a key or a length that cannot be
is an error here, and never reaches the queue pair.
"""

from __future__ import annotations

from kdirect.errors import ProtocolError

FILE_IDS = 1 << 16
MOST_ADDRESS = (1 << 63) - 1
MOST_KEY = (1 << 32) - 1
HINT = "broker and client are of different versions"


def check_grant(
    name: str, file_id: int, address: int, rkey: int, length: int, position: int
) -> None:
    """ProtocolError unless this may be a file of `length` bytes, written from `position` on."""
    if not 0 <= file_id < FILE_IDS:  # the router's table of writers has no bounds of its own
        raise ProtocolError(f"{name}: the broker granted file {file_id}", hint=HINT)
    if not 0 <= position <= length:
        raise ProtocolError(
            f"{name}: the broker granted position {position} of a file of {length} bytes", hint=HINT
        )
    if address < 0 or address > MOST_ADDRESS - length or not 0 <= rkey <= MOST_KEY:
        raise ProtocolError(
            f"{name}: the broker granted {length} bytes at address {address} under key {rkey}",
            hint=HINT,
        )


def check_shared_word(name: str, address: int, rkey: int) -> None:
    """ProtocolError unless an atomic on a shared head's word may be posted to this address."""
    if address <= 0 or address > MOST_ADDRESS or address & 7 or not 0 <= rkey <= MOST_KEY:
        raise ProtocolError(
            f"{name}: the broker granted a shared word at address {address:#x}", hint=HINT
        )
