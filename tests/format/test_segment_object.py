"""Objects: round trips, the bytes themselves, keys, and bytes from anybody."""

from __future__ import annotations

import dataclasses
import pickle
import struct
import tracemalloc
import uuid

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kdirect.errors import CorruptObjectError, FormatError, UnsupportedFormatError
from kdirect.format import layout
from kdirect.format.batch import crc32c
from kdirect.format.ids import decode_id, encode_id
from kdirect.format.segment_object import (
    CustomMetadata,
    Section,
    SegmentIdentity,
    TailPlace,
    footer_needs,
    needs,
    object_key,
    pack_custom_metadata,
    pack_tail,
    parse_custom_metadata,
    parse_footer,
    parse_key,
    parse_tail,
    partition_prefix,
    require_identity,
)
from tests.format import made_objects as made


@pytest.fixture(scope="module")
def logs(ref):
    return made.batches(ref)


@pytest.fixture(scope="module")
def data(logs):
    return made.write(made.facts(logs), b"".join(logs), made.sections(logs))


def refusal(data: bytes, size: int | None = None) -> str:
    with pytest.raises(CorruptObjectError) as caught:
        parse_tail(data, len(data) if size is None else size)
    assert caught.value.hint
    return str(caught.value)


# -- round trips -----------------------------------------------------------------------------------


def test_the_bytes_are_those_of_the_diagram(logs, data):
    log = b"".join(logs)
    tail = pack_tail(made.facts(logs), crc32c(log), made.sections(logs))
    assert log + tail == data
    without = pack_tail(made.facts(logs), crc32c(log), {})
    assert log + without == made.write(made.facts(logs), log, {})


def test_a_golden_object_is_read_as_ever(golden, logs, data):
    """What an object store holds today is read by every later build."""
    frozen = (golden / "object-v1.kseg").read_bytes()
    assert frozen == data
    found, sections = parse_tail(frozen, len(frozen))
    assert found.identity == made.IDENTITY and sections[Section.LOG] == b"".join(logs)


def test_a_tail_says_what_was_packed(logs, data):
    facts, log = made.facts(logs), b"".join(logs)
    found, sections = parse_tail(data, len(data))
    values = {f.name: getattr(found, f.name) for f in dataclasses.fields(facts)}
    assert values == {f.name: getattr(facts, f.name) for f in dataclasses.fields(facts)}
    assert sections == {Section.LOG: log, **made.sections(logs)}
    assert found.object_bytes == len(data)
    assert found.tail == TailPlace(len(log), len(data) - len(log))
    assert found.tail.object_bytes == len(data)
    assert found.sections[Section.OFFSET_INDEX][:2] == (len(log), 24)
    assert pickle.loads(pickle.dumps(found)) == found and hash(found)
    assert all(view.readonly for view in sections.values())


@pytest.mark.parametrize("cut", range(0, 900, 7))
def test_sections_that_are_whole_in_a_tail_are_returned(logs, data, cut):
    everything = {Section.LOG: b"".join(logs), **made.sections(logs)}
    if footer_needs(data[cut:], len(data)) > len(data) - cut:
        assert "of which" in refusal(data[cut:], len(data))
        return
    found, sections = parse_tail(data[cut:], len(data))
    whole = {s for s in Section if found.sections[s].position >= cut}
    assert sections == {s: everything[s] for s in whole}


def test_a_guess_that_was_too_short_leads_to_the_whole_tail(logs, data):
    asked, length = [], 1
    while (wanted := needs(data[-length:], len(data))) > length:
        asked.append(wanted)
        length = wanted
    assert asked == [16, footer_needs(data, len(data)), len(data) - len(b"".join(logs))]
    assert needs(data, len(data)) == length
    _, sections = parse_tail(data[-length:], len(data))
    assert sections == made.sections(logs)


words = st.text("abcXYZ019._-", min_size=1, max_size=40).filter(lambda t: t not in (".", ".."))
ids = st.uuids().filter(lambda u: u.int)
identities = st.builds(
    SegmentIdentity,
    cluster_id=words,
    topic=words,
    topic_id=ids,
    partition=st.integers(0, 2**31 - 1),
    segment_id=ids,
)
offsets = st.integers(0, 2**63 - 1)


@given(
    identities,
    st.tuples(offsets, offsets).filter(lambda t: t[0] != t[1]),
    st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1)),
    st.integers(-(2**31), 2**31 - 1),
    st.dictionaries(st.sampled_from(list(Section)[1:]), st.binary(max_size=40)),
    st.binary(min_size=61, max_size=90),
)
def test_any_facts_go_there_and_back(identity, between, times, number, parts, log):
    facts = made.SegmentFacts(
        identity=identity,
        base_offset=min(between),
        end_offset=max(between),
        log_bytes=len(log),
        max_timestamp_ms=max(times),
        min_timestamp_ms=min(times),
        broker_id=number,
        leader_epoch=number,
    )
    data = log + pack_tail(facts, crc32c(log), parts)
    assert data == made.write(facts, log, parts)
    found, sections = parse_tail(data, len(data))
    assert [getattr(found, f.name) for f in dataclasses.fields(facts)] == [
        getattr(facts, f.name) for f in dataclasses.fields(facts)
    ]
    assert sections == {Section.LOG: log, **{s: parts.get(s, b"") for s in list(Section)[1:]}}
    require_identity(found, identity, min(between))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"end_offset": made.BASE}, "from offset 1000 to 1000"),
        ({"base_offset": -1}, "from offset -1"),
        ({"log_bytes": 60}, "log of 60 bytes"),
        ({"log_bytes": 1 << 31}, "log of 2147483648 bytes"),
        ({"min_timestamp_ms": made.TIME + 100}, "times from"),
        ({"broker_id": 1 << 31}, "a number does not fit"),
        ({"identity": dataclasses.replace(made.IDENTITY, cluster_id="a/b")}, "cluster id"),
        ({"identity": dataclasses.replace(made.IDENTITY, topic="..")}, "topic"),
        ({"identity": dataclasses.replace(made.IDENTITY, partition=-1)}, "partition -1"),
        ({"identity": dataclasses.replace(made.IDENTITY, topic_id=uuid.UUID(int=0))}, "zeros"),
    ],
)
def test_what_an_object_cannot_say_is_not_packed(logs, change, named):
    with pytest.raises(FormatError, match=named):
        pack_tail(made.facts(logs, **change), 0, {})
    # Nor believed, where somebody else wrote it.
    if "broker_id" not in change and change.get("log_bytes", 0) < 1 << 31:
        facts = made.facts(logs, **change)
        log = b"".join(logs)[: facts.log_bytes]
        assert named in refusal(made.write(facts, log, {}))


def test_the_log_is_no_section_to_pack(logs):
    with pytest.raises(FormatError, match="given with the log"):
        pack_tail(made.facts(logs), 0, {Section.LOG: b""})


# -- damage ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", Section)
def test_a_damaged_section_is_named(logs, data, section):
    place = parse_footer(data, len(data)).sections[section]
    for at in (place.position, place.position + place.length - 1):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        assert f"the CRC of {section.title} of segment 1000 of flights.raw-7" in refusal(damaged)
        parse_footer(damaged, len(damaged))  # which does not look at sections


def section_field(section: Section, field: int, fmt: str, value: int):
    at = layout.FOOTER_HEAD_BYTES + section * layout.SECTION_BYTES + field

    def change(footer: bytearray) -> None:
        struct.pack_into(fmt, footer, at, value)

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (section_field(Section.TIME_INDEX, 0, "<H", 9), "section 9 in place of the time index"),
        (section_field(Section.TIME_INDEX, 2, "<H", 1), "in place of the time index"),
        (section_field(Section.TIME_INDEX, 8, "<Q", 1), "places the time index at 1,"),
        (section_field(Section.LOG, 8, "<Q", 1), "places the log at 1,"),
        (section_field(Section.LOG, 16, "<Q", 2**64 - 1), "places the log at 0, with 1844"),
        (section_field(Section.PRODUCERS, 16, "<Q", 9), "places the leader epochs"),
        (section_field(Section.LEADER_EPOCHS, 16, "<Q", 1), "places the topic at"),
        (section_field(Section.TOPIC, 16, "<Q", 1), "sections of an object end at"),
        (lambda f: f.__setitem__(slice(2, 4), b"\5\0"), "names 5 sections"),
        (lambda f: f.__setitem__(84, 1), "with a cluster id of"),
        (lambda f: f.__setitem__(82, 200), "a topic of 200"),
        (lambda f: f.append(0), "with a cluster id of"),
        (lambda f: f.__setitem__(-1, 0xFF), "of no text"),
        (lambda f: f.__setitem__(-1, 0), "a topic that no topic"),
        (lambda f: f.__delitem__(slice(100, None)), "footer of an object has 100 bytes"),
        (lambda f: f.__delitem__(slice(3, None)), "names a footer of 3"),
    ],
)
def test_a_footer_that_lies_is_named(data, change, named):
    assert named in refusal(made.with_footer(data, change))


def test_the_footer_and_the_trailer_are_named(data):
    assert "the CRC of the footer" in refusal(data[:-40] + b"x" + data[-39:])
    assert "does not end in KDSEGEND" in refusal(data[:-1] + b"x")
    assert "does not end in KDSEGEND" in refusal(data[:-1])
    assert "names a footer of 65537" in refusal(
        data[:-16] + struct.pack("<I", 65537) + data[-12:], 1 << 20
    )
    assert "an object of 7 bytes" in refusal(b"1234567")
    assert "of which" in refusal(data, len(data) - 1)
    # The same tail at the end of a longer object.
    assert "begins at" in refusal(data, len(data) + 1)


def test_a_later_version_is_not_damage(logs):
    data = made.write(made.facts(logs), b"".join(logs), {}, version=2)
    with pytest.raises(UnsupportedFormatError, match=r"footer of version 2; .*newer kdirect"):
        parse_tail(data, len(data))
    with pytest.raises(UnsupportedFormatError):
        needs(data, len(data))


def test_another_segment_is_not_taken_for_the_one_that_was_asked_for(data):
    found = parse_footer(data, len(data))
    require_identity(found, made.IDENTITY, made.BASE)
    with pytest.raises(CorruptObjectError, match="base_offset 1000 in place of 1001"):
        require_identity(found, made.IDENTITY, made.BASE + 1)
    other = dataclasses.replace(made.IDENTITY, topic="other", partition=8)
    with pytest.raises(
        CorruptObjectError, match=r"topic flights\.raw in place of other, partition 7"
    ):
        require_identity(found, other, made.BASE)


numbers = st.sampled_from([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1])


@given(st.data())
def test_bytes_from_anybody(logs, data, draw):
    """An object with changed bytes, a changed footer whose CRC fits, or none at all is accepted or
    refused by name; and what is accepted is in the object."""
    kind = draw.draw(st.sampled_from(["flip", "cut", "footer", "number", "noise"]))
    size = len(data)
    if kind == "noise":
        mutated = draw.draw(st.binary(max_size=400))
        size = len(mutated)
    elif kind == "cut":
        mutated = data[draw.draw(st.integers(0, size)) :][: draw.draw(st.integers(0, size))]
    elif kind == "flip":
        out = bytearray(data)
        for _ in range(draw.draw(st.integers(1, 4))):
            out[-draw.draw(st.integers(1, 320))] = draw.draw(st.integers(0, 255))
        mutated = bytes(out)
    else:

        def change(footer: bytearray) -> None:
            if kind == "number":
                at = draw.draw(st.integers(0, len(footer) - 8))
                struct.pack_into("<Q", footer, at, draw.draw(numbers))
            else:
                for _ in range(draw.draw(st.integers(1, 3))):
                    at = draw.draw(st.integers(0, len(footer) - 1))
                    footer[at] = draw.draw(st.integers(0, 255))
                del footer[draw.draw(st.integers(1, len(footer))) :]

        mutated = made.with_footer(data, change)
        size = len(mutated)
    size += draw.draw(st.sampled_from([0, 0, 0, 1, -1, 1 << 40]))
    if size < 0:
        return
    try:
        found, sections = parse_tail(mutated, size)
    except (CorruptObjectError, UnsupportedFormatError) as e:
        assert e.hint
    else:
        assert footer_needs(mutated, size) <= len(mutated)
        assert needs(mutated, size) == found.tail.length < size == found.object_bytes
        at = 0
        for section in Section:
            place = found.sections[section]
            assert place.position == at
            at += place.length
            if section in sections:
                assert crc32c(sections[section]) == place.crc
        assert at < size


def test_lengths_cost_no_memory(data):
    """A footer that names exabytes is refused before anything is allocated."""
    changes = [
        section_field(section, 16, "<Q", length)
        for section in Section
        for length in (2**40, 2**63, 2**64 - 1)
    ]
    mutated = [made.with_footer(data, change) for change in changes]
    tracemalloc.start()
    for m in mutated:
        refusal(m, 1 << 41)
        refusal(m)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 18


# -- custom metadata -------------------------------------------------------------------------------


def test_custom_metadata_goes_there_and_back():
    custom = CustomMetadata(7, TailPlace(1 << 30, 12345))
    packed = pack_custom_metadata(custom)
    assert packed == b"KSEG\1\0\0\0" + struct.pack("<iIQQ", 7, 0, 1 << 30, 12345)
    assert len(packed) == layout.CUSTOM_METADATA_BYTES <= 128
    assert parse_custom_metadata(packed) == custom
    started = CustomMetadata(0)
    assert parse_custom_metadata(pack_custom_metadata(started)) == started


def test_custom_metadata_of_others_is_none_and_damaged_is_named():
    assert parse_custom_metadata(None) is None
    assert parse_custom_metadata(b"") is None
    assert parse_custom_metadata(b"another plugin's bytes") is None
    packed = pack_custom_metadata(CustomMetadata(0, TailPlace(100, 10)))
    below = packed[:8] + b"\xff" * 4 + packed[12:]
    nonzero = (packed[:6] + b"\1" + packed[7:], packed[:12] + b"\1" + packed[13:])
    for damaged in (packed[:-1], packed + b"\0", packed[:4], *nonzero, below):
        with pytest.raises(CorruptObjectError):
            parse_custom_metadata(damaged)
    for position, length in ((0, 1), (1 << 31, 1), (1, 0), (1, 2**63 - 1), (2**64 - 1, 2**64 - 1)):
        with pytest.raises(CorruptObjectError, match="names a tail"):
            parse_custom_metadata(b"KSEG\1\0\0\0" + struct.pack("<QQQ", 0, position, length))
    with pytest.raises(UnsupportedFormatError, match="version 2"):
        parse_custom_metadata(b"KSEG\2\0")


# -- keys ------------------------------------------------------------------------------------------


def test_a_key_is_as_documented():
    key = object_key("tiers/prod", made.IDENTITY, made.BASE)
    assert key == (
        "tiers/prod/bVJ2c1JxTkJ-_dPR0xHQQg/flights.raw-fS5qDEOxTFKfoi8eCxw9Tg/7/"
        "00000000000000001000-ABEiM0RVZneImaq7zN3u_w.kseg"
    )
    assert key.startswith(
        partition_prefix(
            "tiers/prod/",
            made.IDENTITY.cluster_id,
            made.IDENTITY.topic,
            made.IDENTITY.topic_id,
            made.IDENTITY.partition,
        )
    )
    assert object_key("", made.IDENTITY, 0).startswith("bVJ2c1JxTkJ-_dPR0xHQQg/flights")


@given(identities, offsets, st.sampled_from(["", "p", "p/q", "/p/", "a-b_c"]))
@example(dataclasses.replace(made.IDENTITY, topic="-a--b-"), 5, "p")
@example(dataclasses.replace(made.IDENTITY, segment_id=uuid.UUID(bytes=b"\xff" * 16)), 0, "")
@example(
    dataclasses.replace(made.IDENTITY, topic_id=uuid.UUID(bytes=b"\xfb\xef\xbe" * 5 + b"!")), 0, ""
)
def test_keys_go_there_and_back(identity, base_offset, prefix):
    key = object_key(prefix, identity, base_offset)
    assert parse_key(prefix, key) == (identity, base_offset)
    assert parse_key(prefix, key + "x") is None
    assert parse_key(prefix, "/" + key) is None
    assert parse_key(prefix, key[:-1]) is None


@given(st.data())
def test_keys_of_others_are_none(draw):
    key = list(object_key("p", made.IDENTITY, made.BASE))
    for _ in range(draw.draw(st.integers(1, 3))):
        at = draw.draw(st.integers(0, len(key) - 1))
        key[at] = draw.draw(st.sampled_from(list("/-_.0A~é\n") + [""]))
    text = "".join(key)
    found = parse_key("p", text)
    assert found is None or object_key("p", *found) == text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/7/", "/07/"),
        ("/7/", "/2147483648/"),
        ("1000-", "100-"),
        ("00000000000000001000", "99999999999999999999"),
        ("_w.kseg", "_x.kseg"),  # spare bits of an id
        ("ABEiM0RVZneImaq7zN3u_w", "AAAAAAAAAAAAAAAAAAAAAA"),
        (".kseg", ".kseg.tmp"),
        ("bVJ2c1JxTkJ-_dPR0xHQQg", ".."),
    ],
)
def test_a_key_has_one_spelling(old, new):
    key = object_key("p", made.IDENTITY, made.BASE)
    assert key.count(old) == 1
    assert parse_key("p", key) is not None and parse_key("p", key.replace(old, new)) is None


def test_what_no_key_can_say_is_refused():
    with pytest.raises(FormatError, match="base offset -1"):
        object_key("p", made.IDENTITY, -1)
    with pytest.raises(FormatError, match="cluster id"):
        object_key("p", dataclasses.replace(made.IDENTITY, cluster_id=""), 0)


def test_ids_have_one_text():
    value = uuid.UUID("00112233-4455-6677-8899-aabbccddeeff")
    assert encode_id(value) == "ABEiM0RVZneImaq7zN3u_w" and decode_id(encode_id(value)) == value
    for text in (
        "ABEiM0RVZneImaq7zN3u_x",
        "ABEiM0RVZneImaq7zN3u_w==",
        "",
        "ABEiM0RVZneImaq7zN3u/w",
    ):
        with pytest.raises(FormatError, match="is no id"):
            decode_id(text)
