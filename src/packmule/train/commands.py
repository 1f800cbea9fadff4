"""What the other commands do: evaluate, generate, verify, info. Loads no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from packmule.checkpoint.head import HEAD_NAME, Head, read_head
from packmule.checkpoint.snapshots import BEST, best_step, is_snapshot, snapshots
from packmule.checkpoint.verify import verify as verify_state
from packmule.data.prepared import open_data
from packmule.data.report import PrepareReport, PrepareRequest
from packmule.errors import ConfigError, DamagedFile
from packmule.graph.costs import Costs
from packmule.kernels import checksum
from packmule.plan.inference import inference_plan
from packmule.shapes.bodies import dtypes
from packmule.shapes.model import ModelShape
from packmule.shapes.module import ModuleShape, Shape
from packmule.spec.environment import Environment
from packmule.spec.job import Data
from packmule.tiers.disk import PosixDisk
from packmule.train.folder import HELD_OUT, RunFolder, module_metrics, perplexities, read_log
from packmule.train.memory import process_memory
from packmule.train.messages import Request
from packmule.train.modules import check_imports, import_path, samples_report
from packmule.train.results import Checked, Evaluation
from packmule.train.situation import RESERVE, model_folder, shape_of, text_positions, tokenizer_bytes
from packmule.train.watch import run_child


def evaluate(
    run: Path,
    environment: Environment,
    dataset: tuple[str, ...] = (),
    rows: int | None = None,
    ram_bytes: int | None = None,
    name: str | None = None,
    imports: tuple[str, ...] = (),
) -> Evaluation:
    """Loss and other metrics of a commit or snapshot.

    Args:
        dataset: other text to judge on.
        name: of one of the run's evaluation sets; by default the first, its held-out rows.
        imports: modules of the caller's own that may be imported.

    Raises:
        PackmuleError: see the parts.
    """
    folder = RunFolder.open(run)
    head = commit_of(folder)
    modules = folder.module_shape()
    if modules is not None:
        return _evaluate_modules(folder, modules, environment, head, dataset, rows, ram_bytes, name, imports)
    with tempfile.TemporaryDirectory(prefix="packmule-eval-", dir=folder.path) as temporary:
        data = folder.data
        if dataset:
            data = Path(temporary) / "data"
            row = head.numerics.max_seq_length
            prepare_text(folder.model, environment, dataset, folder.job().data, row, Path(temporary))
        sets = open_data(data).validation
        if not sets:
            raise ConfigError(f"{folder.path} has no validation data.", "give text with --dataset")
        chosen = next((part for part in sets if name in (None, part.name)), None)
        if chosen is None:
            raise ConfigError(
                f"{folder.path} has no evaluation set {name!r}.",
                f"it has {', '.join(part.name for part in sets)}",
            )
        counts = tuple(min(rows or len(part.rows), len(part.rows)) if part is chosen else 0 for part in sets)
        length = chosen.rows.meta.mean_length_by_token
        result = _run(folder, environment, head, ram_bytes, "evaluate", data, length, counts, (), 0, {})
    kept = {k: v for k, v in result["evaluation"].items() if k in Evaluation.model_fields}
    return Evaluation(step=head.step, **kept)


def _evaluate_modules(
    folder: RunFolder,
    shape: ModuleShape,
    environment: Environment,
    head: Head,
    dataset: tuple[str, ...],
    rows: int | None,
    ram_bytes: int | None,
    name: str | None,
    imports: tuple[str, ...],
) -> Evaluation:
    """The same of modules of one's own, on the samples that the run holds out."""
    if dataset:
        raise ConfigError(
            f"{folder.path} was trained on samples of `{shape.dataset}`, and `--dataset` names text.",
            "leave it out: the run's held-out samples are judged on",
        )
    check_imports(shape, imports)
    job = folder.job()
    held_out = samples_report(shape, job).validation
    if not held_out:
        raise ConfigError(
            f"{folder.path} holds no samples out.", "train with `data.val_size` or `data.val_factory`"
        )
    if name not in (None, held_out[0].name):
        raise ConfigError(
            f"{folder.path} has no evaluation set {name!r}.", f"it has {held_out[0].name}; leave --set out"
        )
    count = held_out[0].rows.rows
    more = {"import_path": import_path(), "val_size": job.data.held_out}
    counts = (min(rows or count, count),)
    result = _run(folder, environment, head, ram_bytes, "evaluate", folder.data, 1.0, counts, (), 0, more)
    found = result["evaluation"]
    known = {key: found.pop(key) for key in Evaluation.model_fields if key in found}
    metrics = {key: value for key, value in found.items() if key not in ("event", "set")}
    return Evaluation(step=head.step, **known, metrics=metrics)


def prepare_text(
    model: Path, environment: Environment, dataset: tuple[str, ...], reading: Data, length: int, out: Path
) -> PrepareReport:
    """Tokenize text that is not a run's own into OUT/data, all of it for validation.

    Args:
        model: a prepared model folder.
        reading: how records are read.
        length: tokens of a row.
    """
    report: dict[str, Any] = {}
    request = PrepareRequest(
        model=str(model),
        dataset=dataset,
        columns=reading.columns,
        train_on=reading.train_on,
        long_documents=reading.long_documents,
        max_seq_length=length,
        val_size=0.0,
        validation_only=True,
        seed=0,
        out=str(out),
        random_init=True,
    )

    def note(event: Mapping[str, Any]) -> None:
        if event["event"] == "report":
            report.update(event["report"])

    run_child("packmule.data.prepare", request.model_dump_json(), note, environment.of_child())
    return PrepareReport.parse(report, "data preparation")


def generate(
    run: Path,
    environment: Environment,
    prompt: str,
    tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    ram_bytes: int | None = None,
) -> str:
    """The continuation of a prompt by a commit or snapshot.

    Raises:
        ConfigError: an empty prompt, or one longer than the model's positions.
        PackmuleError: see the parts.
    """
    from packmule.data.tokenizer import TextTokenizer

    folder = RunFolder.open(run)
    head, shape = commit_of(folder), folder.decoder_shape()
    tokenizer = TextTokenizer.from_folder(folder.model)
    start = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    ids = (*start, *tokenizer.encode([prompt])[0])
    if not ids:
        raise ConfigError("`--prompt` is empty.", "give some text to continue")
    positions = text_positions(ids, tokens, shape)
    if len(ids) > positions:
        raise ConfigError(
            f"The prompt has {len(ids)} tokens, and the model has room for {shape.max_positions}.",
            "shorten the prompt",
        )
    extra = {"temperature": temperature, "top_p": top_p, "seed": seed}
    result = _run(
        folder,
        environment,
        head,
        ram_bytes,
        "generate",
        folder.data,
        float(positions),
        (),
        ids,
        positions,
        extra,
    )
    return str(result["text"]["text"])


def _run(
    folder: RunFolder,
    environment: Environment,
    head: Head,
    ram_bytes: int | None,
    work: Literal["evaluate", "generate"],
    data: Path,
    mean_length: float,
    rows: tuple[int, ...],
    ids: tuple[int, ...],
    positions: int,
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """Plan for inference, run the child; its events by name."""
    hardware, shape = folder.read_hardware(), folder.shape()
    budget = ram_bytes or folder.read_plan().budget_bytes
    own = max(hardware.parent_baseline_bytes, process_memory().peak + RESERVE)
    base = own + hardware.child_baseline_bytes
    if ids and isinstance(shape, ModelShape):
        base += tokenizer_bytes(folder.model, shape)
    costs = Costs.of(hardware, dtypes(head.numerics).product, hardware.disks[0])
    chunk = head.layout.chunk_bytes
    plan = inference_plan(shape, head.numerics, costs, budget, base, chunk, mean_length, rows, positions)
    request = Request(
        work=work,
        folder=str(folder.path),
        state=str(folder.state),
        data=str(data),
        ram_bytes=budget - own,
        sample_ids=ids,
        positions=positions,
        evaluation_rows=rows,
        mean_length=mean_length,
        plan=plan.model_dump(mode="json"),
        **extra,
    )
    events: dict[str, Any] = {}
    variables = environment.of_child(
        OMP_NUM_THREADS=str(plan.numerics.threads), TOKENIZERS_PARALLELISM="false"
    )

    def note(event: Mapping[str, Any]) -> None:
        events[event["event"]] = dict(event)

    run_child("packmule.train.child", request.model_dump_json(), note, variables)
    return events


def verify(run: Path, environment: Environment) -> dict[str, Checked]:
    """Check the state of a run and its snapshots against their checksums.

    Returns:
        By folder name.

    Raises:
        DamagedFile: names block, plane and chunk of the first damage.
    """
    folder = RunFolder.open(run)
    disk, crc = PosixDisk(), checksum()
    paths = [folder.state]
    if not is_snapshot(folder.state):
        paths += snapshots(disk, folder.state, crc)
        paths += [folder.state / BEST] if best_step(disk, folder.state, crc) is not None else []
    found: dict[str, Checked] = {}
    for path in paths:
        verdict = verify_state(disk, path, crc)
        if verdict.damage:
            more = f" (and {len(verdict.damage) - 1} more)" if len(verdict.damage) > 1 else ""
            raise DamagedFile(
                f"{verdict.damage[0]}{more}",
                "train again with the same command: it goes back to the newest snapshot",
            )
        found[path.name] = Checked(step=verdict.step or 0, checked_bytes=verdict.checked_bytes)
    return found


def info(path: Path, environment: Environment) -> dict[str, Any]:
    """What a run, snapshot or model is, as plain values by name.

    Raises:
        ConfigError: it is none of them.
    """
    path = path.expanduser()
    path = path if path.exists() else model_folder(path)
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist.", "give a run, a checkpoint-N, a model folder or a .gguf file"
        )
    if (path / "config.yaml").exists() or (path / HEAD_NAME).exists():
        return _run_info(RunFolder.open(path))
    return {"kind": "model", "path": str(path), **_shape_info(shape_of(path))}


def _shape_info(shape: Shape) -> dict[str, Any]:
    if isinstance(shape, ModuleShape):
        own = shape.validation
        return {
            "modules": shape.factory,
            "data set": shape.dataset,
            "samples": shape.samples,
            **(
                {} if own is None else {"validation data set": own.dataset, "validation samples": own.samples}
            ),
            "parameters": shape.numel,
            "layers": shape.layers,
        }
    return {
        "parameters": shape.numel,
        "layers": shape.layers,
        "hidden": shape.hidden,
        "heads": shape.heads,
        "key/value heads": shape.kv_heads,
        "feed-forward": shape.ffn,
        "vocabulary": shape.vocab,
        "tied": shape.tied,
        "positions": shape.max_positions,
    }


def _run_info(folder: RunFolder) -> dict[str, Any]:
    disk, crc = PosixDisk(), checksum()
    snapshot = is_snapshot(folder.state)
    found: dict[str, Any] = {"kind": "snapshot" if snapshot else "run", "path": str(folder.state)}
    if folder.module.exists() or (folder.model / "config.json").exists():
        found |= _shape_info(folder.shape())
    head = read_head(disk, folder.state, crc)
    if head is None:
        return {**found, "step": None}
    numerics = head.numerics
    found |= {
        "step": head.step,
        "total steps": numerics.schedule.total_steps,
        "targets seen" if folder.module.exists() else "target tokens seen": head.tokens,
        "precision": numerics.precision,
        "micro-batches": list(numerics.micro_rows),
    }
    log = [entry for entry in read_log(folder.log) if entry["step"] <= head.step]
    losses = [entry for entry in log if "train/loss" in entry]
    if losses:
        found["last loss"] = losses[-1]["train/loss"]
    if folder.module.exists():
        for name, pairs in module_metrics(log).items():
            found[f"held-out {name}"] = {f"step {step}": value for step, value in pairs}
    else:
        found["held-out perplexity"] = {}
    for name, pairs in perplexities(log).items():
        told = "held-out" if name == HELD_OUT else name
        found[f"{told} perplexity"] = {f"step {step}": value for step, value in pairs}
    if not snapshot:
        found["snapshots"] = [path.name for path in snapshots(disk, folder.state, crc)]
        found["best step"] = best_step(disk, folder.state, crc)
    return found


def commit_of(folder: RunFolder) -> Head:
    """The last commit of a run or snapshot.

    Raises:
        ConfigError: there is none yet.
    """
    head = folder.head()
    if head is None:
        raise ConfigError(
            f"{folder.state} has no commit yet.", "run `packmule train` until it has loaded the model"
        )
    return head
