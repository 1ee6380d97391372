"""Accumulators: how each aggregate is stored, updated, merged and finished.

Owns: the table of cells (which kernel, how many words, which input, one lane for each executor or
one in all), the layout of states that follows from a plan, and the way from the words of states to
Arrow columns.  The loops are in accumulate_run.h.

Invariants.  Each cell is a CRDT under `merge`: associative and commutative, and its result depends
on no order of arrival.  Integers, decimals, extremes, first and last and registers are so by
themselves; float sums, averages and moments have a lane for each executor, which only that
executor's rows touch, in the order of its deltas, and lanes are combined in the order of executors.
First and last compare (event time, null before values, value).  Pure.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import pyarrow as pa

from kdirect.errors import ConfigError, StateError
from kdirect.state.accumulate import Kernel, average_decimals, estimate_distinct, order_doubles
from kdirect.state.aggregates import Aggregate
from kdirect.state.keys import ANY_LENGTH, KeyShape, gather
from kdirect.state.schema import arrow_type

INT64_MAX, INT64_MIN = (1 << 63) - 1, -(1 << 63)
NO_BIT = 64
WRAP, IGNORE_NULLS = 1, 2


class Form(IntEnum):
    """In which form an input column reaches the kernels: 8 bytes a row, WIDE 16."""

    INTEGER = 0  # int64
    FLOAT = 1  # double
    WIDE = 2  # int128: unscaled decimals
    ORDERED = 3  # doubles as integers of the same order
    UNSIGNED = 4  # uint64 as integers of the same order
    HASH = 5  # a hash of the value, of any type
    TIME = 6  # the event time of the row

    @property
    def words(self) -> int:
        return 2 if self is Form.WIDE else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The state of one aggregate: `words` words a lane, `initial` their values for a new key."""

    aggregate: Aggregate
    type: pa.DataType | None  # of its column
    output: pa.DataType
    kernel: Kernel
    form: Form | None
    words: int
    initial: bytes
    lanes: bool = False
    needs_seen: bool = False  # its words cannot say whether there was a value
    option: int = 0


def _pack(*words: int) -> bytes:
    return struct.pack(f"<{len(words)}q", *words)


_EDGES = {
    ("min", False): (Kernel.MIN_I64, _pack(INT64_MAX)),
    ("max", False): (Kernel.MAX_I64, _pack(INT64_MIN)),
    ("min", True): (Kernel.MIN_I128, _pack(-1, INT64_MAX)),
    ("max", True): (Kernel.MAX_I128, _pack(0, INT64_MIN)),
    ("first", False): (Kernel.FIRST, _pack(INT64_MAX, 0, 0)),
    ("last", False): (Kernel.LAST, _pack(INT64_MIN, 0, 0)),
    ("first", True): (Kernel.FIRST_I128, _pack(INT64_MAX, 0, 0, 0)),
    ("last", True): (Kernel.LAST_I128, _pack(INT64_MIN, 0, 0, 0)),
}
_MOMENTS = ("stddev_samp", "stddev_pop", "var_samp", "var_pop")


def _ordered_form(type_: pa.DataType) -> Form:
    if pa.types.is_floating(type_):
        return Form.ORDERED
    if pa.types.is_decimal(type_):
        return Form.WIDE
    return Form.UNSIGNED if type_ == pa.uint64() else Form.INTEGER


def cell_of(aggregate: Aggregate, column: str | None, overflow: str = "error") -> Cell:
    """The cell of an aggregate over a column of the type named `column` (schema.py).  Raises
    ConfigError for a combination that no cell of fixed width can hold."""
    kind, type_ = aggregate.kind, None if column is None else arrow_type(column)
    decimal = type_ is not None and pa.types.is_decimal(type_)
    floating = type_ is not None and pa.types.is_floating(type_)
    if kind == "avg" and type_ == pa.uint64():
        floating = True  # the sum of an average need not fit into int64
    given: dict[str, Any] = {"aggregate": aggregate, "type": type_}
    kinds = {} if column is None else {str(aggregate.column): column}
    in_cell = aggregate.kept_as(kinds) == "cell"
    if in_cell:
        given["output"] = arrow_type(aggregate.result_type(kinds))
    if kind == "count":
        kernel = Kernel.COUNT if type_ is None else Kernel.COUNT_VALID
        form = None if type_ is None else Form.INTEGER
        return Cell(**given, kernel=kernel, form=form, words=1, initial=_pack(0))
    if type_ is None or not in_cell:
        raise ConfigError(f"aggregate {aggregate.name}: it is not kept in a cell",
                          hint="lists, sets and strings are kept in chains")  # fmt: skip
    if kind == "approx_count_distinct":
        registers = 1 << aggregate.precision_bits
        return Cell(**given, kernel=Kernel.DISTINCT, form=Form.HASH, words=registers // 8,
                    initial=bytes(registers))  # fmt: skip
    if kind in _MOMENTS:
        return Cell(**given, kernel=Kernel.MOMENTS, form=Form.FLOAT, words=3, initial=bytes(24),
                    lanes=True)  # fmt: skip
    if kind in ("sum", "avg"):
        average = kind == "avg"
        form = Form.WIDE if decimal else Form.FLOAT if floating else Form.INTEGER
        kernel = Kernel[f"{kind.upper()}_{('I64', 'F64', 'I128')[form]}"]
        words = (2 if decimal or (average and not floating) else 1) + average
        return Cell(**given, kernel=kernel, form=form, words=words, initial=bytes(8 * words),
                    lanes=floating, needs_seen=not average,
                    option=WRAP if overflow == "wrap" else 0)  # fmt: skip
    kernel, initial = _EDGES[kind, decimal]
    return Cell(**given, kernel=kernel, form=_ordered_form(type_), words=len(initial) // 8,
                initial=initial, needs_seen=kind in ("min", "max"))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayout:
    """The states of a plan: which cell lies where.

    A state of a table is [seen bits] [stamp] cells, where a cell with lanes has one for each
    executor; the state of a fragment has one lane and no stamp.  `inputs` are the columns that
    reach the kernels; they are also what a tuple carries.  `codes` is what the engine reads of each
    cell: kernel, input, offset in a table, offset in a delta, words, lanes, bit, option, precision.
    """

    cells: tuple[Cell, ...]
    inputs: tuple[tuple[str | None, Form], ...]
    executors: int
    has_seen: bool
    stamp: int  # offset of the word that says in which batch a key changed, or -1
    words: int
    delta_words: int
    codes: tuple[tuple[int, ...], ...]
    initial: bytes
    delta_initial: bytes
    tuple_words: int  # of validity bytes and inputs
    check: int  # CRC of what both sides of a delta must agree on

    @property
    def tuple_inputs_at(self) -> tuple[int, ...]:
        """The word of each input within a tuple's validity and inputs."""
        at, found = (len(self.inputs) + 7) // 8, []
        for _, form in self.inputs:
            found.append(at)
            at += form.words
        return tuple(found)


def layout_of(cells: Sequence[Cell], executors: int, *, nullable: bool = True,
              stamped: bool = False, keys: str = "") -> StateLayout:  # fmt: skip
    """Where cells lie.  `nullable` False: no input is ever null.  `keys` names the key types: it
    only goes into `check`."""
    inputs: list[tuple[str | None, Form]] = []
    for cell in cells:
        if cell.form is not None and (cell.aggregate.column, cell.form) not in inputs:
            inputs.append((cell.aggregate.column, cell.form))
    if any(cell.kernel in _TIMED for cell in cells):
        inputs.append((None, Form.TIME))
    has_seen = nullable and any(cell.needs_seen for cell in cells)
    initial, delta = b"", b""
    if has_seen:
        initial = delta = _pack(0)
    stamp = -1
    if stamped:
        stamp = len(initial) // 8
        initial += _pack(-1)
    codes, bit = [], 0
    for cell in cells:
        number = 0 if cell.form is None else inputs.index((cell.aggregate.column, cell.form))
        own_bit = NO_BIT
        if has_seen and cell.needs_seen:
            own_bit, bit = bit, bit + 1
        precision = cell.aggregate.precision_bits if cell.kernel is Kernel.DISTINCT else 0
        codes.append((int(cell.kernel), number, len(initial) // 8, len(delta) // 8, cell.words,
                      int(cell.lanes), own_bit, cell.option, precision))  # fmt: skip
        initial += cell.initial * (executors if cell.lanes else 1)
        delta += cell.initial
    if bit > 64:
        raise ConfigError(
            "a plan may have at most 64 sums, minima and maxima",
            hint="compute the others in a second plan, or query",
        )
    described = repr((keys, [(int(c.kernel), c.words, c.form) for c in cells], inputs, has_seen))
    return StateLayout(
        cells=tuple(cells), inputs=tuple(inputs), executors=executors, has_seen=has_seen,
        stamp=stamp, words=len(initial) // 8, delta_words=len(delta) // 8, codes=tuple(codes),
        initial=initial, delta_initial=delta,
        tuple_words=(len(inputs) + 7) // 8 + sum(form.words for _, form in inputs),
        check=zlib.crc32(described.encode()),
    )  # fmt: skip


_TIMED = (Kernel.FIRST, Kernel.LAST, Kernel.FIRST_I128, Kernel.LAST_I128)


# -- inputs ----------------------------------------------------------------------------------------
def _valid_bytes(array: pa.Array) -> np.ndarray | None:
    if not array.null_count:
        return None
    bits = np.frombuffer(array.buffers()[0], np.uint8)
    return np.unpackbits(bits, bitorder="little")[array.offset : array.offset + len(array)]


def _values(array: pa.Array) -> np.ndarray:
    """The values of a column of fixed width, nulls included, without a copy if they are bytes."""
    type_, n = array.type, len(array)
    data = array.buffers()[1]
    if pa.types.is_boolean(type_):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
        return bits[array.offset : array.offset + n]
    code = (
        "f" if pa.types.is_floating(type_) else "u" if pa.types.is_unsigned_integer(type_) else "i"
    )
    width = type_.bit_width // 8
    return np.frombuffer(data, f"{code}{width}", n, array.offset * width)


def input_of(
    name: str, array: pa.Array, form: Form, overflow: str, counted: bool
) -> tuple[Any, Any]:
    """(values, validity bytes or None) of a column as the kernels read it.  `counted`: only its
    validity is needed.  The values are an int64, float64 or uint64 array of numpy, or (n, 2)."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    valid, n = _valid_bytes(array), len(array)
    if form is Form.HASH:
        shape = KeyShape([("value", array.type)], longest=ANY_LENGTH)
        return shape.encode([array], n, False).hashes(), valid
    if counted or not n:
        return np.zeros((n, form.words), np.int64), valid
    if form is Form.WIDE:
        return np.frombuffer(array.buffers()[1], np.int64, 2 * n, array.offset * 16), valid
    if form in (Form.FLOAT, Form.ORDERED):
        if pa.types.is_decimal(array.type):
            array = array.cast(pa.float64())
        floats = np.ascontiguousarray(_values(array), dtype=np.float64)
        return (order_doubles(floats) if form is Form.ORDERED else floats), valid
    values = _values(array)
    if values.dtype == np.uint64:
        if form is Form.UNSIGNED:
            return (values ^ np.uint64(1 << 63)).view(np.int64), valid
        values = values.view(np.int64)
        if overflow == "error" and (values[valid.astype(bool)] if valid is not None else values
                                    ).min(initial=0) < 0:  # fmt: skip
            raise StateError(
                f"column {name}: a uint64 value from 2**63 on cannot be summed as int64",
                hint="set overflow=wrap, or use a decimal",
            )
    return np.ascontiguousarray(values, dtype=np.int64), valid


# -- results ---------------------------------------------------------------------------------------
def _arrow(values: np.ndarray, null: np.ndarray | None, type_: pa.DataType) -> pa.Array:
    """An array of fixed width from values of the same width; `null` marks the nulls."""
    bits = None
    if null is not None and null.any():
        bits = pa.py_buffer(np.packbits(~null, bitorder="little"))
    n = len(values)
    if pa.types.is_boolean(type_):
        values = np.packbits(values.astype(bool), bitorder="little")
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(type_, n, [bits, data])


def _from_ordered(words: np.ndarray, type_: pa.DataType) -> np.ndarray:
    signed = words.view(np.int64)
    if pa.types.is_floating(type_):
        back = signed ^ ((signed >> 63).view(np.uint64) >> np.uint64(1)).view(np.int64)
        floats = back.view(np.float64)
        return floats.astype(np.float32) if type_ == pa.float32() else floats
    if type_ == pa.uint64():
        return words ^ np.uint64(1 << 63)
    if pa.types.is_boolean(type_):
        return signed
    return signed.astype(f"i{type_.bit_width // 8}")


class Results:
    """The results of the states at `positions` (bytes from address `base`)."""

    def __init__(self, layout: StateLayout, base: int, positions: np.ndarray, overflow: str):
        self.layout, self.base, self.positions = layout, base, positions
        self.overflow = overflow
        self._seen = gather(base, positions, 0) if layout.has_seen else None

    @np.errstate(over="ignore", invalid="ignore")
    def columns(self) -> list[pa.Array]:
        """An Arrow array for each cell.  Floats beyond their range are infinite or no numbers, as
        in Spark, without a warning."""
        return [
            self._column(cell, code)
            for cell, code in zip(self.layout.cells, self.layout.codes, strict=True)
        ]

    def _word(self, word: int) -> np.ndarray:
        return gather(self.base, self.positions, word)

    def _unseen(self, bit: int) -> np.ndarray | None:
        if self._seen is None or bit == NO_BIT:
            return None
        return (self._seen >> np.uint64(bit) & np.uint64(1)) == 0

    def _column(self, cell: Cell, code: tuple[int, ...]) -> pa.Array:
        _, _, at, _, words, _, bit, _, _ = code
        lanes = [at + lane * words for lane in range(self.layout.executors if cell.lanes else 1)]
        kernel, null = cell.kernel, self._unseen(bit)
        if kernel in (Kernel.COUNT, Kernel.COUNT_VALID, Kernel.SUM_I64):
            return _arrow(self._word(at), null, pa.int64())
        if kernel is Kernel.SUM_F64:
            return _arrow(self._float_sum(lanes), null, pa.float64())
        if kernel is Kernel.AVG_F64:
            count = sum(self._word(lane + 1) for lane in lanes)
            return self._average(self._float_sum(lanes), np.asarray(count))
        if kernel is Kernel.AVG_I64:
            return self._average(self._wide_float(at), self._word(at + 2))
        if kernel is Kernel.MOMENTS:
            return self._moments(cell.aggregate.kind, lanes)
        if kernel is Kernel.DISTINCT:
            registers = cell.aggregate.precision_bits
            return pa.array(estimate_distinct(self.base, self.positions, at, registers))
        if kernel is Kernel.SUM_I128:
            return self._decimal(np.stack([self._word(at), self._word(at + 1)], 1), null, cell)
        if kernel is Kernel.AVG_I128:
            return self._average_decimal(cell, at)
        if kernel in (Kernel.MIN_I64, Kernel.MAX_I64):
            return _arrow(_from_ordered(self._word(at), cell.output), null, cell.output)
        if kernel in (Kernel.MIN_I128, Kernel.MAX_I128):
            return _arrow(np.stack([self._word(at), self._word(at + 1)], 1), null, cell.output)
        null = self._word(at + 1) == 0
        if kernel in (Kernel.FIRST_I128, Kernel.LAST_I128):
            return _arrow(np.stack([self._word(at + 2), self._word(at + 3)], 1), null, cell.output)
        return _arrow(_from_ordered(self._word(at + 2), cell.output), null, cell.output)

    def _float_sum(self, lanes: list[int]) -> np.ndarray:
        """The lanes added in the order of executors."""
        total = self._word(lanes[0]).view(np.float64)
        for lane in lanes[1:]:
            total = total + self._word(lane).view(np.float64)
        return total

    def _wide_float(self, at: int) -> np.ndarray:
        low, high = self._word(at), self._word(at + 1).view(np.int64)
        signed = low.view(np.int64)
        wide = high.astype(np.float64) * 2.0**64 + low.astype(np.float64)
        return np.where(high == signed >> 63, signed.astype(np.float64), wide)

    @staticmethod
    def _average(total: np.ndarray, count: np.ndarray) -> pa.Array:
        null = count == 0
        return _arrow(total / np.where(null, 1, count), null, pa.float64())

    def _decimal(self, wide: np.ndarray, null: np.ndarray | None, cell: Cell) -> pa.Array:
        """Decimals of the output's precision; what does not fit is an error, or null if sums may
        wrap."""
        limit = 10**cell.output.precision
        high, low = wide[:, 1].view(np.int64), wide[:, 0]

        def at_least(bound: int) -> np.ndarray:
            top, rest = bound >> 64, np.uint64(bound & ((1 << 64) - 1))
            return (high > top) | ((high == top) & (low >= rest))

        over = at_least(limit) | ~at_least(1 - limit)
        if over.any():
            if self.overflow == "error":
                raise StateError(
                    f"aggregate {cell.aggregate.name}: a value does not fit into {cell.output}",
                    hint="set overflow=wrap to get null for it",
                )
            null = over if null is None else null | over
        return _arrow(wide, null, cell.output)

    def _average_decimal(self, cell: Cell, at: int) -> pa.Array:
        assert cell.type is not None
        shift = cell.output.scale - cell.type.scale
        wide, null = average_decimals(self.base, self.positions, at, shift)
        return self._decimal(wide, null, cell)

    def _moments(self, kind: str, lanes: list[int]) -> pa.Array:
        """Chan's merge of the lanes in the order of executors, then variance or deviation."""
        n, mean, squares = (self._word(lanes[0] + i).view(np.float64) for i in range(3))
        for lane in lanes[1:]:
            nb, mb, sb = (self._word(lane + i).view(np.float64) for i in range(3))
            both = n + nb
            share = nb / np.where(both == 0, 1, both)
            delta = mb - mean
            squares = squares + sb + np.where((n == 0) | (nb == 0), 0.0, delta * delta * n * share)
            mean = np.where(n == 0, mb, np.where(nb == 0, mean, mean + delta * share))
            n = both
        least = 2 if kind.endswith("samp") else 1
        null = n < least
        variance = squares / np.where(null, 1, n - (least - 1))
        return _arrow(np.sqrt(variance) if kind.startswith("stddev") else variance, null,
                      pa.float64())  # fmt: skip
