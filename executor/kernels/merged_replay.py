"""One replay instead of two: the gradient of every unit, before ratio or reward is needed.

A unit's ratio is known only when its last chunk has been replayed, so each unit keeps its own flat buffer:
    g_u = sum_{(c,k) in u} w_c grad logp_{c,k},
filled by letting every ``p.grad`` be a view of row u before the backward of a part of unit u. The same
forwards give the unit log-probs. Scaling by A phi afterwards equals seeding with it before, because a
backward is linear in its seed. The kernel knows neither old log-probs, clipping nor rewards.

Shapes: U units, P adapter parameters, B = 1, T E text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stagebreaker.executor.algorithms.base import Algorithm
from stagebreaker.executor.algorithms.interfaces import Adapter, Policy
from stagebreaker.executor.algorithms.rollout import Trajectory
from stagebreaker.executor.kernels.replay import replay_units, unit_count


@dataclass(frozen=True)
class UnitGradients:
    """Log-prob and its gradient, one row per unit, at one adapter version."""

    logp_U: Tensor
    g_UP: Tensor
    adapter_version: int


def merged_replay(
    policy: Policy,
    adapter: Adapter,
    algorithm: Algorithm,
    text_1TE: Tensor,
    trajectory: Trajectory,
    steps: Sequence[int] | None = None,
) -> UnitGradients:
    """Replay ``steps`` (default: all trained ones) once, with gradients."""
    chosen = trajectory.select_steps(steps)
    logp_U = trajectory.x_CKDFHW.new_zeros(unit_count(algorithm, chosen))
    param = adapter.params[0]
    g_UP = torch.zeros(len(logp_U), adapter.numel, dtype=param.dtype, device=param.device)
    try:
        for unit, logp in replay_units(policy, algorithm, text_1TE, trajectory, chosen, grad=True):
            adapter.set_grad(g_UP[unit])
            torch.autograd.backward(logp)
            logp_U[unit] += logp.detach()
    finally:
        adapter.set_grad(None)
    return UnitGradients(logp_U, g_UP, adapter.version)
