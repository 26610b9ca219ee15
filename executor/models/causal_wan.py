"""A Wan transformer that generates video chunk by chunk, with a key/value cache.

Stock WanTransformer3DModel attends in both directions and starts RoPE at frame 0. Here a chunk sees itself
and the clean chunks before it, as Self-Forcing and LongLive do: `velocity` is one noisy pass that only reads
the cache, `commit` is the clean pass at t=0 that extends it. A pass carries its context inside the rotary
embedding, which diffusers hands to every block as an argument, so gradient checkpointing recomputes with the
same context and a deepcopy shares nothing. It does not know samplers, log-probabilities or LoRA.

Shapes: B candidates, D channels, F latent frames, H W latent height and width, T tokens, E text
width, N heads, R head width.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

KeyValue = tuple[Tensor, Tensor]


@dataclass
class KVCache:
    """Roped keys and values of the clean chunks so far: one detached (k_BTNR, v_BTNR) per layer.

    frames: latent frames committed since the start (the next chunk's absolute position).
    held: latent frames still in `layers` after eviction (held <= frames).
    Tensors are replaced, never written in place: an autograd graph may hold them.
    """

    layers: list[KeyValue] = field(default_factory=list)
    frames: int = 0
    held: int = 0

    def fork(self) -> KVCache:
        """A second cache with the same past; costs no tensor memory, since tensors are only ever replaced."""
        return replace(self, layers=list(self.layers))


@dataclass(frozen=True)
class _Pass:
    """What one forward hands to each attention layer in place of diffusers' (cos, sin)."""

    cos: Tensor
    sin: Tensor
    context: list[KeyValue]
    written: list[KeyValue] | None


class CausalRope(nn.Module):
    """RoPE whose first frame is `start_frame`; it also carries the context of the pass in progress."""

    freqs_cos: Tensor
    freqs_sin: Tensor

    def __init__(self, rope: Any) -> None:
        super().__init__()
        self.patch_size: tuple[int, int, int] = tuple(rope.patch_size)
        self.split_sizes = [rope.t_dim, rope.h_dim, rope.w_dim]
        self.register_buffer("freqs_cos", rope.freqs_cos, persistent=False)
        self.register_buffer("freqs_sin", rope.freqs_sin, persistent=False)
        self.start_frame = 0
        self.context: list[KeyValue] = []
        self.written: list[KeyValue] | None = None

    def forward(self, x_BDFHW: Tensor) -> _Pass:
        frames, height, width = (n // p for n, p in zip(x_BDFHW.shape[2:], self.patch_size, strict=True))
        stop = self.start_frame + frames
        if stop > self.freqs_cos.shape[0]:
            raise ValueError(
                f"frame {stop} is past rope_max_seq_len={len(self.freqs_cos)}; ask for fewer latent frames"
            )

        def grid(table: Tensor) -> Tensor:
            by_frame, by_row, by_column = torch.split(table, self.split_sizes, dim=1)
            parts = (
                by_frame[self.start_frame : stop].view(frames, 1, 1, -1),
                by_row[:height].view(1, height, 1, -1),
                by_column[:width].view(1, 1, width, -1),
            )
            cells = torch.cat([p.expand(frames, height, width, -1) for p in parts], dim=-1)
            return cells.flatten(0, 2)[None, :, None]

        return _Pass(grid(self.freqs_cos), grid(self.freqs_sin), self.context, self.written)


class CausalSelfAttention:
    """Processor of one layer's attn1: the chunk's queries over [context; chunk]. Its state: its layer."""

    def __init__(self, layer: int) -> None:
        self.layer = layer

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: _Pass | None = None,
    ) -> Tensor:
        if rotary_emb is None or encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("CausalSelfAttention serves attn1 of a CausalPolicy only, without a mask")
        query = rotate(attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1)), rotary_emb)
        key = rotate(attn.norm_k(attn.to_k(hidden_states)).unflatten(2, (attn.heads, -1)), rotary_emb)
        value = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        if rotary_emb.written is not None:
            rotary_emb.written.append((key.detach(), value.detach()))
        if rotary_emb.context:
            past_key, past_value = rotary_emb.context[self.layer]
            key, value = torch.cat([past_key, key], dim=1), torch.cat([past_value, value], dim=1)
        out = dispatch_attention_fn(query, key, value).flatten(2, 3).type_as(query)
        out = attn.to_out[1](attn.to_out[0](out))
        assert isinstance(out, Tensor)
        return out


def rotate(x_BTNR: Tensor, rope: _Pass) -> Tensor:
    even, odd = x_BTNR[..., 0::2], x_BTNR[..., 1::2]
    cos, sin = rope.cos[..., 0::2], rope.sin[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x_BTNR)


class CausalPolicy:
    """Chunk-wise passes over a WanTransformer3DModel.

    window_frames bounds sink + past + current latent frames (None: no bound); the first sink_frames are never
    evicted. Keys keep their absolute position, as in LongLive. Text keys and values are recomputed in every
    pass: a cache of them would go stale with each adapter version and hide their gradient.
    """

    def __init__(self, transformer: Any, window_frames: int | None = None, sink_frames: int = 0) -> None:
        if sink_frames < 0:
            raise ValueError(f"sink_frames={sink_frames} must be >= 0")
        if window_frames is not None and window_frames <= sink_frames:
            raise ValueError(f"window_frames={window_frames} must exceed sink_frames={sink_frames}")
        if transformer.config.patch_size[0] != 1:
            raise ValueError(f"patch_size={tuple(transformer.config.patch_size)} must be 1 along frames")
        self.transformer = transformer
        self.window_frames = window_frames
        self.sink_frames = sink_frames
        transformer.rope = CausalRope(transformer.rope)
        for layer, block in enumerate(transformer.blocks):
            block.attn1.set_processor(CausalSelfAttention(layer))

    def new_cache(self) -> KVCache:
        return KVCache()

    def velocity(self, x_BDFHW: Tensor, sigma: float, text_BTE: Tensor, cache: KVCache) -> Tensor:
        """v_BDFHW of a noisy chunk at noise level sigma in [0, 1]; x's dtype, the caller's grad mode."""
        return self._forward(x_BDFHW, sigma, text_BTE, cache, None)

    def commit(self, x_BDFHW: Tensor, text_BTE: Tensor, cache: KVCache) -> None:
        """Append a clean chunk, detached, to the cache. Eviction assumes no shorter chunk follows."""
        written: list[KeyValue] = []
        with torch.no_grad():
            self._forward(x_BDFHW, 0.0, text_BTE, cache, written)
        frames = x_BDFHW.shape[2]
        if cache.layers:
            written = [
                (torch.cat([old_key, key], dim=1), torch.cat([old_value, value], dim=1))
                for (old_key, old_value), (key, value) in zip(cache.layers, written, strict=True)
            ]
        cache.layers, cache.frames, cache.held = written, cache.frames + frames, cache.held + frames
        cache.layers, cache.held = self._context(cache, frames)

    def _forward(
        self, x_BDFHW: Tensor, sigma: float, text_BTE: Tensor, cache: KVCache, written: list[KeyValue] | None
    ) -> Tensor:
        weight = self.transformer.patch_embedding.weight
        dtype = torch.promote_types(weight.dtype, torch.float32)
        timestep_B = torch.full((x_BDFHW.shape[0],), sigma * 1000.0, dtype=dtype, device=x_BDFHW.device)
        rope = self.transformer.rope
        rope.start_frame, rope.written = cache.frames, written
        rope.context, _ = self._context(cache, x_BDFHW.shape[2])
        try:
            (v_BDFHW,) = self.transformer(
                x_BDFHW.to(weight.dtype), timestep_B, text_BTE.to(weight.dtype), return_dict=False
            )
        finally:
            rope.start_frame, rope.context, rope.written = 0, [], None
        assert isinstance(v_BDFHW, Tensor)
        return v_BDFHW.to(x_BDFHW.dtype)

    def _context(self, cache: KVCache, current_frames: int) -> tuple[list[KeyValue], int]:
        """The cached layers that a chunk may see (sink + most recent), and how many frames they span."""
        if self.window_frames is None:
            return cache.layers, cache.held
        allowed = self.window_frames - current_frames
        if allowed < self.sink_frames:
            raise ValueError(
                f"chunk of {current_frames} frames and sink_frames={self.sink_frames} must fit in "
                f"window_frames={self.window_frames}; widen the window or shorten the chunk"
            )
        if cache.held <= allowed:
            return cache.layers, cache.held
        recent = allowed - self.sink_frames

        def trim(x_BTNR: Tensor) -> Tensor:
            tokens = x_BTNR.shape[1] // cache.held
            sink_BTNR = x_BTNR[:, : self.sink_frames * tokens]
            return torch.cat([sink_BTNR, x_BTNR[:, (cache.held - recent) * tokens :]], dim=1)

        return [(trim(key), trim(value)) for key, value in cache.layers], allowed
