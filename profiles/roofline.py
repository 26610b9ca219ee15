"""Roofline profiles: what tasks cost on hardware that is not at hand, so that any workload can be planned first.

A forward takes a fixed overhead plus the longer of two times: its FLOPs at a share of the peak, its memory traffic at a
share of the bandwidth. Formulas come from ``models`` and ``judges``, rates from ``data/hardware.yaml``, shares from the
constants below, none of which was fitted to a measurement of ours: a predicted profile says so, ranks schedules, and
is to be replaced by a measured one. It leaves out what a framework adds around an update or an engine's start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Annotated, ClassVar

from pydantic import Field

from stagebreaker.profiles.document import Document, InputError, Model, load_yaml, nearest
from stagebreaker.profiles.judges import Judge
from stagebreaker.profiles.models import (
    BF16,
    FP32,
    TEXT_DIM,
    TEXT_TOKENS,
    UMT5_VOCABULARY,
    UMT5_XXL,
    Clip,
    Lora,
    Passes,
    VideoModel,
    block_activation_bytes,
    context_refresh,
    forward_bytes,
    grad_activation_bytes,
    grad_replay,
    replay,
    rollout,
)
from stagebreaker.profiles.table import (
    DATA_KINDS,
    TASK_KINDS,
    GpuKind,
    JudgeTurn,
    LinkCost,
    Profile,
    TaskCost,
    Verdicts,
)

ETA_DIT = 0.525
"""Share of dense bf16 peak of an eager DiT on a card of about 250 TFLOP/s: the middle of the estimate 0.45 to 0.6."""
DIT_CEILING_FLOPS = 263e12
"""What eager DiT kernels sustain at most: the slope of publicly reported LongLive-1.3B chunk times on an H100."""
ETA_VAE = 0.65
"""Share of the DiT's rate a VAE decode reaches: decode over DiT is 0.43 in published time, 0.28 in FLOPs."""
ETA_PREFILL = 0.65
"""Share of peak of reading a prompt: public profiles of the products alone give 0.67 (7B, H100) and 0.77 (8B, A100)."""
ETA_MEMORY = 0.8
"""Share of memory bandwidth of reading weights and caches: 0.77 was reported for an 8B decoder on an A100."""
FORWARD_OVERHEAD_S = 0.020
"""Launches of one eager forward (30 blocks); reports and estimates range over 10 to 50 ms. A backward pays it too."""
LINK_LATENCY_US = 20
"""One message between two GPUs of a node (assumed)."""
SERVING_MEMORY = 0.9
"""Share of a GPU's memory a judge may fill with weights and caches."""
MOST_SECONDS = 1e6
"""A task longer than this, eleven days, is a slip in the workload."""
SCORE_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
"""Batch sizes of the scoring curve."""


class Figure(Model):
    """A number and where it is from; ``derived``: computed or assumed, not published."""

    value: Annotated[int, Field(ge=1)]
    source: Annotated[str, Field(min_length=1)]
    derived: bool = False


class Hardware(Model):
    """One kind of GPU and its links."""

    name: str
    model: str
    peak_flops: Figure
    memory_bytes_per_s: Figure
    memory_bytes: Figure
    link_bytes_per_s: Figure
    host_bytes_per_s: Figure

    @property
    def dit_flops(self) -> float:
        """FLOP/s a DiT sustains."""
        return min(ETA_DIT * self.peak_flops.value, DIT_CEILING_FLOPS)

    @property
    def bandwidth(self) -> float:
        """Bytes/s read from memory in practice."""
        return ETA_MEMORY * self.memory_bytes_per_s.value


class HardwareTable(Document):
    """hardware.yaml."""

    WHAT: ClassVar[str] = "hardware table"
    hardware: tuple[Hardware, ...]

    def find(self, name: str) -> Hardware:
        """The kind of this name."""
        for one in self.hardware:
            if one.name == name:
                return one
        raise InputError(f"hardware {name!r} is not in the table; {nearest(name, [h.name for h in self.hardware])}")


def hardware_table() -> HardwareTable:
    """The table that ships with the package."""
    text = (resources.files("stagebreaker.profiles.data") / "hardware.yaml").read_text("utf-8")
    return HardwareTable.parse(load_yaml(text), "hardware.yaml")


# -- durations in seconds ------------------------------------------------------------------------------


def forward_s(hardware: Hardware, flop: float, traffic_bytes: float) -> float:
    """One eager forward (or backward) of a DiT or text encoder."""
    return FORWARD_OVERHEAD_S + max(flop / hardware.dit_flops, traffic_bytes / hardware.bandwidth)


def passes_s(hardware: Hardware, clip: Clip, passes: Passes, lora: Lora | None = None) -> float:
    """Forwards and backwards over a video's chunks; a backward moves twice a forward's bytes."""
    dit, total = clip.model.dit, clip.model.dit.text_kv_flop / hardware.dit_flops
    for chunk, (ahead, back) in enumerate(zip(passes.forwards, passes.backwards, strict=True)):
        cost = clip.forward(chunk, lora)
        traffic = forward_bytes(dit, clip.chunk_tokens, clip.cached_tokens(chunk))
        total += ahead * forward_s(hardware, cost.total, traffic)
        total += back * forward_s(hardware, cost.backward(), 2 * traffic)
    return total


def decode_s(hardware: Hardware, clip: Clip) -> float:
    """VAE decoding of one video."""
    return clip.decode_flop / (hardware.dit_flops * ETA_VAE)


def encode_prompt_s(hardware: Hardware) -> float:
    """Encoding one prompt."""
    return forward_s(hardware, UMT5_XXL.encode_flop(TEXT_TOKENS), BF16 * UMT5_XXL.parameters)


def token_step_s(hardware: Hardware, judge: Judge, requests: int, context_tokens: float) -> float:
    """One token of each of ``requests`` requests with this context."""
    read = judge.vlm.step_bytes(requests, context_tokens) / hardware.bandwidth
    return max(read, judge.vlm.step_flop(requests) / (hardware.peak_flops.value * ETA_PREFILL))


def most_requests(hardware: Hardware, judge: Judge, tokens: int, height: int, width: int) -> int:
    """How many verdicts of ``tokens`` tokens fit into memory at once."""
    room = SERVING_MEMORY * hardware.memory_bytes.value - judge.vlm.step_weight_bytes
    found = int(room // judge.request_bytes(tokens, height, width))
    if found < 1:
        raise InputError(
            f"judge {judge.name} and one verdict of {tokens} tokens do not fit into the "
            f"{hardware.memory_bytes.value} bytes of {hardware.name}; take a GPU with more memory"
        )
    return found


def verdict_s(hardware: Hardware, judge: Judge, batch: int, tokens: int, height: int, width: int) -> float:
    """t(b): ``batch`` verdicts of ``tokens`` tokens that start together, from pictures to last token.

    What does not fit into memory waits for a wave of its own.
    """
    most = most_requests(hardware, judge, tokens, height, width)
    waves, rest = divmod(batch, most)
    full = waves * _wave_s(hardware, judge, most, tokens, height, width) if waves else 0.0
    return full + (_wave_s(hardware, judge, rest, tokens, height, width) if rest else 0.0)


def _wave_s(hardware: Hardware, judge: Judge, batch: int, tokens: int, height: int, width: int) -> float:
    vlm, share, total = judge.vlm, tokens / len(judge.rounds), 0.0
    for turn in judge.rounds:
        prompt = judge.prompt_tokens(turn, height, width)
        read = turn.encoded_frames * vlm.vit.image_flop(height, width) + vlm.prefill_flop(prompt)
        total += batch * read / (hardware.peak_flops.value * ETA_PREFILL)
        total += share * token_step_s(hardware, judge, batch, prompt + share / 2)
    return total


def fold_s(hardware: Hardware, parameters: int) -> float:
    """accumulator += A g: one read more than it writes, in fp32."""
    return 3 * FP32 * parameters / hardware.bandwidth


def update_s(hardware: Hardware, parameters: int) -> float:
    """Norm, clip and AdamW in fp32: gradient read twice; weights and both moments read and written."""
    return FORWARD_OVERHEAD_S + 8 * FP32 * parameters / hardware.bandwidth


def switch_s(hardware: Hardware, clip: Clip, judge: Judge) -> float:
    """One engine's weights to the host, the other's back."""
    policy = BF16 * clip.model.dit.parameters
    return (policy + judge.vlm.step_weight_bytes) / hardware.host_bytes_per_s.value


# -- the profile ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    """What is trained, once its options are settled."""

    clip: Clip
    lora: Lora
    judge: Judge
    denoise_steps: int
    trained_steps: int
    value_steps: int
    judge_tokens: int
    checkpointing: bool

    def tasks_s(self, hardware: Hardware) -> dict[str, float]:
        """Seconds of every task kind but score."""
        chunks, adapter = self.clip.chunks, self.lora.parameters(self.clip.model.dit)

        def passes(made: Passes, lora: Lora | None = self.lora) -> float:
            return passes_s(hardware, self.clip, made, lora)

        value = replay(chunks, self.value_steps)
        trained = grad_replay(chunks, self.trained_steps, self.value_steps, checkpointing=self.checkpointing)
        return {
            "encode_prompt": encode_prompt_s(hardware),
            "generate": passes(rollout(chunks, self.denoise_steps)),
            "vae_decode": decode_s(hardware, self.clip),
            "old_replay": passes(value),
            "ref_replay": passes(value, None),
            "loss_replay": passes(value),
            "grad_replay": passes(trained),
            "context_rebuild": passes(context_refresh(chunks)),
            "fold": fold_s(hardware, adapter),
            "update": update_s(hardware, adapter),
            "switch": switch_s(hardware, self.clip, self.judge),
        }

    def sizes_bytes(self) -> dict[str, int]:
        """Bytes of every data kind."""
        adapter = FP32 * self.lora.parameters(self.clip.model.dit)
        return {
            "embeddings": BF16 * TEXT_TOKENS * TEXT_DIM,
            "latents": self.clip.latents_bytes,
            "trajectory": self.clip.trajectory_bytes(self.denoise_steps),
            "frames": self.clip.frames_bytes,
            "gradient": adapter,
            "adapter": adapter,
            "reference": self.trained_steps * self.clip.latents_bytes,
        }

    def memory_bytes(self) -> dict[str, int]:
        """Bytes of every memory kind: adapter, its gradients and moments in fp32, all else in bf16.

        Left out: the policy's keys and values of the text (94 MB for 1.3B), what a framework and its allocator add.
        """
        clip, judge, dit = self.clip, self.judge, self.clip.model.dit
        adapter = FP32 * self.lora.parameters(dit)
        forward = block_activation_bytes(dit, clip.chunk_tokens)
        cached = clip.cached_tokens(clip.chunks - 1)
        return {
            "policy_weights": BF16 * dit.parameters,
            "adapter": adapter,
            "kv_cache": clip.kv_cache_bytes(),
            "gradient_buffer": adapter,
            "optimizer": 2 * adapter,
            "vae_weights": BF16 * clip.model.vae.parameters,
            "text_encoder_weights": BF16 * (UMT5_XXL.parameters + UMT5_VOCABULARY * TEXT_DIM),
            "judge_weights": judge.vlm.weight_bytes,
            "judge_reserve": judge.request_bytes(self.judge_tokens, clip.height, clip.width),
            "encode_prompt_activations": UMT5_XXL.activation_bytes(TEXT_TOKENS),
            "generate_activations": forward,
            "replay_activations": forward,
            "grad_replay_activations": grad_activation_bytes(
                dit, clip.chunk_tokens, cached, checkpointing=self.checkpointing
            ),
            "vae_decode_activations": clip.model.vae.decode_bytes(clip.height, clip.width),
            "score_activations": judge.vlm.activation_bytes(judge.longest_prompt(clip.height, clip.width)),
        }


def predicted_profile(
    model: VideoModel,
    judge: Judge,
    hardware: Hardware,
    *,
    latent_frames: int,
    resolution: str,
    chunk_frames: int,
    denoise_steps: int,
    trained_steps: int,
    lora_rank: int,
    lora_targets: tuple[str, ...],
    judge_tokens: int,
    name: str,
    workload: str,
    settings: Mapping[str, str | int],
    value_steps: int | None = None,
    window_frames: int | None = None,
    checkpointing: bool = False,
    sigma: float | None = None,
) -> Profile:
    """A profile of every task kind on one kind of GPU, from dimensions alone; ``resolution`` is HxW in pixels.

    ``value_steps``: denoising steps whose log-probability the loss needs, if more than are trained (KVPO: all).
    ``window_frames``: the attention window, if not the model's own. ``sigma``: with it the judge is described token by
    token, its verdicts' lengths spread that much (log-normal). Raises ``InputError`` for what cannot be.
    """
    if window_frames is not None:
        model = replace(model, window_frames=window_frames)
    height, width = _pixels(resolution)
    needed = trained_steps if value_steps is None else value_steps
    for field, value, most in (("value_steps", needed, denoise_steps), ("judge_tokens", judge_tokens, None)):
        if value < 1 or (most is not None and value > most):
            raise InputError(f"{field}={value} must be in 1..{most}" if most else f"{field}={value} must be at least 1")
    work = _Work(
        Clip(model, latent_frames, chunk_frames, height, width),
        Lora(lora_rank, lora_targets),
        judge,
        denoise_steps,
        trained_steps,
        needed,
        judge_tokens,
        checkpointing,
    )
    costs, sizes = work.tasks_s(hardware), work.sizes_bytes()
    tasks = [_cost(hardware, kind, 1, costs[kind]) for kind in TASK_KINDS if kind != "score"]
    for batch in SCORE_BATCHES:
        seconds = verdict_s(hardware, judge, batch, judge_tokens, height, width)
        tasks.append(_cost(hardware, "score", batch, seconds))
    verdicts = None
    if sigma is not None:
        verdicts = predicted_verdicts(hardware, judge, judge_tokens, height, width, sigma)
        tasks += _verdict_costs(hardware, judge, verdicts, height, width)
    return Profile(
        name=name,
        provenance="predicted",
        source=f"Roofline of {model.name} and {judge.name} on {hardware.model}; no measurement of this hardware.",
        workload=workload,
        serving="continuous",
        settings=dict(settings),
        gpu_kinds=(GpuKind(name=hardware.name, model=hardware.model, memory_bytes=hardware.memory_bytes.value),),
        link=LinkCost(latency_us=LINK_LATENCY_US, bytes_per_s=hardware.link_bytes_per_s.value),
        sizes_bytes={kind: sizes[kind] for kind in DATA_KINDS},
        tasks=tuple(tasks),
        memory_bytes=work.memory_bytes(),
        verdicts=verdicts,
    )


def predicted_verdicts(
    hardware: Hardware, judge: Judge, tokens: int, height: int, width: int, sigma: float
) -> Verdicts:
    """A judge's turns; a verdict of ``tokens`` tokens is spread over them evenly and at most four times as long."""
    if not 0 <= sigma <= 3:
        raise InputError(f"sigma={sigma} must be in 0..3; 0.35 is a usual spread of verdict lengths")
    each = max(1, tokens // len(judge.rounds))
    return Verdicts(
        turns=tuple(
            JudgeTurn(frames=turn.encoded_frames, prompt_tokens=judge.prompt_tokens(turn, height, width))
            for turn in judge.rounds
        ),
        tokens_per_turn=each,
        sigma=sigma,
        max_tokens=4 * each,
        most_active=most_requests(hardware, judge, tokens, height, width),
    )


def _verdict_costs(hardware: Hardware, judge: Judge, verdicts: Verdicts, height: int, width: int) -> list[TaskCost]:
    """``JUDGE_KINDS``; a step's context is the mean over the turns, each half written."""
    rate = hardware.peak_flops.value * ETA_PREFILL
    prompts = [turn.prompt_tokens for turn in verdicts.turns]
    context = sum(prompts) / len(prompts) + verdicts.tokens_per_turn / 2
    costs = [_cost(hardware, "judge_encode", 1, judge.vlm.vit.image_flop(height, width) / rate)]
    for tokens in sorted(set(prompts)):
        costs.append(_cost(hardware, "judge_prefill", tokens, judge.vlm.prefill_flop(tokens) / rate))
    for batch in SCORE_BATCHES:
        costs.append(_cost(hardware, "judge_step", batch, token_step_s(hardware, judge, batch, context)))
    return costs


def _cost(hardware: Hardware, kind: str, batch: int, seconds: float) -> TaskCost:
    if seconds > MOST_SECONDS:
        raise InputError(
            f"one {kind} would take {seconds:.3g} s on {hardware.name}; lower lora_rank, latent_frames or resolution"
        )
    return TaskCost(kind=kind, gpu_kind=hardware.name, batch_size=batch, samples_us=(round(seconds * 1_000_000),))


def _pixels(resolution: str) -> tuple[int, int]:
    height, _, width = resolution.partition("x")
    if not (height.isdecimal() and width.isdecimal()):
        raise InputError(f"resolution={resolution!r} must be HxW in pixels, such as 480x832")
    return int(height), int(width)
