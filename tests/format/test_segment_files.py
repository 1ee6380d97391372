"""Transaction indexes and leader epochs: there and back, and bytes from anybody."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdirect.errors import FormatError, UnsupportedFormatError
from kdirect.format.segment_files import (
    AbortedTransaction,
    pack_leader_epochs,
    pack_transaction_index,
    parse_leader_epochs,
    parse_transaction_index,
)
from kdirect.log.checkpoint import LEADER_EPOCHS, read_leader_epochs, write_leader_epochs

number = st.integers(0, 2**63 - 1)
entry = st.builds(
    lambda p, a, b, s: AbortedTransaction(p, min(a, b), max(a, b), s),
    number,
    number,
    number,
    number,
)


@given(st.lists(entry, max_size=5))
def test_transaction_indexes_go_there_and_back(entries):
    data = pack_transaction_index(entries)
    assert data == b"".join(struct.pack(">hqqqq", 0, *e) for e in entries)
    assert list(parse_transaction_index(data)) == entries


def test_a_damaged_transaction_index_is_named():
    data = pack_transaction_index([AbortedTransaction(1, 2, 3, 4)] * 2)
    with pytest.raises(FormatError, match="67 bytes does not end with an entry"):
        list(parse_transaction_index(data[:-1]))
    with pytest.raises(UnsupportedFormatError, match=r"entry 1 .* version 1; "):
        list(parse_transaction_index(data[:34] + b"\0\1" + data[36:]))
    with pytest.raises(FormatError, match=r"entry 0 .* from offset 5 to 4"):
        list(parse_transaction_index(struct.pack(">hqqqq", 0, 1, 5, 4, 5)))


def test_leader_epochs_are_the_file_that_the_log_writes(tmp_path):
    epochs = ((0, 0), (3, 20), (2**31 - 1, 2**63 - 1))
    write_leader_epochs(tmp_path, epochs)
    data = (tmp_path / LEADER_EPOCHS).read_bytes()
    assert pack_leader_epochs(epochs) == data and parse_leader_epochs(data) == epochs
    assert parse_leader_epochs(pack_leader_epochs(())) == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "begin with its version"),
        ("1\n0\n", "begin with its version"),
        ("0\n", "as many entries"),
        ("0\n2\n1 2\n", "as many entries"),
        ("0\n-1\n", "as many entries"),
        ("0\n1\n1\n", "entry 0 .* is no epoch"),
        ("0\n1\n1 -2\n", "entry 0 .* is no epoch"),
        ("0\n1\n1 02\n", "entry 0 .* is no epoch"),
        ("0\n1\n1 2 3\n", "entry 0 .* is no epoch"),
        ("0\n1\n2147483648 2\n", "entry 0 .* is no epoch"),
        ("0\n1\n1 9223372036854775808\n", "entry 0 .* is no epoch"),
        ("0\n2\n1 2\n1 3\n", "entry 1 .* does not follow"),
        ("0\n2\n1 2\n2 1\n", "entry 1 .* does not follow"),
    ],
)
def test_damaged_leader_epochs_are_named(text, named):
    with pytest.raises(FormatError, match=named):
        parse_leader_epochs(text.encode())


@given(st.binary(max_size=80) | st.text("0123 \n-", max_size=40).map(str.encode))
def test_leader_epochs_of_anybody(tmp_path_factory, data):
    """What is accepted the log's own reader understands in the same way."""
    try:
        epochs = parse_leader_epochs(data)
    except FormatError:
        return
    directory = tmp_path_factory.mktemp("epochs")
    (directory / LEADER_EPOCHS).write_bytes(data)
    assert tuple(read_leader_epochs(directory)) == epochs
