"""Messages: what arrives equals what was sent, bit by bit, in arrays that the receiver owns."""

import numpy as np
import pytest
import torch

from stagebreaker.executor.algorithms.rollout import NoiseKey, Trajectory
from stagebreaker.executor.algorithms.sampler import Sampler, warped_sigmas
from stagebreaker.executor.kernels.reward_async import ClipCounts, SignGradients
from stagebreaker.executor.messages import pack, size_bytes, to_numpy, unpack


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


def travel(value, dtype=torch.float32):
    """Through read-only arrays, as from an object store."""

    def frozen(part):
        if isinstance(part, np.ndarray):
            part = part.copy()
            part.setflags(write=False)
        elif isinstance(part, dict):
            part = {key: frozen(inner) for key, inner in part.items()}
        elif isinstance(part, list):
            part = [frozen(inner) for inner in part]
        return part

    return unpack(frozen(pack(value)), "cpu", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_buffers_and_their_counts(dtype):
    sent = SignGradients(random(7, dtype=dtype), random(7, 1, dtype=dtype).flatten(), ClipCounts(3, 1, 0))
    got = travel(sent)
    assert torch.equal(got.plus_P, sent.plus_P)
    assert torch.equal(got.minus_P, sent.minus_P)
    assert got.plus_P.dtype == dtype
    assert got.clip == ClipCounts(3, 1, 0)
    assert got.n_buffers == 2
    for advantage in (1.3, -0.7):
        assert torch.equal(got.apply(advantage), sent.apply(advantage))


def test_one_buffer_travels_once_and_stays_one():
    plus_P = random(7)
    sent = SignGradients(plus_P, plus_P, ClipCounts(3))
    assert size_bytes(pack(sent)) == 7 * 4
    assert size_bytes(pack(SignGradients(plus_P, plus_P.clone(), ClipCounts(3)))) == 2 * 7 * 4
    assert travel(sent).n_buffers == 1


def trajectory(dtype=torch.float32):
    return Trajectory(
        random(2, 4, 3, 1, 2, 2, dtype=dtype),
        Sampler("renoise", warped_sigmas(3)),
        (0, 1),
        (2,),
        random(2, dtype=dtype),
        NoiseKey(5, 6, 7),
        8,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_trajectory_and_its_text(dtype):
    sent, text = trajectory(dtype), random(1, 4, 6, dtype=dtype)
    got, got_text = travel((sent, text), dtype)
    assert torch.equal(got.x_CKDFHW, sent.x_CKDFHW)
    assert torch.equal(got.old_logp_U, sent.old_logp_U)
    assert got.x_CKDFHW.dtype == dtype
    assert (got.sampler, got.steps, got.excluded_steps) == (sent.sampler, sent.steps, sent.excluded_steps)
    assert (got.key, got.adapter_version) == (sent.key, sent.adapter_version)
    assert torch.equal(got_text, text)


def test_half_precision_text_comes_back_exactly():
    text = random(1, 4, 6, dtype=torch.bfloat16)
    _, got = travel((trajectory(), text), torch.bfloat16)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, text)
    assert to_numpy(text).dtype == np.float32


def test_lists_tensors_frames_and_nothing():
    parts = [random(3), random(3) + 1]
    assert all(torch.equal(a, b) for a, b in zip(travel(parts), parts, strict=True))
    latents = random(1, 2, 3, 2, 2)
    assert torch.equal(travel(latents), latents)
    frames = np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
    assert np.array_equal(travel(frames), frames)
    assert travel(None) is None


def test_the_receiver_owns_what_it_got():
    sent = random(3)
    message = pack(sent)
    got = unpack(message, "cpu", torch.float32)
    got += 1
    assert torch.equal(sent, random(3))


def test_size_counts_arrays_only():
    frames = np.zeros((2, 4, 4, 3), dtype=np.uint8)
    assert size_bytes(pack(frames)) == 96
    assert size_bytes(pack([random(3), random(5)])) == 32
    sent = trajectory()
    assert size_bytes(pack((sent, random(1, 4, 6)))) == 4 * (sent.x_CKDFHW.numel() + 2 + 24)
    assert size_bytes(pack(None)) == 0
