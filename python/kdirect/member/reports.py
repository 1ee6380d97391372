"""What is wrong with the metadata store, for the log: each thing once.

A damaged node is met with each look at it.
"""

from __future__ import annotations

import logging

log = logging.getLogger("kdirect.member")

MOST_REMEMBERED = 1000


class Reports:
    """See the module.  `told` keeps what was logged, in its order."""

    def __init__(self) -> None:
        self.told: dict[str, None] = {}

    def error(self, error: BaseException | str) -> None:
        """Log an error, unless it was logged before."""
        text = str(error)
        if text in self.told:
            return
        if len(self.told) >= MOST_REMEMBERED:
            self.told.clear()
        self.told[text] = None
        log.error("%s", text)
