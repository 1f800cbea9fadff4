"""The plan: every decision about a run, as one immutable record.

`Numerics` fixes bits; everything else only moves work and bytes (docs/design.md).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from packmule.spec.growth import Growth, Scaling
from packmule.spec.records import Record
from packmule.spec.turns import Turns

Precision = Literal["fp32", "bf16-mixed", "fp64"]
Update = Literal["after-backward", "on-backward", "on-fetch"]
RuleName = Literal["adamw", "lomo", "adalomo"]


class OptimizerNumerics(Record):
    """The rule and its hyper-parameters, without the learning rate of a step."""

    rule: RuleName = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay_on: Literal["matrices", "all"] = Field(
        default="matrices",
        description="what decays: tensors of two and more dimensions, or norms and biases too",
    )
    decay_embedding: bool = Field(default=True, description="whether the embedding decays")


class ScheduleNumerics(Record):
    """Learning rate as a pure function of the step (packmule.optim.schedules)."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    learning_rate: float
    minimum: float = 0.0
    warmup_steps: int = 0
    total_steps: int
    decay_steps: int = Field(default=0, description="wsd: steps of its last phase, in which the rate falls")
    decay_shape: Literal["linear", "cosine", "sqrt"] = "linear"
    scaling: Scaling = Field(default="off", description="how the rate follows the rows of a step")
    base_rows: int = Field(default=0, description="rows of a step that learning_rate is meant for; 0: all")


class SharedUpdates(Record):
    """Which chunks of the state a GPU updates. Its updates round otherwise than those of the cores."""

    percent: int = Field(ge=1, le=100, description="as `device_updates` of a plan")
    chunk_bytes: int = Field(description="as `io.chunk_bytes` of a plan")


class Numerics(Record):
    """What fixes bits. Same numerics, same machine: same bits, however it is placed."""

    precision: Precision
    products: Literal["bfloat16", "float32", "float64"] | None = Field(
        default=None,
        description="dtype in which matrices are multiplied, where this machine is faster in a wider one "
        "than the precision's; null: the precision's",
    )
    micro_rows: tuple[int, ...] = Field(description="rows of each micro-batch of a step")
    growth: Growth | None = Field(default=None, description="batch warm-up; null: every step is whole")
    max_seq_length: int
    loss_chunk: int = Field(description="tokens whose logits exist at once")
    vocabulary_parts: int = Field(
        default=1, ge=1, description="blocks that embedding and head are each cut into"
    )
    clip: float | None
    router_aux_loss_coef: float | None = Field(
        default=None, description="factor of the load-balancing loss; null: the model's own"
    )
    optimizer: OptimizerNumerics
    schedule: ScheduleNumerics
    turns: Turns | None = Field(default=None, description="which blocks each step trains; null: all of them")
    seed: int
    threads: int
    kernels: Literal["native", "torch"]
    torch: str
    cpu_features: tuple[str, ...]
    device: str | None = Field(default=None, description="GPU that computes the model; null: the cores")
    shared_updates: SharedUpdates | None = Field(
        default=None, description="what a GPU updates; null: nothing, or there is none"
    )

    @property
    def rows(self) -> int:
        """Rows of the global batch."""
        return sum(self.micro_rows)

    def cut(self, rows: int) -> tuple[int, ...]:
        """Rows of each micro-batch of a step of `rows` rows: the first ones of `micro_rows`."""
        found: list[int] = []
        for size in self.micro_rows:
            found.append(min(size, rows - sum(found)))
            if sum(found) == rows:
                break
        return tuple(found)

    @property
    def micro_tokens(self) -> tuple[int, ...]:
        """Most tokens of each micro-batch."""
        return tuple(rows * self.max_seq_length for rows in self.micro_rows)


class Placement(Record):
    """Where each kind of buffer lives between its uses."""

    state: Literal["ram", "disk"]
    weights: Literal["state", "ram", "disk"] = Field(
        description="compute weights: made from the state at each fetch, or a copy kept in ram or on disk"
    )
    gradients: Literal["ram", "disk"] = "ram"
    inputs: Literal["ram", "disk", "device"] = "ram"
    kept_weights: int = Field(
        default=0, ge=0, description="blocks whose compute weights stay in ram though others' do not"
    )
    kept_state: int = Field(
        default=0, ge=0, description="blocks whose state stays in ram too: stored like the others', not read"
    )
    device_weights: int = Field(
        default=0, ge=0, description="blocks whose compute weights stay on the device, and nowhere else"
    )


class DevicePlan(Record):
    """What computes instead of the cores."""

    name: str = Field(description='"cuda:0", or "fake": ordinary memory behind a link of a stated rate')
    memory_bytes: int = Field(ge=0, description="bound on what the run holds in its memory, torch included")


class Io(Record):
    """How streams are cut. Never changes bits."""

    prefetch: int = Field(default=1, ge=0, description="blocks fetched ahead")
    chunk_bytes: int = Field(default=4 << 20, description="bytes of one plane per streamed chunk")
    read_ahead: int = Field(default=2, ge=1, description="chunks of a stream read before the first is used")


class CheckpointPlan(Record):
    """When state becomes durable."""

    commit_steps: int = Field(ge=1)
    snapshot_steps: int | None
    snapshots_kept: int = 2


class PhaseMemory(Record):
    """Predicted bytes in one phase of a run's life."""

    phase: Literal["load", "step", "evaluation", "sample", "commit", "resume", "export"]
    ram_bytes: int = Field(description="whole process tree, baselines included")
    parts: dict[str, int] = Field(description="bytes by kind: baseline, state, weights, ...")
    disk_bytes: int
    device_bytes: int = 0


class Predicted(Record):
    """What the plan's simulation says."""

    step_seconds: float
    clipped_step_seconds: float = Field(
        default=0.0, description="of a step after one whose gradient was clipped; 0: no longer than others"
    )
    compute_seconds: float
    disk_seconds: float
    update_seconds: float
    exposed_io_seconds: float
    bottleneck: str
    peak_ram_bytes: int
    peak_device_bytes: int = 0
    device_seconds: float = Field(default=0.0, description="that a device computes")
    sent_bytes_per_step: int = Field(default=0, description="from RAM to a device")
    received_bytes_per_step: int = 0
    phases: tuple[PhaseMemory, ...]
    disk_bytes_written_per_step: int
    disk_bytes_read_per_step: int
    disk_bytes_spilled_per_step: int = Field(
        default=0, description="of those written: block inputs, which grow with the rows of a step"
    )
    snapshot_seconds: float = Field(default=0.0, description="that a snapshot adds to one step")
    snapshot_bytes: int = Field(default=0, description="that a snapshot adds to what one step writes")


class Plan(Record):
    """Every decision of a run."""

    format: int = 1
    budget_bytes: int
    numerics: Numerics
    placement: Placement
    device: DevicePlan | None = Field(default=None, description="null: the cores compute")
    order: Literal["breadth", "depth"]
    recompute: tuple[bool, ...] = Field(description="per layer: run its forward again in backward")
    update: Update
    speculate: bool = Field(
        default=False,
        description="on-fetch: blocks are updated in backward as if nothing were clipped; where the norm "
        "then says otherwise, that is dropped and they are updated when the next step fetches them",
    )
    device_updates: int = Field(
        default=0,
        ge=0,
        le=100,
        description="of a hundred chunks of the state, how many the device updates; the cores do the rest",
    )
    io: Io
    checkpoint: CheckpointPlan
    predicted: Predicted | None = None

    @property
    def commits_late(self) -> bool:
        """A step is committed in the graph of the next one: its updates or its stores come there."""
        return self.update == "on-fetch" or self.placement.state == "ram"
