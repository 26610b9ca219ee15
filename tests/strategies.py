"""Hypothesis strategies: step graphs with fixed orders; workloads with placements and profiles.

Numbers are small, so that events of one instant and zero durations are common: that is where orders go wrong.
"""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import (
    DATA_KINDS,
    DERIVED_KINDS,
    TASK_KINDS,
    GpuKind,
    JudgeTurn,
    LinkCost,
    Profile,
    TaskCost,
    Verdicts,
)
from stagebreaker.sim.dataflow import CONTROL_KINDS, GRADIENT_VECTORS, Assignment, Lane, Need, StepGraph, Task
from stagebreaker.sim.engine import Costs, simulate
from stagebreaker.sim.plan import SCORING, Placement, Split
from stagebreaker.sim.schedules import SCHEDULES, build, why_not
from stagebreaker.sim.workload import Cluster, Gpu, Workload

TRAINED_STEPS = 3
SERVINGS = ("serial", "dynamic", "continuous")
LANE_KINDS = tuple(kind for kind in TASK_KINDS if kind != "context_rebuild")
EDGE_DATA = (None, None, *DATA_KINDS, *(kind for kind in GRADIENT_VECTORS if kind not in DATA_KINDS))
SMALL_US = st.one_of(st.sampled_from((0, 0, 1, 2, 3)), st.integers(0, 40))


@dataclass(frozen=True)
class Case:
    """Everything an interpreter of a step graph takes."""

    graph: StepGraph
    assignment: Assignment
    profile: Profile
    cluster: Cluster
    trained_steps: int = TRAINED_STEPS

    def costs(self):
        return Costs(self.graph, self.profile, self.cluster, self.trained_steps)

    def timeline(self):
        return simulate(self.graph, self.assignment, self.profile, self.cluster, self.trained_steps)

    def created_in(self, order):
        """The same graph with its tasks, and the needs of each, listed in another order."""
        tasks = [self.graph.tasks[n] for n in order]
        tasks = tuple(replace(task, needs=task.needs[::-1]) for task in tasks)
        return replace(self, graph=StepGraph(tasks, self.graph.lanes))


_TURNS = st.builds(JudgeTurn, fetch_us=st.sampled_from((0, 0, 5)), frames=st.integers(0, 2), prompt_tokens=st.just(1))
VERDICTS = st.builds(
    Verdicts,
    turns=st.lists(_TURNS, min_size=1, max_size=2).map(tuple),
    tokens_per_turn=st.integers(1, 8),
    sigma=st.sampled_from((0.0, 0.5)),
    max_tokens=st.integers(4, 12),
    most_active=st.sampled_from((None, 1, 3)),
    seed=st.integers(0, 3),
)


def judged_by_tokens(draw, profile):
    """The profile with a judge that is known token by token."""
    costs = []
    for gpu in profile.gpu_kinds:
        encode, read, first, more = draw(st.tuples(SMALL_US, SMALL_US, SMALL_US, st.integers(0, 3)))
        costs += [("judge_encode", gpu.name, 1, encode), ("judge_prefill", gpu.name, 1, read)]
        costs += [("judge_step", gpu.name, 1, first), ("judge_step", gpu.name, 64, first + 63 * more)]
    more = [TaskCost(kind=k, gpu_kind=g, batch_size=b, samples_us=(us,)) for k, g, b, us in costs]
    return profile.model_copy(update={"tasks": (*profile.tasks, *more), "verdicts": draw(VERDICTS)})


@st.composite
def profiles(draw, gpu_kinds=1, servings=SERVINGS):
    """Durations of 0 to 40 us, batch curves that rise, links that take 0 to 9 us; half know the derived kinds.

    A third have a judge that is known token by token.
    """
    names = [f"kind{g}" for g in range(gpu_kinds)]
    kinds = (*TASK_KINDS, *(DERIVED_KINDS if draw(st.booleans()) else ()))
    count = gpu_kinds * (len(kinds) + 1)
    durations = iter(draw(st.lists(SMALL_US, min_size=count, max_size=count)))
    tasks = []
    for name in names:
        for kind in kinds:
            us = next(durations)
            tasks.append(TaskCost(kind=kind, gpu_kind=name, samples_us=(us,)))
            if kind == "score":
                tasks.append(TaskCost(kind=kind, gpu_kind=name, batch_size=64, samples_us=(us + 8 * next(durations),)))
    sizes = draw(st.lists(st.integers(0, 6), min_size=len(DATA_KINDS), max_size=len(DATA_KINDS)))
    made = Profile(
        name="drawn",
        provenance="provisional",
        source="drawn",
        serving=draw(st.sampled_from(servings)),
        gpu_kinds=tuple(GpuKind(name=name, model="none") for name in names),
        link=LinkCost(latency_us=draw(st.integers(0, 3)), bytes_per_s=1_000_000),
        sizes_bytes=dict(zip(DATA_KINDS, sizes, strict=True)),
        tasks=tuple(tasks),
    )
    return judged_by_tokens(draw, made) if draw(st.sampled_from((False, False, True))) else made


_TASKS = st.lists(
    st.tuples(
        st.sampled_from((*LANE_KINDS, *CONTROL_KINDS)),
        st.integers(0, 3),
        st.lists(st.tuples(st.integers(0, 5), st.sampled_from(EDGE_DATA)), max_size=3),
        st.integers(0, 99),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=16,
)
"""Per task: kind, lane, needs as (how many tasks back, data kind), place in its queue, steps, members or price."""


def _task(number, kind, back, part):
    needs = tuple(Need(number - 1 - distance, data) for distance, data in back if distance < number)
    steps = tuple(range(part)) if kind == "grad_replay" and part else None
    members = tuple(f"{number}.{k}" for k in range(part)) if kind == "score" else ()
    cost = {"generate": "generate_train", "grad_replay": "grad_replay_kl"}.get(kind) if part == 3 else None
    return Task(number, kind, needs, steps=steps, members=members, cost_kind=cost)


def _queue_order(tasks, places, consistent):
    """Task numbers by place; if ``consistent``, never a task before one it needs."""
    order, left = [], sorted(range(len(tasks)), key=lambda n: (places[n], n))
    while left:
        n = next(n for n in left if not consistent or all(need.task in order for need in tasks[n].needs))
        order.append(n)
        left.remove(n)
    return order


@st.composite
def fixed_orders(draw, consistent=True):
    """A graph without requests whose queues fit its needs, or need not fit where ``consistent`` is False."""
    drawn = draw(_TASKS)
    lane_count = draw(st.integers(1, 4))
    lanes = tuple(Lane(f"lane{n}", "all", n) for n in range(lane_count))
    numbered = [_task(n, kind, back, part) for n, (kind, _, back, _, part) in enumerate(drawn)]
    name = [f"{task.kind}:{task.id}" for task in numbered]
    order = _queue_order(numbered, [place for *_, place, _ in drawn], consistent)
    lane_of = {name[n]: lanes[drawn[n][1] % lane_count].name for n in order if drawn[n][0] not in CONTROL_KINDS}
    queues = {lane.name: tuple(t for t in lane_of if lane_of[t] == lane.name) for lane in lanes}
    tasks = [
        replace(task, id=name[n], needs=tuple(Need(name[need.task], need.data) for need in task.needs))
        for n, task in enumerate(numbered)
    ]
    graph = StepGraph(tuple(draw(st.permutations(tasks))), lanes)
    gpus = tuple(Gpu(name=f"gpu{n}", kind=f"kind{n}") for n in range(lane_count))
    return Case(graph, Assignment(lane_of, queues), draw(profiles(lane_count)), Cluster(gpus=gpus))


@st.composite
def workloads(draw):
    """Up to twelve candidates, every choice that changes the step graph."""
    algorithm = draw(st.sampled_from(("dancegrpo", "flow_grpo", "kvpo")))
    groups, group_size = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    whole = [m for m in range(1, groups + 1) if groups % m == 0]
    mini_batches = draw(st.sampled_from(whole) if algorithm == "kvpo" else st.integers(1, 4))
    shape = "anchor" if algorithm == "kvpo" else draw(st.sampled_from(("pointwise", "anchor", "all_pairs")))
    scope = draw(st.sampled_from(("group", "minibatch", "batch")))
    if scope == "minibatch":  # a mini-batch of one has no spread
        mini_batches = min(mini_batches, groups * group_size // 2)
    mini_batches = min(mini_batches, groups * group_size)
    selected = None
    if algorithm != "kvpo" and groups % mini_batches == 0 and draw(st.booleans()):
        selected = draw(st.integers(1, group_size))
    kl_beta = 0.0 if algorithm == "dancegrpo" else draw(st.sampled_from((0.0, 0.04)))
    made = Workload(
        name="drawn",
        algorithm=algorithm,
        policy="tiny",
        judge="tiny",
        candidates=groups * group_size,
        group_size=group_size,
        mini_batches=mini_batches,
        latent_frames=9,
        resolution="64x64",
        chunk_frames=3,
        denoise_steps=4,
        trained_steps=TRAINED_STEPS,
        old_logprob_source=draw(st.sampled_from(("rollout", "first_replay", "recompute"))),
        advantage_scope=scope,
        reward_shape=shape,
        reference_replay=draw(st.booleans()) or kl_beta > 0,
        kl_beta=kl_beta,
        train_per_group=selected,
        seed=draw(st.integers(0, 3)),
        deterministic=draw(st.booleans()),
    )
    return _without_some_rewards(draw, made) if draw(st.sampled_from((False, False, True))) else made


def _without_some_rewards(draw, workload):
    """Some rewards do not come; the workload as it was where that would leave a mini-batch empty."""
    policy = "drop_group" if workload.algorithm == "kvpo" else draw(st.sampled_from(("drop_group", "mask_candidate")))
    failed = draw(st.sets(st.integers(0, workload.candidates - 1), min_size=1, max_size=3))
    try:
        return workload.with_(on_unscorable=policy, failed_rewards=sorted(failed))
    except InputError:
        return workload


@st.composite
def placements(draw, workload, scorings=SCORING):
    """Any schedule, one to three GPUs of each role, any counts moved; sometimes a candidate split by step."""
    schedule = draw(st.sampled_from(sorted(name for name in SCHEDULES if why_not(name, workload) is None)))
    actors, rewards = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    moved = {}
    if SCHEDULES[schedule].movable:
        sizes = [len(workload.mini_batch_members(m)) for m in range(workload.mini_batches)]
        moved["vae_moved"] = draw(st.integers(0, workload.candidates))
        for name in ("train_moved", "ref_moved", "old_moved"):
            moved[name] = tuple(draw(st.integers(0, size)) for size in sizes)
        if draw(st.booleans()):
            lanes = [f"actor{n}" for n in range(actors)] + [f"reward{n}" for n in range(rewards)]
            candidate = draw(st.integers(0, workload.candidates - 1))
            parts = tuple(draw(st.sampled_from(lanes)) for _ in range(2))
            moved["splits"] = (Split(candidate=candidate, steps=((0, 1), (2,)), lanes=parts),)
    scoring = draw(st.sampled_from(scorings))
    return Placement(schedule=schedule, actors=actors, rewards=rewards, scoring=scoring, **moved)


@st.composite
def scheduled(draw, scorings=SCORING, servings=SERVINGS):
    """A case built by a schedule."""
    workload = draw(workloads())
    placement = draw(placements(workload, scorings))
    graph, assignment = build(workload, placement)
    return Case(graph, assignment, draw(profiles(servings=servings)), Cluster.equal(len(graph.lanes), "kind0"))


__all__ = ["Case", "fixed_orders", "placements", "profiles", "scheduled", "workloads"]
