"""Small workloads and profiles with round numbers; short ways to read a timeline, in seconds."""

from stagebreaker.profiles.table import DATA_KINDS, DERIVED_KINDS, TASK_KINDS, GpuKind, LinkCost, Profile, TaskCost
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.schedules import build
from stagebreaker.sim.workload import Cluster, Workload

SECOND = 1_000_000


def profile_of(serving="serial", t0=0, t1=0, link=None, sizes_bytes=None, **seconds):
    """Task kinds cost the given ``seconds`` and else nothing; a batch of b takes t0 + b t1."""
    costs = [
        TaskCost(kind=kind, gpu_kind="gpu", samples_us=(round(seconds.get(kind, 0) * SECOND),))
        for kind in (*TASK_KINDS, *(k for k in DERIVED_KINDS if k in seconds))
        if kind != "score"
    ]
    costs += [
        TaskCost(kind="score", gpu_kind="gpu", batch_size=b, samples_us=(round((t0 + b * t1) * SECOND),))
        for b in (1, 64)
    ]
    return Profile(
        name="round",
        provenance="provisional",
        source="made up",
        serving=serving,
        gpu_kinds=(GpuKind(name="gpu", model="none"),),
        link=link or LinkCost(bytes_per_s=10_000_000_000),
        sizes_bytes=dict.fromkeys(DATA_KINDS, 0) | (sizes_bytes or {}),
        tasks=tuple(costs),
    )


def workload_of(**fields):
    """Two candidates of one group in one mini-batch, unless ``fields`` say otherwise."""
    data = {
        "name": "small",
        "algorithm": "dancegrpo",
        "policy": "tiny",
        "judge": "tiny",
        "candidates": 2,
        "group_size": 2,
        "mini_batches": 1,
        "latent_frames": 9,
        "resolution": "64x64",
        "chunk_frames": 3,
        "denoise_steps": 4,
        "trained_steps": 3,
    }
    return Workload.parse(data | fields, "workload small")


def placement_of(schedule, actors=1, rewards=1, **fields):
    """A placement of the count space."""
    return Placement(schedule=schedule, actors=actors, rewards=rewards, **fields)


def simulated(workload, placement, profile):
    """(timeline, graph) of a step on equal GPUs."""
    graph, assignment = build(workload, placement)
    cluster = Cluster.equal(len(graph.lanes), profile.gpu_kinds[0].name)
    return simulate(graph, assignment, profile, cluster, workload.trained_steps), graph


def step_s(workload, placement, profile):
    """Step time in seconds."""
    return simulated(workload, placement, profile)[0].makespan_us / SECOND


def span_s(timeline, task):
    """(start, end) in seconds of a task's only row."""
    (row,) = [row for row in timeline.rows if row.task == task]
    return row.start_us / SECOND, row.end_us / SECOND


def ancestors(graph, task):
    """Ids of everything that must be done before ``task`` can start."""
    found, left = set(), [task]
    while left:
        for need in graph.by_id[left.pop()].needs:
            if need.task not in found:
                found.add(need.task)
                left.append(need.task)
    return found


def needs(graph, task):
    """task -> data kind of every direct input."""
    return {need.task: need.data for need in graph.by_id[task].needs}
