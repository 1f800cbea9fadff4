"""Steps of the models of bigger_than_memory.py with what else trains them from disk.

    python benchmarks/peers_bigger_than_memory.py --shape 374m
    python benchmarks/peers_bigger_than_memory.py --shape 1.1b --peer mapped --limit 2.5GB

Same shapes, same tokens, AdamW, gradient checkpointing, no clipping; transformers' model. Peers, each in a
process of its own (extra `peers`):

    deepspeed   ZeRO-3 with optimizer and parameters on NVMe; its buffers no larger than the largest tensor.
                Its operators are compiled at first use, for minutes, and need the headers of libaio. A
                compilation that was killed leaves a file `lock` in ~/.cache/torch_extensions: remove it
    mapped      parameters, gradients and both moments are fp32 tensors mapped on files, trained in place by
                torch.optim.AdamW(fused=True): the operating system moves pages as it likes

Prints the least step time, the least that its threads together were on cores (which other programs change
less), peak memory (VmHWM; and the most of it that was anonymous, or mapped from files, which the system may
take back), and what the process read and wrote in its last step as the kernel counts it (of `mapped`: pages
made dirty, written at some time). With --limit a peer runs inside a memory cgroup of so
many bytes without swap (needs root), and the row says whether it was killed. With --against a row ends with
its ratios to Packmule's step and peak. Exit code 1 when a peer failed for another reason than its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bigger_than_memory import LENGTH, RATE, SHAPES, config_of

PEERS = ("deepspeed", "mapped")
WORKER = "PACKMULE_PEER"
SAMPLE_SECONDS = 0.1
NEEDS = "It needs the extra `peers`, a C++ compiler and the headers of libaio (libaio-dev)."
TINY = {
    "hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 128, "vocab_size": 256,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


# In the process of a peer.


def counters() -> tuple[int, int]:
    """Bytes this process has (read from, written to) disks."""
    found = dict(re.findall(r"^(\w+): (\d+)$", Path("/proc/self/io").read_text(), re.MULTILINE))
    return int(found["read_bytes"]), int(found["write_bytes"])


def tell(**event: Any) -> None:
    """One JSON line to the parent, which ends no line of anybody else's."""
    os.write(int(os.environ[WORKER]), (json.dumps(event) + "\n").encode())


def llama(config: dict[str, Any]) -> Any:
    """transformers' configuration."""
    from transformers import LlamaConfig

    return LlamaConfig(**config, use_cache=False)


def prepare(model: Any) -> Any:
    """Training mode with gradient checkpointing."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def mapped(config: dict[str, Any], folder: Path, options: argparse.Namespace) -> Callable[[Any], float]:
    """The naive baseline: (micro-batches of ids) -> loss of the last."""
    import torch
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    with torch.device("meta"):
        model = LlamaForCausalLM(llama(config))
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config)
    total = sum(p.numel() for p in model.parameters())
    kinds = ("parameters", "gradients", "exp_avg", "exp_avg_sq")
    # torch.from_file makes a file of that size, full of zeros.
    files = {kind: torch.from_file(str(folder / kind), shared=True, size=total) for kind in kinds}
    state, place = {}, 0
    for name, meta in list(model.named_parameters()):
        cut = {kind: file[place : place + meta.numel()].view(meta.shape) for kind, file in files.items()}
        place += meta.numel()
        parameter = torch.nn.Parameter(cut["parameters"])
        parameter.grad = cut["gradients"]
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, parameter)
        with torch.no_grad():  # as transformers draws them
            parameter.fill_(1) if "norm" in name else parameter.normal_(0, model.config.initializer_range)
        state[parameter] = {
            "step": torch.tensor(0.0), "exp_avg": cut["exp_avg"], "exp_avg_sq": cut["exp_avg_sq"]
        }  # fmt: skip
    optimizer = torch.optim.AdamW(prepare(model).parameters(), lr=RATE, fused=True)
    optimizer.state.update(state)

    def step(batches: Any) -> float:
        for ids in batches:
            # Without the cache: it would keep a copy of every weight until the forward pass ends.
            with torch.autocast("cpu", torch.bfloat16, options.precision == "bf16", cache_enabled=False):
                loss = model(input_ids=ids, labels=ids).loss
            (loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return float(loss.detach())

    return step


def deepspeed(config: dict[str, Any], folder: Path, options: argparse.Namespace) -> Callable[[Any], float]:
    """ZeRO-3 on NVMe: (micro-batches of ids) -> loss of the last."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    import deepspeed
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        sizes = [p.numel() for p in LlamaForCausalLM(llama(config)).parameters()]
    largest, offload = max(sizes), {"device": "nvme", "nvme_path": str(folder), "pin_memory": False}
    settings = {
        "train_micro_batch_size_per_gpu": options.micro_rows,
        "gradient_accumulation_steps": options.rows // options.micro_rows,
        "optimizer": {"type": "AdamW", "params": {"lr": RATE}},
        "bf16": {"enabled": options.precision == "bf16"},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {**offload, "buffer_count": 4, "fast_init": False},
            "offload_param": {**offload, "buffer_count": options.buffers, "buffer_size": largest},
            "sub_group_size": largest,
            "reduce_bucket_size": largest,
            "stage3_prefetch_bucket_size": largest,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 2 * largest,
            "stage3_param_persistence_threshold": 0,
        },
        "aio": {
            "block_size": 1 << 20, "queue_depth": 8, "thread_count": 1, "single_submit": False,
            "overlap_events": True,
        },
        "steps_per_print": 10**9,
    }  # fmt: skip
    deepspeed.init_distributed(dist_backend="gloo")
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = prepare(LlamaForCausalLM(llama(config)))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def step(batches: Any) -> float:
        for ids in batches:
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
        return float(loss.detach())

    return step


def work(options: argparse.Namespace) -> None:
    """Train, and tell of every step."""
    import torch

    torch.manual_seed(0)
    config = {**config_of("374m"), **TINY} if options.tiny else config_of(options.shape)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        step = {"mapped": mapped, "deepspeed": deepspeed}[options.peer[0]](config, Path(name), options)
        ids = torch.randint(0, config["vocab_size"], (options.rows, LENGTH))
        tell(event="ready")
        for _ in range(options.steps):
            before, began, busy = counters(), time.perf_counter(), time.process_time()
            loss = step(ids.split(options.micro_rows))
            seconds, after = time.perf_counter() - began, counters()
            tell(
                event="step",
                seconds=seconds,
                cpu=time.process_time() - busy,
                loss=loss,
                read=after[0] - before[0],
                written=after[1] - before[1],
            )


# In the parent.


@dataclass
class Row:
    """What became of a peer.

    Attributes:
        seconds, cpu: of each step: on the clock, and of all threads together on cores.
        peak, anonymous, files: highest VmHWM, RssAnon and RssFile in bytes; the last two as sampled.
        read, written: bytes of each step.
        end: how it ended; empty when it made all its steps.
        failed: ended for another reason than its limit.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0
    anonymous: int = 0
    files: int = 0
    read: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    ready: bool = False
    end: str = ""
    failed: bool = False

    def sample(self, process: int) -> None:
        """Look at a process's memory."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/status").read_text()
            found = {
                key: int(size) << 10 for key, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)
            }
            self.peak = max(self.peak, found.get("VmHWM", 0))
            self.anonymous = max(self.anonymous, found.get("RssAnon", 0))
            self.files = max(self.files, found.get("RssFile", 0))

    def hear(self, line: str) -> None:
        """Take in what a peer tells."""
        event = json.loads(line)
        if event["event"] == "ready":
            self.ready = True
        else:
            self.seconds.append(event["seconds"])
            self.cpu.append(event["cpu"])
            self.losses.append(event["loss"])
            self.read.append(event["read"])
            self.written.append(event["written"])


class Group:
    """A memory cgroup without swap."""

    def __init__(self, limit: int) -> None:
        root = Path("/sys/fs/cgroup")
        self._first = (root / "memory").is_dir()
        self.folder = (root / "memory" if self._first else root) / f"packmule-peer-{os.getpid()}"
        self.folder.mkdir()
        if self._first:
            (self.folder / "memory.limit_in_bytes").write_text(str(limit))
            with contextlib.suppress(OSError):  # there where the kernel accounts for swap
                (self.folder / "memory.memsw.limit_in_bytes").write_text(str(limit))
            (self.folder / "memory.swappiness").write_text("0")
        else:
            (self.folder / "memory.max").write_text(str(limit))
            (self.folder / "memory.swap.max").write_text("0")

    def join(self) -> None:
        """Put the calling process in."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def kills(self) -> int:
        """Processes killed for memory."""
        name = "memory.oom_control" if self._first else "memory.events"
        found = re.search(r"^oom_kill (\d+)$", (self.folder / name).read_text(), re.MULTILINE)
        return int(found[1]) if found else 0

    def close(self) -> None:
        """Once all processes have left."""
        for _ in range(50):
            with contextlib.suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)


@contextlib.contextmanager
def memory_group(limit: int | None) -> Iterator[Group | None]:
    """A memory cgroup, or None where there is no limit."""
    if limit is None:
        yield None
        return
    group = Group(limit)
    try:
        yield group
    finally:
        group.close()


def follow(words: list[str], group: Group | None, timeout: float) -> Row:
    """Run a peer to its end."""
    row, (here, there) = Row(), os.pipe()
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *words],
            stdout=said, stderr=said, pass_fds=(there,), preexec_fn=group.join if group else None,
            env={**os.environ, WORKER: str(there), "DS_ACCELERATOR": "cpu"}, start_new_session=True,
        )  # fmt: skip
        os.close(there)
        os.set_blocking(here, False)
        left, ends = b"", time.monotonic() + timeout
        try:
            while True:
                code = process.poll()
                row.sample(process.pid)
                with contextlib.suppress(BlockingIOError):
                    while more := os.read(here, 1 << 16):
                        left += more
                *lines, left = left.split(b"\n")
                for line in lines:
                    row.hear(line.decode())
                if code is not None or time.monotonic() > ends:
                    break
                time.sleep(SAMPLE_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            os.close(here)
        where = f"in step {len(row.seconds) + 1}" if row.ready else "while it was set up"
        said.seek(0)
        text = said.read().decode(errors="replace")
        out_of_memory = (group is not None and group.kills() > 0) or "MemoryError" in text
        if code is None:
            row.end = f"stopped {where}, after {timeout:.0f} s"
        elif out_of_memory:
            row.end = f"killed for memory {where}"
        elif code:
            row.end, row.failed = f"failed {where}, exit code {code}", True
            print(text[-3000:], file=sys.stderr)
    return row


def report(peer: str, options: argparse.Namespace, row: Row) -> str:
    """One line of the table."""
    from packmule.spec.units import format_bytes

    last = -1 if row.seconds else 0
    cells = [
        peer,
        f"{min(row.seconds):.2f} s" if row.seconds else "-",
        f"{min(row.cpu):.2f} s" if row.cpu else "-",
        format_bytes(row.peak),
        format_bytes(row.anonymous),
        format_bytes(row.files),
        format_bytes(row.read[last]) if row.read else "-",
        format_bytes(row.written[last]) if row.written else "-",
    ]
    if options.against:
        seconds, peak = options.against
        cells += [f"{min(row.seconds) / seconds:.2f}" if row.seconds else "-", f"{row.peak / peak:.2f}"]
    line = "  ".join(f"{cell:<10}" for cell in cells).rstrip()
    steps = ", ".join(f"{seconds:.2f}" for seconds in row.seconds)
    losses = ", ".join(f"{loss:.3f}" for loss in row.losses)
    return (
        f"{line}\n  {row.end or 'made all its steps'}; seconds {steps or 'none'}; losses {losses or 'none'}"
    )


def main() -> int:
    """Run the peers, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", choices=PEERS, nargs="+", default=list(PEERS))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="374m")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--steps", type=int, default=3, help="made; the least time counts")
    parser.add_argument("--micro-rows", type=int, help="computed at once; all of a step")
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--buffers", type=int, default=5, help="of DeepSpeed for parameters in RAM")
    parser.add_argument("--folder", default=".", help="on the disk to use")
    parser.add_argument("--limit", help="memory of a cgroup, like 2.5GB")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a peer may take")
    parser.add_argument("--against", nargs=2, metavar=("SECONDS", "BYTES"), help="Packmule's step and peak")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # operators get compiled
    options = parser.parse_args()
    options.rows = options.tokens // LENGTH
    options.micro_rows = options.micro_rows or options.rows
    if options.rows % options.micro_rows:
        parser.error(f"--micro-rows {options.micro_rows} does not divide the {options.rows} rows of a step")
    if WORKER in os.environ:
        work(options)
        return 0
    from packmule.probe.cpu import cpu_name
    from packmule.probe.roots import HOST
    from packmule.spec.units import format_bytes, parse_bytes

    limit = parse_bytes(options.limit) if options.limit else None
    if options.against:
        options.against = (float(options.against[0]), parse_bytes(options.against[1]))
    print(
        f"{options.shape}: {options.tokens} tokens a step, {options.micro_rows} of {options.rows} rows at "
        f"once, {options.precision}, gradient checkpointing, AdamW, {cpu_name(HOST)}, "
        + (f"memory cgroup of {format_bytes(limit)}" if limit else "memory not limited")
    )
    head = ["peer", "step", "cores", "peak", "anonymous", "files", "read", "written"]
    head += ["x step", "x peak"] if options.against else []
    print("  ".join(f"{cell:<10}" for cell in head).rstrip(), flush=True)
    failed = False
    for peer in options.peer:
        words = ["--peer", peer, "--shape", options.shape, "--tokens", str(options.tokens)]
        words += ["--steps", str(options.steps), "--micro-rows", str(options.micro_rows)]
        words += ["--precision", options.precision, "--buffers", str(options.buffers)]
        words += ["--folder", options.folder]
        if peer == "deepspeed":  # compilers work outside the group; one that is killed leaves its lock behind
            built = follow([*words, "--tiny", "--steps", "1"], None, math.inf)
            if built.end:
                print(f"{peer}: not run, {built.end} with a tiny model (see above). {NEEDS}", flush=True)
                continue
        with memory_group(limit) as group:
            row = follow(words, group, options.timeout)
        print(report(peer, options, row), flush=True)
        failed = failed or row.failed
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
