"""How long the keys and values of a row may be: an entry of the state has to fit into a page.

A page of 64 KiB takes the longest key and the longest values together, unless the group has large
states besides; then, and in smaller pages, keys and values share what is left.  What the kernels
hold to (`keys.pyx`, `rows.pyx`, `texts.pyx`) depends on nulls and padding; the limit here is a
little below, so that a row that passes it is never too long for them, and one that does not is a
bad row like any other.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from kdirect.errors import ConfigError
from kdirect.state.schema import width_of

MOST_BYTES = 32_000  # of a row's key, and of what is kept of it
COLUMN_BYTES = 16  # that a column takes at least: a decimal; of a string, its length and padding
ROW_BYTES = 32  # lengths and nulls
PAGE_BYTES = 768  # of a page: its header and footer, and what padding takes at most


@dataclass(frozen=True, slots=True)
class RowLimit:
    """The values of these string and binary columns of a row may have `most` bytes together."""

    columns: tuple[str, ...]
    most: int

    @property
    def what(self) -> str:
        """How messages name the columns."""
        return ", ".join(self.columns)

    def too_long(self, columns: Mapping[str, pa.Array]) -> pa.Array | None:
        """Which rows have more, or None if none has."""
        lengths = [pc.binary_length(columns[name]) for name in self.columns]
        if sum(pc.max(each).as_py() or 0 for each in lengths) <= self.most:
            return None
        total = pc.cast(pc.fill_null(lengths[0], 0), pa.int64())
        for each in lengths[1:]:
            total = pc.add(total, pc.cast(pc.fill_null(each, 0), pa.int64()))
        found = pc.greater(total, self.most)
        return found if pc.any(found).as_py() else None

    def why(self) -> str:
        """What is wrong with such a row."""
        return f"more than the {self.most} bytes that a row may have there"


def limits_of(
    kinds: Mapping[str, str],
    *,
    key: Iterable[str],
    kept: Iterable[str] = (),
    alone: Iterable[str] = (),
    states: int = 0,
    page_bytes: int | None = None,
) -> tuple[RowLimit, ...]:
    """The limits of rows whose columns are of these types: of the columns of the key together, of
    those that are kept of each row together, and of those whose values lie alone.  An entry, which
    has `states` bytes of other states too, goes into a page of `page_bytes` (None: of any size).

    Raises ConfigError where columns of a fixed width are too wide, whatever is in them."""
    # A key of a fixed width may be as long as a page has room for it.
    free_key, most_key, taken_key = _together(key, kinds, "the key", fixed=None)
    free_kept, most_kept, taken_kept = _together(kept, kinds, "the columns that are kept")
    widths = {name: width_of(kinds[name]) for name in alone}
    free_alone = [name for name, width in widths.items() if width is None]
    most_alone = MOST_BYTES
    spare = (page_bytes or 0) - PAGE_BYTES - states - taken_key - taken_kept
    wide = max((width or 0 for width in widths.values()), default=0)
    # A page that is too small for columns of a fixed width is the kernels' error.
    if page_bytes is not None and spare > wide:
        of_key = 0
        if free_key:
            of_key = min(spare // 2 if free_kept or free_alone else spare, spare - wide)
        most_key = min(most_key, of_key)
        most_kept, most_alone = min(most_kept, spare - of_key), min(most_alone, spare - of_key)
    found = [RowLimit(free_key, most_key), RowLimit(free_kept, most_kept)]
    found += [RowLimit((name,), most_alone) for name in free_alone]
    return tuple(limit for limit in found if limit.columns)


def _together(
    names: Iterable[str], kinds: Mapping[str, str], what: str, *, fixed: int | None = MOST_BYTES
) -> tuple[tuple[str, ...], int, int]:
    """Columns whose width is free, the bytes that they may have together, and those of the rest.
    `fixed` is how many bytes there may be where no width is free."""
    widths = {name: width_of(kinds[name]) for name in names}
    free = tuple(name for name, width in widths.items() if width is None)
    taken = ROW_BYTES + sum(max(COLUMN_BYTES, width or 0) for width in widths.values())
    wide = taken if free else sum(width or 0 for width in widths.values()) + len(widths) // 8
    most = MOST_BYTES if free else fixed
    if most is not None and wide > most:
        raise ConfigError(
            f"{what}: columns of a fixed width have {wide} bytes in all",
            hint=f"{MOST_BYTES} bytes are the most: take fewer or narrower columns",
        )
    return free, MOST_BYTES - taken, taken
