"""FLOP and byte formulas of the policy, its VAE and its text encoder, as functions of plain dimensions.

A causal video DiT works chunk by chunk: the tokens of a chunk attend to themselves and to cached keys and values of
earlier chunks inside a window, so the cost of a forward grows with the chunk until the window is full. A pass over a
video is one forward per chunk; rollout and replays are counts of forwards and backwards per chunk. A multiply-add is 2
FLOPs; element-wise work is left out. It knows no hardware and no time: ``roofline`` makes durations of its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from stagebreaker.profiles.document import InputError, nearest

BF16, FP32 = 2, 4
"""Bytes of an element: weights, caches and latents are bf16; adapters and their gradients fp32."""
TEXT_TOKENS, TEXT_DIM = 512, 4096
"""A prompt is padded to this many tokens of the umT5-XXL encoder's width."""
TIME_DIM = 256
"""Width of the sinusoidal timestep embedding."""
PATCH = 2
"""A DiT token covers 2x2 latent pixels."""
FLASH_BACKWARD = 5
"""Matrix products of a flash-attention backward: scores again, dP, dV, dQ, dK; a forward has 2."""
FLASH_BACKWARD_CACHED = 3
"""The same where keys and values are constants: neither dV nor dK."""


class Dimensions:
    """Refuses a dimension below 1 where it is made."""

    MAY_BE_ZERO: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field in fields(self):  # type: ignore[arg-type]
            value, least = getattr(self, field.name), int(field.name not in self.MAY_BE_ZERO)
            if isinstance(value, int) and value < least:
                raise InputError(f"{type(self).__name__}: {field.name}={value} must be at least {least}")


@dataclass(frozen=True)
class Dit(Dimensions):
    """A video DiT: blocks of self-attention, cross-attention to text and a two-layer FFN."""

    layers: int
    dim: int
    heads: int
    head_dim: int
    ffn: int
    text_tokens: int = TEXT_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads * self.head_dim != self.dim:
            raise InputError(f"heads={self.heads} x head_dim={self.head_dim} must be dim={self.dim}")

    @property
    def parameters(self) -> int:
        """Weights of the blocks and of the text and time embeddings; norms and patch layers are left out."""
        d = self.dim
        blocks = self.layers * (8 * d * d + 2 * d * self.ffn)
        return blocks + (TEXT_DIM * d + d * d) + (TIME_DIM * d + d * d) + 6 * d * d

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in every layer."""
        return 2 * BF16 * self.layers * self.dim

    @property
    def text_kv_flop(self) -> int:
        """Keys and values of the text: once per video, with the first forward."""
        return 4 * self.layers * self.text_tokens * self.dim**2


@dataclass(frozen=True)
class Lora(Dimensions):
    """A LoRA of one rank on linear layers of every block, by diffusers' names; ``("all-linear",)`` is all of them."""

    rank: int
    targets: tuple[str, ...]

    def parameters(self, dit: Dit) -> int:
        """rank x (in + out) of every adapted layer; an attention layer stands in self- and cross-attention."""
        attention, feed = 2 * (dit.dim + dit.dim), dit.dim + dit.ffn
        known = dict.fromkeys(("to_q", "to_k", "to_v", "to_out.0"), attention)
        known |= dict.fromkeys(("ffn.net.0.proj", "ffn.net.2"), feed)
        targets = tuple(known) if self.targets == ("all-linear",) else self.targets
        for name in targets:
            if name not in known:
                raise InputError(f"lora_targets names {name!r}; {nearest(name, [*known, 'all-linear'])}")
        if not targets or len(set(targets)) != len(targets):
            raise InputError(f"lora_targets={list(targets)} must name each layer once, and at least one")
        return dit.layers * self.rank * sum(known[name] for name in targets)


@dataclass(frozen=True)
class Forward:
    """FLOPs of one DiT forward over a chunk, by what their backward costs.

    ``lora`` counts every adapted layer on every token; keys and values of the text are cached, so it is an upper bound.
    """

    linear: int
    attention_own: int
    attention_cached: int
    cross: int
    lora: int

    @property
    def attention(self) -> int:
        """Self-attention over the chunk and its cached context."""
        return self.attention_own + self.attention_cached

    @property
    def total(self) -> int:
        """All of it."""
        return self.linear + self.attention + self.cross + self.lora

    def backward(self, *, cached_kv_gradient: bool = True) -> int:
        """FLOPs of the backward under LoRA: no weight gradient of the frozen base, both factors of the adapter.

        Kernels compute dK and dV of cached tokens too and drop them; ``cached_kv_gradient=False`` is one that does not.
        """
        cached = FLASH_BACKWARD if cached_kv_gradient else FLASH_BACKWARD_CACHED
        attention = FLASH_BACKWARD * (self.attention_own + self.cross) + cached * self.attention_cached
        return self.linear + attention // 2 + 2 * self.lora


def dit_forward(dit: Dit, tokens: int, cached_tokens: int, lora: Lora | None = None) -> Forward:
    """One forward over ``tokens`` of a chunk that also attend to ``cached_tokens``."""
    d, per_pair = dit.dim, 4 * dit.layers * dit.dim
    return Forward(
        linear=dit.layers * tokens * (12 * d * d + 4 * d * dit.ffn),
        attention_own=per_pair * tokens * tokens,
        attention_cached=per_pair * tokens * cached_tokens,
        cross=per_pair * tokens * dit.text_tokens,
        lora=2 * tokens * lora.parameters(dit) if lora else 0,
    )


def activation_bytes(dit: Dit, tokens: int) -> int:
    """bf16 activations one forward writes, and one grad forward keeps without checkpointing."""
    return BF16 * dit.layers * tokens * (16 * dit.dim + 2 * dit.ffn)


def block_activation_bytes(dit: Dit, tokens: int) -> int:
    """bf16 activations of one block: what a forward needs at once when nothing is kept for a backward."""
    return activation_bytes(dit, tokens) // dit.layers


def grad_activation_bytes(dit: Dit, tokens: int, cached_tokens: int, *, checkpointing: bool = False) -> int:
    """What one grad forward keeps for its backward: activations, and keys and values joined with the cached ones.

    With checkpointing, every block's input and one block's own.
    """
    joined = (tokens + cached_tokens) * dit.kv_bytes_per_token
    kept = activation_bytes(dit, tokens) + joined
    return BF16 * dit.layers * tokens * dit.dim + kept // dit.layers if checkpointing else kept


def forward_bytes(dit: Dit, tokens: int, cached_tokens: int) -> int:
    """Memory traffic of one forward: weights and cache read, activations written and read again."""
    cache = (tokens + cached_tokens) * dit.kv_bytes_per_token
    return BF16 * dit.parameters + cache + 2 * activation_bytes(dit, tokens)


@dataclass(frozen=True)
class Vae(Dimensions):
    """A causal video VAE: FLOPs of decoding the first and each later latent frame at 480x832; they grow with pixels.

    ``decoder_dim`` channels at full resolution, of which a position covers ``patch`` x ``patch`` pixels; twice as many
    at a quarter of the positions, and so on.
    """

    stride: int
    channels: int
    first_flop: int
    later_flop: int
    parameters: int
    decoder_dim: int
    patch: int = 1

    def decode_flop(self, latent_frames: int, height: int, width: int) -> int:
        """FLOPs of decoding one video."""
        return (self.first_flop + self.later_flop * (latent_frames - 1)) * height * width // (480 * 832)

    def decode_bytes(self, height: int, width: int) -> int:
        """Memory of decoding one latent frame after the other: bf16 states of the convolutions and what one makes.

        Every level caches 2 frames before each of 7 convolutions, over the three widest levels 1 + 1/2 + 1/4 of the
        first's; a residual block at full resolution holds 3 tensors of the 4 frames a latent frame becomes.
        """
        frame = BF16 * self.decoder_dim * height * width // self.patch**2
        return 2 * 7 * frame * 7 // 4 + 3 * 4 * frame


@dataclass(frozen=True)
class VideoModel(Dimensions):
    """A policy: DiT, VAE, and the attention window in latent frames, of which the first ``sink_frames`` never leave."""

    MAY_BE_ZERO = ("sink_frames",)
    name: str
    dit: Dit
    vae: Vae
    window_frames: int
    sink_frames: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sink_frames >= self.window_frames:
            raise InputError(
                f"sink_frames={self.sink_frames} must be in 0..{self.window_frames - 1} "
                f"(window_frames={self.window_frames})"
            )


@dataclass(frozen=True)
class Clip(Dimensions):
    """One video of a policy: its size in latent frames and pixels, and how it is cut into chunks."""

    model: VideoModel
    latent_frames: int
    chunk_frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.latent_frames % self.chunk_frames:
            raise InputError(
                f"latent_frames={self.latent_frames} must be a multiple of chunk_frames={self.chunk_frames}"
            )
        if self.chunk_frames > self.model.window_frames:
            raise InputError(f"chunk_frames={self.chunk_frames} must fit the window of {self.model.window_frames}")
        cell = self.model.vae.stride * PATCH
        if self.height % cell or self.width % cell:
            raise InputError(f"resolution={self.height}x{self.width} must be multiples of {cell} for {self.model.name}")

    @property
    def chunks(self) -> int:
        """Chunks of the video."""
        return self.latent_frames // self.chunk_frames

    @property
    def tokens_per_frame(self) -> int:
        """DiT tokens of a latent frame."""
        cell = self.model.vae.stride * PATCH
        return (self.height // cell) * (self.width // cell)

    @property
    def chunk_tokens(self) -> int:
        """Query tokens of a chunk."""
        return self.chunk_frames * self.tokens_per_frame

    def cached_tokens(self, chunk: int) -> int:
        """Context of chunk number ``chunk``: all earlier frames, up to the window without the chunk itself."""
        return min(chunk * self.chunk_frames, self.model.window_frames - self.chunk_frames) * self.tokens_per_frame

    def forward(self, chunk: int, lora: Lora | None = None) -> Forward:
        """FLOPs of one forward of chunk number ``chunk`` (from 0)."""
        return dit_forward(self.model.dit, self.chunk_tokens, self.cached_tokens(chunk), lora)

    def kv_cache_bytes(self, frames: int | None = None) -> int:
        """Keys and values of ``frames`` latent frames; of the whole video inside the window if not given."""
        held = min(self.latent_frames, self.model.window_frames) if frames is None else frames
        return held * self.tokens_per_frame * self.model.dit.kv_bytes_per_token

    @property
    def latents_bytes(self) -> int:
        """Clean latents of the video."""
        stride = self.model.vae.stride
        return BF16 * self.latent_frames * self.model.vae.channels * (self.height // stride) * (self.width // stride)

    def trajectory_bytes(self, denoise_steps: int) -> int:
        """Every noisy input and the clean end."""
        return (denoise_steps + 1) * self.latents_bytes

    @property
    def frames_bytes(self) -> int:
        """Decoded RGB bytes: the first latent frame is one picture, every later one four."""
        return (4 * self.latent_frames - 3) * 3 * self.height * self.width

    @property
    def decode_flop(self) -> int:
        """FLOPs of decoding the video."""
        return self.model.vae.decode_flop(self.latent_frames, self.height, self.width)


@dataclass(frozen=True)
class Passes:
    """How many forwards and backwards a task makes of each chunk."""

    forwards: tuple[int, ...]
    backwards: tuple[int, ...]

    def flop(self, clip: Clip, lora: Lora | None = None, *, cached_kv_gradient: bool = True) -> int:
        """FLOPs of the task, without the text's keys and values."""
        total = 0
        for chunk, (ahead, back) in enumerate(zip(self.forwards, self.backwards, strict=True)):
            cost = clip.forward(chunk, lora)
            total += ahead * cost.total + back * cost.backward(cached_kv_gradient=cached_kv_gradient)
        return total


def rollout(chunks: int, denoise_steps: int) -> Passes:
    """Generation: the denoising steps and one clean forward that writes the cache, of every chunk, the last too."""
    return Passes((denoise_steps + 1,) * chunks, (0,) * chunks)


def context_refresh(chunks: int) -> Passes:
    """The clean forwards that give a replay its context: nothing attends to the last chunk."""
    return Passes((1,) * (chunks - 1) + (0,), (0,) * chunks)


def replay(chunks: int, steps: int) -> Passes:
    """A forward-only replay of ``steps`` denoising steps, with its context."""
    return Passes(tuple(steps + n for n in context_refresh(chunks).forwards), (0,) * chunks)


def grad_replay(chunks: int, trained_steps: int, value_steps: int, *, checkpointing: bool = False) -> Passes:
    """The merged replay: ``trained_steps`` forwards and backwards, forward only where the loss needs just the value.

    Checkpointing makes every trained forward twice.
    """
    if not 1 <= trained_steps <= value_steps:
        raise InputError(f"trained_steps={trained_steps} must be in 1..{value_steps} (value_steps)")
    ahead = value_steps + (trained_steps if checkpointing else 0)
    return Passes(replay(chunks, ahead).forwards, (trained_steps,) * chunks)


@dataclass(frozen=True)
class Encoder(Dimensions):
    """A transformer encoder with full attention; ``ffn_matrices`` is 3 where the FFN is gated, else 2."""

    layers: int
    dim: int
    ffn: int
    ffn_matrices: Literal[2, 3]

    @property
    def parameters(self) -> int:
        """Weights of the blocks."""
        return self.layers * (4 * self.dim**2 + self.ffn_matrices * self.dim * self.ffn)

    def activation_bytes(self, tokens: int) -> int:
        """bf16 activations of one block over one sequence."""
        return BF16 * tokens * (4 * self.dim + self.ffn_matrices * self.ffn)

    def encode_flop(self, tokens: int) -> int:
        """FLOPs over one sequence of ``tokens``."""
        return 2 * self.parameters * tokens + 4 * self.layers * self.dim * tokens**2


WAN21_VAE = Vae(
    stride=8,
    channels=16,
    first_flop=4_350_000_000_000,
    later_flop=13_550_000_000_000,
    parameters=127_000_000,
    decoder_dim=96,
)
WAN22_VAE = Vae(
    stride=16,
    channels=48,
    first_flop=9_100_000_000_000,
    later_flop=29_400_000_000_000,
    parameters=705_000_000,
    decoder_dim=256,
    patch=2,
)
WAN_1_3B = Dit(layers=30, dim=1536, heads=12, head_dim=128, ffn=8960)
WAN_5B = Dit(layers=30, dim=3072, heads=24, head_dim=128, ffn=14336)
UMT5_XXL = Encoder(layers=24, dim=4096, ffn=10240, ffn_matrices=3)
UMT5_VOCABULARY = 256_384
"""Rows of the text encoder's embedding table: no FLOPs, but 2.1 GB."""

_MODELS = (
    VideoModel("wan2.1-1.3b-self-forcing", WAN_1_3B, WAN21_VAE, window_frames=21),
    VideoModel("longlive-1.3b", WAN_1_3B, WAN21_VAE, window_frames=12, sink_frames=3),
    VideoModel("longlive-5b", WAN_5B, WAN22_VAE, window_frames=32, sink_frames=8),
)
MODELS = {model.name: model for model in _MODELS}
"""Policies by the name a workload gives them."""


def find_model(name: str) -> VideoModel:
    """A policy by name."""
    if name not in MODELS:
        raise InputError(f"policy {name!r} has no known dimensions; {nearest(name, MODELS)}")
    return MODELS[name]
