"""Proof of value for merged replay and delayed rewards: the same gradient as the stage-centric kernel.

A toy policy first (any dtype, all cases), then the real CausalPolicy with a LoRA.
Error is max|difference| / max|g|.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from stagebreaker.executor.algorithms.dancegrpo import DanceGRPO
from stagebreaker.executor.algorithms.rollout import LatentShape, NoiseKey, rollout
from stagebreaker.executor.algorithms.sampler import Sampler, warped_sigmas
from stagebreaker.executor.kernels.merged_replay import merged_replay
from stagebreaker.executor.kernels.replay import old_log_probs
from stagebreaker.executor.kernels.reward_async import (
    Accumulator,
    ClipCounts,
    compress,
)
from stagebreaker.executor.kernels.stage_centric import grad_replay, loss_replay
from stagebreaker.executor.kernels.update import AdamWConfig, FlatAdamW
from stagebreaker.profiles.document import InputError

D, F, H, W, E = 4, 2, 3, 4, 6
SHAPE = LatentShape(chunks=3, channels=D, frames=F, height=H, width=W)
SIGMAS = warped_sigmas(4)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
ALGORITHM = DanceGRPO(trained_steps=3, clip_low=2e-3, clip_high=3e-3)


class ToyPolicy(nn.Module):
    """One frozen channel mix with a LoRA; past chunks enter through a detached summary made with the LoRA."""

    def __init__(self, dtype):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base, self.mix, self.text = (
            (0.4 * torch.randn(D, n, generator=generator, dtype=torch.float64)).to(dtype) for n in (D, D, E)
        )
        self.down = nn.Parameter(0.5 * torch.randn(2, D, generator=generator, dtype=torch.float64).to(dtype))
        self.up = nn.Parameter(0.1 * torch.randn(D, 2, generator=generator, dtype=torch.float64).to(dtype))

    def _project(self, x):
        return torch.einsum("ed,bdfhw->befhw", self.base + self.up @ self.down, x)

    def new_cache(self):
        return []

    def velocity(self, x, sigma, text, cache):
        h = self._project(x) + (text.mean(1) @ self.text.T)[:, :, None, None, None] + sigma
        if cache:
            h = h + torch.einsum("ed,bdfhw->befhw", self.mix, torch.stack(cache).mean(0))
        return torch.tanh(h) + self._project(torch.sin(h))

    def commit(self, x, text, cache):
        with torch.no_grad():
            cache.append(self._project(x).detach())


class ToyAdapter:
    """The LoRA of a toy policy as a flat vector."""

    def __init__(self, policy):
        self.params = list(policy.parameters())
        self.numel = sum(p.numel() for p in self.params)
        self.version = 0

    def vector(self):
        return torch.cat([p.detach().flatten() for p in self.params])

    def views(self, flat_P):
        pieces = flat_P.split([p.numel() for p in self.params])
        return [piece.view_as(p) for piece, p in zip(pieces, self.params, strict=True)]

    def load(self, vector_P, version):
        with torch.no_grad():
            for p, value in zip(self.params, self.views(vector_P), strict=True):
                p.copy_(value)
        self.version = version

    def set_grad(self, flat_P):
        grads = [None] * len(self.params) if flat_P is None else self.views(flat_P)
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad


class World:
    """A policy, its adapter, a text and a few candidates rolled out by it."""

    def __init__(self, dtype, candidates=4, sampler="renoise", policy=None, adapter=None, text=None, shape=SHAPE):
        self.dtype, self.policy = dtype, policy or ToyPolicy(dtype)
        self.adapter = adapter or ToyAdapter(self.policy)
        generator = torch.Generator().manual_seed(1)
        self.text = torch.randn(1, 5, E, generator=generator, dtype=torch.float64).to(dtype) if text is None else text
        kind = Sampler(sampler, SIGMAS)
        self.trajectories = [
            rollout(self.policy, ALGORITHM, self.text, shape, kind, NoiseKey(0, 0, i), adapter_version=0)
            for i in range(candidates)
        ]

    def move(self, size=1e-3):
        """An adapter that is not the rollout's, as after an update."""
        noise_P = torch.randn(self.adapter.numel, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        self.adapter.load(self.adapter.vector() + size * noise_P.to(self.dtype), self.adapter.version + 1)

    def stage_centric(self, i, old_U, advantage, steps=None):
        args = (ALGORITHM, self.text, self.trajectories[i])
        logp_U = loss_replay(self.policy, *args, steps)
        return grad_replay(self.policy, self.adapter, *args, logp_U, old_U, advantage, steps)

    def merged(self, i, steps=None):
        return merged_replay(self.policy, self.adapter, ALGORITHM, self.text, self.trajectories[i], steps)

    def signed(self, i, old_U, steps=None):
        units = self.merged(i, steps)
        return compress(ALGORITHM, units.logp_U, old_U, units.g_UP)

    def full_graph(self, old_IU, advantages):
        """One autograd graph of the whole mini-batch loss, written without the kernels."""
        total = 0.0
        for trajectory, old_U, advantage in zip(self.trajectories, old_IU, advantages, strict=True):
            cache, logp = self.policy.new_cache(), [0.0] * 3
            for states in trajectory.x_CKDFHW:
                for k in range(3):
                    v = self.policy.velocity(states[k][None], SIGMAS[k], self.text, cache)
                    mean, std = trajectory.sampler.mean(states[k][None], v, k), trajectory.sampler.std(k)
                    logp[k] = logp[k] + torch.distributions.Normal(mean, std).log_prob(states[k + 1][None]).mean() / 3
                self.policy.commit(states[-1][None], self.text, cache)
            for k in range(3):
                rho = torch.exp(logp[k] - old_U[k])
                clipped = rho.clamp(1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high)
                total = total - torch.minimum(advantage * rho, advantage * clipped) / 3
        grads = torch.autograd.grad(total / len(self.trajectories), list(self.adapter.params))
        return torch.cat([g.flatten() for g in grads])


def error(got, want):
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


def fold(gradients):
    accumulator = Accumulator(dict.fromkeys(range(len(gradients)), 1), len(gradients[0]), gradients[0].dtype)
    for i, g_P in enumerate(gradients):
        accumulator.add(i, g_P)
    return accumulator.finish()


RATIOS = {
    "inside": (1.0005, 0.9995, 1.001),
    "above": (1.01, 1.2, 1.004),
    "below": (0.99, 0.8, 0.997),
    "mixed": (0.9, 1.001, 1.1),
}


@DTYPES
@pytest.mark.parametrize("ratios", RATIOS.values(), ids=RATIOS.keys())
@pytest.mark.parametrize("sampler", ["renoise", "dance_sde"])
def test_merged_equals_stage_centric(dtype, ratios, sampler):
    world = World(dtype, candidates=1, sampler=sampler)
    world.move()
    logp_U = loss_replay(world.policy, ALGORITHM, world.text, world.trajectories[0])
    old_U = logp_U - torch.tensor(ratios, dtype=dtype).log()
    signed = world.signed(0, old_U)
    for advantage in (1.7, 0.3, -0.6, -2.9, 0.0):
        want = world.stage_centric(0, old_U, advantage)
        got = signed.apply(advantage)
        assert error(got, want) <= TOLERANCE[dtype]
        if not want.any():
            assert not got.any()


@DTYPES
@pytest.mark.parametrize("sampler", ["renoise", "dance_sde"])
def test_stage_centric_equals_one_full_graph(dtype, sampler):
    world = World(dtype, sampler=sampler)
    world.move(1e-2)
    advantages = [1.3, -0.7, 0.0, -1.1]
    offsets = torch.tensor([[0.0, 0.01, -0.01], [-0.02, 0.001, 0.01], [0.0, 0.0, 0.0], [0.02, -0.001, 0.0]])
    old = [
        loss_replay(world.policy, ALGORITHM, world.text, t) + o
        for t, o in zip(world.trajectories, offsets, strict=True)
    ]
    want = world.full_graph(old, advantages)
    staged = fold([world.stage_centric(i, old[i], advantages[i]) for i in range(4)])
    merged = fold([world.signed(i, old[i]).apply(advantages[i]) for i in range(4)])
    assert error(staged, want) <= TOLERANCE[dtype]
    assert error(merged, want) <= TOLERANCE[dtype]


@DTYPES
def test_two_mini_batches_with_an_update_between(dtype):
    """Rollout log-probs: ratios are 1 in the first mini-batch and exp(new - rollout) in the second."""
    staged, merged = World(dtype), World(dtype)
    updates = [FlatAdamW(world.adapter, AdamWConfig(lr=1e-2)) for world in (staged, merged)]
    advantages = [0.9, -0.9, 1.4, -0.5]
    for mini_batch in ((0, 1), (2, 3)):
        old = {i: old_log_probs(ALGORITHM, merged.trajectories[i]) for i in mini_batch}
        for i in mini_batch:
            rho_U = torch.exp(merged.merged(i).logp_U - old[i])
            assert bool((rho_U == 1).all()) == (i < 2)
        got = fold([merged.signed(i, old[i]).apply(advantages[i]) for i in mini_batch])
        same_adapter = fold([merged.stage_centric(i, old[i], advantages[i]) for i in mini_batch])
        assert error(got, same_adapter) <= TOLERANCE[dtype]
        updates[0].step(fold([staged.stage_centric(i, old[i], advantages[i]) for i in mini_batch]))
        updates[1].step(got)
    assert merged.adapter.version == 2
    assert error(merged.adapter.vector(), staged.adapter.vector()) <= TOLERANCE[dtype]


@DTYPES
def test_first_replay_has_ratio_one_and_a_single_buffer(dtype):
    world = World(dtype, candidates=1)
    units = world.merged(0)
    phi_plus, phi_minus = ALGORITHM.phi(units.logp_U, units.logp_U)
    assert torch.equal(phi_plus, torch.full_like(phi_plus, -1.0) / 3)
    assert torch.equal(phi_minus, phi_plus)
    signed = compress(ALGORITHM, units.logp_U, units.logp_U, units.g_UP)
    assert signed.n_buffers == 1
    assert signed.clip == ClipCounts(units=3)
    torch.testing.assert_close(signed.apply(2.0), -2.0 / 3 * units.g_UP.sum(0))


@DTYPES
def test_equal_rewards_give_exactly_zero(dtype):
    world = World(dtype)
    world.move()
    scores, groups = dict.fromkeys(range(4), 0.8345), dict.fromkeys(range(4), 0)
    values = ALGORITHM.advantages(scores, groups).values
    total = fold([world.signed(i, world.trajectories[i].old_logp_U).apply(values[i]) for i in range(4)])
    assert torch.equal(total, torch.zeros_like(total))
    assert not world.stage_centric(0, world.trajectories[0].old_logp_U, values[0]).any()


@DTYPES
@pytest.mark.parametrize("parts", [[(0,), (1,), (2,)], [(2, 0), (1,)], [(0, 1), (2,)]])
def test_step_subsets_sum_to_the_whole(dtype, parts):
    world = World(dtype, candidates=1)
    world.move(1e-2)
    trajectory = world.trajectories[0]
    whole = world.merged(0)
    for advantage in (1.5, -0.8):
        want = world.signed(0, trajectory.old_logp_U).apply(advantage)
        olds = [old_log_probs(ALGORITHM, trajectory, steps) for steps in parts]
        merged = Accumulator({0: len(parts)}, world.adapter.numel, dtype)
        for part, (steps, old_U) in enumerate(zip(parts, olds, strict=True)):
            merged.add(0, world.signed(0, old_U, steps).apply(advantage), part)
        staged = sum(world.stage_centric(0, o, advantage, s) for s, o in zip(parts, olds, strict=True))
        assert error(merged.finish(), want) <= TOLERANCE[dtype]
        assert error(staged, want) <= TOLERANCE[dtype]
    for steps in parts:
        units = world.merged(0, steps)
        assert torch.equal(units.logp_U, whole.logp_U[list(steps)])
        assert torch.equal(units.g_UP, whole.g_UP[list(steps)])


@DTYPES
def test_one_candidates_gradient_does_not_see_another(dtype):
    world = World(dtype, candidates=3)
    world.move()
    before = world.signed(1, world.trajectories[1].old_logp_U)
    other = world.trajectories[0]
    world.trajectories[0] = replace(other, x_CKDFHW=other.x_CKDFHW + 1)
    world.merged(0)
    after = world.signed(1, world.trajectories[1].old_logp_U)
    assert torch.equal(before.plus_P, after.plus_P)
    assert torch.equal(before.minus_P, after.minus_P)


def test_replays_leave_no_gradient_and_no_grad_mode_behind():
    world = World(torch.float32, candidates=1)
    world.merged(0)
    loss_replay(world.policy, ALGORITHM, world.text, world.trajectories[0])
    assert all(p.grad is None for p in world.adapter.params)
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert world.merged(0).g_UP.any()


@DTYPES
@pytest.mark.parametrize("n", [-2, 0, 2])
def test_kernels_agree_at_the_bounds(dtype, n):
    """Unit log-probs are given here, so that the ratio is exactly on, or two ulp off, a bound."""
    world = World(dtype, candidates=1)
    rho_U = torch.tensor([1 - ALGORITHM.clip_low, 1 + ALGORITHM.clip_high, 1.0], dtype=dtype)
    for _ in range(abs(n)):
        rho_U = torch.nextafter(rho_U, torch.full_like(rho_U, math.copysign(math.inf, n)))
    logp_U = rho_U.log()
    while not torch.equal(logp_U.exp(), rho_U):  # near 1 a logarithm is finer than its ratio, so this ends
        logp_U = logp_U + (rho_U - logp_U.exp()) / 2
    old_U = torch.zeros_like(logp_U)
    signed = compress(ALGORITHM, logp_U, old_U, world.merged(0).g_UP)
    for advantage in (1.7, -0.6):
        args = (world.policy, world.adapter, ALGORITHM, world.text, world.trajectories[0])
        want = grad_replay(*args, logp_U, old_U, advantage)
        assert error(signed.apply(advantage), want) <= TOLERANCE[dtype]
    assert signed.n_buffers == (1 if n == 0 else 2)


def test_a_trajectory_must_have_the_trained_steps_of_the_loss():
    world = World(torch.float32, candidates=1)
    with pytest.raises(InputError, match=r"trains 3 steps \[0, 1, 2\]"):
        loss_replay(world.policy, DanceGRPO(trained_steps=4), world.text, world.trajectories[0])


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def causal_world(dtype):
    """A causal Wan of toy size with a LoRA that is not zero."""
    from stagebreaker.executor.models.causal_wan import CausalPolicy
    from stagebreaker.executor.models.lora import FlatAdapter
    from stagebreaker.executor.models.tiny import LATENT_CHANNELS, TEXT_DIM, tiny_transformer

    transformer = tiny_transformer().to(dtype)
    adapter = FlatAdapter(transformer, rank=2)
    noise_P = torch.randn(adapter.numel, generator=torch.Generator().manual_seed(3))
    adapter.load(adapter.vector() + 0.05 * noise_P.to(dtype), 0)
    text = torch.randn(1, 4, TEXT_DIM, generator=torch.Generator().manual_seed(4)).to(dtype)
    shape = LatentShape(3, LATENT_CHANNELS, 1, 4, 4)
    return World(dtype, 2, "dance_sde", CausalPolicy(transformer), adapter, text, shape)


@DTYPES
def test_real_policy_merged_equals_stage_centric_and_full_graph(dtype, monkeypatch):
    if dtype == torch.float64:  # Wan's blocks call .float(), which would cap a float64 comparison at 1e-7.
        to_float = torch.Tensor.float
        monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))
    world = causal_world(dtype)
    assert torch.equal(world.merged(0).logp_U, world.trajectories[0].old_logp_U)
    world.move(2e-3)
    advantages = [1.2, -0.7]
    logps = [loss_replay(world.policy, ALGORITHM, world.text, t) for t in world.trajectories]
    log_rho = torch.tensor([[0.001, 0.01, -0.01], [-0.02, 0.001, 0.02]], dtype=dtype)
    old = [logp_U - d for logp_U, d in zip(logps, log_rho, strict=True)]
    want = world.full_graph(old, advantages)
    staged = fold([world.stage_centric(i, old[i], advantages[i]) for i in range(2)])
    signed = [world.signed(i, old[i]) for i in range(2)]
    merged = fold([g.apply(a) for g, a in zip(signed, advantages, strict=True)])
    assert signed[0].clip + signed[1].clip == ClipCounts(6, 2, 2)
    assert want.abs().max() > 0
    assert error(merged, staged) <= TOLERANCE[dtype]
    assert error(staged, want) <= TOLERANCE[dtype]
