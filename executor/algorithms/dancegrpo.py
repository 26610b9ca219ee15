"""DanceGRPO: PPO clipping with one importance ratio per denoising step.

Unit (candidate, step): log p of the whole clip at that step is the mean over all its elements, that is the
size-weighted mean of its chunks, w_c = n_c / n. Loss of one candidate, K trained steps,
rho = exp(logp - old):
    (1/K) sum_k max(-A rho_k, -A clamp(rho_k, 1 - clip_low, 1 + clip_high)).
Its gradient is zero for rho > 1 + clip_high when A > 0 and for rho < 1 - clip_low when A < 0; bounds are
inside. Advantages are group z-scores clamped to +-5. There is no KL term.

Shapes: U units, C chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stagebreaker.executor.algorithms.advantages import Advantages, advantages
from stagebreaker.executor.algorithms.base import Algorithm
from stagebreaker.profiles.document import InputError


@dataclass(frozen=True)
class DanceGRPO(Algorithm):
    """``trained_steps`` is K of the whole candidate, also when a task replays only some of its steps."""

    trained_steps: int
    clip_low: float = 1e-4
    clip_high: float = 1e-4
    advantage_clamp: float = 5.0
    eps: float = 1e-8
    name: str = "dancegrpo"

    def __post_init__(self) -> None:
        if self.trained_steps < 1:
            raise InputError(f"trained_steps={self.trained_steps} must be at least 1")
        if not (0 < self.clip_low < 1 and 0 < self.clip_high < math.inf):
            raise InputError(
                f"clip_low={self.clip_low} must be in (0, 1) and clip_high={self.clip_high} finite and > 0"
            )
        if not (self.advantage_clamp > 0 and self.eps >= 0):
            raise InputError(f"advantage_clamp={self.advantage_clamp} must be > 0 and eps={self.eps} >= 0")

    def units(self, steps: Sequence[int]) -> tuple[int, ...]:
        return tuple(range(len(steps)))

    def chunk_weights(self, frames_C: Sequence[int]) -> tuple[float, ...]:
        return tuple(frames / sum(frames_C) for frames in frames_C)

    def check_steps(self, steps: Sequence[int]) -> None:
        if len(steps) != self.trained_steps:
            raise InputError(
                f"the trajectory trains {len(steps)} steps {list(steps)}, the loss averages over "
                f"trained_steps={self.trained_steps}; set it to the number of random steps"
            )

    def loss(self, logp_U: Tensor, old_logp_U: Tensor, advantage: float) -> Tensor:
        rho_U = torch.exp(logp_U - old_logp_U)
        clamped_U = torch.clamp(rho_U, 1 - self.clip_low, 1 + self.clip_high)
        return torch.maximum(-advantage * rho_U, -advantage * clamped_U).sum() / self.trained_steps

    def advantages(
        self,
        scores: Mapping[int, float | None],
        groups: Mapping[int, int],
        *,
        scope: str = "group",
        on_unscorable: str = "fail",
        mini_batches: Mapping[int, int] | None = None,
    ) -> Advantages:
        """Z-scores clamped here and not in the loss, which a clamp would stop from being homogeneous."""
        raw = advantages(
            scores, groups, scope=scope, on_unscorable=on_unscorable, eps=self.eps, mini_batches=mini_batches
        )
        a = self.advantage_clamp
        return Advantages({i: min(max(value, -a), a) for i, value in raw.values.items()}, raw.masked)
