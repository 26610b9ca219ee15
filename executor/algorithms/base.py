"""How an algorithm meets the kernels: units of log-probability, and a loss over them.

An algorithm says which *unit* each (chunk, step) log-prob belongs to, logp_u = sum_c w_c logp_{c,u}, and
gives one candidate's loss f(logp, old, A). The loss must be homogeneous in the advantage,
f(rho, 2A) = 2 f(rho, A); then
    grad f = A sum_u phi_u^{sgn A} grad logp_u,   phi^s = s df(logp, old, A=s)/dlogp,
and phi+ and phi- hold ratio, clip and ties before any reward is known. They are equal where nothing is
clipped. The mini-batch normaliser 1/Z is not part of the loss: it is one scalar when gradients are folded.
This module knows neither tensors of latents nor models.

Shapes: U units, C chunks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stagebreaker.executor.algorithms.advantages import Advantages
from stagebreaker.profiles.document import InputError


class Algorithm(ABC):
    """One RL algorithm; stateless, so that any GPU can evaluate any part of it."""

    name: str

    @abstractmethod
    def units(self, steps: Sequence[int]) -> tuple[int, ...]:
        """The unit (0..U-1) of each of these denoising steps of one candidate."""

    @abstractmethod
    def chunk_weights(self, frames_C: Sequence[int]) -> tuple[float, ...]:
        """w_c of the chunk log-probs in a unit, given the latent frames of every chunk."""

    @abstractmethod
    def loss(self, logp_U: Tensor, old_logp_U: Tensor, advantage: float) -> Tensor:
        """One candidate's loss (to be minimised), a scalar; a subset of units gives its share."""

    @abstractmethod
    def advantages(
        self,
        scores: Mapping[int, float | None],
        groups: Mapping[int, int],
        *,
        scope: str,
        on_unscorable: str,
        mini_batches: Mapping[int, int] | None = None,
    ) -> Advantages:
        """Advantages of one batch, ready for ``loss``."""

    @abstractmethod
    def check_steps(self, steps: Sequence[int]) -> None:
        """Refuse a trajectory whose trained steps are not the ones the loss is normalised for."""

    def seed(self, logp_U: Tensor, old_logp_U: Tensor, advantage: float) -> Tensor:
        """d loss / d logp_U, by autograd, at a known advantage."""
        leaf_U = logp_U.detach().clone().requires_grad_()
        with torch.enable_grad():
            loss = self.loss(leaf_U, old_logp_U.detach(), advantage)
        (seed_U,) = torch.autograd.grad(loss, leaf_U)
        return seed_U

    def phi(self, logp_U: Tensor, old_logp_U: Tensor) -> tuple[Tensor, Tensor]:
        """(phi+_U, phi-_U): the reward-free part of ``seed`` for positive and for negative advantages."""
        return self.seed(logp_U, old_logp_U, 1.0), -self.seed(logp_U, old_logp_U, -1.0)

    def assert_homogeneous(self) -> None:
        """Start-up check that f(rho, 2A) = 2 f(rho, A); ``InputError`` if the loss is not separable."""
        old_U = torch.zeros(1, dtype=torch.float64)
        for rho in (0.5, 1 - 1e-3, 1.0, 1 + 1e-3, 1.5, 4.0):
            logp_U = torch.full_like(old_U, math.log(rho))
            for advantage in (-3.0, -0.25, 0.0, 0.25, 3.0):
                once, twice = (float(self.loss(logp_U, old_U, n * advantage)) for n in (1, 2))
                if abs(twice - 2 * once) > 1e-12 * max(1.0, abs(twice)):
                    raise InputError(
                        f"{self.name}: loss(rho={rho}, A={2 * advantage})={twice} is not twice "
                        f"loss(rho={rho}, A={advantage})={once}; its gradient must wait for the reward"
                    )
