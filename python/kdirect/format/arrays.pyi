"""Types of `kdirect.format.arrays`, which is compiled.  See arrays.pyx."""

import pyarrow as pa

SCHEMA: pa.Schema
SCHEMA_VIEWS: pa.Schema
SCHEMA_VIEWS_WITH_HEADERS: pa.Schema
SCHEMA_WITH_HEADERS: pa.Schema
