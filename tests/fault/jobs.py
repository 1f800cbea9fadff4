"""Tiny jobs run by the real command line in real processes, and what their end must look like.

A start costs what importing torch costs, so a job is as small as a job can be: two layers, twelve
steps. Every wait has a deadline; leaving `Running` kills what is left.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from packmule.checkpoint.reader import StateReader
from packmule.kernels import checksum
from packmule.probe.cpu import cpu_features, cpu_name
from packmule.probe.disk import locate
from packmule.probe.machine import software
from packmule.probe.ram import ram
from packmule.probe.roots import HOST
from packmule.spec.hardware import DiskSpeed, Hardware, MatmulPoint
from packmule.tiers.disk import PosixDisk, aligned_buffer

DEADLINE = 120.0
"""Seconds any one start may take, on a machine that is busy with other things."""

STEPS = 12
EVALUATE_EVERY = 4
SNAPSHOT_EVERY = 6

Event = dict[str, Any]

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
    words = ("the", "mule", "carries", "sacks", "of", "grain", "over", "a", "hill", "and", "down", "to", "mill")
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
    """

    base: Path
    out: Path
    flags: Mapping[str, str] = field(default_factory=dict)

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
        return ["train", "--json", *(word for pair in flags.items() for word in pair)]

    @property
    def variables(self) -> dict[str, str]:
        """The environment of its processes."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PACKMULE_")}
        return {**kept, "PACKMULE_CACHE": str(self.base / "cache"), "OMP_NUM_THREADS": "1"}

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


@dataclass(frozen=True)
class Result:
    """How a start ended.

    Attributes:
        code: as a shell gives it: 128 + N for signal N.
        events: what it printed.
        err: its standard error.
        seconds: from the last thing done to it to its end.
    """

    code: int
    events: tuple[Event, ...]
    err: str
    seconds: float

    def named(self, event: str) -> list[Event]:
        """The events of one name."""
        return [found for found in self.events if found["event"] == event]

    @property
    def last_step(self) -> int:
        """The last step it told of; -1: none."""
        return max((event["step"] for event in self.named("step")), default=-1)

    def refused(self, code: int, *words: str) -> str:
        """Assert that it ended in a message with these words, not in a traceback; the message."""
        assert self.code == code, (self.code, self.err)
        assert self.err.startswith(("error: ", "note: ")) and "\nhint: " in self.err, self.err
        assert "Traceback" not in self.err and "bug in packmule" not in self.err, self.err
        for word in words:
            assert word in self.err, (word, self.err)
        return self.err


class Running:
    """A started command, its events read as they come. Use as a context manager."""

    def __init__(self, command: list[str], variables: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(variables)
        )
        self.events: list[Event] = []
        self._queue: queue.Queue[Event | None] = queue.Queue()
        self._err: list[str] = []
        self._since = time.monotonic()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._read_err)]
        for thread in self._threads:
            thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(json.loads(line))
        self._queue.put(None)

    def _read_err(self) -> None:
        assert self.process.stderr is not None
        self._err.append(self.process.stderr.read())

    def until(self, wanted: Callable[[Event], bool], deadline: float = DEADLINE) -> bool:
        """Wait for an event; False if the command ended first."""
        limit = time.monotonic() + deadline
        while True:
            event = self._queue.get(timeout=max(0.01, limit - time.monotonic()))
            if event is None:
                self._queue.put(None)
                return False
            self.events.append(event)
            if wanted(event):
                return True

    def until_phase(self, name: str, count: int = 1) -> bool:
        """Wait for the count-th phase of a name."""
        seen = 0

        def wanted(event: Event) -> bool:
            nonlocal seen
            seen += event["event"] == "phase" and event["name"] == name
            return seen == count

        return self.until(wanted)

    def send(self, number: int) -> None:
        """A signal to the parent."""
        self._since = time.monotonic()
        self.process.send_signal(number)

    def children(self) -> list[int]:
        """Process ids of its children now."""
        found = []
        for task in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            try:
                found += [int(word) for word in task.read_text().split()]
            except OSError:
                continue
        return found

    def end(self, deadline: float = DEADLINE) -> Result:
        """Wait for its end.

        Raises:
            AssertionError: it does not come.
        """
        try:
            code = self.process.wait(deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {deadline} s: {self.events[-3:]}") from None
        seconds = time.monotonic() - self._since
        self.until(lambda event: False)
        for thread in self._threads:
            thread.join(DEADLINE)
        return Result(128 - code if code < 0 else code, tuple(self.events), "".join(self._err), seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pids = self.children()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(DEADLINE)
            for pid in pids:
                _kill(pid)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def alive(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rsplit(")", 1)[1].split()[0] not in ("Z", "X")


def gone(pid: int, deadline: float) -> bool:
    """Wait until a process has ended."""
    limit = time.monotonic() + deadline
    while alive(pid):
        if time.monotonic() > limit:
            return False
        time.sleep(0.01)
    return True


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
        tuple((key, value) for key, value in json.loads(line).items() if key != "seconds") for line in lines
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
