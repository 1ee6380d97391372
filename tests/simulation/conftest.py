"""Lets the simulations import `harness` and its parts, which are theirs alone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
