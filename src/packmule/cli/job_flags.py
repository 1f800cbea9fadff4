"""The flags that `plan` and `train` share: one table, and what makes typer options of it.

Values stay text: `packmule.spec.job` says what each may be, in one place for files and flags.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer

from packmule.errors import ConfigError


class Flag(NamedTuple):
    """One option that sets one field of the job."""

    name: str
    metavar: str
    help: str
    also: str = ""


FLAGS = (
    Flag("ram", "SIZE", "Budget of all processes together, like 2.2GB. Default: what is available."),
    Flag("model", "PATH", "Hugging Face folder, .gguf file, or folder with only config.json."),
    Flag(
        "dataset",
        "PATH",
        "File, folder or glob to train on; may be given several times.",
        also="data",
    ),
    Flag("model-factory", "MODULE:FUNCTION", "A function that makes modules of your own (docs/modules.md)."),
    Flag("data-factory", "MODULE:FUNCTION", "A function that makes their data set."),
    Flag("dataset-format", "NAME", "Of records: auto, text, alpaca, sharegpt, messages, ..."),
    Flag("train-on", "WHAT", "What carries loss: assistant (answers only) or all."),
    Flag("output-dir", "PATH", "Where the run lives; the same folder resumes it."),
    Flag("max-seq-length", "TOKENS", "Most tokens of a row."),
    Flag("global-batch-size", "ROWS", "Rows of a step; never changes."),
    Flag("micro-batch-size", "ROWS", "Rows computed at once: auto or a number."),
    Flag("max-steps", "STEPS", "Train this many steps."),
    Flag("epochs", "NUMBER", "Train this many passes over the data; may be fractional."),
    Flag("max-tokens", "TOKENS", "Train on this many tokens."),
    Flag("learning-rate", "NUMBER", "The highest learning rate of the schedule.", also="lr"),
    Flag("lr-scheduler", "NAME", "constant, linear, cosine or wsd."),
    Flag("warmup-steps", "STEPS", "Steps over which the learning rate rises."),
    Flag("warmup-ratio", "SHARE", "The same as a share of all steps."),
    Flag("optim", "NAME", "adamw, lomo or adalomo."),
    Flag("block-schedule", "NAME", "all, or groups of blocks that take turns: hift or badam."),
    Flag("weight-decay", "NUMBER", "Decoupled weight decay."),
    Flag("max-grad-norm", "NORM", "Clip the global gradient norm; 0 or null: off."),
    Flag("precision", "NAME", "auto, fp32, bf16-mixed or fp64."),
    Flag("recompute", "WHEN", "Run forward again in backward: auto, true or false."),
    Flag("update", "WHEN", "auto, after-backward, on-backward or on-fetch."),
    Flag("save-steps", "STEPS", "Keep a full copy (checkpoint-N) every so many steps."),
    Flag("save-total-limit", "COUNT", "How many of these copies are kept."),
    Flag("save-best", "WHEN", "true: keep a full copy (best) of the best evaluation's step."),
    Flag("resume", "FROM", "auto, never, or the folder of another run or checkpoint to go on from."),
    Flag("max-minutes", "NUMBER", "Stop, with a commit, before so much time has passed; resumable."),
    Flag("logging-steps", "STEPS", "Log every so many steps."),
    Flag("eval-steps", "STEPS", "Evaluate every so many steps."),
    Flag("val-size", "SIZE", "Held out for validation: a share below 1 or a number of documents."),
    Flag("seed", "NUMBER", "Order of the data and random weights."),
    Flag("report-to", "NAMES", "tensorboard, wandb, trackio; log.jsonl is always written."),
    Flag("run-name", "NAME", "A name for people."),
    Flag("threads", "COUNT", "CPU threads: auto or a number."),
    Flag("disk", "PATH", "Folder for state and work files. Default: the output folder."),
    Flag("tbw", "SIZE", "What that disk may be written over its rated life, like 600TB."),
)


_JOB_HELP = "The job. Any key of it may follow as --section.key VALUE; flags win over the file."


class JobWords(NamedTuple):
    """What a command line says about the job.

    Attributes:
        path: the job file, or None.
        overrides: (key, value) in the order given, for `load_job`.
    """

    path: str | None
    overrides: tuple[tuple[str, str], ...]


def job_command(function: Callable[..., int]) -> Callable[..., int]:
    """Give `function(context, words, **own)` the job's flags and any `--section.key VALUE`.

    The command must be registered with `ignore_unknown_options`.
    """
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    words = inspect.Parameter(
        "words",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            list[str] | None, typer.Argument(metavar="JOB.yaml", help=_JOB_HELP, show_default=False)
        ],
    )
    flags = [_option(flag) for flag in FLAGS]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [
        context,
        words,
        *flags,
        *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own[2:]),
    ]

    @functools.wraps(function)
    def command(context: typer.Context, words: list[str] | None = None, **given: Any) -> int:
        overrides: list[tuple[str, str]] = []
        for flag in FLAGS:
            value = given.pop(flag.name.replace("-", "_"))
            if isinstance(value, list) and value:
                value = value[0] if len(value) == 1 else f"[{', '.join(map(_quoted, value))}]"
            if value is not None and value != []:
                overrides.append((flag.name, value))
        path, extra = split_words(words or [])
        return function(context, JobWords(path, (*overrides, *extra)), **given)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del command.__wrapped__
    return command


def split_words(words: Sequence[str]) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """The job file and the free `--key value`, `--key=value` or bare `--key` pairs of a command line.

    Raises:
        ConfigError: a second file, or a single-dash option.
    """
    path: str | None = None
    pairs: list[tuple[str, str]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if not equals:
                # A bare --key switches something on.
                value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            pairs.append((key, value))
        elif word.startswith("-"):
            raise ConfigError(f"the command line: unknown option `{word}`.", "options start with two dashes")
        elif path is not None:
            raise ConfigError(
                f"the command line: two job files, `{path}` and `{word}`.",
                "give one; a model goes by `--model PATH`, its data by `--dataset PATH`",
            )
        else:
            path = word
    return path, tuple(pairs)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _option(flag: Flag) -> inspect.Parameter:
    names = [f"--{flag.name}", *([f"--{flag.also}"] if flag.also else [])]
    kind: Any = list[str] | None if flag.name == "dataset" else str | None
    return inspect.Parameter(
        flag.name.replace("-", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            kind, typer.Option(*names, metavar=flag.metavar, help=flag.help, show_default=False)
        ],
    )
