"""The known run of the fault tests serves the unit tests of checkpoint too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "fault"))
