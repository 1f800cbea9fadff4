"""The job: what the user wants, as one immutable record of sections.

Every field is checked at construction; what a field means for several others is checked by the
section. How names are looked up and layers merged: `packmule.spec.job_text`.
No file is opened here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_origin

from pydantic import ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from packmule.errors import ConfigError
from packmule.spec.growth import Growth
from packmule.spec.job_text import collect
from packmule.spec.job_values import (
    AutoBytes,
    AutoCount,
    AutoFlag,
    BlockOrder,
    Clip,
    DeviceName,
    Factory,
    FormatName,
    MetricName,
    OptimizerName,
    OptionalText,
    Paths,
    PrecisionName,
    ReadNamed,
    ReadSources,
    ReportTo,
    ResumeFrom,
    ScalingName,
    SchedulerName,
    Similarity,
    Steps,
    Text,
    TrainOn,
    UpdateName,
    ValSize,
    Where,
    count_of,
    unset_if_minus_one,
)
from packmule.spec.plan import Precision
from packmule.spec.records import Record
from packmule.spec.turns import Turns
from packmule.spec.yaml_text import dump_yaml

BF16_UNITS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU features that multiply bfloat16: of x86-64, and of aarch64."""


class Section(Record):
    """One part of a job. Numbers become text where text is asked for; a bool is never a number."""

    model_config = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: Any) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation in (
            int,
            float,
            int | None,
        ):
            raise ValueError("is not a number")
        return value


class Model(Section):
    """Which model is trained."""

    path: OptionalText = Field(
        description="a Hugging Face folder, a .gguf file, or a folder with only config.json; beside a "
        "factory: a run of the same modules, whose weights are taken"
    )
    init: Literal["pretrained", "random"] = "pretrained"
    factory: Factory = Field(default=None, description="a function that makes modules of one's own")
    arguments: dict[str, Any] = Field(default={}, description="of the factory")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("factory") is not None and data.get("path") is None:
            return {**data, "path": None}
        return data

    @model_validator(mode="after")
    def _agree(self) -> Model:
        if self.path is None and self.factory is None:
            raise ConfigError("`model.path` is null.", "name a Hugging Face folder or a .gguf file")
        if self.arguments and self.factory is None:
            raise ConfigError("`model.arguments` are given without `model.factory`.", "name the function too")
        return self

    @property
    def source(self) -> str:
        """`path`, where it is known to be given."""
        if self.path is None:
            raise RuntimeError("modules of one's own come from a factory")
        return self.path


class DataSource(Section):
    """One source of a mix."""

    path: Text
    weight: float | None = Field(default=None, gt=0, description="share of the rows, beside the others'")


PathOrSource = Annotated[
    Annotated[Text, Tag("path")] | Annotated[DataSource, Tag("source")],
    Discriminator(lambda value: "path" if isinstance(value, (str, int, float)) else "source"),
]


class ValidationData(Section):
    """Validation data of its own, and the name its metrics go by."""

    name: Text
    path: Paths = Field(min_length=1)


class Data(Section):
    """What it is trained on."""

    path: Annotated[tuple[PathOrSource, ...], ReadSources] = Field(
        default=(), description="files, folders, globs, or {path, weight}; empty when only planning"
    )
    format: FormatName = Field(default="auto", description="of records; auto: told by their columns")
    columns: dict[str, str] = Field(default={}, description="our name of a column -> the files'")
    train_on: TrainOn = Field(default="assistant", description="all: prompts and users' turns carry loss too")
    chat_template: OptionalText = Field(default=None, description="a Jinja file in place of the model's own")
    long_documents: Literal["auto", "split", "truncate", "drop"] = Field(
        default="auto", description="longer than a row; auto: text is split, conversations truncated"
    )
    deduplicate: Similarity = Field(
        default=None, description="leave out documents so similar (Jaccard) to an earlier one"
    )
    val_size: ValSize = Field(
        default=0.02, description="held out for validation: a share (< 1) or a number of documents"
    )
    val_path: Annotated[tuple[ValidationData, ...], ReadNamed] = Field(
        default=(), description="validation data of its own, one or several by name; val_size is then unused"
    )
    factory: Factory = Field(
        default=None, description="a function that makes a data set for one's own modules"
    )
    arguments: dict[str, Any] = Field(default={}, description="of the factory")
    val_factory: Factory = Field(
        default=None, description="a function that makes samples to evaluate on; val_size is then unused"
    )
    val_arguments: dict[str, Any] = Field(default={}, description="of val_factory")

    @property
    def held_out(self) -> float:
        """Share, or number, of the data's own documents or samples that are held out."""
        own = self.val_path or self.val_factory is not None
        return 0.0 if own else float(self.val_size)

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """`path` as sources."""
        return tuple(DataSource(path=s) if isinstance(s, str) else s for s in self.path)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of all sources."""
        return tuple(source.path for source in self.sources)

    @property
    def weights(self) -> tuple[float, ...]:
        """One per source of a mix; empty where there is none."""
        return tuple(source.weight for source in self.sources if source.weight is not None)

    @model_validator(mode="after")
    def _agree(self) -> Data:
        if self.weights and len(self.weights) < len(self.path):
            unweighted = next(source.path for source in self.sources if source.weight is None)
            raise ConfigError(
                f"`data.path`: {unweighted} has no weight, and others have.",
                "give every source a weight, or none",
            )
        if self.arguments and self.factory is None:
            raise ConfigError("`data.arguments` are given without `data.factory`.", "name the function too")
        if self.val_arguments and self.val_factory is None:
            raise ConfigError(
                "`data.val_arguments` are given without `data.val_factory`.", "name the function too"
            )
        names = [found.name for found in self.val_path]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(
                f"`data.val_path`: two sets go by the name {twice!r}.",
                "name them: {first: PATH, second: PATH}",
            )
        return self


class Train(Section):
    """How long, how much at a time, in which numbers."""

    output_dir: Text = "packmule-out"
    max_seq_length: int = Field(default=512, ge=2, description="tokens of a row")
    global_batch_size: int = Field(default=8, ge=1, description="rows of a step; never changes")
    micro_batch_size: AutoCount = Field(default="auto", description="rows computed at once")
    gradient_accumulation_steps: int | None = Field(default=None, ge=1, description="micro-batches of a step")
    max_steps: Steps = None
    epochs: float | None = Field(default=None, gt=0)
    max_tokens: Steps = None
    precision: PrecisionName = "auto"
    recompute: AutoFlag = "auto"
    seed: int = Field(default=42, ge=0, lt=2**63)
    eval_steps: Steps = Field(default=None, description="null: only after the last step")
    eval_rows: int | None = Field(default=None, ge=1, description="validation rows; null: all")
    best_metric: MetricName = Field(default="eval/loss", description="what the best step is judged by")
    early_stop_patience: int | None = Field(
        default=None, ge=1, description="end after so many evaluations without improvement"
    )
    early_stop_min_delta: float = Field(default=0.0, ge=0, description="what counts as improvement")
    max_minutes: float | None = Field(default=None, gt=0, description="stop, resumable, before so much time")
    sample_prompt: str | None = Field(default=None, description="continued greedily at every evaluation")
    sample_tokens: int = Field(default=64, ge=1)
    update: UpdateName = "auto"
    router_aux_loss_coef: float | None = Field(
        default=None, ge=0, description="factor of the load-balancing loss of experts; null: the model's own"
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Derive the one of the three batch sizes that was left out, and the default length of a run."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        micro, total = count_of(data.get("micro_batch_size")), count_of(data.get("global_batch_size"))
        accumulation = count_of(data.get("gradient_accumulation_steps"))
        if "global_batch_size" not in data and micro and accumulation:
            data["global_batch_size"] = micro * accumulation
        elif accumulation and data.get("micro_batch_size", "auto") == "auto":
            rows = total if total else cls.model_fields["global_batch_size"].default
            data["micro_batch_size"] = max(1, math.ceil(rows / accumulation))
        lengths = ("max_steps", "epochs", "max_tokens")
        if all(unset_if_minus_one(data.get(key)) is None for key in lengths):
            data["epochs"] = 1.0
        return data

    @model_validator(mode="after")
    def _agree(self) -> Train:
        lengths = {key: getattr(self, key) for key in ("max_steps", "epochs", "max_tokens")}
        given = [f"`train.{key}` = {value}" for key, value in lengths.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both decide how long to train.", "keep one of them")
        if self.early_stop_patience is not None and self.eval_steps is None:
            raise ConfigError(
                f"`train.early_stop_patience` = {self.early_stop_patience} counts evaluations, and without "
                "`train.eval_steps` there is none before the last step.",
                "set eval_steps too",
            )
        if self.micro_batch_size == "auto":
            return self
        if self.micro_batch_size > self.global_batch_size:
            raise ConfigError(
                f"`train.micro_batch_size` = {self.micro_batch_size} is more than "
                f"`train.global_batch_size` = {self.global_batch_size}, the rows of a whole step.",
                "lower micro_batch_size or raise global_batch_size",
            )
        needed = math.ceil(self.global_batch_size / self.micro_batch_size)
        if self.gradient_accumulation_steps not in (None, needed):
            raise ConfigError(
                f"`train.gradient_accumulation_steps` = {self.gradient_accumulation_steps} does not fit "
                f"`train.global_batch_size` = {self.global_batch_size} and `train.micro_batch_size` = "
                f"{self.micro_batch_size}: that takes {needed} micro-batches.",
                "leave gradient_accumulation_steps out; it follows from the other two",
            )
        return self

    def resolved_precision(self, cpu_features: Iterable[str]) -> Precision:
        """`precision`, with auto decided: bf16-mixed where the CPU multiplies bf16, else fp32."""
        if self.precision != "auto":
            return self.precision
        return "bf16-mixed" if BF16_UNITS & set(cpu_features) else "fp32"


class Optim(Section):
    """The update rule and its schedule."""

    optim: OptimizerName = "adamw"
    learning_rate: float = Field(default=5e-5, ge=0, description="the highest of the schedule")
    lr_scheduler: SchedulerName = "cosine"
    warmup_steps: int | None = Field(default=None, ge=0)
    warmup_ratio: float | None = Field(default=None, ge=0, le=1, description="share of all steps")
    min_lr: float = Field(default=0.0, ge=0, description="where linear, cosine and wsd end")
    decay_steps: int | None = Field(default=None, ge=0, description="wsd: steps of its last phase")
    decay_ratio: float | None = Field(default=None, ge=0, le=1, description="the same as a share; null: 0.1")
    decay_shape: Literal["linear", "cosine", "sqrt"] = Field(
        default="linear", description="of wsd's last phase"
    )
    weight_decay: float = Field(default=0.1, ge=0)
    weight_decay_on: Literal["matrices", "all"] = Field(default="matrices", description="all: norms too")
    weight_decay_embedding: bool = Field(default=True, description="whether the embedding decays")
    max_grad_norm: Clip = Field(default=1.0, description="global norm; null or 0: no clipping")
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    adam_epsilon: float = Field(default=1e-8, gt=0)
    batch_warmup_steps: int | None = Field(default=None, ge=1, description="steps until a step has all rows")
    batch_warmup_rows: int | None = Field(default=None, ge=1, description="rows of the first step")
    lr_scaling: ScalingName = Field(default="off", description="the learning rate follows the rows of a step")
    lr_base_batch_size: int | None = Field(
        default=None, ge=1, description="rows that learning_rate is meant for; null: global_batch_size"
    )
    block_schedule: Literal["all", "hift", "badam"] = Field(
        default="all", description="which blocks a step trains: all of them, or groups that take turns"
    )
    block_layers: int = Field(default=1, ge=1, description="layers of a group")
    block_steps: int | None = Field(default=None, ge=1, description="steps of a turn of BAdam; null: 50")
    block_order: BlockOrder = Field(default="ascending", description="whose turn is next")
    block_ends: bool = Field(default=True, description="whether embedding and head have turns too")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """AdaLomo bounds the update of each tensor; it is not clipped besides unless asked to."""
        if isinstance(data, dict) and str(data.get("optim")).lower() == "adalomo":
            return {"max_grad_norm": None, **data}
        return data

    @model_validator(mode="after")
    def _agree(self) -> Optim:
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError(
                f"`optim.warmup_steps` = {self.warmup_steps} and `optim.warmup_ratio` = {self.warmup_ratio} "
                "both say how long to warm up.",
                "keep one of them",
            )
        if self.decay_steps is not None and self.decay_ratio is not None:
            raise ConfigError(
                f"`optim.decay_steps` = {self.decay_steps} and `optim.decay_ratio` = {self.decay_ratio} "
                "both say how long the last phase is.",
                "keep one of them",
            )
        if self.lr_scheduler != "wsd" and (self.decay_steps is not None or self.decay_ratio is not None):
            raise ConfigError(
                f"`optim.lr_scheduler` = {self.lr_scheduler!r} has no last phase of its own.",
                "leave decay_steps and decay_ratio out, or use `wsd`",
            )
        if (self.batch_warmup_steps is None) != (self.batch_warmup_rows is None):
            raise ConfigError(
                "`optim.batch_warmup_steps` and `optim.batch_warmup_rows` belong together.",
                "give both: the steps until the batch is whole, and the rows of the first step",
            )
        self._check_turns()
        if self.min_lr > self.learning_rate:
            raise ConfigError(
                f"`optim.min_lr` = {self.min_lr} is above `optim.learning_rate` = {self.learning_rate}.",
                "min_lr is where the schedule ends; lower it",
            )
        return self

    def _check_turns(self) -> None:
        """What has a meaning only where groups of blocks take turns."""
        fields = type(self).model_fields
        for name in ("block_layers", "block_steps", "block_order", "block_ends"):
            given = getattr(self, name) != fields[name].default
            if given and self.block_schedule == "all":
                raise ConfigError(
                    f"`optim.{name}` = {getattr(self, name)!r} is of blocks that take turns, and "
                    "`optim.block_schedule` is `all`.",
                    "use `hift` or `badam`, or leave it out",
                )
        if self.block_schedule == "hift" and self.block_steps not in (None, 1):
            raise ConfigError(
                f"`optim.block_steps` = {self.block_steps}: a turn of `hift` is one step.",
                "leave it out, or use `badam`",
            )
        if self.block_schedule == "badam" and self.optim != "adamw":
            raise ConfigError(
                f"`optim.block_schedule` = 'badam' runs Adam on each block, and `optim.optim` is "
                f"{self.optim!r}.",
                "use `--optim adamw`, or `--block-schedule hift`, which takes any optimizer",
            )

    @property
    def turns(self) -> Turns | None:
        """The active-block schedule, if there is one."""
        if self.block_schedule == "all":
            return None
        return Turns(
            method=self.block_schedule,
            layers=self.block_layers,
            steps=1 if self.block_schedule == "hift" else self.block_steps or 50,
            order=self.block_order,
            ends=self.block_ends,
        )

    def warmup(self, total_steps: int) -> int:
        """Steps of warm-up in a run of `total_steps`; a ratio is rounded up, as in transformers."""
        if self.warmup_ratio:
            return math.ceil(self.warmup_ratio * total_steps)
        return self.warmup_steps or 0

    def decay(self, total_steps: int) -> int:
        """Steps of the last phase of `wsd` in a run of `total_steps`."""
        if self.lr_scheduler != "wsd":
            return 0
        if self.decay_steps is not None:
            return self.decay_steps
        return math.ceil((0.1 if self.decay_ratio is None else self.decay_ratio) * total_steps)


class Checkpoint(Section):
    """When state becomes durable, and where a run starts."""

    commit_steps: AutoCount = "auto"
    save_steps: Steps = Field(default=None, description="a full copy kept apart every so many steps")
    save_total_limit: int = Field(default=2, ge=1)
    save_best: bool = Field(default=False, description="a full copy of the best step by train.best_metric")
    resume: ResumeFrom = Field(default="auto", description="auto, never or a folder")


class HardwareSection(Section):
    """What the run may use, and where things must lie."""

    ram: AutoBytes = Field(default="auto", description="budget of the whole process tree, in bytes")
    disk_path: OptionalText = Field(
        default=None, description="folder for state and work files; null: output_dir"
    )
    tbw: AutoBytes = Field(
        default="auto", description="bytes that disk may be written over its life, as its data sheet rates it"
    )
    threads: AutoCount = "auto"
    state: Where = "auto"
    weights: Literal["auto", "state", "ram", "disk"] = "auto"
    gradients: Where = "auto"
    inputs: Literal["auto", "ram", "disk", "device"] = "auto"
    device: DeviceName = Field(default="cpu", description="what computes: cpu, auto, cuda:0, fake")
    device_memory: AutoBytes = Field(default="auto", description="of the device, in bytes")


class Logging(Section):
    """What is written down."""

    logging_steps: int = Field(default=1, ge=1)
    report_to: ReportTo = Field(default=(), description="tensorboard, wandb, trackio; log.jsonl always is")
    run_name: str | None = None


TEXT_ONLY = {
    "model.init": "the factory draws or reads the weights",
    **dict.fromkeys(
        (
            *("data.path", "data.format", "data.columns", "data.train_on", "data.chat_template"),
            *("data.long_documents", "data.deduplicate"),
        ),
        "samples come from `data.factory`",
    ),
    "data.val_path": "samples to evaluate on come from `data.val_factory`, or are held out",
    "train.max_seq_length": "a row is one sample",
    "train.max_tokens": "samples have no tokens to count; use max_steps or epochs",
    "train.sample_prompt": "modules of one's own continue no text",
    "train.router_aux_loss_coef": "a loss that experts of one's own need is part of the head's",
    "train.recompute": "nothing of a forward is kept but each block's input",
}
"""Settings that modules of one's own cannot have, and why."""


class Job(Record):
    """Everything a user can ask for, resolved."""

    model: Model
    data: Data = Data()
    train: Train = Train()
    optim: Optim = Optim()
    checkpoint: Checkpoint = Checkpoint()
    hardware: HardwareSection = HardwareSection()
    logging: Logging = Logging()

    @model_validator(mode="after")
    def _agree(self) -> Job:
        self._check_factories()
        growth, rows = self.growth, self.train.global_batch_size
        if growth is None:
            return self
        if growth.start_rows >= rows:
            raise ConfigError(
                f"`optim.batch_warmup_rows` = {growth.start_rows} leaves nothing to grow to "
                f"`train.global_batch_size` = {rows}.",
                "begin with fewer rows, or leave the batch warm-up out",
            )
        doublings = len(growth.stages(rows)) - 1
        if growth.steps < doublings:
            raise ConfigError(
                f"`optim.batch_warmup_steps` = {growth.steps} is too short: from {growth.start_rows} to "
                f"{rows} rows the batch doubles {doublings} times.",
                f"use at least {doublings} steps",
            )
        return self

    def _check_factories(self) -> None:
        """Modules of one's own go with data of one's own, and with no setting that only text has."""
        model, data, judged = self.model.factory, self.data.factory, self.data.val_factory
        if model is None and data is None:
            if judged is not None:
                raise ConfigError(
                    f"`data.val_factory` = {judged!r} makes samples for modules of one's own, and there is "
                    "no `model.factory`.",
                    "text to evaluate on goes by `data.val_path`",
                )
            return
        if model is None:
            raise ConfigError(
                f"`data.factory` = {data!r} makes samples for modules of one's own, and there is no "
                "`model.factory`.",
                "name the function that makes the modules: --model-factory module:function",
            )
        if data is None:
            raise ConfigError(
                f"`model.factory` = {model!r} makes modules of one's own, which need samples of one's own: "
                "`data.factory` is missing.",
                "name the function that makes the data set: --data-factory module:function",
            )
        for key, why in TEXT_ONLY.items():
            section, _, name = key.partition(".")
            value, field = getattr(getattr(self, section), name), SECTIONS[section].model_fields[name]
            if value != field.get_default() and not (key == "train.recompute" and value is True):
                raise ConfigError(
                    f"`{key}` = {value!r} does not go with `model.factory`: {why}.", "leave it out"
                )

    @property
    def growth(self) -> Growth | None:
        """The batch warm-up, if there is one."""
        steps, rows = self.optim.batch_warmup_steps, self.optim.batch_warmup_rows
        return None if steps is None or rows is None else Growth(start_rows=rows, steps=steps)

    def to_yaml(self) -> str:
        """The resolved job as YAML; `load_job` reads it back to an equal job."""
        return dump_yaml(self.model_dump(mode="json"))

    def require_data(self) -> None:
        """Raise ConfigError unless there is something to train on."""
        if not self.data.path and self.data.factory is None:
            raise ConfigError("`data.path` is missing.", "name a text file, .jsonl or folder: --dataset PATH")


SECTIONS: dict[str, type[Section]] = {
    "model": Model,
    "data": Data,
    "train": Train,
    "optim": Optim,
    "checkpoint": Checkpoint,
    "hardware": HardwareSection,
    "logging": Logging,
}
"""The sections of a job, in the order they are printed."""


class LoadedJob(NamedTuple):
    """A job and what the user should know about how it was read."""

    job: Job
    notes: tuple[str, ...]


def read_job(
    job: str | Mapping[str, Any],
    source: str,
    overrides: Sequence[tuple[str, str]] = (),
    variables: Sequence[tuple[str, str]] = (),
    arguments: Mapping[str, Any] | None = None,
) -> LoadedJob:
    """A job from YAML text, environment variables, flags and arguments; later ones win.

    Args:
        job: YAML with sections, or with flat names as other tools write them, or such data; may be empty.
        source: where the text came from, for messages.
        overrides: (key, value) of flags without dashes: ("max-steps", "100"), ("optim.lr", "1e-4").
        variables: (name, value) of PACKMULE_* variables.
        arguments: of a call from Python: {"max_steps": 100, "optim": {"lr": 1e-4}}.

    Raises:
        ConfigError: names the source, key, value and what to write instead.
    """
    fields = {
        name: {key: _holds_text(info.annotation) for key, info in section.model_fields.items()}
        for name, section in SECTIONS.items()
    }
    collected = collect(job, source, variables, overrides, arguments or {}, fields)
    try:
        found = Job.model_validate(collected.data)
    except ValidationError as error:
        # Parsed again under the name of the layer that wrote the offending field.
        found = Job.parse(collected.data, collected.source_of(error.errors()[0]["loc"], source))
    return LoadedJob(found, tuple(collected.notes))


def _holds_text(annotation: Any) -> bool:
    return "str" in str(annotation) and get_origin(annotation) is not dict


def load_job(
    text: str,
    source: str,
    overrides: Sequence[tuple[str, str]] = (),
    variables: Sequence[tuple[str, str]] = (),
) -> Job:
    """`read_job` without the notes."""
    return read_job(text, source, overrides, variables).job
