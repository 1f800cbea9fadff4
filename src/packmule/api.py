"""The commands as functions, for scripts and notebooks. What they do lives in packmule.train.

Jobs are given as a YAML file's path, as such a file's content, or as keyword arguments with the keys,
aliases and errors of the command line. Every failure is a `PackmuleError`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from packmule.errors import ConfigError, PackmuleError
from packmule.plan.table import Table
from packmule.probe import asked_threads, explain
from packmule.probe import load as load_hardware
from packmule.spec.environment import read_environment
from packmule.spec.hardware import Hardware
from packmule.spec.job import Job
from packmule.spec.plan import Plan
from packmule.spec.units import format_bytes, parse_bytes
from packmule.train import commands
from packmule.train.export import export as write_export
from packmule.train.folder import RunFolder, read_log
from packmule.train.jobs import JobLike, job_of
from packmule.train.launch import train as launch
from packmule.train.planning import Planned as Planned
from packmule.train.planning import make_plan
from packmule.train.results import Checked
from packmule.train.results import Evaluation as Evaluation
from packmule.train.results import Exported as Exported
from packmule.train.show import progress_line

Paths = str | os.PathLike[str]


class Machine(Hardware):
    """A machine as measured. `str` is the table that `packmule probe` prints."""

    def __repr__(self) -> str:
        free = format_bytes(self.ram_available_bytes)
        return f"<Machine {self.host}: {self.cpu}, {self.threads} threads, {free} of RAM available>"

    def __str__(self) -> str:
        return Table("machine", tuple(explain(self))).plain()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def probe(disk: Paths = ".", *, threads: int | None = None, refresh: bool = False) -> Machine:
    """Measure this machine, or take the kept measurement.

    Args:
        disk: a folder on the disk a run will use.
        threads: CPU threads; by default all usable.
        refresh: measure again.

    Raises:
        PackmuleError: see packmule.probe.load.
    """
    environment = read_environment()
    path, count = environment.cache / "probe.json", asked_threads(threads, environment.omp_num_threads)
    found = load_hardware(path, Path(disk), refresh=refresh, threads=count, progress=progress_line())
    return Machine(**dict(found))


def plan(job: JobLike = None, /, **keys: Any) -> Planned:
    """How a job fits, how fast it will run, and why. Nothing is trained.

    Args:
        job: a YAML file, its content as a mapping, a `Job`, or nothing.
        keys: keys of a job, which win: `ram="4GB"`, `max_steps=100`, `optim={"lr": 1e-4}`; functions of your
            own as they are: `model_factory=vit.model` (docs/modules.md).

    Raises:
        DoesNotFit: says what would fit.
        PackmuleError: bad input.
    """
    environment = read_environment()
    found = job_of(job, environment, arguments=keys, nameless="the job")
    return make_plan(found, environment, progress=progress_line())


def train(
    job: JobLike = None, /, *, renumber: bool = False, yes: bool = False, quiet: bool = False, **keys: Any
) -> Run:
    """Run a job within its budget; the same call resumes it.

    Args:
        job, keys: as for `plan`.
        renumber: resume although the numerics (docs/design.md) differ from the run's.
        yes: write more than a tenth of the disk's rated life.
        quiet: print results only, no progress.

    Returns:
        The run, which is complete.

    Raises:
        Interrupted, RunFailed: the same call carries on from the last commit.
        PackmuleError: bad input, too small a budget, a full disk.
    """
    environment = read_environment()
    found = job_of(job, environment, arguments=keys, nameless="the job")
    found.require_data()
    launch(found, environment, renumber=renumber, yes=yes, quiet=quiet, json_lines=False)
    run = Run(found.train.output_dir)
    factories = (found.model.factory, found.data.factory, found.data.val_factory)
    run._imports = tuple(name.rpartition(":")[0] for name in factories if name is not None)
    return run


def open(run: Paths) -> Run:
    """A run that exists already, or a checkpoint-N in it.

    Raises:
        ConfigError: it is none.
    """
    return Run(run)


class Run:
    """A run's folder, or a checkpoint-N in it.

    Args:
        path: as it was given to `train` as `output_dir`.

    Attributes:
        path: absolute.

    Raises:
        ConfigError: no run is there.
    """

    def __init__(self, path: Paths) -> None:
        self._imports: tuple[str, ...] = ()
        self._folder = RunFolder.open(Path(path))
        self.path = Path(path).expanduser().absolute()

    # What it is

    @property
    def job(self) -> Job:
        """The resolved job."""
        return self._folder.job()

    @property
    def plan(self) -> Plan:
        """The plan of its last start."""
        return self._folder.read_plan()

    @property
    def machine(self) -> Machine:
        """The machine of its last start."""
        return Machine(**dict(self._folder.read_hardware()))

    @property
    def step(self) -> int | None:
        """The last commit's; None before the first."""
        head = self._folder.head()
        return None if head is None else head.step

    @property
    def log(self) -> list[dict[str, Any]]:
        """Its metrics, one mapping per entry, oldest first (docs/formats.md, log.jsonl)."""
        return read_log(self._folder.log)

    @property
    def report(self) -> dict[str, dict[str, float]]:
        """For each term of the plan's prediction: "predicted" and "measured".

        Raises:
            ConfigError: there is none, for the run has not ended yet.
        """
        try:
            text = self._folder.report.read_text(encoding="utf-8")
        except OSError:
            raise ConfigError(
                f"{self._folder.report} is not there yet.", "it is written when the run ends"
            ) from None
        terms: dict[str, dict[str, float]] = json.loads(text)["terms"]
        return terms

    @property
    def final(self) -> Path:
        """The trained model, a Hugging Face folder, once the run is complete."""
        return self._folder.final

    @property
    def snapshots(self) -> list[Run]:
        """The full copies kept apart, oldest first."""
        return [Run(self._folder.state / name) for name in self.info().get("snapshots", [])]

    def info(self) -> dict[str, Any]:
        """What `packmule info` prints, as plain values."""
        return commands.info(self.path, read_environment())

    # What can be done with it

    def evaluate(
        self,
        dataset: Paths | Sequence[Paths] = (),
        *,
        rows: int | None = None,
        ram: str | int | None = None,
        set_name: str | None = None,
        imports: Sequence[str] = (),
    ) -> Evaluation:
        """Loss and other metrics on held-out text.

        Args:
            dataset: text to judge on; by default the run's validation data.
            rows: judge on so many rows only.
            set_name: which of the run's evaluation sets; by default the first.
            ram: budget of all processes; by default the run's.
            imports: modules of your own that the run was trained with and that may be imported, like
                `["vit"]`; not needed of a run that `train` has given back.
        """
        paths = (dataset,) if isinstance(dataset, (str, os.PathLike)) else dataset
        return commands.evaluate(
            self.path,
            read_environment(),
            dataset=tuple(os.fspath(path) for path in paths),
            rows=rows,
            ram_bytes=None if ram is None else parse_bytes(ram),
            name=set_name,
            imports=(*imports, *self._imports),
        )

    def generate(
        self,
        prompt: str,
        *,
        tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        ram: str | int | None = None,
    ) -> str:
        """The continuation of a prompt.

        Args:
            tokens: most new ones.
            temperature: 0: always the likeliest token.
            top_p: sample among the likeliest tokens of this share.
            seed: of the sampling.
            ram: budget of all processes; by default the run's.
        """
        return commands.generate(
            self.path,
            read_environment(),
            prompt=prompt,
            tokens=tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            ram_bytes=None if ram is None else parse_bytes(ram),
        )

    def export(
        self,
        output: Paths,
        *,
        dtype: str | None = None,
        prune_vocab: bool = False,
        corpus: Paths | Sequence[Paths] = (),
    ) -> Exported:
        """Write the weights for other tools; checksums are verified on the way.

        Args:
            output: a folder, or a file whose name ends in .gguf; not there yet.
            dtype: by default bfloat16 in a folder, float16 in a .gguf file; also float32, and q8_0 in
                the latter.
            prune_vocab: leave out the tokens that `corpus`, by default the run's data, does not use.
            corpus: files, folders or globs.
        """
        chosen = [corpus] if isinstance(corpus, str | os.PathLike) else corpus
        return write_export(
            self.path,
            Path(output),
            read_environment(),
            dtype=dtype,
            prune_vocab=prune_vocab,
            corpus=tuple(os.fspath(path) for path in chosen),
        )

    def verify(self) -> dict[str, Checked]:
        """Compare everything on disk with its checksums.

        Returns:
            By folder name, what was read.

        Raises:
            DamagedFile: names block, plane and chunk of the first damage.
        """
        return commands.verify(self.path, read_environment())

    def __repr__(self) -> str:
        try:
            found = self.info()
        except PackmuleError as error:
            return f"<Run {self.path}: {error.cause}>"
        if found["step"] is None:
            return f"<Run {self.path}: no commit yet>"
        words = [f"step {found['step']} of {found['total steps']}"]
        if "last loss" in found:
            words.append(f"loss {found['last loss']:.4f}")
        for name in ("held-out perplexity", "held-out accuracy"):
            values = list(found.get(name, {}).values())
            if values:
                words.append(f"{name} {values[-1]:.3f}")
        return f"<Run {self.path}: {', '.join(words)}>"
