"""From a job, a model, a machine and prepared data to a planning problem. No torch."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from packmule.data.hub import downloaded, is_hub_id
from packmule.data.prune import ids_of_data
from packmule.data.report import PrepareReport
from packmule.data.sources import find_files
from packmule.errors import ConfigError, DataError
from packmule.graph.costs import Costs
from packmule.kernels import native
from packmule.plan.candidates import CHUNK_BYTES
from packmule.plan.situation import Situation, Smaller
from packmule.probe import asked_threads
from packmule.probe import load as load_hardware
from packmule.shapes.bodies import dtypes
from packmule.shapes.layout import ITEMSIZE
from packmule.shapes.model import ModelShape
from packmule.shapes.module import ModuleShape, Shape
from packmule.spec.environment import Environment, read_environment
from packmule.spec.growth import steps_for
from packmule.spec.hardware import Hardware
from packmule.spec.job import Job
from packmule.spec.plan import CheckpointPlan, Numerics, OptimizerNumerics, Precision, ScheduleNumerics
from packmule.spec.units import format_bytes
from packmule.train.devices import device_of
from packmule.train.folder import HELD_OUT, RunFolder
from packmule.train.memory import process_memory
from packmule.train.stopping import check_metric

RESERVE = 14 << 20
"""What the parent may still grow by at least while it plans and watches."""

SEARCH_BYTES = 56 << 10
"""Objects of a search per chunk of a model's masters (M: 40 kB for 374M parameters, 51 kB for 1.1B)."""

WATCH_BYTES = 2 << 20
"""What it may still grow by while it watches."""

TOKENIZER_FACTOR = 16
"""Resident bytes of a loaded tokenizer per byte of its tokenizer.json (M: SmolLM2's 3.5 MB)."""

TOKENIZER_LIBRARY_BYTES = 10 << 20
"""Resident bytes of the tokenizers library (M: 8 to 10 MB)."""

TOKENIZER_JSON_BYTES = 48
"""Bytes of tokenizer.json per token, where there is no such file yet (M: SmolLM2's has 32)."""

UNKNOWN_EVALUATION_ROWS = 8
"""Validation rows while planning, where neither job nor data say."""

UNKNOWN_MEAN_LENGTH_SHARE = 0.5
"""Without data, documents are taken to be half a row long on average."""


def total_steps(job: Job, report: PrepareReport | None, cursor: int = 0, tokens: int = 0) -> int:
    """Optimizer steps of the whole run.

    Args:
        cursor, tokens: rows and targets of the steps before the first of this data.

    Raises:
        ConfigError: it follows from the data, and there is none.
    """
    train = job.train
    if train.max_steps is not None:
        return train.max_steps
    if report is None:
        if train.max_tokens is None:
            return 1000  # only the length of the run depends on it
        wanted = train.max_tokens / train.max_seq_length
    elif train.max_tokens is not None:
        wanted = cursor + max(0, train.max_tokens - tokens) * report.train.rows / report.train.targets
    else:
        wanted = cursor + (train.epochs or 1.0) * report.train.rows
    return steps_for(job.growth, train.global_batch_size, math.ceil(wanted))


def make_numerics(job: Job, hardware: Hardware, steps: int) -> Numerics:
    """What a fresh run computes, with one micro-batch; the search cuts it."""
    optim, train = job.optim, job.train
    threads = threads_of(job, hardware)
    precision = precision_of(job, hardware)
    modules, device = job.model.factory is not None, device_of(job, hardware)
    gpu = None if device is None or device.speed.fake else device.speed.model
    return Numerics(
        precision=precision,
        products=None if modules or gpu else hardware.wider_product(precision),
        device=gpu,
        micro_rows=(train.global_batch_size,),
        growth=job.growth,
        turns=optim.turns,
        max_seq_length=1 if modules else train.max_seq_length,
        loss_chunk=1 if modules else 512,
        clip=optim.max_grad_norm,
        router_aux_loss_coef=train.router_aux_loss_coef,
        optimizer=OptimizerNumerics(
            rule=optim.optim,
            beta1=optim.adam_beta1,
            beta2=optim.adam_beta2,
            eps=optim.adam_epsilon,
            weight_decay=optim.weight_decay,
            decay_on=optim.weight_decay_on,
            decay_embedding=optim.weight_decay_embedding,
        ),
        schedule=ScheduleNumerics(
            kind=optim.lr_scheduler,
            learning_rate=optim.learning_rate,
            minimum=optim.min_lr,
            warmup_steps=optim.warmup(steps),
            total_steps=steps,
            decay_steps=optim.decay(steps),
            decay_shape=optim.decay_shape if optim.lr_scheduler == "wsd" else "linear",
            scaling=optim.lr_scaling,
            base_rows=optim.lr_base_batch_size or 0,
        ),
        seed=train.seed,
        threads=threads,
        kernels="torch" if native.library_path() is None else "native",
        torch=version("torch"),
        cpu_features=hardware.cpu_features,
    )


def threads_of(job: Job, hardware: Hardware) -> int:
    """CPU threads of a run."""
    return hardware.threads if job.hardware.threads == "auto" else int(job.hardware.threads)


def precision_of(job: Job, hardware: Hardware) -> Precision:
    """The precision of a run. Modules of a user's own compute in fp32 unless he says that they can do
    otherwise."""
    if job.model.factory is not None and job.train.precision == "auto":
        return "fp32"
    return job.train.resolved_precision(hardware.cpu_features)


def make_situation(
    job: Job,
    shape: Shape,
    hardware: Hardware,
    budget: int,
    report: PrepareReport | None,
    numerics: Numerics,
    fixed: bool,
    positions: int,
) -> Situation:
    """The planning problem of a job.

    Args:
        report: what data preparation found; None when only planning.
        numerics: as `make_numerics`, or those of the run that is resumed.
        fixed: numerics may not change.
        positions: of a sample, prompt included.

    Raises:
        ConfigError: rows longer than the model's positions; experts to balance, and none there; a device
            that is not there.
        DataError: nothing to train on.
    """
    length = numerics.max_seq_length
    if isinstance(shape, ModelShape):
        check_length(length, shape)
        shape = shape.balanced(numerics.router_aux_loss_coef)
    if report is not None and report.train.targets == 0:
        raise DataError(
            "The data has no token to predict: every document is a single token.", "use longer texts"
        )
    mean = length * UNKNOWN_MEAN_LENGTH_SHARE if report is None else report.train.mean_length_by_token
    train, checkpoint, device = job.train, job.checkpoint, device_of(job, hardware)
    recompute = None if train.recompute == "auto" else bool(train.recompute)
    if isinstance(shape, ModuleShape):
        recompute = True
        resident = max(hardware.child_baseline_bytes, shape.resident_bytes)
        hardware = hardware.model_copy(update={"child_baseline_bytes": resident})
    if report is None:
        evaluations = (train.eval_rows or UNKNOWN_EVALUATION_ROWS,) * len(evaluation_names(job))
    else:
        evaluations = tuple(
            min(part.rows.rows, train.eval_rows or part.rows.rows) for part in report.validation
        )
    return Situation(
        shape=shape,
        hardware=hardware,
        costs=Costs.of(
            hardware, dtypes(numerics).product, hardware.disks[0], None if device is None else device.speed
        ),
        budget_bytes=budget,
        numerics=numerics,
        fixed=fixed,
        micro_rows=None if train.micro_batch_size == "auto" else int(train.micro_batch_size),
        recompute=recompute,
        update=None if train.update == "auto" else train.update,
        wishes=job.hardware,
        checkpoint=CheckpointPlan(
            commit_steps=1 if checkpoint.commit_steps == "auto" else int(checkpoint.commit_steps),
            snapshot_steps=checkpoint.save_steps,
            snapshots_kept=checkpoint.save_total_limit,
        ),
        commit_auto=checkpoint.commit_steps == "auto",
        mean_length=mean,
        evaluation_rows=evaluations,
        sample_tokens=positions,
        disk_free_bytes=hardware.disks[0].free_bytes,
        total_steps=numerics.schedule.total_steps,
        device=None if device is None else device.speed,
        device_bytes=0 if device is None else device.memory_bytes,
    )


def smaller_vocabulary(job: Job, folder: RunFolder) -> Smaller | None:
    """The model with its vocabulary cut down to the run's prepared data, if that can be done and helps."""
    if job.model.init == "random":
        return None  # there are no weights to cut
    vocab = shape_of(Path(job.model.source).expanduser()).vocab
    try:
        kept = len(ids_of_data(folder.data, folder.model, vocab))
    except DataError:
        return None  # no BPE
    if kept >= vocab:
        return None
    name = f"{Path(job.model.source).stem}-pruned"
    texts = (*job.data.paths, *(path for found in job.data.val_path for path in found.path))
    corpus = [word for text in texts for word in ("--corpus", text)]
    words = ("packmule", "export", job.model.source, name, "--prune-vocab", *corpus, "--dtype", "float32")
    return Smaller(kept, f"--model {shlex.quote(name)}", shlex.join(words))


def hardware_of(job: Job, environment: Environment, progress: Callable[[str, float], None]) -> Hardware:
    """The machine as measured, with the job's threads and disk.

    Raises:
        PackmuleError: as packmule.probe.load.
    """
    threads = None if job.hardware.threads == "auto" else int(job.hardware.threads)
    disk = job.hardware.disk_path or job.train.output_dir
    return load_hardware(
        environment.cache / "probe.json",
        Path(disk).expanduser().absolute(),
        threads=asked_threads(threads, environment.omp_num_threads),
        progress=progress,
    )


def ram_budget(job: Job, hardware: Hardware) -> int:
    """The budget asked for, or what is available now.

    Raises:
        ConfigError: more than the machine has.
    """
    available = hardware.ram_available_bytes
    if job.hardware.ram == "auto":
        return int(available * 0.9)
    asked = int(job.hardware.ram)
    if asked > hardware.ram_total_bytes:
        raise ConfigError(
            f"`hardware.ram` = {format_bytes(asked)} is more than this machine has "
            f"({format_bytes(hardware.ram_total_bytes)}, of which {format_bytes(available)} are available).",
            f"use at most {format_bytes(available)}",
        )
    if asked > available:
        print(
            f"note: only {format_bytes(available)} of RAM are available now ({hardware.ram_limit_source}), "
            f"less than the budget of {format_bytes(asked)}",
            file=sys.stderr,
        )
    return asked


def search_bytes(shape: Shape) -> int:
    """By how much this process may grow while it searches: graphs have some tasks per chunk of state."""
    return SEARCH_BYTES * -(-shape.numel * ITEMSIZE["float32"] // max(CHUNK_BYTES))


def with_own_memory(situation: Situation, tokenizer: int, growth: int | None = None) -> Situation:
    """Count this very process instead of the probe's stand-in, and the child's tokenizer.

    Args:
        growth: bytes this process may still grow by; those of a search by default.
    """
    if growth is None:
        growth = max(RESERVE, search_bytes(situation.shape))
    hardware = situation.hardware
    own = max(hardware.parent_baseline_bytes, process_memory().peak + growth)
    changed = hardware.model_copy(
        update={
            "parent_baseline_bytes": own,
            "child_baseline_bytes": hardware.child_baseline_bytes + tokenizer,
        }
    )
    return replace(situation, hardware=changed)


def model_folder(model: str | Path) -> Path:
    """Where a model's config and tokenizer lie: of a run or snapshot, in its model/; of one that was
    downloaded, in the cache of Hugging Face tools."""
    path = Path(model).expanduser()
    if not path.exists():
        path = downloaded(str(model), read_environment().hf_hub) or path
    run = RunFolder.at(path)
    return path if run is None else run.model


def shape_of(model: Path) -> ModelShape:
    """The architecture of a model that is not prepared yet."""
    from packmule.data.gguf import read_gguf
    from packmule.data.gguf_config import gguf_config

    run = RunFolder.at(model)
    if run is not None:
        return run.decoder_shape()
    model = model_folder(model)
    if model.is_dir():
        path = model / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} is not JSON: {error}.", "restore the file") from None
        except FileNotFoundError:
            raise ConfigError(
                f"{model} has no config.json.", "give a Hugging Face folder or a .gguf file"
            ) from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}.", "restore it") from None
        return ModelShape.from_config(config, str(path))
    if not model.exists():
        hint, cause = "give a Hugging Face folder or a .gguf file", f"model {model} does not exist"
        if is_hub_id(str(model)):
            cause += f", and has not been downloaded either ({read_environment().hf_hub})"
            hint += f", or download it: hf download {model}"
        raise ConfigError(f"{cause}.", hint)
    return ModelShape.from_config(gguf_config(read_gguf(model)), str(model))


def text_positions(prompt: Sequence[int], tokens: int, shape: ModelShape) -> int:
    """Positions that are computed for a prompt and so many new tokens: the last one is never read."""
    return min(len(prompt) + tokens - 1, shape.max_positions) if prompt else 0


def tokenizer_bytes(model: Path, shape: ModelShape) -> int:
    """Resident bytes of a model's tokenizer; a bound where the model is not prepared yet."""
    path = model / "tokenizer.json"
    size = path.stat().st_size if path.exists() else shape.vocab * TOKENIZER_JSON_BYTES
    return TOKENIZER_LIBRARY_BYTES + TOKENIZER_FACTOR * size


def refuse_unoffered(job: Job) -> None:
    """Refuse what a job may say but no run does.

    Raises:
        ConfigError: names the key.
    """
    names = evaluation_names(job)
    if judges(job) and (job.model.factory is None or not names):  # what modules report is not known yet
        check_metric(job.train.best_metric, names)
    if job.optim.turns is None:
        return
    if job.train.update == "on-fetch":
        raise ConfigError(
            "`train.update` = 'on-fetch' leaves an update to the next step, and `optim.block_schedule` = "
            f"{job.optim.block_schedule!r} trains other blocks then.",
            "use `--update on-backward`, or leave it `auto`: only one group's gradient is held",
        )
    if job.hardware.gradients == "disk":
        raise ConfigError(
            "`hardware.gradients` = 'disk' is not offered where groups of blocks take turns "
            f"(`optim.block_schedule` = {job.optim.block_schedule!r}): only one group's gradient is there.",
            "leave it `auto`; `--update on-backward` holds one block's",
        )


def judges(job: Job) -> bool:
    """Whether anything depends on `train.best_metric`."""
    return job.train.early_stop_patience is not None or job.checkpoint.save_best


def evaluation_names(job: Job) -> list[str]:
    """Names of the sets that a job evaluates on."""
    if job.data.val_path:
        return [part.name for part in job.data.val_path]
    return [HELD_OUT] if job.data.val_factory is not None or job.data.val_size else []


def check_inputs(job: Job) -> None:
    """Refuse a fresh run whose model or data cannot be used, before its folder is made.

    Raises:
        ConfigError, DataError: names the path.
    """
    if job.model.factory is not None:
        return  # they are looked at where they are built
    shape = shape_of(Path(job.model.source).expanduser()).balanced(job.train.router_aux_loss_coef)
    check_length(job.train.max_seq_length, shape)
    find_files(job.data.paths)
    for held_out in job.data.val_path:
        find_files(held_out.path)


def check_length(length: int, shape: ModelShape) -> None:
    """Raise ConfigError where rows are longer than the model's positions."""
    if length > shape.max_positions:
        raise ConfigError(
            f"`train.max_seq_length` = {length} is more than the model's {shape.max_positions} positions.",
            f"use at most {shape.max_positions}",
        )
