"""FLOP and byte formulas of vision-language judges, as functions of plain dimensions.

A verdict encodes pictures, reads a prompt and writes a chain of thought. Writing reads all weights once per token
whatever the number of requests, and each request's own cache, which is why a batch costs little more than one request.
It knows no hardware and no time, and a verdict's length only as a number somebody gives.
"""

from __future__ import annotations

from dataclasses import dataclass

from stagebreaker.profiles.document import InputError, nearest
from stagebreaker.profiles.models import BF16, Dimensions, Encoder


@dataclass(frozen=True)
class Vit(Encoder):
    """A vision tower: ``patch`` pixels a side, ``merge`` x ``merge`` patches become one token of the language model."""

    patch: int
    merge: int = 2

    def image_tokens(self, height: int, width: int) -> int:
        """Tokens of a picture, its sides rounded to whole tokens."""
        cell = self.patch * self.merge
        return max(1, round(height / cell)) * max(1, round(width / cell))

    def image_flop(self, height: int, width: int) -> int:
        """FLOPs of encoding one picture. Attention inside a picture is left out."""
        return 2 * self.parameters * self.image_tokens(height, width) * self.merge**2


@dataclass(frozen=True)
class Vlm(Dimensions):
    """A vision-language model: a decoder with grouped keys and values and a gated FFN, behind a vision tower."""

    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    vit: Vit

    @property
    def body_parameters(self) -> int:
        """Weights every token passes."""
        attention = self.dim * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.dim * self.ffn)

    @property
    def head_parameters(self) -> int:
        """The output layer."""
        return self.dim * self.vocabulary

    @property
    def step_weight_bytes(self) -> int:
        """Weights a decoding step reads."""
        return BF16 * (self.body_parameters + self.head_parameters)

    @property
    def weight_bytes(self) -> int:
        """All weights: body, output layer, input embedding of the same size, vision tower."""
        return self.step_weight_bytes + BF16 * (self.head_parameters + self.vit.parameters)

    def activation_bytes(self, tokens: int) -> int:
        """bf16 activations of one block over a prompt."""
        return BF16 * tokens * (4 * self.dim + 3 * self.ffn)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in every layer."""
        return 2 * BF16 * self.layers * self.kv_heads * self.head_dim

    def prefill_flop(self, tokens: int) -> int:
        """FLOPs of reading a prompt: causal attention is half of a square."""
        return 2 * self.body_parameters * tokens + 2 * self.layers * self.heads * self.head_dim * tokens**2

    def step_flop(self, requests: int) -> int:
        """FLOPs of one decoding step of ``requests`` requests; their attention is memory-bound."""
        return 2 * (self.body_parameters + self.head_parameters) * requests

    def step_bytes(self, requests: int, context_tokens: float) -> float:
        """Bytes one decoding step reads: the weights once, every request's cache."""
        return self.step_weight_bytes + requests * context_tokens * self.kv_bytes_per_token


@dataclass(frozen=True)
class Round(Dimensions):
    """One turn of a verdict: pictures encoded for it, and pictures its prompt shows."""

    encoded_frames: int
    shown_frames: int


@dataclass(frozen=True)
class Judge(Dimensions):
    """A judge of video pairs: what one verdict shows its model, turn by turn.

    Every turn is a fresh prompt; the verdict's tokens are spread evenly. A pointwise request would show half.
    """

    name: str
    vlm: Vlm
    rounds: tuple[Round, ...]
    text_tokens: int = 700

    def prompt_tokens(self, turn: Round, height: int, width: int) -> int:
        """Tokens of the prompt of a turn."""
        return self.text_tokens + turn.shown_frames * self.vlm.vit.image_tokens(height, width)

    def longest_prompt(self, height: int, width: int) -> int:
        """Tokens of the turn that shows most."""
        return max(self.prompt_tokens(turn, height, width) for turn in self.rounds)

    def request_bytes(self, tokens: int, height: int, width: int) -> int:
        """Keys and values of one request whose verdict has ``tokens`` tokens, at the end of its longest turn."""
        written = -(-tokens // len(self.rounds))
        return (self.longest_prompt(height, width) + written) * self.vlm.kv_bytes_per_token


QWEN25_VL_7B = Vlm(
    layers=28, dim=3584, ffn=18944, heads=28, kv_heads=4, head_dim=128, vocabulary=152_064,
    vit=Vit(layers=32, dim=1280, ffn=3420, ffn_matrices=3, patch=14),
)  # fmt: skip
QWEN3_VL_8B = Vlm(
    layers=36, dim=4096, ffn=12288, heads=32, kv_heads=8, head_dim=128, vocabulary=151_936,
    vit=Vit(layers=27, dim=1152, ffn=4304, ffn_matrices=2, patch=16),
)  # fmt: skip

_JUDGES = (
    Judge("vr-thinker", QWEN25_VL_7B, (Round(8, 8), Round(8, 16))),
    Judge("unified-reward-flex", QWEN3_VL_8B, (Round(16, 16),)),
)
JUDGES = {judge.name: judge for judge in _JUDGES}
"""Judges by name. VR-Thinker sees four plus four frames, then eight it asks for; that it asks once is assumed."""


def find_judge(name: str) -> Judge:
    """A judge by name."""
    if name not in JUDGES:
        raise InputError(f"judge {name!r} has no known dimensions; {nearest(name, JUDGES)}")
    return JUDGES[name]
