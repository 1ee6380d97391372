"""The header and the catalogue of a state file: what another process needs to go on with it.

Owns: how both are written and read.  The catalogue says which tables there are and which blocks
they lie in; it is written before the header, whose CRC is written last, so that a header that is
valid and CLEAN or DONE never stands before a catalogue that is not.  Bytes of a file are believed
only after their CRC, and used only after their bounds were checked.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

from kdirect.errors import StateError
from kdirect.format.batch import crc32c
from kdirect.rdma.shm_link import place
from kdirect.state import layout as at
from kdirect.state.arena import StateMemory, block_log
from kdirect.state.batches import Phase, StateHeader

_PHASES = {1: Phase.CLEAN, 2: Phase.DIRTY, 3: Phase.DONE}
_NUMBERS = {phase: number for number, phase in _PHASES.items()}
BOOT = crc32c(place()[0])  # of this start of the host; of zeros where it does not say
_BODY = struct.Struct("<32sIIqqI4xQQQQIIII")  # bytes 16 to 128
if at.STATE_AT_PLAN_HASH + _BODY.size != at.STATE_END:
    raise AssertionError("header: fields do not add up")


class Catalogue:
    """The catalogue of one memory: written to a block of its own, which moves when it grows."""

    def __init__(self, memory: StateMemory, block: tuple[int, int] | None = None) -> None:
        self.memory = memory
        self.block = block  # (position, log)

    def write(self, content: dict[str, Any]) -> tuple[int, int, int]:
        """(position, bytes, CRC) of the content, which then lies in the memory.  The content gets
        `blocks`, those of the catalogue itself included."""
        memory = self.memory
        given = list(content["blocks"])
        for _ in range(2):  # the second time if the block has to grow
            content["blocks"] = [*given, *([self.block] if self.block else [])]
            text = json.dumps(content, separators=(",", ":")).encode()
            if self.block and len(text) <= 1 << self.block[1]:
                break
            if self.block:
                memory.release(*self.block)
            log = block_log(len(text) + 64)
            self.block = (memory.allocate(log), log)
        else:
            content["blocks"] = [*given, self.block]
            text = json.dumps(content, separators=(",", ":")).encode()
        assert self.block is not None
        position = self.block[0]
        memoryview(memory)[position : position + len(text)] = text
        return position, len(text), crc32c(text)


def write_header(memory: StateMemory, header: StateHeader,
                 catalogue: tuple[int, int, int] = (0, 0, 0)) -> None:  # fmt: skip
    """Write the header; its CRC makes it valid and comes last."""
    position, length, crc = catalogue
    body = _BODY.pack(
        header.plan_hash.encode().ljust(at.STATE_PLAN_HASH_BYTES, b"\0"), header.executor,
        header.executors, header.attempt, header.batch, _NUMBERS[header.phase], position, length,
        memory.limit, memory.top, crc, *header.vparts,
        BOOT,
    )  # fmt: skip
    view = memoryview(memory)
    view[at.STATE_AT_CRC : at.STATE_AT_CRC + 4] = bytes(4)
    view[at.STATE_AT_PLAN_HASH : at.STATE_END] = body
    view[: at.STATE_AT_CRC] = struct.pack("<QI", at.STATE_MAGIC, at.STATE_VERSION)
    view[at.STATE_AT_CRC : at.STATE_AT_CRC + 4] = struct.pack("<I", crc32c(body))


def read_header(memory: StateMemory) -> tuple[StateHeader, dict[str, Any]] | None:
    """The header of a state file and its catalogue (empty while DIRTY), or None if the file has no
    valid one of this start of the host: then it is as good as new."""
    view = memoryview(memory)
    magic, version, crc = struct.unpack_from("<QII", view)
    body = bytes(view[at.STATE_AT_PLAN_HASH : at.STATE_END])
    if magic != at.STATE_MAGIC or version != at.STATE_VERSION or crc32c(body) != crc:
        return None
    (
        plan_hash, executor, executors, attempt, batch, phase, position, length, _, top, check,
        first, last, boot,
    ) = _BODY.unpack(body)  # fmt: skip
    if phase not in _PHASES or boot != BOOT:
        return None
    content: dict[str, Any] = {}
    after = None
    if _PHASES[phase] is not Phase.DIRTY:
        if position + length > memory.limit or top > memory.limit:
            return None
        text = bytes(view[position : position + length])
        if crc32c(text) != check:
            return None
        try:
            content = json.loads(text)
        except ValueError:
            return None
        if not isinstance(content, dict):
            return None
        content["top"] = top
        content["catalogue"] = position
        after = content.get("after")
    fields = {
        "plan_hash": plan_hash.rstrip(b"\0").decode(errors="replace"), "executor": executor,
        "executors": executors, "vparts": [first, last], "attempt": attempt, "batch": batch,
        "phase": _PHASES[phase].value, "after": after,
    }  # fmt: skip
    try:
        return StateHeader.from_json(fields), content
    except ValueError:
        return None


def blocks_of(content: dict[str, Any]) -> list[tuple[int, int]]:
    """The blocks that a catalogue says are in use.  Raises StateError."""
    try:
        return [(int(position), int(log)) for position, log in content["blocks"]]
    except (KeyError, TypeError, ValueError) as e:
        raise StateError(f"the catalogue of a state file is damaged: {e}") from e


def damaged(memory: StateMemory, reason: Exception) -> StateError:
    """The error for a state file whose header is valid and whose contents are not."""
    return StateError(
        f"{memory.name} is damaged: {reason}",
        hint="remove this file: the job then goes on from its last snapshot",
    )


def claim(free: set[tuple[int, int]], entries: Sequence[dict[str, Any]]) -> None:
    """Take the blocks that these entries of a catalogue name, of tables and logs, out of those that
    nothing else has named.  ValueError if one is not there: it lies elsewhere, or is another's."""
    for entry in entries:
        named = [(position, log) for position, log, _ in entry["segments"]]
        if entry.get("index"):
            named.append((entry["index"], entry["index_log"]))
        for block in named:
            if block not in free:
                raise ValueError(f"a table names memory that is not its own: {block}")
            free.remove(block)
