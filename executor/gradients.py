"""check-gradients: every way to compute a gradient against the stage-centric reference, on the real policy at toy size.

One policy with the workload's LoRA, sampler settings and clip bounds rolls out a few candidates; the adapter moves, so
that ratios leave 1; then merged replay with g+ and g- is compared with two replays that know the advantage. In float64
``Tensor.float`` keeps float64, because Wan's blocks would otherwise compute in float32 and cap the comparison at 1e-7.
It checks kernels and messages, not schedules, and says nothing about the workload's own checkpoint or resolution.

Shapes: U units, P adapter parameters, T text tokens, E text width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stagebreaker.executor.algorithms.dancegrpo import DanceGRPO
from stagebreaker.executor.algorithms.rollout import LatentShape, NoiseKey, Trajectory, rollout
from stagebreaker.executor.algorithms.sampler import SAMPLERS, Sampler, warped_sigmas
from stagebreaker.executor.kernels import stage_centric
from stagebreaker.executor.kernels.merged_replay import UnitGradients, merged_replay
from stagebreaker.executor.kernels.replay import old_log_probs
from stagebreaker.executor.kernels.reward_async import Accumulator, SignGradients, compress
from stagebreaker.executor.kernels.update import AdamWConfig, FlatAdamW
from stagebreaker.executor.messages import pack, unpack
from stagebreaker.executor.models.causal_wan import CausalPolicy
from stagebreaker.executor.models.load import load_policy
from stagebreaker.executor.models.lora import FlatAdapter
from stagebreaker.executor.models.tiny import LATENT_CHANNELS, TEXT_DIM
from stagebreaker.executor.worker import DTYPES, check_executable
from stagebreaker.sim.workload import Workload

TOLERANCE = {"float64": 1e-12, "float32": 1e-5}
"""max |difference| / max |reference| per dtype."""

ROUNDS = len(TOLERANCE) * len(SAMPLERS)

WRONG = 1.0
"""The error of a result that is not finite, not exactly zero, or not bit-equal where it has to be."""

SHAPE = LatentShape(chunks=2, channels=LATENT_CHANNELS, frames=1, height=4, width=4)
TEXT_TOKENS = 4
MINI_BATCHES = ((0, 1), (2, 3))
ADVANTAGES = {0: 1.3, 1: -0.7, 2: -1.1, 3: 0.5}


@dataclass(frozen=True)
class Case:
    """One comparison; ``clipped`` counts the units whose gradient the clip cut for the advantages used."""

    name: str
    dtype: str
    max_rel_error: float
    same_bits: bool
    clipped: int


def check(workload: Workload, tick: Callable[[int], None] = lambda _: None) -> list[Case]:
    """All cases in every dtype, ``tick(1)`` after each of ``ROUNDS``. ``InputError`` where there are no kernels."""
    check_executable(workload)
    cases = []
    for dtype in TOLERANCE:
        with keep_float64() if dtype == "float64" else nullcontext():
            for sampler in SAMPLERS:
                cases += _Bench(workload, sampler, dtype).cases()
                tick(1)
            cases += _Bench(workload, workload.sampler, dtype).at_the_bounds()
    return cases


@contextmanager
def keep_float64() -> Iterator[None]:
    """``Tensor.float`` leaves float64 alone inside this context."""
    original = torch.Tensor.float

    def keep(x: Tensor, *args: Any, **settings: Any) -> Tensor:
        return x if x.dtype == torch.float64 else original(x, *args, **settings)

    torch.Tensor.float = keep  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.float = original  # type: ignore[method-assign]


def rel_error(got_P: Tensor, want_P: Tensor) -> float:
    """max |difference| / max |want|; where everything is 0, only 0 is right."""
    difference, scale = float((got_P - want_P).abs().max()), float(want_P.abs().max())
    if difference == 0:
        return 0.0
    return difference / scale if scale > 0 and math.isfinite(difference / scale) else WRONG


def log_ratio(rho_U: Tensor) -> Tensor | None:
    """d with exp(d) == rho bit by bit, found easily near 1, where d is finer than rho; None if there is no such d."""
    d_U = rho_U.log()
    for _ in range(64):
        if torch.equal(d_U.exp(), rho_U):
            return d_U
        d_U = d_U + (rho_U - d_U.exp()) / 2
    return None


class _Bench:
    """A policy, its adapter, and the candidates it rolled out before the adapter moved."""

    def __init__(self, workload: Workload, sampler: str, dtype: str) -> None:
        w, self.sampler, self.dtype = workload, sampler, dtype
        precision = DTYPES[dtype]
        model = load_policy("tiny", precision, "cpu", w.seed)
        self.adapter = FlatAdapter(model, w.lora_rank, w.lora_alpha, w.lora_targets, w.seed)
        self.policy = CausalPolicy(model)
        self.algorithm = DanceGRPO(w.trained_steps, w.clip_low, w.clip_high, w.advantage_clamp, w.advantage_eps)
        self.learning_rate = w.learning_rate
        self._replayed: dict[tuple[int, int], UnitGradients] = {}
        text_1TE = torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=torch.Generator().manual_seed(w.seed))
        self.text_1TE = text_1TE.to(precision)
        self.adapter.load(self._near(0.05, 1), 0)  # a LoRA starts at zero, where half of its gradient vanishes
        kind = Sampler(sampler, warped_sigmas(w.denoise_steps, w.shift), w.eta)
        self.trajectories = [
            rollout(
                self.policy,
                self.algorithm,
                self.text_1TE,
                SHAPE,
                kind,
                NoiseKey(w.seed, 0, i),
                adapter_version=0,
                steps=range(w.trained_steps),
            )
            for i in ADVANTAGES
        ]

    def _near(self, distance: float, seed: int) -> Tensor:
        """The adapter's vector plus noise."""
        noise_P = torch.randn(self.adapter.numel, generator=torch.Generator().manual_seed(seed))
        vector_P = self.adapter.vector()
        return vector_P + distance * noise_P.to(vector_P)

    # -- the two ways --------------------------------------------------------------------------------------------

    def _logp(self, i: int, steps: Sequence[int] | None = None) -> Tensor:
        return stage_centric.loss_replay(self.policy, self.algorithm, self.text_1TE, self.trajectories[i], steps)

    def _merged(self, i: int) -> UnitGradients:
        """Replayed once per candidate and adapter version."""
        key = (i, self.adapter.version)
        if key not in self._replayed:
            self._replayed[key] = self._replay(self.trajectories[i])
        return self._replayed[key]

    def _replay(self, trajectory: Trajectory, steps: Sequence[int] | None = None) -> UnitGradients:
        return merged_replay(self.policy, self.adapter, self.algorithm, self.text_1TE, trajectory, steps)

    def _staged(self, i: int, old_U: Tensor, advantage: float, logp_U: Tensor | None = None) -> Tensor:
        """The reference: log-probs from a replay of their own, then a backward seeded with the advantage."""
        known_U = self._logp(i) if logp_U is None else logp_U
        args = (self.policy, self.adapter, self.algorithm, self.text_1TE, self.trajectories[i])
        return stage_centric.grad_replay(*args, known_U, old_U, advantage)

    def _signed(self, units: UnitGradients, old_U: Tensor) -> SignGradients:
        return compress(self.algorithm, units.logp_U, old_U, units.g_UP)

    # -- cases ---------------------------------------------------------------------------------------------------

    def cases(self) -> list[Case]:
        """Everything but the clip bounds, which need no policy of their own."""
        cases = [*self._first_replay()]
        self._two_mini_batches(cases)
        self.adapter.load(self._near(1e-3, 2), self.adapter.version + 1)
        units = self._merged(0)
        ratios = self._chosen_ratios()
        for name, old_U in ratios.items():
            signed = self._signed(units, old_U)
            for advantage in (1.7, -0.6) if name != "mixed" else (1.7, -0.6, 0.0):
                want_P = self._staged(0, old_U, advantage)
                where = f"ratios {name}, A = {advantage:g}"
                cases.append(self._case(where, signed.apply(advantage), want_P, _cut(signed, advantage)))
        mixed_U = ratios["mixed"]
        return [*cases, self._tied(), *self._subsets(mixed_U), *self._messages(mixed_U), self._masked()]

    def at_the_bounds(self) -> list[Case]:
        """Unit log-probs are given here: a ratio exactly on a bound, or two ulp off it, is not one a replay hits."""
        units, cases = self._merged(0), []
        for bound, where in ((1 - self.algorithm.clip_low, "lower"), (1 + self.algorithm.clip_high, "upper")):
            for ulps in (-2, 0, 2):
                rho_U = torch.full_like(units.logp_U, bound)
                for _ in range(abs(ulps)):
                    rho_U = torch.nextafter(rho_U, torch.full_like(rho_U, math.copysign(math.inf, ulps)))
                logp_U = log_ratio(rho_U)
                if logp_U is None:
                    continue
                old_U = torch.zeros_like(logp_U)
                signed = compress(self.algorithm, logp_U, old_U, units.g_UP)
                for advantage in (1.7, -0.6):
                    want_P = self._staged(0, old_U, advantage, logp_U)
                    name = f"{where} bound {ulps:+d} ulp, A = {advantage:g}"
                    cases.append(self._case(name, signed.apply(advantage), want_P, _cut(signed, advantage)))
        return cases

    def _case(self, name: str, got_P: Tensor, want_P: Tensor, clipped: int = 0, exact: bool = False) -> Case:
        same = torch.equal(got_P, want_P)
        error = WRONG if exact and not same else rel_error(got_P, want_P)
        return Case(f"{self.sampler}: {name}", self.dtype, error, same, clipped)

    def _chosen_ratios(self) -> dict[str, Tensor]:
        """Old log-probs of candidate 0 that put its ratios inside, above and below the bounds, or all three in turn."""
        low, high = 1 - self.algorithm.clip_low, 1 + self.algorithm.clip_high
        choices: dict[str, tuple[float, ...]] = {
            "inside": (low**0.5, high**0.5),
            "above": (high**2, high**3),
            "below": (low**2, low**3),
            "mixed": (low**2, high**0.5, high**2),
        }
        logp_U = self._logp(0)
        return {
            name: logp_U - torch.tensor([rho[u % len(rho)] for u in range(len(logp_U))]).to(logp_U).log()
            for name, rho in choices.items()
        }

    def _first_replay(self) -> Iterator[Case]:
        """old_logprob_source first_replay: the replay's own log-probs are the old ones, rho = 1, one buffer."""
        units = self._merged(0)
        signed = self._signed(units, units.logp_U)
        for advantage in (1.7, -0.6):
            want_P = self._staged(0, self._logp(0), advantage)
            got_P = signed.apply(advantage) if signed.n_buffers == 1 else torch.full_like(want_P, math.nan)
            yield self._case(f"first replay, A = {advantage:g}", got_P, want_P, _cut(signed, advantage))

    def _two_mini_batches(self, cases: list[Case]) -> None:
        """Rollout log-probs: mini-batch 1 on the rollout's adapter, mini-batch 2 after an update."""
        recomputed = {i: self._logp(i) for i in ADVANTAGES}
        stored = {i: old_log_probs(self.algorithm, t) for i, t in enumerate(self.trajectories)}
        same = torch.cat(list(recomputed.values())), torch.cat(list(stored.values()))
        cases.append(self._case("recomputed old log-probs are the rollout's", *same, exact=True))
        update = FlatAdamW(self.adapter, AdamWConfig(lr=self.learning_rate))
        for m, members in enumerate(MINI_BATCHES):
            signed = {i: self._signed(self._merged(i), stored[i]) for i in members}
            got_P = _fold({i: signed[i].apply(ADVANTAGES[i]) for i in members}, members)
            want_P = _fold({i: self._staged(i, recomputed[i], ADVANTAGES[i]) for i in members}, members)
            cut = sum(_cut(signed[i], ADVANTAGES[i]) for i in members)
            cases.append(self._case(f"rollout log-probs, mini-batch {m + 1}", got_P, want_P, cut))
            update.step(got_P)

    def _tied(self) -> Case:
        """Equal scores: advantages and gradient are exactly zero."""
        values = self.algorithm.advantages(dict.fromkeys(ADVANTAGES, 0.8345), dict.fromkeys(ADVANTAGES, 0)).values
        signed = {i: self._signed(self._merged(i), self.trajectories[i].old_logp_U) for i in MINI_BATCHES[0]}
        got_P = _fold({i: g.apply(values[i]) for i, g in signed.items()}, MINI_BATCHES[0])
        return self._case("tied group", got_P, torch.zeros_like(got_P), exact=True)

    def _subsets(self, old_U: Tensor) -> Iterator[Case]:
        """Replays of parts of the steps, added on the update GPU, against the whole candidate."""
        steps = self.trajectories[0].steps
        want = {advantage: self._staged(0, old_U, advantage) for advantage in (1.7, -0.6)}
        divisions = {tuple((k,) for k in steps), (steps[:1], steps[1:])}
        for parts in sorted(d for d in divisions if all(d) and len(d) > 1):
            replays = [self._replay(self.trajectories[0], part) for part in parts]
            olds = [old_U[[steps.index(k) for k in part]] for part in parts]
            signed = [self._signed(units, old) for units, old in zip(replays, olds, strict=True)]
            for advantage, want_P in want.items():
                accumulator = Accumulator({0: len(parts)}, self.adapter.numel, self.text_1TE.dtype)
                for number, gradient in enumerate(signed):
                    accumulator.add(0, gradient.apply(advantage), number)
                name = f"steps {' + '.join(','.join(map(str, part)) for part in parts)}, A = {advantage:g}"
                cut = sum(_cut(gradient, advantage) for gradient in signed)
                yield self._case(name, accumulator.finish(), want_P, cut)

    def _messages(self, old_U: Tensor) -> Iterator[Case]:
        """What another worker receives, trajectory or g+ and g-, gives the same bits."""
        travel: Callable[[Any], Any] = lambda value: unpack(pack(value), "cpu", self.text_1TE.dtype)  # noqa: E731
        here = self._signed(self._merged(0), old_U)
        trajectory, _ = travel((self.trajectories[0], self.text_1TE))
        there = {"trajectory": self._signed(self._replay(trajectory), old_U), "g+ and g-": travel(here)}
        for name, signed in there.items():
            for advantage in (1.7, -0.6):
                pair = signed.apply(advantage), here.apply(advantage)
                yield self._case(f"message: {name}, A = {advantage:g}", *pair, _cut(here, advantage), exact=True)

    def _masked(self) -> Case:
        """A candidate without a score leaves the mean, the deviation, the sum and the normaliser."""
        scores: dict[int, float | None] = {0: 0.2, 1: None, 2: 0.9, 3: 0.4}
        found = self.algorithm.advantages(scores, dict.fromkeys(scores, 0), on_unscorable="mask_candidate").values
        old = {i: self.trajectories[i].old_logp_U for i in found}
        signed = {i: self._signed(self._merged(i), old[i]) for i in found}
        got_P = _fold({i: signed[i].apply(a) for i, a in found.items()}, tuple(scores))
        want_P = sum((self._staged(i, old[i], a) for i, a in found.items()), torch.zeros_like(got_P)) / len(found)
        return self._case("candidate 1 masked", got_P, want_P, sum(_cut(signed[i], a) for i, a in found.items()))


def _fold(gradients: Mapping[int, Tensor], members: Sequence[int]) -> Tensor:
    """The mini-batch gradient; the last to arrive comes first, and members without a gradient are masked."""
    some_P = next(iter(gradients.values()))
    accumulator = Accumulator(dict.fromkeys(members, 1), len(some_P), some_P.dtype)
    for i in sorted(members, reverse=True):
        add = partial(accumulator.add, i, gradients[i]) if i in gradients else partial(accumulator.mask, i)
        add()
    return accumulator.finish()


def _cut(signed: SignGradients, advantage: float) -> int:
    """Units whose gradient the clip cuts at this advantage."""
    if advantage == 0:
        return 0
    return signed.clip.cut_if_positive if advantage > 0 else signed.clip.cut_if_negative
