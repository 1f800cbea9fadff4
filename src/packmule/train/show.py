"""Show: what a run prints: the machine, the plan, progress, results. Rich on a terminal or in a notebook,
lines else."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from packmule.plan.explain import tables as plan_tables
from packmule.plan.table import Table
from packmule.probe import explain as explain_hardware
from packmule.spec.units import format_bytes, format_seconds
from packmule.train.data import data_tables
from packmule.train.folder import HELD_OUT, module_metrics, perplexities
from packmule.train.memory import process_memory
from packmule.train.modules import module_tables
from packmule.train.tables import print_tables, wrapped

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from packmule.data.report import PrepareReport
    from packmule.plan.search import Found
    from packmule.plan.situation import Situation
    from packmule.shapes.module import ModuleShape
    from packmule.spec.hardware import Hardware

LINE_SECONDS = 5.0
"""Least time between two progress lines where there is no terminal to redraw."""

SMOOTH = 0.2
"""Weight of the newest step in the step time that tokens/s and ETA are made of."""

HIDDEN = ("report", "progress", "end")
"""Events of children that `--json` does not pass on."""

NOT_METRICS = frozenset({"event", "step", "set", "loss", "seconds", "resident_bytes", "peak_bytes"})
"""What an evaluation's event holds besides metrics, and the loss, which comes first."""

SAMPLES = "samples"
"""What a run of modules of one's own counts, in place of tokens."""

LABELS = {
    "step_seconds": "step",
    "compute_seconds": "compute",
    "update_seconds": "update",
    "disk_seconds": "disk busy",
    "exposed_io_seconds": "waiting for disk",
    "disk_bytes_read_per_step": "read per step",
    "disk_bytes_written_per_step": "written per step",
    "peak_ram_bytes": "peak RAM",
    "device_seconds": "device busy",
    "sent_bytes_per_step": "sent per step",
    "received_bytes_per_step": "received per step",
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
        redraws = self._console.is_terminal or _is_notebook(self._console)
        self._live = redraws and not quiet and not json_lines
        self._bar: Any = None
        self._phase = ""
        self._budget = 0
        self._total = 0
        self._prompt = ""
        self._step_seconds = 0.0
        self._last_line = 0.0
        self._first = True
        self._unit = "tokens"

    def __enter__(self) -> Self:
        if self._live:
            from packmule.train.bar import Bar

            self._bar = Bar(self._console)
            self._bar.start()
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
            self._bar.show(done=fraction, total=1.0)

    def phase(self, name: str) -> None:
        """A new phase begins."""
        if name == self._phase:
            return
        self._phase = name
        if self._bar is not None:
            self._bar.phase(name)

    def machine(self, hardware: Hardware) -> None:
        """What was measured."""
        if self._json:
            self._emit({"event": "machine", "hardware": hardware.model_dump(mode="json")})
        else:
            self._tables([Table("machine", tuple(explain_hardware(hardware)))])

    def data(self, report: PrepareReport) -> None:
        """What was prepared."""
        if self._json:
            self._emit({"event": "data", "report": report.model_dump(mode="json")})
            return
        self._tables(data_tables(report))

    def samples(self, shape: ModuleShape, report: PrepareReport) -> None:
        """Modules of the user's own, and their data set."""
        self._unit = SAMPLES
        if self._json:
            self._emit({"event": "data", "report": report.model_dump(mode="json")})
            return
        self._tables(module_tables(shape, report))

    def plan(self, situation: Situation, found: Found, step: int, total: int, prompt: str) -> None:
        """What will be done.

        Args:
            step: where the run stands.
            prompt: what samples continue; may be empty.
        """
        self._budget, self._total, self._prompt = situation.budget_bytes, total, prompt
        if self._json:
            self._emit({"event": "plan", "plan": found.plan.model_dump(mode="json"), "step": step})
            return
        self._tables(plan_tables(situation, found, total - step))
        if not self._quiet:
            self._print()
            self._print(f"resuming after step {step} of {total}" if step else f"starting: {total} steps")

    def note(self, text: str) -> None:
        """Something a user should know."""
        self.event({"event": "note", "text": text})

    def complete(
        self, step: int, total: int, final: Path, log: Iterable[Mapping[str, Any]], unit: str = "tokens"
    ) -> None:
        """Nothing is left to do."""
        self._unit = unit
        if self._json:
            self._emit({"event": "complete", "step": step, "path": str(final)})
            return
        done = f"all {step} steps are done" if step >= total else f"it stopped early after step {step}"
        self._print(f"The run is complete: {done}. Nothing to do.")
        self._results(final, log)

    # The child's events

    def event(self, event: Mapping[str, Any]) -> None:
        """One event of a child."""
        if self._json:
            if event["event"] not in HIDDEN:
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
            self._bar.show(done=event["done"], total=event["total"], below=self._memory(event))

    def _on_step(self, event: Mapping[str, Any]) -> None:
        step, seconds = event["step"], event["seconds"]
        self.phase("train")
        before = self._step_seconds or seconds
        self._step_seconds = (1 - SMOOTH) * before + SMOOTH * seconds
        left = format_seconds((self._total - step) * self._step_seconds)
        where = f"step {step}/{self._total}"
        speed = f"{event['tokens'] / self._step_seconds:,.0f} {self._unit}/s"
        numbers = f"loss {event['loss']:.4f}  {speed}  {self._memory(event)}"
        if self._bar is not None:
            self._bar.show(done=step, total=self._total, beside=f"{where}  ETA {left} ", below=numbers)
            return
        now = time.monotonic()
        if not self._quiet and (now - self._last_line > LINE_SECONDS or step in (1, self._total)):
            self._last_line = now
            self._print(f"{where}  {numbers}" + (f"  ETA {left}" if step < self._total else ""))

    def _on_evaluation(self, event: Mapping[str, Any]) -> None:
        name = "held-out" if event["set"] == HELD_OUT else event["set"]
        figures = [f"{name} loss {event['loss']:.4f}"]
        figures += [told_metric(key, value) for key, value in event.items() if key not in NOT_METRICS]
        took = format_seconds(event["seconds"])
        self._print(f"step {event['step']}: {', '.join(figures)} ({took})")

    def _on_sample(self, event: Mapping[str, Any]) -> None:
        self._print(f"step {event['step']}: a sample, the prompt in brackets")
        for line in wrapped(f"[{self._prompt}]{event['text']}", self._console, "  | "):
            self._print(line.rstrip())

    def _on_snapshot(self, event: Mapping[str, Any]) -> None:
        self._print(f"step {event['step']}: full copy in {event['path']}")

    def _memory(self, event: Mapping[str, Any]) -> str:
        if "resident_bytes" not in event:
            return ""
        own = process_memory()
        now = format_bytes(event["resident_bytes"] + own.resident)
        peak = format_bytes(event["peak_bytes"] + own.peak)
        return f"RAM {now} now, {peak} peak, {format_bytes(self._budget)} budget"

    # Afterwards

    def comparison(
        self,
        budget: int,
        terms: Mapping[str, Mapping[str, float]],
        steps: int,
        final: Path,
        log: Sequence[Mapping[str, Any]],
    ) -> None:
        """Predicted, measured, error; then what the run came to.

        Args:
            terms: by name of spec.plan.Predicted: "predicted" and "measured".
            steps: how many were measured.
            log: of the whole run.
        """
        if self._json:
            self._emit({"event": "report", "budget_bytes": budget, "terms": terms})
            return
        rows = []
        for key, pair in terms.items():
            predicted, measured = float(pair["predicted"]), float(pair["measured"])
            form = format_seconds if key.endswith("seconds") else format_bytes
            error = f"{predicted / measured - 1:+.1%}" if measured else "-"
            rows.append((LABELS[key], form(predicted), form(measured), error))
        title = f"predicted and measured, over {steps} steps" if steps > 1 else "predicted and measured"
        note = "error: how much of the measured value the prediction is too high (+) or too low (-)"
        header = ("", "predicted", "measured", "error")
        self._tables([Table(title, tuple(rows), header, frozenset({1, 2, 3}), (note,))], always=True)
        self._results(final, log)

    def _results(self, final: Path, log: Iterable[Mapping[str, Any]]) -> None:
        """Perplexity before and after, and where the model is."""
        text = self._unit == "tokens"
        if text:
            metrics = {
                f"{'held-out' if name == HELD_OUT else name} perplexity": found
                for name, found in perplexities(log).items()
            }
        else:
            metrics = {f"held-out {name}": found for name, found in module_metrics(log).items()}
        rows = []
        for name, found in metrics.items():
            if len(found) > 1:
                (first, before), (last, after) = found[0], found[-1]
                rows.append((name, f"{before:.3f} at step {first}, {after:.3f} at step {last}"))
        rows.append(("model", f"{final} ({'Hugging Face format' if text else 'state dict'})"))
        self._tables([Table("result", tuple(rows))], always=True)

    # Output

    def _tables(self, tables: list[Table], always: bool = False) -> None:
        if self._json or (self._quiet and not always):
            return
        if not self._first:
            self._print()
        self._first = False
        print_tables(self._console, tables)

    def _print(self, text: str = "") -> None:
        self._first = False
        self._console.print(text, markup=False)

    @staticmethod
    def _emit(event: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(dict(event)) + "\n")
        sys.stdout.flush()


def told_metric(name: str, value: float) -> str:
    """A metric of an evaluation in words."""
    if name == "accuracy":
        return f"accuracy {value:.1%}"
    if name == "bits_per_byte":
        return f"{value:.4f} bits per byte"
    return f"{name} {value:.3f}" if name == "perplexity" else f"{name} {value:.4f}"


def _is_notebook(console: Console) -> bool:
    """Whether output goes to a notebook that can redraw a part of it."""
    return console.is_jupyter and find_spec("ipywidgets") is not None


def progress_line() -> Callable[[str, float], None]:
    """A reporter of (what, fraction done): one line of standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        return lambda doing, fraction: None

    def report(doing: str, fraction: float) -> None:
        end = "\r\x1b[K" if fraction >= 1 else ""
        print(f"\r\x1b[K{fraction:4.0%} {doing}{end}", end="", file=sys.stderr, flush=True)

    return report
