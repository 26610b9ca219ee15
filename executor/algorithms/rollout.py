"""Generating one candidate, and the record a replay needs.

A trajectory holds, for every chunk c and step k, the noisy state x[c, k] (x[c, K] is the clean chunk), so
that any later replay can recompute log p(x[c, k+1] | x[c, k], context of chunks < c) under another adapter.
Every random draw has its own generator, keyed by (seed, rl_step, candidate, chunk, step) and independent of
dtype and device, so neither the GPU that runs a candidate nor the order of candidates changes a sample. It
knows nothing of rewards, groups or where it runs.

Shapes: C chunks, K steps (K+1 states), F frames of a chunk, D channels, H W latent height and width, U units,
B = 1 candidate, T text tokens, E text width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagebreaker.executor.algorithms.base import Algorithm
from stagebreaker.executor.algorithms.interfaces import Policy
from stagebreaker.executor.algorithms.sampler import Sampler
from stagebreaker.profiles.document import InputError


@dataclass(frozen=True)
class LatentShape:
    """Size of one candidate's latents."""

    chunks: int
    channels: int
    frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 1:
                raise InputError(f"{field.name}={getattr(self, field.name)} of the latents must be at least 1")

    @staticmethod
    def of_video(latent_frames: int, chunk_frames: int, channels: int, height: int, width: int) -> LatentShape:
        """The shape of ``latent_frames`` cut into equal chunks."""
        if chunk_frames < 1 or latent_frames % chunk_frames:
            raise InputError(f"latent_frames={latent_frames} must be a multiple of chunk_frames={chunk_frames}")
        return LatentShape(latent_frames // chunk_frames, channels, chunk_frames, height, width)


@dataclass(frozen=True)
class NoiseKey:
    """Names every random draw of one candidate."""

    seed: int
    rl_step: int
    candidate: int

    def __post_init__(self) -> None:
        if self.seed < 0 or not (0 <= self.rl_step < 2**32 and 0 <= self.candidate < 2**32):
            raise InputError(f"{self} must have seed >= 0 and rl_step and candidate in 0..2**32-1")

    def draw(self, chunk: int, step: int, shape: Sequence[int]) -> Tensor:
        """Standard normal noise that leads to state x[chunk, step], float32 on the CPU."""
        # A spawn key keeps the fields apart; in a plain list a wide seed would spill into rl_step.
        sequence = np.random.SeedSequence(self.seed, spawn_key=(self.rl_step, self.candidate, chunk, step))
        generator = np.random.Generator(np.random.Philox(sequence))
        return torch.from_numpy(generator.standard_normal(tuple(shape), dtype=np.float32))


@dataclass(frozen=True)
class Trajectory:
    """What one candidate did. ``old_logp_U`` are the rollout's own log-probs, one per unit of ``steps``."""

    x_CKDFHW: Tensor
    sampler: Sampler
    steps: tuple[int, ...]
    excluded_steps: tuple[int, ...]
    old_logp_U: Tensor
    key: NoiseKey
    adapter_version: int

    @property
    def chunks(self) -> int:
        return int(self.x_CKDFHW.shape[0])

    @property
    def sigmas(self) -> tuple[float, ...]:
        return self.sampler.sigmas

    @property
    def clean(self) -> Tensor:
        """The finished latents, [D, all frames, H, W]."""
        return torch.cat(list(self.x_CKDFHW[:, -1].unbind(0)), dim=1)

    def select_steps(self, steps: Sequence[int] | None) -> tuple[int, ...]:
        """``steps`` checked to be a non-empty subset of the trained steps; None means all of them."""
        chosen = self.steps if steps is None else tuple(steps)
        if not chosen or len(set(chosen)) != len(chosen) or not set(chosen) <= set(self.steps):
            raise InputError(f"steps {list(chosen)} must be a non-empty subset of the trained steps {list(self.steps)}")
        return chosen

    def to_numpy(self) -> dict[str, Any]:
        """Arrays and plain values, for a message to another process; arrays share memory with CPU tensors."""
        return {
            "x_CKDFHW": self.x_CKDFHW.detach().cpu().numpy(),
            "sampler": asdict(self.sampler),
            "steps": self.steps,
            "excluded_steps": self.excluded_steps,
            "old_logp_U": self.old_logp_U.detach().cpu().numpy(),
            "key": asdict(self.key),
            "adapter_version": self.adapter_version,
        }

    @staticmethod
    def from_numpy(message: Mapping[str, Any], device: torch.device | str = "cpu") -> Trajectory:
        """The inverse of ``to_numpy``. Arrays are copied: those from an object store are read-only."""
        return Trajectory(
            x_CKDFHW=torch.from_numpy(message["x_CKDFHW"].copy()).to(device),
            sampler=Sampler(**message["sampler"]),
            steps=tuple(message["steps"]),
            excluded_steps=tuple(message["excluded_steps"]),
            old_logp_U=torch.from_numpy(message["old_logp_U"].copy()).to(device),
            key=NoiseKey(**message["key"]),
            adapter_version=message["adapter_version"],
        )


@torch.no_grad()
def rollout(
    policy: Policy,
    algorithm: Algorithm,
    text_1TE: Tensor,
    shape: LatentShape,
    sampler: Sampler,
    key: NoiseKey,
    *,
    adapter_version: int,
    steps: Sequence[int] | None = None,
) -> Trajectory:
    """Generate one candidate chunk by chunk; ``steps`` are those to train (default: every random one).

    States are float32, or float64 when the text embedding is; they live on the text's device.
    """
    choice = sampler.choose_steps(steps)
    dtype = torch.float64 if text_1TE.dtype == torch.float64 else torch.float32
    x_CKDFHW = torch.empty(
        (shape.chunks, sampler.steps + 1, shape.channels, shape.frames, shape.height, shape.width),
        dtype=dtype,
        device=text_1TE.device,
    )
    units, weights = algorithm.units(choice.trained), algorithm.chunk_weights([shape.frames] * shape.chunks)
    old_logp_U = x_CKDFHW.new_zeros(max(units) + 1)
    unit_of = dict(zip(choice.trained, units, strict=True))
    cache = policy.new_cache()
    for c, states_KDFHW in enumerate(x_CKDFHW):
        for k, logp in _denoise(policy, text_1TE, cache, sampler, key, c, states_KDFHW):
            if k in unit_of:
                old_logp_U[unit_of[k]] += weights[c] * logp
        if c + 1 < shape.chunks:
            policy.commit(states_KDFHW[-1][None], text_1TE, cache)
    return Trajectory(x_CKDFHW, sampler, choice.trained, choice.excluded, old_logp_U, key, adapter_version)


def _denoise(
    policy: Policy,
    text_1TE: Tensor,
    cache: Any,
    sampler: Sampler,
    key: NoiseKey,
    c: int,
    states_KDFHW: Tensor,
) -> Iterator[tuple[int, Tensor]]:
    """Fill the K+1 states of chunk ``c`` and yield the log-prob of every random transition."""
    states_KDFHW[0] = key.draw(c, 0, states_KDFHW.shape[1:])
    for k in range(sampler.steps):
        x, new = states_KDFHW[k][None], states_KDFHW[k + 1][None]
        v = policy.velocity(x, sampler.sigmas[k], text_1TE, cache)
        new.copy_(sampler.mean(x, v, k))
        std = sampler.std(k)
        if std > 0:
            new += std * key.draw(c, k + 1, new.shape).to(new)
            yield k, sampler.log_prob(x, v, new, k)[0]
