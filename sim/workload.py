"""Workload and Cluster: what is trained, how it is scored, and on which GPUs.

A workload holds everything an RL step's dataflow and mathematics depend on; a cluster says which GPUs there are.
Neither says where a task runs: that is a placement (``sim.plan``). Named workloads ship in ``sim/data``.
"""

from __future__ import annotations

import random
from importlib import resources
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import yaml
from pydantic import Field, field_validator, model_validator

from stagebreaker.profiles.document import Document, InputError, Model, load_yaml, nearest, read_mapping
from stagebreaker.profiles.judges import find_judge
from stagebreaker.profiles.models import find_model
from stagebreaker.profiles.roofline import Hardware, predicted_profile
from stagebreaker.profiles.table import Profile

RESOLUTIONS = {"360p": "352x640", "480p": "480x832"}
Positive = Annotated[int, Field(ge=1, le=1_000_000)]
"""Up to a million: more is a slip."""


COST_FIELDS = (
    "policy",
    "vae",
    "text_encoder",
    "judge",
    "latent_frames",
    "resolution",
    "chunk_frames",
    "denoise_steps",
    "trained_steps",
    "judge_tokens",
    "lora_rank",
    "lora_targets",
)


class Workload(Document):
    """workload.yaml. Candidates of one group share a prompt and are compared with each other."""

    WHAT: ClassVar[str] = "workload"
    name: str
    algorithm: Literal["dancegrpo", "flow_grpo", "kvpo"]
    policy: str
    vae: str = "tiny"
    text_encoder: str = "tiny"
    judge: str
    candidates: Positive
    group_size: Positive
    mini_batches: Positive
    latent_frames: Positive
    resolution: str
    chunk_frames: Positive
    denoise_steps: Positive
    trained_steps: Positive
    old_logprob_source: Literal["rollout", "first_replay", "recompute"] = "rollout"
    advantage_scope: Literal["group", "minibatch", "batch"] = "group"
    reward_shape: Literal["pointwise", "anchor", "all_pairs"] = "pointwise"
    reference_replay: bool = False
    kl_beta: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a KL to the reference: of Gaussians (means) for flow_grpo, of log-probabilities for kvpo."""
    train_per_group: Positive | None = None
    """How many of each group are trained, chosen when its rewards are known (best-of-n); None: all."""
    judge_tokens: Positive = 64
    window_frames: Positive | None = None
    sink_frames: Annotated[int, Field(ge=0)] = 0
    lora_rank: Positive = 16
    lora_alpha: Positive = 16
    lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    sampler: Literal["dance_sde", "renoise"] = "dance_sde"
    eta: Annotated[float, Field(gt=0)] = 0.3
    shift: Annotated[float, Field(gt=0)] = 5.0
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    clip_high: Annotated[float, Field(gt=0)] = 1e-4
    advantage_clamp: Annotated[float, Field(gt=0)] = 5.0
    advantage_eps: Annotated[float, Field(ge=0)] = 1e-8
    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    on_unscorable: Literal["fail", "drop_group", "mask_candidate"] = "fail"
    failed_rewards: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """A what-if: candidates whose reward does not come; ``on_unscorable`` says what becomes of them."""
    deterministic: bool = True
    seed: Annotated[int, Field(ge=0)] = 0
    profile: str | None = None
    default_gpus: Annotated[int, Field(ge=2)] = 2

    @field_validator("resolution", mode="before")
    @classmethod
    def _pixels(cls, value: object) -> str:
        value = RESOLUTIONS.get(str(value), str(value))
        height, _, width = value.partition("x")
        if not (
            height.isdigit()
            and width.isdigit()
            and int(height) % 8 == 0
            and int(width) % 8 == 0
            and int(height) * int(width)
        ):
            raise ValueError(
                f"resolution={value!r} must be HxW in pixels, multiples of 8, or one of {', '.join(RESOLUTIONS)}"
            )
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Workload:
        b, n, m = self.candidates, self.group_size, self.mini_batches
        if n < 2:
            raise ValueError(f"group_size={n} must be at least 2: an advantage needs a spread within its group")
        if b % n:
            raise ValueError(f"candidates={b} must be a multiple of group_size={n}")
        if m > b:
            raise ValueError(f"mini_batches={m} must be in 1..{b} (candidates={b})")
        if self.latent_frames % self.chunk_frames:
            raise ValueError(
                f"latent_frames={self.latent_frames} must be a multiple of chunk_frames={self.chunk_frames}"
            )
        most = self.denoise_steps - (self.algorithm != "kvpo")
        if self.trained_steps > most:
            raise ValueError(
                f"trained_steps={self.trained_steps} must be in 1..{most} (denoise_steps={self.denoise_steps}"
                + ("; the last step is deterministic and has no probability)" if most < self.denoise_steps else ")")
            )
        if self.advantage_scope == "minibatch" and b // m < 2:
            raise ValueError(
                f"mini_batches={m} must be at most {b // 2} with advantage_scope='minibatch': one score has no spread"
            )
        self._check_kl()
        self._check_selection()
        self._check_failed()
        if self.algorithm == "kvpo":
            if (b // n) % m:
                raise ValueError(
                    f"mini_batches={m} must divide the {b // n} groups: a KVPO group may not be split, "
                    f"its softmax needs all branches at one adapter"
                )
            if self.reward_shape != "anchor":
                raise ValueError(f"reward_shape={self.reward_shape!r} must be 'anchor' for KVPO")
        return self

    def _check_kl(self) -> None:
        if not self.kl_beta:
            return
        if self.algorithm == "dancegrpo":
            raise ValueError(
                f"kl_beta={self.kl_beta} must be 0 with algorithm='dancegrpo', which has no KL; use flow_grpo or kvpo"
            )
        if not self.reference_replay:
            raise ValueError(f"kl_beta={self.kl_beta} needs the reference; set reference_replay: true, or kl_beta: 0")

    def _check_selection(self) -> None:
        n, groups = self.train_per_group, self.candidates // self.group_size
        if n is None:
            return
        if n > self.group_size:
            raise ValueError(f"train_per_group={n} must be in 1..{self.group_size} (group_size={self.group_size})")
        if self.algorithm == "kvpo" and n < self.group_size:
            raise ValueError(
                f"train_per_group={n} must be {self.group_size} with algorithm='kvpo': its softmax needs all branches"
            )
        if groups % self.mini_batches:
            raise ValueError(
                f"mini_batches={self.mini_batches} must divide the {groups} groups with train_per_group: otherwise "
                f"rewards would decide which mini-batch a candidate is in, and no replay could start before them"
            )

    def _check_failed(self) -> None:
        failed = self.failed_rewards
        if not failed:
            return
        if len(set(failed)) < len(failed) or max(failed) >= self.candidates:
            raise ValueError(
                f"failed_rewards={list(failed)} must name candidates of 0..{self.candidates - 1}, each once"
            )
        if self.on_unscorable == "fail" or (self.on_unscorable == "mask_candidate" and self.algorithm == "kvpo"):
            allowed = "drop_group" if self.algorithm == "kvpo" else "drop_group or mask_candidate"
            raise ValueError(
                f"failed_rewards={list(failed)} with on_unscorable={self.on_unscorable!r} leaves no step to look at; "
                f"set on_unscorable to {allowed}"
            )
        for m in range(self.mini_batches):
            if not self.trained_members(m):
                raise ValueError(
                    f"failed_rewards={list(failed)} with on_unscorable={self.on_unscorable!r} leave nobody of "
                    f"mini-batch {m} to train; name fewer"
                )

    @property
    def gaussian_kl(self) -> bool:
        """The loss has a KL between Gaussians, whose gradient needs the reference's means (latent-sized)."""
        return self.algorithm == "flow_grpo" and self.kl_beta > 0

    @property
    def selects(self) -> bool:
        """Some candidates are dropped when rewards are known."""
        chosen = self.train_per_group is not None and self.train_per_group < self.group_size
        return chosen or bool(self.failed_rewards)

    def trained_of(self, group: int) -> tuple[int, ...]:
        """Candidates of a group that are trained, ascending.

        Without its reward a candidate, or its whole group, is not (``on_unscorable``), nor is a single one that is
        left. Among the others rewards decide; before them the candidates of a group are exchangeable, so a draw seeded
        by (seed, group) stands for it: the same for every schedule and placement, blind to where a candidate runs.
        """
        members = [i for i in self.group_members(group) if i not in self.failed_rewards]
        if len(members) < (self.group_size if self.on_unscorable == "drop_group" else 2):
            return ()
        wanted = self.train_per_group or self.group_size
        if wanted < len(members):
            members = sorted(random.Random(f"{self.seed}/{group}").sample(members, wanted))
        return tuple(members)

    def trained_members(self, mini_batch: int) -> tuple[int, ...]:
        """Candidates of a mini-batch that its update learns from: all, or those of its groups that are trained."""
        members = self.mini_batch_members(mini_batch)
        if not self.selects:
            return tuple(members)
        trained = {i for g in dict.fromkeys(self.group_of(i) for i in members) for i in self.trained_of(g)}
        return tuple(i for i in members if i in trained)

    @property
    def groups(self) -> int:
        """Number of groups (prompts)."""
        return self.candidates // self.group_size

    @property
    def chunks(self) -> int:
        """Number of chunks per video."""
        return self.latent_frames // self.chunk_frames

    @property
    def latent_size(self) -> tuple[int, int]:
        """Latent (H, W): pixels over the VAE's stride of 8."""
        height, width = self.resolution.split("x")
        return int(height) // 8, int(width) // 8

    def group_of(self, candidate: int) -> int:
        """Group of a candidate."""
        return candidate // self.group_size

    def group_members(self, group: int) -> range:
        """Candidates of a group."""
        return range(group * self.group_size, (group + 1) * self.group_size)

    def mini_batch_members(self, mini_batch: int) -> range:
        """Candidates of a mini-batch: contiguous, sizes differing by at most one, the larger ones first."""
        size, extra = divmod(self.candidates, self.mini_batches)
        start = mini_batch * size + min(mini_batch, extra)
        return range(start, start + size + (mini_batch < extra))

    def mini_batch_of(self, candidate: int) -> int:
        """Mini-batch of a candidate."""
        return next(m for m in range(self.mini_batches) if candidate in self.mini_batch_members(m))

    def cost_settings(self) -> dict[str, str | int]:
        """The fields that decide what a task costs."""
        fields = {name: getattr(self, name) for name in COST_FIELDS}
        return {name: ",".join(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    def check_profile(self, profile: Profile) -> None:
        """Raise ``InputError`` if the profile's costs are those of another workload."""
        mine = self.cost_settings()
        for name, value in profile.settings.items():
            if name in mine and mine[name] != value:
                raise InputError(
                    f"profile {profile.name!r} was taken with {name}={value}, workload {self.name} has "
                    f"{name}={mine[name]}; profile that workload, or plan the one that was profiled"
                )

    def with_(self, **changes: object) -> Workload:
        """A copy with some fields changed, validated."""
        return Workload.parse({**self.model_dump(mode="json"), **changes}, f"workload {self.name}")


class Gpu(Model):
    """One GPU."""

    name: str
    kind: str
    node: str = "node0"
    memory_bytes: Annotated[int, Field(ge=0)] = 0


class Cluster(Document):
    """cluster.yaml: GPUs in a fixed order; the first ``actors`` of them roll out, the rest score."""

    WHAT: ClassVar[str] = "cluster"
    gpus: tuple[Gpu, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        names = [gpu.name for gpu in self.gpus]
        if not names:
            raise ValueError("gpus is empty; name at least one GPU")
        if len(set(names)) != len(names):
            raise ValueError("gpus names a GPU twice; give each its own name")
        return self

    @classmethod
    def equal(cls, count: int, kind: str, memory_bytes: int = 0) -> Cluster:
        """``count`` equal GPUs on one node."""
        if count < 1:
            raise InputError(f"gpus={count} must be at least 1")
        return cls(gpus=tuple(Gpu(name=f"gpu{i}", kind=kind, memory_bytes=memory_bytes) for i in range(count)))


def shipped_workloads() -> list[str]:
    """Names of the workloads that ship with the package."""
    folder = resources.files("stagebreaker.sim.data")
    return sorted(f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml"))


def load_workload(source: str, overrides: tuple[str, ...] = ()) -> Workload:
    """A shipped workload by name, or a YAML/JSON file by path, with ``key=value`` overrides applied."""
    if source in shipped_workloads():
        data = load_yaml((resources.files("stagebreaker.sim.data") / f"{source}.yaml").read_text("utf-8"))
    elif Path(source).suffix or "/" in source:
        data = read_mapping(Path(source))
    else:
        raise InputError(
            f"workload {source!r} is neither a shipped workload nor a file; {nearest(source, shipped_workloads())}"
        )
    if isinstance(data, dict):
        data = {**data, **parse_overrides(overrides)}
    return Workload.parse(data, f"workload {source}")


def parse_overrides(overrides: tuple[str, ...]) -> dict[str, object]:
    """``key=value`` pairs, values read as YAML; an unknown key names the nearest known one."""
    result: dict[str, object] = {}
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals:
            raise InputError(f"--set {item!r} must be key=value")
        if key not in Workload.model_fields:
            raise InputError(f"--set {item!r}: unknown key {key!r}; {nearest(key, Workload.model_fields)}")
        try:
            result[key] = load_yaml(text)
        except yaml.YAMLError:
            raise InputError(f"--set {item!r}: the value is not YAML; quote it") from None
    return result


def predicted_costs(workload: Workload, hardware: Hardware, name: str = "", sigma: float | None = None) -> Profile:
    """What FLOP and byte formulas say of a workload's tasks and data on a GPU; ``sigma`` as ``roofline`` has it."""
    return predicted_profile(
        find_model(workload.policy),
        find_judge(workload.judge),
        hardware,
        latent_frames=workload.latent_frames,
        resolution=workload.resolution,
        chunk_frames=workload.chunk_frames,
        denoise_steps=workload.denoise_steps,
        trained_steps=workload.trained_steps,
        lora_rank=workload.lora_rank,
        lora_targets=workload.lora_targets,
        judge_tokens=workload.judge_tokens,
        name=name or f"roofline-{workload.name}",
        workload=workload.name,
        settings=workload.cost_settings(),
        value_steps=workload.denoise_steps if workload.algorithm == "kvpo" else None,
        window_frames=workload.window_frames,
        sigma=sigma,
    )
