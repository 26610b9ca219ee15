"""The reference gradient: two replays, the first for the ratios, the second for the gradient.

With every unit log-prob and the advantage known, d loss / d logp_u is a number; it seeds the backward of each
(chunk, step) as soon as its forward is done, and all of them add into one flat buffer:
    g = sum_u (d loss / d logp_u) grad logp_u,   d loss / d logp_u = A phi_u^{sgn A}.
This is what a trainer does that waits for rewards first. It knows nothing of other candidates or of 1/Z.

Shapes: U units, P adapter parameters, B = 1, T E text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stagebreaker.executor.algorithms.base import Algorithm
from stagebreaker.executor.algorithms.interfaces import Adapter, Policy
from stagebreaker.executor.algorithms.rollout import Trajectory
from stagebreaker.executor.kernels.replay import replay_units, unit_count
from stagebreaker.profiles.document import InputError


def loss_replay(
    policy: Policy,
    algorithm: Algorithm,
    text_1TE: Tensor,
    trajectory: Trajectory,
    steps: Sequence[int] | None = None,
) -> Tensor:
    """Unit log-probs [U] under the adapter that is loaded now, without a gradient."""
    chosen = trajectory.select_steps(steps)
    logp_U = trajectory.x_CKDFHW.new_zeros(unit_count(algorithm, chosen))
    for unit, logp in replay_units(policy, algorithm, text_1TE, trajectory, chosen, grad=False):
        logp_U[unit] += logp
    return logp_U


def grad_replay(
    policy: Policy,
    adapter: Adapter,
    algorithm: Algorithm,
    text_1TE: Tensor,
    trajectory: Trajectory,
    logp_U: Tensor,
    old_logp_U: Tensor,
    advantage: float,
    steps: Sequence[int] | None = None,
) -> Tensor:
    """Gradient [P] of this candidate's loss, or of the share of ``steps``; A = 0 gives exactly 0."""
    chosen = trajectory.select_steps(steps)
    if not math.isfinite(advantage):
        raise InputError(f"advantage={advantage} must be finite; a candidate without a score is masked, not trained")
    g_P = torch.zeros(adapter.numel, dtype=adapter.params[0].dtype, device=adapter.params[0].device)
    if advantage == 0:
        return g_P
    seed_U = algorithm.seed(logp_U, old_logp_U, advantage)
    adapter.set_grad(g_P)
    try:
        for unit, logp in replay_units(policy, algorithm, text_1TE, trajectory, chosen, grad=True):
            torch.autograd.backward(logp, seed_U[unit])
    finally:
        adapter.set_grad(None)
    return g_P
