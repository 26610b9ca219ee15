"""Two replays against one: time of the stage-centric and the merged kernel on the tiny policy, by latent length.

Per candidate: ``loss`` and ``grad`` are the two replays of a trainer that waits for its rewards; ``merged`` is the one
replay that keeps a buffer per denoising step, with g+ and g- made from the buffers and the advantage applied. Loss is
forward-only, so merging saves about its share; ``merged / grad`` is what the buffers cost over a plain backward. One
thread of one CPU, float32: it says how the kernels compare with each other, nothing about a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import cell, conditions, markdown, rotated, spread, write
from torch import Tensor

from stagebreaker.executor.algorithms.dancegrpo import DanceGRPO
from stagebreaker.executor.algorithms.rollout import LatentShape, NoiseKey, rollout
from stagebreaker.executor.algorithms.sampler import Sampler, warped_sigmas
from stagebreaker.executor.kernels.merged_replay import merged_replay
from stagebreaker.executor.kernels.reward_async import compress
from stagebreaker.executor.kernels.stage_centric import grad_replay, loss_replay
from stagebreaker.executor.models.causal_wan import CausalPolicy
from stagebreaker.executor.models.load import load_policy
from stagebreaker.executor.models.lora import FlatAdapter
from stagebreaker.executor.models.tiny import LATENT_CHANNELS, TEXT_DIM, TEXT_TOKENS
from stagebreaker.sim.workload import load_workload

WORKLOAD = load_workload("tiny-dancegrpo")
LENGTHS = (3, 9, 15, 21)
"""Latent frames."""
ADVANTAGE = 0.7


class Bench:
    """One candidate of one latent length, rolled out by the adapter before it moved."""

    def __init__(self, latent_frames: int) -> None:
        w = WORKLOAD
        model = load_policy("tiny", torch.float32, "cpu", w.seed)
        self.policy, self.adapter = (
            CausalPolicy(model),
            FlatAdapter(model, w.lora_rank, w.lora_alpha, w.lora_targets, 0),
        )
        self.algorithm = DanceGRPO(w.trained_steps, w.clip_low, w.clip_high)
        self.text_1TE = torch.randn(1, TEXT_TOKENS, TEXT_DIM, generator=torch.Generator().manual_seed(1))
        noise_P = torch.randn(self.adapter.numel, generator=torch.Generator().manual_seed(2))
        self.adapter.load(0.05 * noise_P, 0)
        shape = LatentShape(latent_frames // w.chunk_frames, LATENT_CHANNELS, w.chunk_frames, *w.latent_size)
        sampler = Sampler(w.sampler, warped_sigmas(w.denoise_steps, w.shift), w.eta)
        self.trajectory = rollout(
            self.policy, self.algorithm, self.text_1TE, shape, sampler, NoiseKey(0, 0, 0), adapter_version=0
        )
        self.adapter.load(0.0501 * noise_P, 1)
        self.common = (self.algorithm, self.text_1TE, self.trajectory)
        self.logp_U = self.loss()

    def loss(self) -> Tensor:
        return loss_replay(self.policy, *self.common)

    def grad(self) -> Tensor:
        old_U = self.trajectory.old_logp_U
        return grad_replay(self.policy, self.adapter, *self.common, self.logp_U, old_U, ADVANTAGE)

    def merged(self) -> Tensor:
        units = merged_replay(self.policy, self.adapter, *self.common)
        return compress(self.algorithm, units.logp_U, self.trajectory.old_logp_U, units.g_UP).apply(ADVANTAGE)


WAYS: dict[str, Callable[[Bench], Tensor]] = {"loss": Bench.loss, "grad": Bench.grad, "merged": Bench.merged}


def measure(bench: Bench, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each way, interleaved; the first round warms up. Raises where the gradients differ."""
    taken: dict[str, list[float]] = {name: [] for name in WAYS}
    for n in range(repeats + 1):
        found = {}
        for name, way in rotated(WAYS, n):
            start = time.perf_counter()
            found[name] = way(bench)
            if n:
                taken[name].append(1e3 * (time.perf_counter() - start))
        difference = float((found["merged"] - found["grad"]).abs().max() / found["grad"].abs().max())
        if not difference <= 1e-5:
            raise SystemExit(f"the two gradients differ by {difference:.1e}: these times would mean nothing")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--repeats", type=int, default=31)
    options = parser.parse_args()
    torch.set_num_threads(1)
    where = conditions("torch", "diffusers")

    data: dict[str, Any] = {"workload": f"{WORKLOAD.name}, {WORKLOAD.resolution}, float32, one thread", "lengths": {}}
    rows = []
    for frames in LENGTHS:
        bench = Bench(frames)
        ms = measure(bench, options.repeats)
        both = [loss + grad for loss, grad in zip(ms["loss"], ms["grad"], strict=True)]
        saved = [two / one for two, one in zip(both, ms["merged"], strict=True)]
        buffers = [one / grad for one, grad in zip(ms["merged"], ms["grad"], strict=True)]
        share = [loss / two for loss, two in zip(ms["loss"], both, strict=True)]
        data["lengths"][str(frames)] = {
            "adapter_parameters": bench.adapter.numel,
            "ms": ms,
            "stage_centric_over_merged": spread(saved),
            "merged_over_grad": spread(buffers),
            "loss_share": spread(share),
        }
        rows.append(
            (
                str(frames),
                *(cell(ms[name], 0) for name in WAYS),
                cell(saved, 2, "x"),
                cell(buffers, 3, "x"),
                f"{100 * spread(share)['median']:.0f} %",
            )
        )
    columns = ("latent frames", "loss, ms", "grad, ms", "merged, ms", "(loss + grad) / merged", "merged / grad", "loss")
    note = f"One candidate, {WORKLOAD.trained_steps} trained steps, {options.repeats} rounds each, interleaved."
    write(options.out, "kernels", f"Kernels: {data['workload']}", where, data, [note, "", *markdown(columns, rows)])


if __name__ == "__main__":
    main()
