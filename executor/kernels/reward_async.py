"""Gradients that wait for their reward: unit buffers become g+ and g-, folded when the advantage is known.

    g^s = sum_u phi_u^s g_u,   grad of the mini-batch loss = (1/Z) sum_i A_i g_i^{sgn A_i}.
phi carries the sign of a loss to be minimised (-rho/K for PPO), so the result is what an optimizer takes as
``grad``. Where nothing is clipped phi+ = phi-, and one buffer serves both signs. Z is the number of surviving
candidates, applied once, after a sum in candidate order, so that the order of arrival changes no bit. It
knows no model and no ray.

Shapes: U units, P adapter parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from stagebreaker.executor.algorithms.base import Algorithm
from stagebreaker.profiles.document import InputError


class FoldError(RuntimeError):
    """A mini-batch cannot be folded: a part is missing, came twice, or nothing survived."""


@dataclass(frozen=True)
class ClipCounts:
    """Units whose gradient the clip cuts, by the sign of the advantage that would be cut."""

    units: int = 0
    cut_if_positive: int = 0  # PPO: rho above the upper bound
    cut_if_negative: int = 0  # PPO: rho below the lower bound

    def __add__(self, other: ClipCounts) -> ClipCounts:
        return ClipCounts(
            self.units + other.units,
            self.cut_if_positive + other.cut_if_positive,
            self.cut_if_negative + other.cut_if_negative,
        )

    @staticmethod
    def of(phi_plus_U: Tensor, phi_minus_U: Tensor) -> ClipCounts:
        return ClipCounts(len(phi_plus_U), int((phi_plus_U == 0).sum()), int((phi_minus_U == 0).sum()))


@dataclass(frozen=True)
class SignGradients:
    """g+ and g- of one candidate, or of some of its steps; the same tensor where no unit is clipped."""

    plus_P: Tensor
    minus_P: Tensor
    clip: ClipCounts

    @property
    def n_buffers(self) -> int:
        """Flat buffers this holds in memory: 1 or 2."""
        return 1 if self.plus_P is self.minus_P else 2

    def apply(self, advantage: float) -> Tensor:
        """Gradient [P] of the candidate's loss; exactly 0 for A = 0, even where a ratio overflowed."""
        if not math.isfinite(advantage):
            raise InputError(f"advantage={advantage} must be finite; a candidate without a score is masked")
        if advantage == 0:
            return torch.zeros_like(self.plus_P)
        return advantage * (self.plus_P if advantage > 0 else self.minus_P)


def compress(algorithm: Algorithm, logp_U: Tensor, old_logp_U: Tensor, g_UP: Tensor) -> SignGradients:
    """Weigh the unit gradients by phi+ and phi-; with ``logp_U`` as old too where the ratio is 1."""
    phi_plus_U, phi_minus_U = algorithm.phi(logp_U, old_logp_U)
    clip = ClipCounts.of(phi_plus_U, phi_minus_U)
    plus_P = _weighted_sum(phi_plus_U, g_UP)
    if torch.equal(phi_plus_U, phi_minus_U):
        return SignGradients(plus_P, plus_P, clip)
    return SignGradients(plus_P, _weighted_sum(phi_minus_U, g_UP), clip)


def _weighted_sum(phi_U: Tensor, g_UP: Tensor) -> Tensor:
    """sum_u phi_u g_u in unit order. Not a matmul: that may run in reduced precision and in any order."""
    total_P = torch.zeros_like(g_UP[0])
    for phi, g_P in zip(phi_U.tolist(), g_UP, strict=True):
        if phi != 0:
            total_P.add_(g_P, alpha=phi)
    return total_P


class Accumulator:
    """Sum of one mini-batch in candidate order, whatever the order of arrival; in float32 at least.

    ``parts`` is {candidate: number of parts its steps were divided into}. Early arrivals wait for their turn.
    """

    def __init__(self, parts: Mapping[int, int], numel: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        if not parts or min(parts.values()) < 1:
            raise InputError(f"parts={dict(parts)} must name at least one candidate, each with 1 part or more")
        self._waiting = [(i, part) for i in sorted(parts) for part in range(parts[i])]
        self._held: dict[tuple[int, int], Tensor | None] = {}
        self._survivors = set(parts)
        self._added: set[int] = set()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self._sum_P = torch.zeros(numel, dtype=wide, device=device)

    def add(self, candidate: int, g_P: Tensor, part: int = 0) -> None:
        """Hand in A_i g_i of one part of a candidate."""
        if g_P.shape != self._sum_P.shape:
            raise InputError(f"candidate {candidate}: gradient of shape {tuple(g_P.shape)}, not {len(self._sum_P)}")
        self._place((candidate, part), g_P)
        self._added.add(candidate)

    def mask(self, candidate: int) -> None:
        """Leave a candidate out of the sum and of Z; none of its parts may have been added."""
        if candidate not in self._survivors or candidate in self._added:
            raise FoldError(
                f"candidate {candidate} cannot be masked: it was folded, masked or is not of this mini-batch"
            )
        self._survivors.remove(candidate)
        for key in [key for key in self._waiting if key[0] == candidate]:
            self._place(key, None)

    @property
    def survivors(self) -> int:
        """Candidates that are not masked: Z."""
        return len(self._survivors)

    def finish(self) -> Tensor:
        """(1/Z) sum_i A_i g_i, [P]."""
        if self._waiting:
            missing = [f"{i}.{part}" for i, part in self._waiting if (i, part) not in self._held]
            raise FoldError(f"gradients of candidate.part {', '.join(missing)} are missing; wait for them or mask them")
        if not self._survivors:
            raise FoldError("every candidate of the mini-batch is masked: there is nothing to update with")
        return self._sum_P / len(self._survivors)

    def _place(self, key: tuple[int, int], g_P: Tensor | None) -> None:
        if key not in self._waiting or key in self._held:
            raise FoldError(f"candidate {key[0]} part {key[1]} was folded already or is not of this mini-batch")
        self._held[key] = g_P
        while self._waiting and self._waiting[0] in self._held:
            ready_P = self._held.pop(self._waiting.pop(0))
            if ready_P is not None:
                self._sum_P += ready_P.to(self._sum_P)
