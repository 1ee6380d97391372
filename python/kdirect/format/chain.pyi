"""Types of `kdirect.format.chain`, which is compiled: its functions are for compiled modules."""

DAMAGED_HINT: str
