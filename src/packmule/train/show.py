"""Show: what a run prints: the machine, the plan, progress, results. Rich on a terminal, lines else."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from packmule.plan.explain import explain
from packmule.probe import explain as explain_hardware
from packmule.spec.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from packmule.data.prepare import PrepareReport
    from packmule.plan.search import Found
    from packmule.plan.situation import Situation
    from packmule.spec.hardware import Hardware

LINE_SECONDS = 5.0
"""Least time between two progress lines where there is no terminal to redraw."""

_LABELS = {
    "step_seconds": "step",
    "compute_seconds": "compute",
    "update_seconds": "update",
    "disk_seconds": "disk busy",
    "exposed_io_seconds": "waiting for disk",
    "disk_bytes_read_per_step": "read per step",
    "disk_bytes_written_per_step": "written per step",
    "peak_ram_bytes": "peak RAM",
}


class Show:
    """Where a run's output goes. Use as a context manager.

    Args:
        quiet: only results.
        json_lines: every event as one JSON object per line on standard output, nothing else.
        color: allow color on a terminal.
    """

    def __init__(self, quiet: bool, json_lines: bool, color: bool) -> None:
        from rich.console import Console

        self._quiet = quiet
        self._json = json_lines
        self._console = Console(stderr=json_lines, no_color=not color, highlight=False, soft_wrap=True)
        self._live = self._console.is_terminal and not quiet and not json_lines
        self._bar: Any = None
        self._task: Any = None
        self._phase = ""
        self._budget = 0
        self._total = 0
        self._step_seconds = 0.0
        self._last_line = 0.0
        self._evaluations: list[tuple[int, float]] = []
        self._samples: list[tuple[int, str]] = []

    def __enter__(self) -> Self:
        if self._live:
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                refresh_per_second=4,
            )
            self._bar.start()
            self._task = self._bar.add_task("start", total=None, text="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    # Before the child

    def fraction(self, doing: str, fraction: float) -> None:
        """Progress of the probe."""
        self.phase(f"probe: {doing}")
        if self._bar is not None:
            self._bar.update(self._task, total=1.0, completed=fraction)

    def phase(self, name: str) -> None:
        """A new phase begins."""
        if name == self._phase:
            return
        self._phase = name
        if self._bar is not None:
            self._bar.update(self._task, description=name, total=None, completed=0, text="")

    def machine(self, hardware: Hardware) -> None:
        """What was measured."""
        if not self._json:
            self._rows("machine", explain_hardware(hardware))

    def plan(self, situation: Situation, found: Found, report: PrepareReport, step: int) -> None:
        """What will be done."""
        self._budget = situation.budget_bytes
        if self._json:
            self._emit({"event": "plan", "plan": found.plan.model_dump(mode="json"), "step": step})
            return
        if self._quiet:
            return
        train = report.train
        self._rows(
            "data",
            [
                ("documents", f"{report.documents:,}, {report.tokens:,} tokens"),
                ("rows", f"{train.rows:,} of at most {train.max_seq_length} tokens, {report.train_fill_percent:.1f} % full"),
                ("cut", f"{train.documents_cut:,} documents longer than a row were cut into pieces"),
                ("validation", f"{report.validation.rows:,} rows" if report.validation else "none"),
            ],
        )
        self._print(explain(situation, found))
        if step:
            self._print(f"resuming after step {step}")

    # The child's events

    def event(self, event: Mapping[str, Any]) -> None:
        """One event of a child."""
        if self._json:
            if event["event"] not in ("report", "progress"):
                self._emit(event)
            return
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def _on_phase(self, event: Mapping[str, Any]) -> None:
        if event["name"] != "step":
            self.phase(event["name"])

    def _on_note(self, event: Mapping[str, Any]) -> None:
        self._print(f"note: {event['text']}")

    def _on_start(self, event: Mapping[str, Any]) -> None:
        self._total = event["total"]

    def _on_progress(self, event: Mapping[str, Any]) -> None:
        self.phase(event["phase"])
        if self._bar is not None:
            text = self._memory(event)
            self._bar.update(self._task, total=event["total"], completed=event["done"], text=text)

    def _on_step(self, event: Mapping[str, Any]) -> None:
        step, seconds = event["step"], event["seconds"]
        self.phase("train")
        self._step_seconds = seconds if not self._step_seconds else 0.8 * self._step_seconds + 0.2 * seconds
        left = format_seconds((self._total - step) * self._step_seconds)
        text = (
            f"step {step}/{self._total}  loss {event['loss']:.4f}  {event['tokens'] / seconds:,.0f} tokens/s  "
            f"{self._memory(event)}  ETA {left}"
        )
        if self._bar is not None:
            self._bar.update(self._task, total=self._total, completed=step, text=text)
            return
        now = time.monotonic()
        if not self._quiet and (now - self._last_line > LINE_SECONDS or step in (1, self._total)):
            self._last_line = now
            self._print(text)

    def _on_evaluation(self, event: Mapping[str, Any]) -> None:
        self._evaluations.append((event["step"], event["perplexity"]))
        self._print(
            f"step {event['step']}: held-out loss {event['loss']:.4f}, perplexity {event['perplexity']:.3f} "
            f"({format_seconds(event['seconds'])})"
        )

    def _on_sample(self, event: Mapping[str, Any]) -> None:
        self._samples.append((event["step"], event["text"]))
        self._print(f"step {event['step']}: sample\n{_indented(event['text'])}")

    def _on_snapshot(self, event: Mapping[str, Any]) -> None:
        self._print(f"step {event['step']}: snapshot {event['path']}")

    def _on_export(self, event: Mapping[str, Any]) -> None:
        self._print(f"exported {event['path']} (Hugging Face format)")

    def _memory(self, event: Mapping[str, Any]) -> str:
        if "resident_bytes" not in event:
            return ""
        from packmule.train.memory import process_memory

        own = process_memory()
        now = format_bytes(event["resident_bytes"] + own.resident)
        peak = format_bytes(event["peak_bytes"] + own.peak)
        return f"RAM {now}, peak {peak} of {format_bytes(self._budget)}"

    # Afterwards

    def comparison(self, budget: int, terms: Mapping[str, Mapping[str, float]]) -> None:
        """Predicted, measured, error."""
        if self._json:
            self._emit({"event": "report", "budget_bytes": budget, "terms": terms})
            return
        rows = [("", "predicted", "measured", "error")]
        for key, pair in terms.items():
            predicted, measured = float(pair["predicted"]), float(pair["measured"])
            form = format_seconds if key.endswith("seconds") else format_bytes
            error = f"{predicted / measured - 1:+.1%}" if measured else ""
            rows.append((_LABELS[key], form(predicted), form(measured), error))
        for label, *values in rows:
            self._print(f"  {label:<18}" + "".join(f"{value:>12}" for value in values))
        if len(self._evaluations) > 1:
            (first, before), (last, after) = self._evaluations[0], self._evaluations[-1]
            self._print(f"held-out perplexity {before:.3f} at step {first}, {after:.3f} at step {last}")

    # Output

    def _rows(self, title: str, rows: list[tuple[str, str]]) -> None:
        if self._quiet or self._json:
            return
        self._print("\n".join([title, *(f"  {label:<18}{value}" for label, value in rows)]))

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False)

    @staticmethod
    def _emit(event: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(dict(event)) + "\n")
        sys.stdout.flush()


def _indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())
