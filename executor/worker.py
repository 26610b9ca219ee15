"""Worker: one GPU's engines, and the body of every task that can run on it.

A plain class, so that tests call it directly and Ray wraps it once. A task is a deterministic function of its order
(adapter version, seed, inputs): large results stay in the worker's store until another worker imports them, small ones
(log-probs, scores) go back with the result. Every task names the adapter version it needs and is refused without it.
The graph decides the mathematics: a grad_replay that is given an advantage seeds with it (stage-centric), one that is
not keeps g+ and g- (reward-asynchronous). It does not know schedules, clocks or other workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stagebreaker.executor import checkpoint
from stagebreaker.executor.algorithms.dancegrpo import DanceGRPO
from stagebreaker.executor.algorithms.rollout import LatentShape, NoiseKey, Trajectory, rollout
from stagebreaker.executor.algorithms.sampler import Sampler, warped_sigmas
from stagebreaker.executor.kernels import stage_centric
from stagebreaker.executor.kernels.merged_replay import merged_replay
from stagebreaker.executor.kernels.replay import old_log_probs
from stagebreaker.executor.kernels.reward_async import Accumulator, ClipCounts, SignGradients, compress
from stagebreaker.executor.kernels.update import AdamWConfig, FlatAdamW
from stagebreaker.executor.messages import Message, pack, to_numpy, to_tensor, unpack
from stagebreaker.executor.models.causal_wan import CausalPolicy
from stagebreaker.executor.models.load import load_judge_model, load_policy, load_text_encoder, load_vae
from stagebreaker.executor.models.lora import FlatAdapter
from stagebreaker.executor.rewards.judges import TinyVlmJudge
from stagebreaker.executor.rewards.protocol import Request
from stagebreaker.profiles.document import InputError
from stagebreaker.sim.dataflow import Task
from stagebreaker.sim.schedules import SCHEDULES
from stagebreaker.sim.workload import Workload

LATENT_CHANNELS = 16
_GRADIENTS = {"sign_gradients": "gradient"}
"""g+ and g- lie where a single gradient would."""

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Order:
    """One task with what the controller knows about it.

    ``values`` holds the small results of the tasks it needs, by task id; ``parts`` the number of gradient parts of each
    candidate of its mini-batch; ``prompts`` one prompt per group.
    """

    task: Task
    rl_step: int
    adapter_version: int
    prompts: tuple[str, ...]
    values: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[int, int] = field(default_factory=dict)


class VersionError(RuntimeError):
    """A task came for an adapter version that is not on this GPU, or arrived damaged."""


def check_executable(workload: Workload, schedule: str | None = None) -> None:
    """Raise ``InputError`` for what the engines do not do yet; a plan of it can still run on the emulated backend."""
    if workload.algorithm != "dancegrpo":
        raise InputError(
            f"algorithm={workload.algorithm!r} has no kernels yet; real engines run dancegrpo, "
            f"the emulated backend runs any plan"
        )
    if workload.reward_shape == "anchor":
        raise InputError("reward_shape='anchor' has no judge yet; real engines run pointwise and all_pairs")
    if workload.reference_replay:
        raise InputError("reference_replay=true has no loss that uses it yet; real engines run it with false")
    if workload.failed_rewards:
        raise InputError(
            f"failed_rewards={list(workload.failed_rewards)} is a what-if of the planner; leave it out of a run, whose "
            f"judges say themselves what they cannot score"
        )
    if workload.selects:
        raise InputError(
            f"train_per_group={workload.train_per_group} is not selected by any engine yet; real engines run "
            f"{workload.group_size} (group_size), the emulated backend runs any plan"
        )
    if schedule is not None and not SCHEDULES[schedule].runs:
        others = ", ".join(name for name, s in SCHEDULES.items() if s.runs)
        raise InputError(f"schedule {schedule} is simulated only; run {others}, or any with --backend emulated")


def check_models(workload: Workload) -> None:
    """Raise ``InputError`` for a model that is neither tiny nor on this machine, before anything is started."""
    for what in ("policy", "vae", "text_encoder", "judge"):
        source = getattr(workload, what)
        if source != "tiny" and not Path(source).exists():
            raise InputError(
                f"{what}={source} is no path on this machine; real engines run 'tiny' or the path of a checkpoint "
                f"(docs/documents.md), --backend emulated runs any plan"
            )


class Worker:
    """Engines are loaded when a task first needs them; ``device`` is "cpu" or "cuda"."""

    def __init__(
        self, workload: Workload, device: str = "cpu", dtype: str = "float32", threads: int | None = 1
    ) -> None:
        check_executable(workload)
        check_models(workload)
        if threads is not None and device == "cpu":
            torch.set_num_threads(threads)
        self.workload, self.device, self.dtype = workload, device, DTYPES[dtype]
        self.store: dict[tuple[str, str], Any] = {}
        self.vectors: dict[int, Tensor] = {}
        self.accumulators: dict[int, Accumulator] = {}
        self.algorithm = DanceGRPO(
            workload.trained_steps,
            workload.clip_low,
            workload.clip_high,
            workload.advantage_clamp,
            workload.advantage_eps,
        )
        self.algorithm.assert_homogeneous()
        self.sampler = Sampler(workload.sampler, warped_sigmas(workload.denoise_steps, workload.shift), workload.eta)
        height, width = workload.latent_size
        self.shape = LatentShape.of_video(workload.latent_frames, workload.chunk_frames, LATENT_CHANNELS, height, width)

    # -- engines ---------------------------------------------------------------------------------------------

    @cached_property
    def _policy_and_adapter(self) -> tuple[CausalPolicy, FlatAdapter]:
        w = self.workload
        model = load_policy(w.policy, self.dtype, self.device, w.seed)
        adapter = FlatAdapter(model, w.lora_rank, w.lora_alpha, w.lora_targets, w.seed)
        self._initial_P = adapter.vector()
        self.vectors.setdefault(0, adapter.vector())
        return CausalPolicy(model, w.window_frames, w.sink_frames), adapter

    @property
    def policy(self) -> CausalPolicy:
        """The causal video model."""
        return self._policy_and_adapter[0]

    @property
    def adapter(self) -> FlatAdapter:
        """Its trained part."""
        return self._policy_and_adapter[1]

    @cached_property
    def vae(self) -> Any:
        """Latents to pixels."""
        return load_vae(
            self.workload.vae,
            self.dtype if self.dtype != torch.float64 else torch.float32,
            self.device,
            self.workload.seed,
        )

    @cached_property
    def text_encoder(self) -> Any:
        """Prompts to conditioning."""
        return load_text_encoder(self.workload.text_encoder, self.dtype, self.device, self.workload.seed)

    @cached_property
    def judge(self) -> TinyVlmJudge:
        """The reward model."""
        model, processor = load_judge_model(self.workload.judge, torch.float32, self.device, self.workload.seed)
        return TinyVlmJudge(model, processor, self.workload.judge_tokens)

    @cached_property
    def optimizer(self) -> FlatAdamW:
        """On the update GPU only."""
        w = self.workload
        config = AdamWConfig(lr=w.learning_rate, weight_decay=w.weight_decay, max_grad_norm=w.max_grad_norm)
        return FlatAdamW(self.adapter, config)

    def warm(self, kinds: tuple[str, ...]) -> None:
        """Load the engines these task kinds need, so that no measured task does."""
        needs = {
            "encode_prompt": ("text_encoder",),
            "vae_decode": ("vae",),
            "score": ("judge",),
            "request": ("judge",),
            "update": ("adapter", "optimizer"),
            "generate": ("policy",),
            "switch": (),
            "fold": (),
        }
        for kind in kinds:
            for engine in needs.get(kind, ("policy",)):
                getattr(self, engine)

    def _use(self, version: int) -> FlatAdapter:
        adapter = self.adapter
        if version not in self.vectors:
            raise VersionError(f"adapter version {version} is not on this GPU; it has {sorted(self.vectors)}")
        if adapter.version != version:
            adapter.load(self.vectors[version], version)
        return adapter

    # -- tasks -----------------------------------------------------------------------------------------------

    def run(self, order: Order) -> Any:
        """Do one task; the small part of its result."""
        value = getattr(self, f"_{order.task.kind}")(order)
        if self.device != "cpu":
            torch.cuda.synchronize()
        return value

    def _encode_prompt(self, order: Order) -> None:
        assert order.task.group is not None
        self.store[order.task.id, "embeddings"] = self.text_encoder.encode(order.prompts[order.task.group])

    def _generate(self, order: Order) -> list[float]:
        candidate = _candidate(order)
        self._use(order.adapter_version)
        text = self._input(order, "embeddings")
        key = NoiseKey(self.workload.seed, order.rl_step, candidate)
        steps = range(self.workload.trained_steps)
        trajectory = rollout(
            self.policy,
            self.algorithm,
            text,
            self.shape,
            self.sampler,
            key,
            adapter_version=order.adapter_version,
            steps=steps,
        )
        self.store[order.task.id, "trajectory"] = (trajectory, text)
        self.store[order.task.id, "latents"] = trajectory.clean[None]
        return _floats(trajectory.old_logp_U)

    def _vae_decode(self, order: Order) -> None:
        self.store[order.task.id, "frames"] = self.vae.decode(self._input(order, "latents"))

    def _score(self, order: Order) -> dict[str, Any]:
        """Request name -> outcome, all members as one batch."""
        requests = [self._asked(name, order) for name in order.task.members]
        outcomes = self.judge.score(requests)
        return {request.key: outcome for request, outcome in zip(requests, outcomes, strict=True)}

    def _request(self, order: Order) -> dict[str, Any]:
        """One request of a judge that serves continuously."""
        return self._score(order)

    def _asked(self, name: str, order: Order) -> Request:
        videos = name.split("-")
        frames = tuple(self.store[f"vae_decode:{v}", "frames"] for v in videos)
        return Request(name, frames, order.prompts[self.workload.group_of(int(videos[0]))])

    def _old_replay(self, order: Order) -> list[float]:
        """Under the adapter frozen at rollout, whatever has been trained since."""
        return self._loss_replay(order)

    def _loss_replay(self, order: Order) -> list[float]:
        self._use(order.adapter_version)
        trajectory, text = self._input(order, "trajectory")
        return _floats(stage_centric.loss_replay(self.policy, self.algorithm, text, trajectory, order.task.steps))

    def _grad_replay(self, order: Order) -> dict[str, Any]:
        adapter = self._use(order.adapter_version)
        trajectory, text = self._input(order, "trajectory")
        steps = order.task.steps
        advantage = self._advantage(order)
        if advantage is not None:
            return self._seeded_replay(order, trajectory, text, advantage["values"].get(str(_candidate(order))))
        units = merged_replay(self.policy, adapter, self.algorithm, text, trajectory, steps)
        old_U = self._old(order, trajectory, units.logp_U)
        gradients = compress(self.algorithm, units.logp_U, old_U, units.g_UP)
        self.store[order.task.id, "gradient"] = gradients
        return _ratio_report(units.logp_U, old_U, gradients.clip, gradients.n_buffers)

    def _seeded_replay(
        self, order: Order, trajectory: Trajectory, text: Tensor, advantage: float | None
    ) -> dict[str, Any]:
        """Stage-centric: the loss replay gave the log-probs, the advantage is known; a masked candidate is skipped."""
        steps = order.task.steps
        logp_U = self._of_steps(order.values[f"loss_replay:{order.task.candidate}"], trajectory, steps)
        old_U = self._old(order, trajectory, logp_U)
        g_P = stage_centric.grad_replay(
            self.policy,
            self.adapter,
            self.algorithm,
            text,
            trajectory,
            logp_U,
            old_U,
            advantage or 0.0,
            steps,
        )
        self.store[order.task.id, "gradient"] = g_P
        return _ratio_report(logp_U, old_U, ClipCounts.of(*self.algorithm.phi(logp_U, old_U)), 1)

    def _old(self, order: Order, trajectory: Trajectory, logp_U: Tensor) -> Tensor:
        """Old log-probs: an old_replay's if there is one, else by old_logprob_source."""
        replayed = order.values.get(f"old_replay:{order.task.candidate}")
        if replayed is not None:
            return self._of_steps(replayed, trajectory, order.task.steps)
        if self.workload.old_logprob_source == "rollout":
            return old_log_probs(self.algorithm, trajectory, order.task.steps)
        return logp_U.detach()

    @staticmethod
    def _of_steps(logp: list[float], trajectory: Trajectory, steps: tuple[int, ...] | None) -> Tensor:
        """The unit log-probs of ``steps`` out of a whole candidate's."""
        wanted = trajectory.select_steps(steps)
        return trajectory.old_logp_U.new_tensor([logp[trajectory.steps.index(k)] for k in wanted])

    @staticmethod
    def _advantage(order: Order) -> Mapping[str, Any] | None:
        return next((value for name, value in order.values.items() if name.startswith("advantage:")), None)

    def _fold(self, order: Order) -> None:
        """A_i g_i into the accumulator, in candidate order; or only scaled here, to be added on the update GPU."""
        advantage = self._advantage(order)
        assert advantage is not None
        a = advantage["values"].get(str(_candidate(order)))
        keys = [(need.task, "gradient") for need in order.task.needs if need.data is not None]
        scaled = None if a is None else [_scale(self.store[key], a) for key in keys]
        for key in keys:
            del self.store[key]
        if self.workload.deterministic:
            self._add(order, _candidate(order), scaled)
        else:
            self.store[order.task.id, "gradient"] = scaled

    def _add(self, order: Order, candidate: int, scaled: list[Tensor] | None) -> None:
        assert order.task.mini_batch is not None
        if order.task.mini_batch not in self.accumulators:
            self.accumulators[order.task.mini_batch] = Accumulator(
                order.parts, self.adapter.numel, self.adapter.params[0].dtype, self.device
            )
        accumulator = self.accumulators[order.task.mini_batch]
        if scaled is None:
            accumulator.mask(candidate)
            return
        for part, g_P in enumerate(scaled):
            accumulator.add(candidate, g_P.to(self.device), part)

    def _update(self, order: Order) -> dict[str, Any]:
        assert order.task.mini_batch is not None
        adapter = self._use(order.adapter_version)
        if not self.workload.deterministic:
            for candidate in sorted(order.parts):
                self._add(order, candidate, self.store.pop((f"fold:{candidate}", "gradient")))
        accumulator = self.accumulators.pop(order.task.mini_batch)
        if accumulator.survivors:
            report = self.optimizer.step(accumulator.finish())
            result = {"grad_norm": report.grad_norm, "clipped": report.clipped, "skipped": False}
        else:  # every candidate is masked: no step, but the version moves on for the tasks that wait for it
            adapter.load(adapter.vector(), order.adapter_version + 1)
            result = {"grad_norm": 0.0, "clipped": False, "skipped": True}
        self.vectors[adapter.version] = adapter.vector()
        return {
            **result,
            "adapter_version": adapter.version,
            "sha256": adapter.sha256(),
            "candidates": len(order.parts),
        }

    def _switch(self, order: Order) -> None:
        """Colocated stages: the engines of one stage leave the GPU, those of the next come back."""
        to_judge = order.task.id.endswith(".judge")
        policy, judge = self.policy.transformer, self.judge.model
        policy.to("cpu" if to_judge else self.device)
        self.vae.vae.to("cpu" if to_judge else self.device)
        judge.to(self.device if to_judge else "cpu")

    def _input(self, order: Order, data: str) -> Any:
        need = next(need for need in order.task.needs if need.data == data)
        return self.store[need.task, data]

    # -- data between workers ----------------------------------------------------------------------------------

    def export(self, task: str, data: str) -> Message:
        """One result as a message for ``receive`` on another worker."""
        if data == "adapter":
            version = max(self.vectors)
            vector = self.vectors[version]
            return {"version": version, "vector": to_numpy(vector), "sha256": self.adapter.sha256(vector)}
        return pack(self.store[task, _GRADIENTS.get(data, data)])

    def receive(self, task: str, data: str, message: Message) -> None:
        """Store what another worker exported; an adapter only if its checksum is right."""
        if data != "adapter":
            value = unpack(message, self.device, self.dtype)
            self.store[task, _GRADIENTS.get(data, data)] = value.to(self.dtype) if data == "embeddings" else value
            return
        vector = to_tensor(message["vector"], self.device)
        found, version = self.adapter.sha256(vector), message["version"]
        if found != message["sha256"]:
            raise VersionError(f"adapter version {version} arrived with checksum {found}, not {message['sha256']}")
        self.vectors[version] = vector

    def adapter_state(self) -> tuple[int, str]:
        """(newest version, its checksum)."""
        version = max(self.vectors, default=0)
        return version, self.adapter.sha256(self.vectors[version])

    def end_step(self) -> int:
        """Forget the step's results and all but the newest adapter; the number of results that were left."""
        left = len(self.store)
        self.store.clear()
        self.accumulators.clear()
        for version in sorted(self.vectors)[:-1]:
            del self.vectors[version]
        return left

    def reset(self) -> None:
        """Back to the state before any step: the seeded adapter at version 0 and a fresh optimizer."""
        self.end_step()
        self.reset_adapter()

    def reset_adapter(self) -> None:
        """The same, keeping the step's results."""
        self.adapter.load(self._initial_P, 0)
        self.vectors = {0: self.adapter.vector()}
        self.__dict__.pop("optimizer", None)

    def save(self, folder: str, step: int) -> None:
        """A checkpoint of adapter and optimizer; atomic."""
        self._use(max(self.vectors))
        checkpoint.save(Path(folder), self.adapter, self.optimizer, step)

    def restore(self, folder: str) -> None:
        """Continue from a checkpoint. Only the update GPU loads it; the others get the adapter by a transfer."""
        checkpoint.load(Path(folder), self.adapter, self.optimizer)
        self.vectors = {self.adapter.version: self.adapter.vector()}


def _candidate(order: Order) -> int:
    assert order.task.candidate is not None
    return order.task.candidate


def _scale(gradient: SignGradients | Tensor, advantage: float) -> Tensor:
    """A_i g_i; a stage-centric gradient carries A_i already."""
    return gradient.apply(advantage) if isinstance(gradient, SignGradients) else gradient


def _ratio_report(logp_U: Tensor, old_U: Tensor, clip: ClipCounts, buffers: int) -> dict[str, Any]:
    return {
        "logp": _floats(logp_U),
        "ratio": _floats(torch.exp(logp_U - old_U)),
        "units": clip.units,
        "cut_if_positive": clip.cut_if_positive,
        "cut_if_negative": clip.cut_if_negative,
        "buffers": buffers,
    }


def _floats(values: Tensor) -> list[float]:
    return [float(v) for v in values]
