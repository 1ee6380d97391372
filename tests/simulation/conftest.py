"""Lets the simulations import `harness`, which is theirs alone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
