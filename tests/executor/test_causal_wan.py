"""The causal policy against its definition: one forward of the stock model under the mask it stands for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor

from stagebreaker.executor.models.causal_wan import CausalPolicy, KVCache
from stagebreaker.executor.models.tiny import TEXT_DIM, tiny_transformer

FRAMES, CHUNK, SIDE = 9, 3, 8
TOKENS = (SIDE // 2) ** 2  # per latent frame
SIGMA = 0.625


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """In float64, diffusers' internal .float() calls are kept from rounding: equality is then near exact."""
    if request.param == torch.float64:
        to_float = Tensor.float
        monkeypatch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))
    chosen: torch.dtype = request.param
    return chosen


class MaskedProcessor(WanAttnProcessor):
    """Stock attention with a fixed mask and a choice of RoPE rows: the reference to compare with."""

    def __init__(self, mask_TT: Tensor, frames: list[int]) -> None:
        super().__init__()
        self.mask_TT, self.frames = mask_TT, frames

    def __call__(self, attn: Any, hidden: Tensor, text: Any = None, mask: Any = None, rope: Any = None) -> Tensor:
        rows = torch.cat([torch.arange(f * TOKENS, (f + 1) * TOKENS) for f in self.frames])
        rope = tuple(table[:, rows] for table in rope)
        return super().__call__(attn, hidden, text, self.mask_TT, rope)


def visible(allowed: Callable[[int, int], bool], frames: int) -> Tensor:
    """Boolean [T, T]: may a token of frame q see a token of frame k?"""
    by_frame = torch.tensor([[allowed(q, k) for k in range(frames)] for q in range(frames)])
    return by_frame.repeat_interleave(TOKENS, 0).repeat_interleave(TOKENS, 1)


def stock_forward(model: Any, x: Tensor, t: Tensor, text: Tensor, mask: Tensor, frames: list[int]) -> Tensor:
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attn1.set_processor(MaskedProcessor(mask, frames))
    out: Tensor = model(x, t, text, return_dict=False)[0]
    return out


def inputs(dtype: torch.dtype, frames: int = FRAMES, batch: int = 2) -> tuple[Any, Tensor, Tensor, Tensor]:
    model = tiny_transformer(seed=1).to(dtype).requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    clean = torch.randn(batch, 16, frames, SIDE, SIDE, generator=generator, dtype=torch.float64).to(dtype)
    noisy = torch.randn(batch, 16, frames, SIDE, SIDE, generator=generator, dtype=torch.float64).to(dtype)
    text = torch.randn(batch, 7, TEXT_DIM, generator=generator, dtype=torch.float64).to(dtype)
    return model, clean, noisy, text


def chunks(x: Tensor) -> tuple[Tensor, ...]:
    return x.split(CHUNK, dim=2)


def close(actual: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 0.1
    tolerance = 1e-5 if actual.dtype == torch.float32 else 1e-12
    assert (actual - expected).abs().max().item() < tolerance


def roll(policy: CausalPolicy, clean: Tensor, noisy: Tensor, text: Tensor, sigma: float) -> Tensor:
    """Velocity of every noisy chunk given the clean chunks before it."""
    cache, out = policy.new_cache(), []
    for clean_chunk, noisy_chunk in zip(chunks(clean), chunks(noisy), strict=True):
        out.append(policy.velocity(noisy_chunk, sigma, text, cache))
        policy.commit(clean_chunk, text, cache)
    return torch.cat(out, dim=2)


def test_first_chunk_is_the_stock_model() -> None:
    model, _, noisy, text = inputs(torch.float32)
    x, t = noisy[:, :, :CHUNK], torch.full((2,), SIGMA * 1000)
    expected = copy.deepcopy(model)(x, t, text, return_dict=False)[0]
    policy = CausalPolicy(model)
    assert torch.equal(policy.velocity(x, SIGMA, text, policy.new_cache()), expected)


def test_clean_chunks_equal_one_block_causal_forward(dtype: torch.dtype) -> None:
    model, clean, _, text = inputs(dtype)
    mask = visible(lambda q, k: k // CHUNK <= q // CHUNK, FRAMES)
    t = torch.zeros(2, dtype=dtype)
    expected = stock_forward(model, clean, t, text, mask, list(range(FRAMES)))
    bidirectional = stock_forward(model, clean, t, text, torch.ones_like(mask), list(range(FRAMES)))
    assert (bidirectional - expected).abs().max() > 1e-2  # the mask matters
    close(roll(CausalPolicy(model), clean, clean, text, 0.0), expected)


def test_noisy_passes_equal_teacher_forcing(dtype: torch.dtype) -> None:
    """[clean; noisy] in one sequence, each noisy chunk seeing itself and the clean chunks before it."""
    model, clean, noisy, text = inputs(dtype)

    def allowed(q: int, k: int) -> bool:
        q_chunk, k_chunk = (q % FRAMES) // CHUNK, (k % FRAMES) // CHUNK
        if q < FRAMES:
            return k < FRAMES and k_chunk <= q_chunk
        return k_chunk < q_chunk if k < FRAMES else k_chunk == q_chunk

    half = torch.zeros(2, FRAMES * TOKENS, dtype=dtype)
    both = stock_forward(
        model,
        torch.cat([clean, noisy], dim=2),
        torch.cat([half, torch.full_like(half, SIGMA * 1000)], dim=1),
        text,
        visible(allowed, 2 * FRAMES),
        [*range(FRAMES), *range(FRAMES)],
    )
    close(roll(CausalPolicy(model), clean, noisy, text, SIGMA), both[:, :, FRAMES:])


@pytest.mark.parametrize(("window", "sink"), [(6, 0), (9, 3), (9, 2)])
def test_window_keeps_the_sink_and_the_most_recent_frames(window: int, sink: int) -> None:
    frames = 15
    model, clean, _, text = inputs(torch.float32, frames=frames)

    def allowed(q: int, k: int) -> bool:
        start = q // CHUNK * CHUNK
        if start <= k < start + CHUNK:
            return True
        recent = start - (window - CHUNK - sink)
        return k < start and (k < sink or k >= recent or start <= window - CHUNK)

    expected = stock_forward(model, clean, torch.zeros(2), text, visible(allowed, frames), list(range(frames)))
    policy = CausalPolicy(model, window_frames=window, sink_frames=sink)
    close(roll(policy, clean, clean, text, 0.0), expected)


def test_window_bounds_what_is_held() -> None:
    model, clean, _, text = inputs(torch.float32, frames=15)
    policy = CausalPolicy(model, window_frames=9, sink_frames=3)
    cache = policy.new_cache()
    held = []
    for chunk in chunks(clean):
        policy.commit(chunk, text, cache)
        held.append((cache.frames, cache.held, cache.layers[0][0].shape[1] // TOKENS))
    assert held == [(3, 3, 3), (6, 6, 6), (9, 6, 6), (12, 6, 6), (15, 6, 6)]


def test_longer_current_chunk_sees_less_of_the_past() -> None:
    model, clean, noisy, text = inputs(torch.float32)
    policy = CausalPolicy(model, window_frames=6)
    cache = policy.new_cache()
    policy.commit(clean[:, :, :2], text, cache)
    policy.commit(clean[:, :, 2:4], text, cache)
    assert cache.held == 4
    narrow = policy.velocity(noisy[:, :, 4:9], SIGMA, text, cache)  # 5 frames leave room for 1
    last = KVCache([(k[:, -TOKENS:], v[:, -TOKENS:]) for k, v in cache.layers], frames=4, held=1)
    assert torch.equal(narrow, policy.velocity(noisy[:, :, 4:9], SIGMA, text, last))
    assert cache.held == 4


def test_velocity_only_reads_the_cache() -> None:
    model, clean, noisy, text = inputs(torch.float32)
    policy = CausalPolicy(model)
    cache = policy.new_cache()
    policy.commit(clean[:, :, :CHUNK], text, cache)
    before = copy.deepcopy(cache)
    tensors = [t for pair in cache.layers for t in pair]
    policy.velocity(noisy[:, :, :CHUNK], SIGMA, text, cache)
    assert (cache.frames, cache.held) == (before.frames, before.held)
    after = [t for pair in cache.layers for t in pair]
    assert all(a is b for a, b in zip(after, tensors, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(after, (t for p in before.layers for t in p), strict=True))


def test_commit_leaves_graphs_and_forks_alone() -> None:
    """A backward that was recorded before a commit still works, and gives what it would have given."""
    model, clean, noisy, text = inputs(torch.float32)
    policy = CausalPolicy(model)
    weight = model.blocks[0].attn1.to_q.weight.requires_grad_(True)

    def gradient(commit_first: bool) -> Tensor:
        cache = policy.new_cache()
        policy.commit(clean[:, :, :CHUNK], text, cache)
        fork = cache.fork()
        loss = policy.velocity(noisy[:, :, CHUNK : 2 * CHUNK], SIGMA, text, cache).square().mean()
        if commit_first:
            policy.commit(clean[:, :, CHUNK : 2 * CHUNK], text, cache)
            assert (cache.frames, fork.frames) == (6, 3)
            assert not any(t.requires_grad for pair in cache.layers for t in pair)
        (grad,) = torch.autograd.grad(loss, weight)
        return grad

    expected = gradient(commit_first=False)
    assert expected.abs().max() > 0
    assert torch.equal(gradient(commit_first=True), expected)


def test_gradient_checkpointing_recomputes_with_the_same_context() -> None:
    """The recomputation runs in backward, when the policy may already have done other passes."""
    model, clean, noisy, text = inputs(torch.float32)
    policy = CausalPolicy(model)
    weight = model.blocks[0].attn1.to_k.weight.requires_grad_(True)
    grads = []
    for checkpointing in (False, True):
        model.train() if checkpointing else model.eval()
        model.gradient_checkpointing = False
        if checkpointing:
            model.enable_gradient_checkpointing()
        cache = policy.new_cache()
        policy.commit(clean[:, :, :CHUNK], text, cache)
        loss = policy.velocity(noisy[:, :, CHUNK : 2 * CHUNK], SIGMA, text, cache).square().mean()
        policy.commit(clean[:, :, CHUNK : 2 * CHUNK], text, cache)
        grads.append(torch.autograd.grad(loss, weight)[0])
    assert grads[0].abs().max() > 0
    assert torch.equal(grads[0], grads[1])


def test_deepcopy_shares_nothing() -> None:
    model, clean, noisy, text = inputs(torch.float32)
    policy = CausalPolicy(model, window_frames=9, sink_frames=3)
    twin = copy.deepcopy(policy)
    expected = roll(policy, clean, noisy, text, SIGMA)
    with torch.no_grad():
        for parameter in policy.transformer.parameters():
            parameter.zero_()
    assert torch.equal(roll(twin, clean, noisy, text, SIGMA), expected)


def test_each_pass_leaves_no_context_behind() -> None:
    model, clean, _, text = inputs(torch.float32)
    policy = CausalPolicy(model)
    cache = policy.new_cache()
    policy.commit(clean[:, :, :CHUNK], text, cache)
    with pytest.raises(RuntimeError):
        policy.velocity(clean[:, :, :CHUNK, :6, :6][:1], SIGMA, text, cache)  # batch 1 over a cache of batch 2
    assert model.rope.context == []
    assert model.rope.written is None


def test_bfloat16_policy_takes_and_returns_float32() -> None:
    model, clean, noisy, text = inputs(torch.float32)
    exact = roll(CausalPolicy(copy.deepcopy(model)), clean, noisy, text, SIGMA)
    rounded = roll(CausalPolicy(model.to(torch.bfloat16)), clean, noisy, text, SIGMA)
    assert rounded.dtype == torch.float32
    assert (rounded - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize(
    ("window", "sink", "message"),
    [(3, 3, "window_frames=3 must exceed sink_frames=3"), (None, -1, "sink_frames=-1 must be >= 0")],
)
def test_bad_windows_are_refused(window: int | None, sink: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CausalPolicy(tiny_transformer(), window_frames=window, sink_frames=sink)


def test_a_chunk_wider_than_the_window_is_refused() -> None:
    model, clean, _, text = inputs(torch.float32)
    policy = CausalPolicy(model, window_frames=5, sink_frames=3)
    with pytest.raises(ValueError, match="chunk of 3 frames and sink_frames=3 must fit in window_frames=5"):
        policy.commit(clean[:, :, :3], text, policy.new_cache())
