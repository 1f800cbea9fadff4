"""Measured: what steps really took, in the same terms as a plan's prediction."""

from __future__ import annotations

import statistics

import numpy as np

from packmule.engine.engine import StepResult
from packmule.graph.kinds import COMPUTE, UPDATES, TaskKind
from packmule.graph.traffic import busy_seconds, copied, link_traffic, traffic

WARM_UP = 1
"""Steps that are left out when there are enough: the first faults memory in."""


class Measured:
    """Collects per-step times; `summary` has the fields of spec.plan.Predicted that were measured."""

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []
        self._copying: list[dict[str, float]] = []

    def add(self, result: StepResult, seconds: float) -> None:
        """One step.

        Args:
            seconds: of the step with its data and logging.
        """
        graph, timeline = result.graph, result.timeline
        spent = timeline.end - timeline.start
        kinds = [TaskKind(kind) for kind in graph.kind.tolist()]
        compute = np.array([kind in COMPUTE for kind in kinds])
        busy = busy_seconds(graph, spent)
        update = np.array([kind in UPDATES for kind in kinds])
        read, written = traffic(graph)
        sent, received = link_traffic(graph)
        # A step with a snapshot is longer: the prediction, too, has these apart.
        (self._copying if copied(graph) else self._steps).append(
            {
                "step_seconds": seconds,
                "compute_seconds": float(spent[compute].sum()),
                "disk_seconds": busy["disk"],
                "update_seconds": float(spent[update].sum()),
                "exposed_io_seconds": max(0.0, timeline.seconds - busy.get("device", busy["cores"])),
                "disk_bytes_read_per_step": read,
                "disk_bytes_written_per_step": written,
                "device_seconds": busy.get("device", 0.0),
                "sent_bytes_per_step": sent,
                "received_bytes_per_step": received,
            }
        )

    def summary(self) -> dict[str, float]:
        """Medians of times, means of bytes; empty before the first step."""
        steps = self._steps or self._copying
        steps = steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps
        if not steps:
            return {}
        found = {}
        for key in steps[0]:
            values = [step[key] for step in steps]
            found[key] = statistics.fmean(values) if key.endswith("_per_step") else statistics.median(values)
        # Commits of resident state come every few steps: their cost is in the mean, as predicted.
        found["step_seconds"] = statistics.fmean(step["step_seconds"] for step in steps)
        return {**found, "steps": len(steps)}
