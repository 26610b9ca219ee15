"""The weight a unit's gradient gets: clip sets with their bounds, ties, homogeneity."""

import math

import pytest
import torch

from stagebreaker.executor.algorithms.dancegrpo import DanceGRPO
from stagebreaker.executor.kernels.reward_async import ClipCounts
from stagebreaker.profiles.document import InputError

DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def log_ratio(rho):
    """d with exp(d) == rho exactly: near 1, d is far finer than rho, so a short search ends."""
    d = torch.log(rho)
    while torch.exp(d) != rho:
        d = d + (rho - torch.exp(d)) * 0.5
    return d


def ulps(value, n, dtype):
    x = torch.tensor(value, dtype=dtype)
    for _ in range(abs(n)):
        x = torch.nextafter(x, torch.tensor(math.inf if n > 0 else -math.inf, dtype=dtype))
    return x


@DTYPES
@pytest.mark.parametrize("n", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize(("clip_low", "clip_high"), [(1e-4, 1e-4), (0.2, 0.28)])
def test_bounds_belong_to_the_trained_range(dtype, n, clip_low, clip_high):
    algorithm = DanceGRPO(trained_steps=1, clip_low=clip_low, clip_high=clip_high)
    zero = torch.zeros(1, dtype=dtype)
    for bound in (1 - clip_low, 1 + clip_high):
        rho = ulps(bound, n, dtype)
        phi_plus, phi_minus = algorithm.phi(log_ratio(rho).reshape(1), zero)
        above, below = bound > 1 and n > 0, bound < 1 and n < 0
        assert float(phi_plus) == (0.0 if above else -float(rho))
        assert float(phi_minus) == (0.0 if below else -float(rho))


def test_one_ulp_below_the_lower_bound_a_known_advantage_may_tie():
    """Where A rho and A lo round to one float, torch's max halves the gradient between them.

    phi, taken at A = +-1, has no such rounding and is 0. So the two kernels may differ for a unit within one
    ulp of the lower bound, and only there: an event of width 6e-8 in float32, inherent in the published loss.
    """
    algorithm, zero = DanceGRPO(trained_steps=1), torch.zeros(1)
    logp = log_ratio(ulps(1 - 1e-4, -1, torch.float32)).reshape(1)
    assert float(algorithm.phi(logp, zero)[1]) == 0.0
    seeds = [float(algorithm.seed(logp, zero, -a / 64)) for a in range(1, 257)]
    halves = [s != 0 for s in seeds]
    assert any(halves)
    assert not all(halves)
    for a, s in enumerate(seeds, start=1):
        assert s == 0 or s == pytest.approx(a / 64 / 2, rel=2e-4)


def test_phi_counts_what_the_clip_cuts():
    algorithm = DanceGRPO(trained_steps=4, clip_low=0.1, clip_high=0.3)
    rho_U = torch.tensor([0.5, 0.95, 1.2, 1.5], dtype=torch.float64)
    phi = algorithm.phi(rho_U.log(), torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(phi[0], -rho_U * torch.tensor([1, 1, 1, 0]) / 4)
    torch.testing.assert_close(phi[1], -rho_U * torch.tensor([0, 1, 1, 1]) / 4)
    assert ClipCounts.of(*phi) + ClipCounts.of(*phi) == ClipCounts(8, 2, 2)


def test_losses_that_are_not_homogeneous_in_the_advantage_are_refused():
    class Squared(DanceGRPO):
        def loss(self, logp_U, old_logp_U, advantage):
            return super().loss(logp_U, old_logp_U, advantage * abs(advantage))

    DanceGRPO(trained_steps=3).assert_homogeneous()
    with pytest.raises(InputError, match="is not twice"):
        Squared(trained_steps=3).assert_homogeneous()


def test_chunks_weigh_by_their_frames():
    assert DanceGRPO(trained_steps=3).chunk_weights([3, 3, 2]) == (3 / 8, 3 / 8, 2 / 8)
