"""Types of `kdirect.state.state_rows`, which is compiled.  See state_rows.pyx."""

import numpy as np

from kdirect.state.table import Table

def entries_of(table: Table) -> np.ndarray: ...
