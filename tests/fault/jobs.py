"""Tiny jobs run by the real command line in real processes, and what their end must look like.

A start costs what importing torch costs, so a job is as small as a job can be: two layers, twelve
steps.
"""

from __future__ import annotations

import json
import os
import platform
import random
import shutil
import signal
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from processes import Result, Running

from packmule.checkpoint.reader import StateReader
from packmule.kernels import checksum
from packmule.probe.cpu import cpu_features, cpu_name
from packmule.probe.disk import locate
from packmule.probe.machine import software
from packmule.probe.ram import ram
from packmule.probe.roots import HOST
from packmule.spec.hardware import DiskSpeed, Hardware, MatmulPoint
from packmule.tiers.disk import PosixDisk, aligned_buffer

STEPS = 12
EVALUATE_EVERY = 4
PARTIAL = 9
SNAPSHOT_EVERY = 6

_MAIN = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests may run where it is ignored
from packmule.cli import main
sys.exit(main(sys.argv[1:]))
"""

COMMON = {
    "--model.init": "random",
    "--max-seq-length": "32",
    "--global-batch-size": "4",
    "--micro-batch-size": "2",
    "--max-steps": str(STEPS),
    "--learning-rate": "0.01",
    "--warmup-steps": "2",
    "--precision": "fp32",
    "--threads": "1",
    "--seed": "7",
    "--val-size": "6",
    "--eval-steps": str(EVALUATE_EVERY),
    "--save-steps": str(SNAPSHOT_EVERY),
    "--train.sample_prompt": "the mule",
    "--train.sample_tokens": "6",
    "--ram": "1GB",
}

PLANS: Mapping[str, Mapping[str, str]] = {
    "ram": {"--hardware.state": "ram", "--update": "after-backward", "--checkpoint.commit_steps": "5"},
    "on-fetch": {"--hardware.state": "disk", "--update": "on-fetch"},
    "on-backward": {"--hardware.state": "disk", "--update": "on-backward", "--max-grad-norm": "0"},
}
"""The first two have the same numerics, hence the same end."""

LIKE = {"ram": "clip", "on-fetch": "clip", "on-backward": "no clip"}
"""Plans that must end in the same bits have the same word here."""


def write_model(folder: Path) -> None:
    """A two-layer Llama to be drawn at random, and a byte-level tokenizer trained on a few texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(random.Random(1)), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": tokenizer.token_to_id("<end>"),
    }
    (folder / "config.json").write_text(json.dumps(config))


def _texts(rng: random.Random) -> list[str]:
    words = ("the", "mule", "carries", "sacks", "of", "grain", "down", "to", "a", "mill")
    return [" ".join(rng.choices(words, k=rng.randint(4, 40))) for _ in range(120)]


def write_data(path: Path) -> None:
    """Documents as .jsonl."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in _texts(random.Random(2))))


def write_probe(cache: Path, folder: Path) -> None:
    """A plausible record of this machine, so that no start measures it."""
    place, memory = locate(folder, HOST), ram(HOST)
    points = (MatmulPoint(size=64, flops_per_second=1e9), MatmulPoint(size=1024, flops_per_second=2e10))
    record = Hardware(
        date="2999-01-01",
        host=platform.node(),
        cpu=cpu_name(HOST),
        cpu_features=cpu_features(HOST),
        threads=1,
        ram_total_bytes=memory.total_bytes,
        ram_available_bytes=memory.available_bytes,
        ram_limit_source=memory.source,
        matmul={"float32": points, "float64": points, "bfloat16": points},
        memory_bytes_per_second=1e10,
        task_seconds=1e-4,
        disks=(
            DiskSpeed(
                path=str(place.folder),
                direct=True,
                read_bytes_per_second=1e9,
                write_bytes_per_second=5e8,
                mix_bytes_per_second=6e8,
                sync_seconds=1e-3,
                free_bytes=place.free_bytes,
                device=place.device,
                filesystem=place.filesystem,
            ),
        ),
        parent_baseline_bytes=60 << 20,
        child_baseline_bytes=400 << 20,
        software=software(),
    )
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "probe.json").write_text(record.to_json())


@dataclass(frozen=True)
class Job:
    """A command line.

    Attributes:
        base: holds model, data and cache; shared by jobs.
        out: the run.
        flags: of the plan and of the test.
        cache: the folder in `base` with the machine's record.
        switches: flags without a value.
    """

    base: Path
    out: Path
    flags: Mapping[str, str] = field(default_factory=dict)
    cache: str = "cache"
    switches: tuple[str, ...] = ()

    @classmethod
    def of(cls, base: Path, out: Path, plan: str, **flags: str) -> Job:
        """With one of PLANS; further flags have underscores for dashes."""
        return cls(base, out, {**PLANS[plan], **{f"--{k.replace('_', '-')}": v for k, v in flags.items()}})

    @property
    def words(self) -> list[str]:
        """After `packmule`."""
        flags = {
            "--model": str(self.base / "model"),
            "--dataset": str(self.base / "texts.jsonl"),
            "--output-dir": str(self.out),
            **COMMON,
            **self.flags,
        }
        return ["train", "--json", *self.switches, *(word for pair in flags.items() for word in pair)]

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its processes."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PACKMULE_")}
        return {**kept, "PACKMULE_CACHE": str(self.base / self.cache), "OMP_NUM_THREADS": "1"}

    def start(self, before: str = "") -> Running:
        """Start it.

        Args:
            before: Python that runs first in the parent.
        """
        return Running([sys.executable, "-c", before + _MAIN, *self.words], self.variables)

    def run(self, before: str = "") -> Result:
        """Start it and wait for its end."""
        with self.start(before) as running:
            return running.end()


# What is shared by all tests of a session


@dataclass(frozen=True)
class Base:
    """Model, data, the machine's record, and how uninterrupted runs end; all made once.

    Attributes:
        path: the folder of all that.
    """

    path: Path

    @classmethod
    def of(cls, folder: Path) -> Base:
        """In a folder of the test session."""
        path = folder / "jobs"
        if not path.exists():
            write_model(path / "model")
            write_data(path / "texts.jsonl")
            write_probe(path / "cache", path)
        return cls(path)

    def job(self, out: Path, plan: str, **flags: str) -> Job:
        """A job of one of PLANS in `out`."""
        return Job.of(self.path, out, plan, **flags)

    def expected(self, plan: str) -> End:
        """How it ends when nothing interrupts it."""
        out = self.path / LIKE[plan]
        if not (out / "report.json").exists():
            result = self.job(out, plan).run()
            assert result.code == 0, result.err
        return End.of(out)

    def copy(self, out: Path, plan: str) -> Job:
        """The job of a finished run that `out` is now a copy of."""
        self.expected(plan)
        shutil.copytree(self.path / LIKE[plan], out)
        return self.job(out, plan)

    def partial(self, out: Path, plan: str, **flags: str) -> Job:
        """The job of a run that was stopped after PARTIAL steps, with one snapshot; a copy in `out`."""
        made = self.path / " ".join((plan, *flags))
        if not (made / "HEAD.json").exists():
            with self.job(made, plan, **flags).start() as running:
                assert running.until(lambda event: event["event"] == "step" and event["step"] == PARTIAL)
                (child,) = running.children()
                os.kill(child, signal.SIGKILL)
                running.end()
            assert PARTIAL <= head_step(made) < STEPS
        shutil.copytree(made, out)
        return self.job(out, plan, **flags)

    def on(self, folder: Path, out: Path, plan: str, **flags: str) -> Job:
        """A job on another disk, with a record of the machine for it."""
        cache = f"cache {folder.name}"
        write_probe(self.path / cache, folder)
        return replace(self.job(out, plan, **flags), cache=cache)


def during_snapshot(running: Running, job: Job) -> None:
    """Wait for a step that writes a snapshot, the step's own or that of the step before."""
    late = job.flags["--hardware.state"] == "ram" or job.flags["--update"] == "on-fetch"
    before = 0 if late else SNAPSHOT_EVERY - 1
    running.until(lambda event: event["event"] == "step" and event["step"] % SNAPSHOT_EVERY == before)


def some(names: Iterable[str], rng: random.Random, long: bool) -> list[str]:
    """All cases in the long form of a suite, else one: a start costs seconds."""
    found = list(names)
    return found if long else [rng.choice(found)]


# What a run holds


def head_step(out: Path) -> int:
    """The step of its last commit; -1: none."""
    path = out / "HEAD.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else -1


def state_of(out: Path) -> dict[str, bytes]:
    """Every plane of the last commit, verified, and its step."""
    found = {}
    with StateReader.open(PosixDisk(), out, checksum()) as reader:
        for block, record in enumerate(reader.layout.blocks):
            for plane in reader.layout.planes:
                buffer = aligned_buffer(record.plane_bytes)
                reader.read_plane(block, plane, buffer)
                found[f"{record.name} {plane}"] = bytes(buffer)
        found["step, tokens"] = f"{reader.head.step}, {reader.head.tokens}".encode()
    return found


def log_of(out: Path) -> list[tuple[Any, ...]]:
    """The log in order: everything but times."""
    lines = (out / "log.jsonl").read_text().splitlines()
    return [
        tuple((key, value) for key, value in json.loads(line).items() if not key.endswith("seconds"))
        for line in lines
    ]


@dataclass(frozen=True)
class End:
    """All that a finished run must agree on with another."""

    state: Mapping[str, bytes]
    log: list[tuple[Any, ...]]
    weights: bytes

    @classmethod
    def of(cls, out: Path) -> End:
        """Of a finished run."""
        return cls(state_of(out), log_of(out), (out / "final" / "model.safetensors").read_bytes())


def compare(out: Path, expected: End) -> None:
    """Assert that a finished run ended as an uninterrupted one does."""
    steps = [dict(entry)["step"] for entry in log_of(out) if "train/loss" in dict(entry)]
    assert steps == list(range(1, STEPS + 1))
    found = End.of(out)
    assert found.log == expected.log
    assert found.state == expected.state
    assert found.weights == expected.weights
