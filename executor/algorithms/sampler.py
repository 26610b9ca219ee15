"""Few-step sampling as a Gaussian policy: sigma schedules, transitions and their log-density.

One denoising step is a draw x_{k+1} ~ N(mean(x_k, v), std^2), v the predicted velocity, x0 = x - sigma v, s'
the next sigma, dt = sigma - s':
    dance_sde (DanceGRPO):   mean = x - dt v - (eta^2/2) dt (x - (1-sigma) x0) / sigma^2,  std = eta sqrt(dt);
    renoise (Self-Forcing):  mean = (1-s') x0,  std = s'.
The step to s' = 0 returns x0 and has no density. It knows neither chunks, candidates nor rewards.

Shapes: B batch, D channels, F frames, H W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stagebreaker.profiles.document import InputError

SAMPLERS = ("dance_sde", "renoise")


def warped_sigmas(steps: int, shift: float = 5.0) -> tuple[float, ...]:
    """K+1 noise levels from 1 to 0: t from 1 to 0 in equal steps, then s t / (1 + (s-1) t)."""
    if steps < 1:
        raise InputError(f"denoise_steps={steps} must be at least 1")
    if not (math.isfinite(shift) and shift > 0):
        raise InputError(f"shift={shift} must be finite and > 0 (1 keeps equal steps, Self-Forcing uses 5)")
    times = [(steps - k) / steps for k in range(steps + 1)]
    return tuple(shift * t / (1 + (shift - 1) * t) for t in times)


def precise(x: Tensor) -> Tensor:
    """``x`` in the dtype of log-probs: float64 stays, anything else becomes float32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


@dataclass(frozen=True)
class StepChoice:
    """Denoising steps that carry gradient, and those asked for that cannot: their transition has std 0."""

    trained: tuple[int, ...]
    excluded: tuple[int, ...]


@dataclass(frozen=True)
class Sampler:
    """A named stochastic policy over a sigma schedule; ``eta`` is read by ``dance_sde`` alone."""

    name: str
    sigmas: tuple[float, ...]
    eta: float = 0.3

    def __post_init__(self) -> None:
        if self.name not in SAMPLERS:
            raise InputError(f"sampler={self.name!r} must be one of {', '.join(SAMPLERS)}")
        falling = all(a > b for a, b in zip(self.sigmas, self.sigmas[1:], strict=False))
        if len(self.sigmas) < 2 or self.sigmas[0] > 1 or self.sigmas[-1] != 0 or not falling:
            raise InputError(f"sigmas={self.sigmas} must fall strictly from at most 1 to exactly 0")
        if not (math.isfinite(self.eta) and self.eta >= 0):
            raise InputError(f"eta={self.eta} must be finite and >= 0")

    @property
    def steps(self) -> int:
        """K, the number of denoising steps."""
        return len(self.sigmas) - 1

    def std(self, k: int) -> float:
        """Standard deviation of the transition k -> k+1; 0 where it is deterministic."""
        sigma, sigma_next = self.sigmas[k], self.sigmas[k + 1]
        if sigma_next == 0:
            return 0.0
        return self.eta * math.sqrt(sigma - sigma_next) if self.name == "dance_sde" else sigma_next

    def mean(self, x_BDFHW: Tensor, v_BDFHW: Tensor, k: int) -> Tensor:
        """Mean of x_{k+1} given x_k and the velocity; x0 itself at the last step."""
        x, v = precise(x_BDFHW), precise(v_BDFHW)
        sigma, sigma_next = self.sigmas[k], self.sigmas[k + 1]
        x0 = x - sigma * v
        if sigma_next == 0:
            return x0
        if self.name == "renoise":
            return (1 - sigma_next) * x0
        dt = sigma - sigma_next
        score = -(x - (1 - sigma) * x0) / sigma**2
        return x - dt * v + (0.5 * self.eta**2 * dt) * score

    def log_prob(self, x_BDFHW: Tensor, v_BDFHW: Tensor, next_BDFHW: Tensor, k: int) -> Tensor:
        """log p(x_{k+1} | x_k), [B]: the mean over all other dimensions, constants included."""
        std = self.std(k)
        if std == 0:
            raise InputError(f"step {k} of {self.name} is deterministic (std 0) and has no log-prob; exclude it")
        return gaussian_log_prob(precise(next_BDFHW), self.mean(x_BDFHW, v_BDFHW, k), std)

    def choose_steps(self, wanted: Sequence[int] | None = None) -> StepChoice:
        """Split ``wanted`` (default: all K steps) into trained and excluded ones, in rising order."""
        asked = tuple(range(self.steps)) if wanted is None else tuple(sorted(wanted))
        if len(set(asked)) != len(asked) or any(not 0 <= k < self.steps for k in asked):
            raise InputError(f"trained steps {list(asked)} must be distinct and in 0..{self.steps - 1}")
        trained = tuple(k for k in asked if self.std(k) > 0)
        if not trained:
            raise InputError(f"none of the steps {list(asked)} of {self.name} is random: nothing to train; set eta > 0")
        return StepChoice(trained, tuple(k for k in asked if self.std(k) == 0))


def gaussian_log_prob(x: Tensor, mean: Tensor, std: float) -> Tensor:
    """Mean over all dimensions but the first of log N(x; mean, std^2)."""
    squares = ((x - mean) ** 2).flatten(1).mean(1)
    return -squares / (2 * std**2) - (math.log(std) + 0.5 * math.log(2 * math.pi))
