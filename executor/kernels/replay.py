"""The inner loop every gradient kernel shares: replay a recorded candidate and yield its chunk log-probs.

For each chunk, for each chosen step: v = policy(x[c, k] | context), then log p(x[c, k+1] | x[c, k], v). The
context is rebuilt with the adapter that is loaded now, C-1 commits per replay whatever steps are chosen, and
is detached. So no two (c, k) graphs are coupled: a caller may back-propagate each log-prob at once, and
replays of disjoint step sets, on any GPUs, add up to the whole. The loop knows neither units, ratios nor
rewards.

Shapes: B = 1 candidate, C chunks, K steps, F frames, D channels, H W latent height and width, U units, T E
text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from stagebreaker.executor.algorithms.base import Algorithm
from stagebreaker.executor.algorithms.interfaces import Policy
from stagebreaker.executor.algorithms.rollout import Trajectory


class ChunkLogProb(NamedTuple):
    """log p of one transition of one chunk, a scalar; it holds a graph when the replay has gradients on."""

    chunk: int
    step: int
    logp: Tensor


def replay_chunks(
    policy: Policy, text_1TE: Tensor, trajectory: Trajectory, steps: Sequence[int], *, grad: bool
) -> Iterator[ChunkLogProb]:
    """Chunk by chunk, and within a chunk in the order of ``steps``."""
    cache = policy.new_cache()
    for c in range(trajectory.chunks):
        states_KDFHW = trajectory.x_CKDFHW[c]
        for k in steps:
            # The grad mode must not span a yield: it would leak into the caller.
            with torch.set_grad_enabled(grad):
                x, new = states_KDFHW[k][None], states_KDFHW[k + 1][None]
                v = policy.velocity(x, trajectory.sigmas[k], text_1TE, cache)
                logp = trajectory.sampler.log_prob(x, v, new, k)[0]
            yield ChunkLogProb(c, k, logp)
        if c + 1 < trajectory.chunks:
            with torch.no_grad():
                policy.commit(states_KDFHW[-1][None], text_1TE, cache)


class UnitLogProb(NamedTuple):
    """w_c log p of one (chunk, step), and the unit it is a part of."""

    unit: int
    weighted_logp: Tensor


def replay_units(
    policy: Policy,
    algorithm: Algorithm,
    text_1TE: Tensor,
    trajectory: Trajectory,
    steps: Sequence[int],
    *,
    grad: bool,
) -> Iterator[UnitLogProb]:
    """``replay_chunks`` with the algorithm's units and weights: a unit's log-prob is the sum of its parts."""
    algorithm.check_steps(trajectory.steps)
    frames = trajectory.x_CKDFHW.shape[3]
    weights_C = algorithm.chunk_weights([frames] * trajectory.chunks)
    unit_of = dict(zip(steps, algorithm.units(steps), strict=True))
    for part in replay_chunks(policy, text_1TE, trajectory, steps, grad=grad):
        with torch.set_grad_enabled(grad):
            weighted_logp = weights_C[part.chunk] * part.logp
        yield UnitLogProb(unit_of[part.step], weighted_logp)


def old_log_probs(algorithm: Algorithm, trajectory: Trajectory, steps: Sequence[int] | None = None) -> Tensor:
    """The rollout's log-probs of the units of ``steps``, [U], in the order a replay of them has."""
    unit_of = dict(zip(trajectory.steps, algorithm.units(trajectory.steps), strict=True))
    kept = dict.fromkeys(unit_of[k] for k in trajectory.select_steps(steps))
    return trajectory.old_logp_U[list(kept)]


def unit_count(algorithm: Algorithm, steps: Sequence[int]) -> int:
    """U of a replay of ``steps``."""
    return max(algorithm.units(steps)) + 1
