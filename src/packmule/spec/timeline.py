"""What one execution of a graph took, simulated or measured. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Timeline:
    """Per-task times and the byte ledger of one graph execution.

    Attributes:
        start, end: float64 [tasks], seconds from the beginning of the execution.
        ledger_seconds: float64 [events], when each ledger entry was made.
        ledger_task: int64 [events], task that claimed (start) or released (end) bytes;
            -1 for persistent buffers claimed before the first task.
        ledger_bytes: dict tier -> int64 [events], live bytes after the event.
        extent: dict tier -> highest offset + bytes ever live.
    """

    start: np.ndarray
    end: np.ndarray
    ledger_seconds: np.ndarray
    ledger_task: np.ndarray
    ledger_bytes: dict[str, np.ndarray]
    extent: dict[str, int] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From the beginning to the end of the last task."""
        return float(self.end.max()) if len(self.end) else 0.0
