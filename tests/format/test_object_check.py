"""The check of a whole object: sound ones have no findings, each damage is named where it is."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import KdirectError
from kdirect.format.object_check import Finding, check_object, read_footer
from kdirect.format.segment_object import Section, parse_footer
from tests.format import made_objects as made

PIECES = (1, 7, 61, 64, 100, 1 << 20)


@pytest.fixture(scope="module")
def logs(ref):
    return made.batches(ref)


def findings(
    data: bytes, size: int | None = None, piece_bytes: int = 1 << 20, **how
) -> list[Finding]:
    def read(position: int, length: int) -> bytes:
        assert length <= max(piece_bytes, 34, 1024)
        return data[position : position + length]

    return list(
        check_object(read, len(data) if size is None else size, piece_bytes=piece_bytes, **how)
    )


def whole(logs, sections=None, **changes) -> bytes:
    parts = {**made.sections(logs), **(sections or {})}
    return made.write(made.facts(logs, **changes), b"".join(logs), parts)


def only(found: list[Finding], section: Section | None, *named: str) -> None:
    assert [f.section for f in found] == [section] * len(named), found
    for f, text in zip(found, named, strict=True):
        assert text in str(f)


@pytest.mark.parametrize("piece_bytes", PIECES)
def test_a_sound_object_has_no_findings(logs, piece_bytes):
    assert findings(whole(logs), piece_bytes=piece_bytes) == []
    log = b"".join(logs)
    assert findings(made.write(made.facts(logs), log, {}), piece_bytes=piece_bytes) == [
        Finding(
            section=Section.LEADER_EPOCHS,
            position=len(log),
            message="a leader-epoch-checkpoint does not begin with its version, 0",
        )
    ]


@pytest.mark.parametrize("piece_bytes", PIECES)
@pytest.mark.parametrize("section", Section)
def test_a_damaged_section_is_named(logs, section, piece_bytes):
    data = bytearray(whole(logs))
    place = parse_footer(data, len(data)).sections[section]
    data[place.position + place.length - 1] ^= 1
    found = findings(data, piece_bytes=piece_bytes)
    if section is Section.LOG:
        last = place.length - len(logs[-1])
        only(
            found,
            section,
            f"the log, at byte {last}: the CRC of the batch up to offset 1011 is wrong",
            "at byte 0: the CRC of its bytes is wrong",
        )
    else:
        only(found, section, f"{section.title}, at byte {place.position}: its CRC is wrong")


def test_two_batches_may_be_damaged(logs):
    data = bytearray(whole(logs))
    for i in (0, 2):
        data[sum(map(len, logs[:i])) + 70] ^= 1
    only(
        findings(data), Section.LOG, "up to offset 1002 is", "up to offset 1008 is", "of its bytes"
    )


def test_the_end_of_an_object_is_needed(logs):
    data = whole(logs)
    only(findings(data[:-1]), None, "does not end in KDSEGEND")
    only(findings(b""), None, "an object of 0 bytes")
    only(findings(data, len(data) + 1), None, "reading 1024 bytes at 156 of an object brought 1023")
    only(findings(data[:300] + data[301:]), None, "places the topic at 822, with 52 bytes")
    assert read_footer(lambda at, n: data[at : at + n], len(data)) == parse_footer(data, len(data))


def test_a_read_that_brings_too_little_is_a_finding_in_every_section(logs):
    data = whole(logs)
    for section in Section:
        place = parse_footer(data, len(data)).sections[section]

        def read(position: int, length: int, place=place) -> bytes:
            got = data[position : position + length]
            return got[:-1] if (position, length) == place[:2] else got

        only(list(check_object(read, len(data))), None, f"reading {place.length} bytes at")


def test_errors_of_the_reader_pass_through():
    def read(position: int, length: int) -> bytes:
        raise KdirectError("no such object")

    with pytest.raises(KdirectError, match="no such object"):
        list(check_object(read, 1 << 20))


# -- a log that does not chain ---------------------------------------------------------------------


def rebuilt(logs, change) -> bytes:
    """The object of batches of which `change` made others; every CRC of the object fits."""
    out = list(logs)
    change(out)
    log = b"".join(out)
    parts = {Section.LEADER_EPOCHS: made.sections(logs)[Section.LEADER_EPOCHS]}
    return made.write(made.facts(logs, log_bytes=len(log)), log, parts)


def header(number: int, at: int, fmt: str, value: int):
    def change(out: list[bytes]) -> None:
        edited = bytearray(out[number])
        struct.pack_into(fmt, edited, at, value)
        out[number] = bytes(edited)

    return change


@pytest.mark.parametrize("piece_bytes", PIECES)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda out: out.pop(1), ["begins at offset 1006: those between are missing"]),
        (lambda out: out.pop(0), ["after offset 999 begins at offset 1003"]),
        (lambda out: out.pop(), ["after offset 1008 is missing: the segment ends at 1012"]),
        (lambda out: out.insert(1, out[0]), ["has offsets from 1000 to 1003"]),
        (header(1, 0, ">q", -1), ["has offsets from -1 to 2", "begins at offset 1006"]),
        (
            header(3, 0, ">q", 1010),
            ["has offsets from 1010 to 1013, in a segment that ends at 1012"],
        ),
        (header(1, 16, ">b", 1), ["is of magic 1, not 2"]),
        (header(1, 8, ">i", 48), ["has 60 bytes, where the log has"]),
        (header(1, 8, ">i", -1), ["has 11 bytes, where the log has"]),
        (header(1, 8, ">i", 2**31 - 1), ["has 2147483659 bytes, where the log has"]),
        (header(1, 12, ">i", 4), ["has the leader epoch 4, which is not one"]),
        (header(3, 12, ">i", 3), ["has the leader epoch 3, which is not one"]),
        (header(1, 12, ">i", -1), []),
        (lambda out: out.append(out[-1][:30]), ["is cut off"]),
    ],
)
def test_a_log_that_does_not_chain_is_named(logs, change, named, piece_bytes):
    only(findings(rebuilt(logs, change), piece_bytes=piece_bytes), Section.LOG, *named)


def test_a_later_time_than_the_footers_is_named(ref, logs):
    late = ref.simple(
        [(b"k", b"v")] * 3, base_offset=1003, leader_epoch=3, max_timestamp=made.TIME + 60_000
    )
    found = findings(rebuilt(logs, lambda out: out.__setitem__(1, late)))
    only(found, Section.LOG, f"has the time {made.TIME + 60_000}, later than")


def test_gaps_of_a_cleaner_are_no_findings(logs):
    data = rebuilt(logs, lambda out: out.pop(1))
    assert findings(data, dense_from=1006) == [] == findings(data, dense_from=1007)
    only(findings(data, dense_from=1003), Section.LOG, "those between are missing")
    only(findings(data, dense_from=1005), Section.LOG, "those between are missing")


# -- sections that contradict the log --------------------------------------------------------------


def index(*entries: tuple[int, int]) -> dict[Section, bytes]:
    return {Section.OFFSET_INDEX: b"".join(struct.pack(">II", *e) for e in entries)}


def times(*entries: tuple[int, int]) -> dict[Section, bytes]:
    return {Section.TIME_INDEX: b"".join(struct.pack(">qI", *e) for e in entries)}


def epochs(text: str) -> dict[Section, bytes]:
    return {Section.LEADER_EPOCHS: text.encode()}


def aborted(*fields: int) -> dict[Section, bytes]:
    return {Section.TRANSACTION_INDEX: struct.pack(">hqqqq", *fields)}


@pytest.mark.parametrize("piece_bytes", PIECES)
@pytest.mark.parametrize(
    ("sections", "named"),
    [
        (index((5, 1)), ["its entry of offset 1005 names 1, where no batch"]),
        (index((5, 0)), ["its entry of offset 1005 names 0, where no batch"]),
        (index((4, 175)), []),  # any offset of the batch
        (index((11, 526)), ["its entry of offset 1011 names 526, where no batch"]),
        (index((5, 1), (6, 175)), ["offset 1005 names 1", "offset 1006 names 175"]),
        (index((5, 175), (5, 350)), ["entry 1, offset 1005 at 350, is not in"]),
        (index((5, 175), (8, 175)), ["entry 1, offset 1008 at 175, is not in"]),
        (index((12, 175)), ["entry 0, offset 1012 at 175, is not in"]),
        (index((5, 1 << 20)), ["entry 0, offset 1005 at 1048576, is not in"]),
        ({Section.OFFSET_INDEX: b"1234567"}, ["7 bytes do not end with an entry of"]),
        (times((made.TIME + 3, 5), (made.TIME + 2, 8)), ["entry 1, time 1700000000002"]),
        (times((made.TIME + 3, 5), (made.TIME + 4, 4)), ["entry 1, time 1700000000004"]),
        (times((made.TIME + 3, 12)), ["entry 0, time 1700000000003 at offset 1012"]),
        (times((made.TIME + 6, 5)), ["entry 0, time 1700000000006"]),
        ({Section.TIME_INDEX: b"1234567"}, ["7 bytes do not end with an entry of"]),
        (aborted(0, 1, 2, 3, 4), ["a transaction that ends at offset 3"]),
        (aborted(0, 1, 1000, 1012, 4), ["a transaction that ends at offset 1012"]),
        (aborted(7, 1, 1000, 1001, 4), ["has version 7"]),
        ({Section.TRANSACTION_INDEX: b"1234567"}, ["7 bytes do not end with an entry of"]),
        (epochs("0\n1\n3 1001\n"), ["do not begin with the segment, at offset 1000"]),
        (epochs("0\n0\n"), ["do not begin with the segment, at offset 1000"]),
        (epochs("0\n2\n3 1000\n5 1012\n"), ["epoch 5 begins at 1012, after the segment"]),
        (epochs("nonsense"), ["does not begin with its version"]),
        (epochs("0" * (1 << 20) + "\n"), ["1048577 bytes are more than any has"]),
    ],
)
def test_sections_that_contradict_the_segment_are_named(logs, sections, named, piece_bytes):
    assert [len(b) for b in logs] == [175] * 4
    if len(next(iter(sections.values()))) > 1000 and piece_bytes < 100:
        return
    only(findings(whole(logs, sections), piece_bytes=piece_bytes), next(iter(sections)), *named)


# -- anything at all -------------------------------------------------------------------------------


@given(st.data())
def test_bytes_from_anybody_give_findings_and_nothing_else(logs, draw):
    data = bytearray(whole(logs))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    del data[draw.draw(st.integers(1, len(data)) | st.just(len(data))) :]
    size = len(data) + draw.draw(st.sampled_from([0, 0, 0, 1, 1000]))
    piece_bytes = draw.draw(st.sampled_from(PIECES))
    found = findings(data, size, piece_bytes)
    assert (found == []) == (bytes(data) == whole(logs) and size == len(data))
    assert len({dataclasses.astuple(f) for f in found}) == len(found)


@given(st.data())
def test_logs_of_anybody_give_findings_and_nothing_else(logs, draw):
    """Any bytes as the log and the sections, in an object whose own CRCs fit."""
    log = bytearray(b"".join(logs))
    for _ in range(draw.draw(st.integers(0, 4))):
        log[draw.draw(st.integers(0, len(log) - 1))] = draw.draw(st.integers(0, 255))
    parts = {
        section: draw.draw(st.binary(max_size=60) | st.just(made.sections(logs)[section]))
        for section in list(Section)[1:]
    }
    data = made.write(made.facts(logs), bytes(log), parts)
    by_size = [findings(data, piece_bytes=n) for n in (1, 64, 1 << 20)]
    said = [[f.message for f in found] for found in by_size]
    assert said[0] == said[1] == said[2]


def test_a_large_object_is_checked_with_little_memory(ref):
    """One piece of it at a time, also where one batch is larger than a piece."""
    one = ref.simple([(b"k", bytes(1 << 22))], base_offset=1000, max_timestamp=made.TIME)
    log = one + ref.simple([(b"k", bytes(1 << 22))], base_offset=1001, max_timestamp=made.TIME)
    parts = {Section.LEADER_EPOCHS: b"0\n1\n0 1000\n", Section.PRODUCERS: bytes(1 << 22)}
    facts = made.facts([], end_offset=1002, log_bytes=len(log), max_timestamp_ms=-1)
    data = memoryview(made.write(facts, log, parts))

    def read(position: int, length: int) -> memoryview:
        return data[position : position + length]

    tracemalloc.start()
    found = list(check_object(read, len(data), piece_bytes=1 << 16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [] and peak < 1 << 18
