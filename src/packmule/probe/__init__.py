"""What this machine can do: `measure` it, `load` the kept measurement, `explain` it.

No torch in this process: what needs it is measured in a process of its own (torch_child.py).
"""

from __future__ import annotations

from packmule.probe.cache import load
from packmule.probe.cpu import asked_threads
from packmule.probe.machine import Effort, Progress, measure
from packmule.probe.roots import Roots
from packmule.probe.table import explain

__all__ = ["Effort", "Progress", "Roots", "asked_threads", "explain", "load", "measure"]
