"""Schedules, transitions, densities, counter-based noise and the record of a rollout."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from stagebreaker.executor.algorithms.dancegrpo import DanceGRPO
from stagebreaker.executor.algorithms.rollout import LatentShape, NoiseKey, Trajectory, rollout
from stagebreaker.executor.algorithms.sampler import Sampler, gaussian_log_prob, warped_sigmas
from stagebreaker.profiles.document import InputError

SIGMAS = warped_sigmas(4)
SHAPE = LatentShape(chunks=3, channels=2, frames=2, height=3, width=4)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def test_self_forcing_schedule():
    assert pytest.approx((1.0, 0.9375, 5 / 6, 0.625, 0.0), abs=1e-15) == SIGMAS
    assert warped_sigmas(2, shift=1.0) == (1.0, 0.5, 0.0)


def test_standard_deviations():
    dance, renoise = Sampler("dance_sde", SIGMAS, eta=0.3), Sampler("renoise", SIGMAS)
    assert [dance.std(k) for k in range(4)] == pytest.approx([0.075, 0.0968, 0.1369, 0.0], abs=1e-4)
    assert [renoise.std(k) for k in range(4)] == pytest.approx([0.9375, 5 / 6, 0.625, 0.0])


@pytest.mark.parametrize(
    ("name", "expected"), [("dance_sde", (0.833, 1.079, 1.535)), ("renoise", (0.0667, 0.1875, 0.5))]
)
def test_sensitivity_of_the_mean_to_the_velocity(name, expected):
    sampler = Sampler(name, SIGMAS, eta=0.3)
    x = torch.randn(1, 2, 2, 3, 4, dtype=torch.float64)
    for k, slope in enumerate(expected):
        shift = sampler.mean(x, torch.ones_like(x), k) - sampler.mean(x, torch.zeros_like(x), k)
        assert float(shift.abs().max()) / sampler.std(k) == pytest.approx(slope, abs=1e-3)


def test_dance_sde_without_noise_is_the_euler_step():
    sampler = Sampler("dance_sde", SIGMAS, eta=0.0)
    x, v = torch.randn(2, 1, 2, 2, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(sampler.mean(x, v, 1), x - (SIGMAS[1] - SIGMAS[2]) * v)


@pytest.mark.parametrize("name", ["dance_sde", "renoise"])
def test_last_step_returns_the_clean_latent_and_is_never_trained(name):
    sampler = Sampler(name, SIGMAS)
    x, v = torch.randn(2, 1, 2, 2, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(sampler.mean(x, v, 3), x - 0.625 * v)
    choice = sampler.choose_steps()
    assert (choice.trained, choice.excluded) == ((0, 1, 2), (3,))
    assert sampler.choose_steps([3, 1]).excluded == (3,)
    with pytest.raises(InputError, match=r"step 3 of .* is deterministic"):
        sampler.log_prob(x, v, x, 3)


def test_density_is_the_mean_of_the_normal_one_over_all_but_the_batch():
    x, mean = torch.randn(2, 5, 2, 2, 3, 3, dtype=torch.float64)
    expected = torch.distributions.Normal(mean, 0.3).log_prob(x).flatten(1).mean(1)
    torch.testing.assert_close(gaussian_log_prob(x, mean, 0.3), expected, rtol=1e-13, atol=1e-13)


def test_log_prob_is_float32_for_half_precision_input():
    sampler = Sampler("renoise", SIGMAS)
    x = torch.randn(1, 2, 2, 3, 3, dtype=torch.bfloat16)
    assert sampler.log_prob(x, x, x, 0).dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampler("ddim", SIGMAS), "dance_sde, renoise"),
        (lambda: Sampler("renoise", (1.0, 0.5)), "exactly 0"),
        (lambda: Sampler("renoise", (1.0, 0.5, 0.5, 0.0)), "fall strictly"),
        (lambda: Sampler("dance_sde", SIGMAS, eta=-1.0), "eta=-1.0"),
        (lambda: Sampler("dance_sde", SIGMAS, eta=0.0).choose_steps(), "nothing to train"),
        (lambda: Sampler("renoise", SIGMAS).choose_steps([4]), "in 0..3"),
        (lambda: warped_sigmas(0), "at least 1"),
        (
            lambda: LatentShape.of_video(20, 3, 16, 8, 8),
            "latent_frames=20 must be a multiple of chunk_frames=3",
        ),
        (lambda: NoiseKey(-1, 0, 0), "seed >= 0"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_every_draw_has_its_own_noise():
    shape = (4, 5)
    keys = [(s, r, i, c, k) for s in (0, 1, 2**32) for r in (0, 1) for i in (0, 1) for c in (0, 1) for k in (0, 1)]
    draws = {NoiseKey(s, r, i).draw(c, k, shape).numpy().tobytes() for s, r, i, c, k in keys}
    assert len(draws) == len(keys)
    assert torch.equal(NoiseKey(3, 1, 4).draw(1, 5, shape), NoiseKey(3, 1, 4).draw(1, 5, shape))


class Drift:
    """A policy whose velocity pulls towards the mean of the chunks before."""

    def new_cache(self):
        return []

    def velocity(self, x, sigma, text, cache):
        past = torch.stack(cache).mean(0) if cache else torch.zeros_like(x)
        return 0.5 * x - past + sigma * text.mean()

    def commit(self, x, text, cache):
        cache.append(x.detach())


def generate(candidate=0, dtype=torch.float64, name="renoise", **options):
    text = torch.ones(1, 2, 3, dtype=dtype)
    sampler = Sampler(name, SIGMAS)
    key = NoiseKey(seed=7, rl_step=0, candidate=candidate)
    return rollout(Drift(), DanceGRPO(3), text, SHAPE, sampler, key, adapter_version=5, **options)


@pytest.mark.parametrize("name", ["dance_sde", "renoise"])
def test_a_trajectory_records_states_and_log_probs(name):
    trajectory = generate(name=name)
    assert trajectory.x_CKDFHW.shape == (3, 5, 2, 2, 3, 4)
    assert (trajectory.steps, trajectory.excluded_steps) == ((0, 1, 2), (3,))
    assert (trajectory.adapter_version, trajectory.sigmas) == (5, SIGMAS)
    policy, text, cache = Drift(), torch.ones(1, 2, 3, dtype=torch.float64), []
    expected = torch.zeros(3, dtype=torch.float64)
    for states in trajectory.x_CKDFHW:
        for k in range(3):
            v = policy.velocity(states[k][None], SIGMAS[k], text, cache)
            mean = trajectory.sampler.mean(states[k][None], v, k)
            expected[k] += gaussian_log_prob(states[k + 1][None], mean, trajectory.sampler.std(k))[0] / 3
        policy.commit(states[4][None], text, cache)
    torch.testing.assert_close(trajectory.old_logp_U, expected, rtol=1e-14, atol=1e-14)
    assert trajectory.clean.shape == (2, 6, 3, 4)
    assert torch.equal(trajectory.clean[:, 2:4], trajectory.x_CKDFHW[1, 4])


def test_a_candidate_depends_on_its_key_alone():
    torch.manual_seed(1)
    alone = generate(candidate=3)
    generate(candidate=0), torch.randn(5)
    again = generate(candidate=3)
    assert torch.equal(alone.x_CKDFHW, again.x_CKDFHW)
    assert not torch.equal(alone.x_CKDFHW, generate(candidate=4).x_CKDFHW)


def test_noise_is_the_same_in_float32_and_float64():
    single, double = generate(dtype=torch.float32), generate(dtype=torch.float64)
    assert single.x_CKDFHW.dtype == torch.float32
    torch.testing.assert_close(single.x_CKDFHW.double(), double.x_CKDFHW, rtol=0, atol=1e-5)


def test_a_trajectory_travels_as_numpy():
    trajectory = generate(candidate=2, steps=[0, 2])
    message = trajectory.to_numpy()
    for value in message.values():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
    back = Trajectory.from_numpy(message)
    assert torch.equal(back.x_CKDFHW, trajectory.x_CKDFHW)
    assert torch.equal(back.old_logp_U, trajectory.old_logp_U)
    for field in dataclasses.fields(Trajectory):
        if not isinstance(getattr(back, field.name), torch.Tensor):
            assert getattr(back, field.name) == getattr(trajectory, field.name)


def test_steps_are_checked():
    trajectory = generate()
    assert trajectory.select_steps(None) == (0, 1, 2)
    for steps in ([], [3], [0, 0]):
        with pytest.raises(InputError, match="non-empty subset"):
            trajectory.select_steps(steps)
    assert math.isfinite(float(trajectory.old_logp_U.sum()))
