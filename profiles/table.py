"""Profile: what each task of an RL step costs on each kind of GPU.

A profile is a table of entries, one per (task kind, GPU kind, batch size), each with its duration samples in
integer microseconds, and a table of data sizes that decide what a transfer costs. Planning uses medians.
It says how it came about (measured, predicted, fitted, provisional) and on what; it does not know any schedule.
"""

from __future__ import annotations

import statistics
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from stagebreaker.profiles.document import Document, InputError, Model, nearest
from stagebreaker.profiles.interpolate import interpolate_us

TASK_KINDS = (
    "encode_prompt",
    "generate",
    "vae_decode",
    "score",
    "old_replay",
    "ref_replay",
    "loss_replay",
    "grad_replay",
    "context_rebuild",
    "fold",
    "update",
    "switch",
)
"""Kinds with a cost. ``context_rebuild`` is no task of its own: every *part* of a split replay pays it once."""

DERIVED_KINDS = ("generate_train", "grad_replay_kl")
"""Kinds a profile may lack: a rollout that also back-propagates, a grad_replay with a second backward for a KL to
reference means. ``sim.engine.Costs`` then makes them of the kinds above."""

JUDGE_KINDS = ("judge_encode", "judge_prefill", "judge_step")
"""What a verdict is made of: one picture encoded; a prompt read, ``batch_size`` its tokens; one token written by each
of ``batch_size`` active requests. Where a profile has ``verdicts``, these take the place of ``score``."""

DATA_KINDS = ("embeddings", "latents", "trajectory", "frames", "gradient", "adapter", "reference")
"""Kinds of data that travel between tasks; what each edge carries is decided by ``sim.dataflow``."""

MEMORY_KINDS = (
    "policy_weights",
    "adapter",
    "kv_cache",
    "gradient_buffer",
    "optimizer",
    "vae_weights",
    "text_encoder_weights",
    "judge_weights",
    "judge_reserve",
    "encode_prompt_activations",
    "generate_activations",
    "replay_activations",
    "grad_replay_activations",
    "vae_decode_activations",
    "score_activations",
)
"""What lies in a GPU's memory, each in bytes. A lane holds as many of each as ``sim.memory`` says.

``adapter``: one version; ``kv_cache``: one video's; ``gradient_buffer``: one vector of the adapter's length (g+, g-, a
unit, the accumulator); ``optimizer``: all moments; ``judge_reserve``: what one request in service keeps; activations:
the most that one task of the kind needs beside all this (``replay``: old, reference and loss replays).
"""

Provenance = Literal["measured", "predicted", "fitted", "provisional"]
Serving = Literal["serial", "dynamic", "continuous"]
NonNegative = Annotated[int, Field(ge=0)]
Duration = Annotated[int, Field(ge=0, le=10**13)]
"""Microseconds; more than 115 days is a slip of units."""


class TaskCost(Model):
    """Samples of one task kind on one GPU kind at one batch size."""

    kind: str
    gpu_kind: str
    batch_size: Annotated[int, Field(ge=1)] = 1
    samples_us: tuple[Duration, ...]
    peak_memory_bytes: NonNegative | None = None
    """None: not measured."""

    @field_validator("kind")
    @classmethod
    def _known(cls, kind: str) -> str:
        known = (*TASK_KINDS, *DERIVED_KINDS, *JUDGE_KINDS)
        if kind not in known:
            raise ValueError(f"kind={kind!r} is no task kind; {nearest(kind, known)}")
        return kind

    @field_validator("samples_us")
    @classmethod
    def _some(cls, samples: tuple[int, ...]) -> tuple[int, ...]:
        if not samples:
            raise ValueError("samples_us is empty; give at least one duration in microseconds")
        return samples

    @property
    def median_us(self) -> int:
        """Median of the samples, rounded down to a whole microsecond."""
        return int(statistics.median(self.samples_us))

    @property
    def spread(self) -> float:
        """Interquartile range over the median (0 for a single sample)."""
        if len(self.samples_us) < 2 or self.median_us == 0:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return (high - low) / self.median_us


class GpuKind(Model):
    """One kind of GPU as the profile saw it."""

    name: str
    model: str
    memory_bytes: NonNegative = 0
    driver: str = ""


class LinkCost(Model):
    """What a transfer of n bytes between two GPUs costs: ``latency_us + n / bytes_per_s``."""

    latency_us: Duration = 0
    bytes_per_s: Annotated[int, Field(ge=1)]

    def duration_us(self, size_bytes: int) -> int:
        """Whole microseconds, rounded up."""
        return self.latency_us + -(-size_bytes * 1_000_000 // self.bytes_per_s)


class JudgeTurn(Model):
    """One turn of a verdict: us until its pictures are there (0: they are), pictures to encode, tokens to read."""

    fetch_us: Duration = 0
    frames: NonNegative = 0
    prompt_tokens: Annotated[int, Field(ge=1)]


class Verdicts(Model):
    """How a judge comes to a score; what that costs stands in ``tasks`` (``JUDGE_KINDS``).

    A turn writes ``tokens_per_turn`` x exp(``sigma`` z) tokens, z normal, at most ``max_tokens``. A verdict is over
    after turn k with probability ``ends_after[k]``, and after the last turn. Draws depend on ``seed`` and the request's
    name alone.
    """

    turns: Annotated[tuple[JudgeTurn, ...], Field(min_length=1)]
    ends_after: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    tokens_per_turn: Annotated[int, Field(ge=1)]
    sigma: Annotated[float, Field(ge=0, le=3)] = 0.0
    max_tokens: Annotated[int, Field(ge=1)] = 2048
    most_active: Annotated[int, Field(ge=1)] | None = None
    seed: NonNegative = 0

    @model_validator(mode="after")
    def _consistent(self) -> Verdicts:
        if len(self.ends_after) >= len(self.turns):
            raise ValueError(
                f"ends_after has {len(self.ends_after)} entries, a verdict of {len(self.turns)} turns has at most "
                f"{len(self.turns) - 1}: it is over after the last turn anyway"
            )
        return self


class Profile(Document):
    """profile.json."""

    WHAT: ClassVar[str] = "profile"
    name: str
    provenance: Provenance
    source: str
    workload: str = ""
    serving: Serving
    dtype: str = "bfloat16"
    settings: dict[str, str | int] = Field(default_factory=dict)
    """The workload's fields that the costs depend on (resolution, latent frames, LoRA rank, ...); empty: any."""
    versions: dict[str, str] = Field(default_factory=dict)
    gpu_kinds: tuple[GpuKind, ...]
    link: LinkCost
    sizes_bytes: dict[str, NonNegative]
    tasks: tuple[TaskCost, ...]
    memory_bytes: dict[str, NonNegative] = Field(default_factory=dict)
    """By ``MEMORY_KINDS``; empty: not known, and no placement is called too large."""
    verdicts: Verdicts | None = None
    """How long verdicts take, token by token; None: ``score`` says it, batch by batch."""

    @model_serializer(mode="wrap")
    def _without_the_unknown(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What a profile does not know is not written."""
        data: dict[str, Any] = dump(self)
        for name in ("memory_bytes", "verdicts"):
            if not data[name]:
                del data[name]
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        if not self.gpu_kinds:
            raise ValueError("gpu_kinds is empty; name at least one kind of GPU")
        known = [kind.name for kind in self.gpu_kinds]
        if len(set(known)) != len(known):
            raise ValueError(f"gpu_kinds names a kind twice: {', '.join(known)}; keep one of each")
        for size in self.sizes_bytes:
            if size not in DATA_KINDS:
                raise ValueError(f"sizes_bytes.{size} is no data kind; {nearest(size, DATA_KINDS)}")
        for held in self.memory_bytes:
            if held not in MEMORY_KINDS:
                raise ValueError(f"memory_bytes.{held} is no memory kind; {nearest(held, MEMORY_KINDS)}")
        seen: set[tuple[str, str, int]] = set()
        for task in self.tasks:
            key = (task.kind, task.gpu_kind, task.batch_size)
            if task.gpu_kind not in known:
                raise ValueError(f"task {task.kind} is on gpu_kind={task.gpu_kind!r}; {nearest(task.gpu_kind, known)}")
            if key in seen:
                raise ValueError(
                    f"task {task.kind} on {task.gpu_kind} at batch {task.batch_size} stands twice; keep one"
                )
            seen.add(key)
        return self

    def has(self, kind: str, gpu_kind: str) -> bool:
        """Whether any batch size of this task was profiled on this GPU kind."""
        return any(task.kind == kind and task.gpu_kind == gpu_kind for task in self.tasks)

    def curve_us(self, kind: str, gpu_kind: str) -> dict[int, int]:
        """Batch size -> median duration in us, ascending."""
        points = {t.batch_size: t.median_us for t in self.tasks if t.kind == kind and t.gpu_kind == gpu_kind}
        kinds = [one.name for one in self.gpu_kinds]
        if gpu_kind not in kinds:
            raise InputError(
                f"profile {self.name!r} was not taken on GPU kind {gpu_kind!r}; it has {', '.join(kinds)}: name one of "
                f"these in the cluster, or profile that GPU"
            )
        if not points:
            raise InputError(
                f"profile {self.name!r} has no task {kind!r} on GPU kind {gpu_kind!r}; it has "
                f"{', '.join(sorted({t.kind for t in self.tasks if t.gpu_kind == gpu_kind})) or 'none'}; "
                f"profile it with stagebreaker-profile"
            )
        return dict(sorted(points.items()))

    def duration_us(self, kind: str, gpu_kind: str, batch_size: int = 1) -> int:
        """Median duration in us of one task of ``batch_size`` members, interpolated between measured batches."""
        return interpolate_us(
            self.curve_us(kind, gpu_kind), batch_size, f"{kind} on {gpu_kind} in profile {self.name!r}"
        )

    def size_bytes(self, data: str) -> int:
        """Bytes of one object of this data kind; an absent entry is an error, not zero."""
        if data not in self.sizes_bytes:
            raise InputError(
                f"profile {self.name!r} has no sizes_bytes.{data}; it has {', '.join(sorted(self.sizes_bytes))}; add it"
            )
        return self.sizes_bytes[data]

    def held_bytes(self, kind: str) -> int:
        """Bytes of one object of this memory kind; an absent entry is an error, not zero."""
        if kind not in self.memory_bytes:
            raise InputError(
                f"profile {self.name!r} has no memory_bytes.{kind}; it has {', '.join(sorted(self.memory_bytes))}; "
                f"add it (0 where it lies on no GPU), or leave memory_bytes out"
            )
        return self.memory_bytes[kind]
