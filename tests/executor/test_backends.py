"""Backends: the same bits between processes as in one, emulated time as simulated, failures by task and lane."""

import os
import statistics
from functools import cache
from itertools import pairwise

import pytest
import torch
from runs import place, program_of, run, small

from stagebreaker.executor import cluster, runner, worker
from stagebreaker.executor.backends import Inline, RayWorkers, TaskFailedError
from stagebreaker.executor.controller import run_step
from stagebreaker.executor.emulated import Emulated
from stagebreaker.executor.models import load
from stagebreaker.executor.record import compare, scaled
from stagebreaker.executor.runner import EmulatedStep
from stagebreaker.executor.worker import Order
from stagebreaker.placement.__main__ import find_profile
from stagebreaker.profiles.cli import RunFailedError
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import JudgeTurn, TaskCost, Verdicts
from stagebreaker.sim.dataflow import Lane, Need, Task
from stagebreaker.sim.engine import Costs, simulate
from stagebreaker.sim.schedules import SCHEDULES
from stagebreaker.sim.workload import load_workload

LANES = (Lane("actor0", "actor", 0), Lane("reward0", "reward", 1))
MOVED = {"vae_moved": 2, "train_moved": (1, 1)}
CLIP = {"clip_low": 3e-4, "clip_high": 3e-4}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def ray():
    """One Ray for all tests here: a backend leaves a Ray that it did not start alone."""
    if "RAY_ADDRESS" in os.environ:
        pytest.skip("RAY_ADDRESS is set")
    started = cluster.start_ray(8)
    yield started
    started.shutdown()


# -- inline


def inline(monkeypatch):
    for name in ("load_vae", "load_text_encoder", "load_judge_model"):
        monkeypatch.setattr(worker, name, cache(getattr(load, name)))
    return Inline(small(), LANES, {"actor0": ("encode_prompt",), "reward0": ()}, "cpu", "float32")


def test_inline_tells_task_and_lane_of_a_failure(monkeypatch):
    backend = inline(monkeypatch)
    replay = Task("grad_replay:1", "grad_replay", (Need("generate:1", "trajectory"),), candidate=1)
    with pytest.raises(TaskFailedError, match=r"task grad_replay:1 on reward0 failed: VersionError: adapter version 4"):
        backend.run(1, Order(replay, 0, 4, ("a",)), "token")
    with pytest.raises(TaskFailedError, match="task generate:1/latents on reward0 failed: KeyError"):
        backend.send(0, 1, "generate:1", "latents", 0, "token")
    with pytest.raises(TaskFailedError, match="task save on actor0 failed: "):
        backend.call(0, "save", "/dev/null/no/folder", 1)
    with pytest.raises(InputError, match="no such file"):
        backend.call(0, "restore", "no/such/folder")


def test_inline_finishes_what_it_starts_with_rising_times(monkeypatch):
    backend = inline(monkeypatch)
    encode = Task("encode_prompt:0", "encode_prompt", group=0)
    backend.run(0, Order(encode, 0, 0, ("a kite",)), "first")
    backend.send(0, 1, "encode_prompt:0", "embeddings", 0, "second")
    first, second = backend.wait()
    assert (first.token, second.token) == ("first", "second")
    assert first.start_us <= first.end_us <= second.start_us <= second.end_us
    assert backend.wait() == []
    workers = backend._workers
    assert torch.equal(*(w.store["encode_prompt:0", "embeddings"] for w in workers))


# -- emulated: the real control plane, sleeping the profiled time

SCALES = (0.018, 0.06)
"""Steps of 120 to 200 s take 2 to 4 s; where calls between processes are slow, 7 to 12 s."""
STEPS = 3
SIX = {"candidates": 24, "group_size": 12}


@cache
def costs(name):
    return find_profile(None, name, load_workload(name).profile)[0]


@pytest.fixture(scope="module")
def sleepers(ray):
    """Six emulated GPUs per time scale, shared by several schedules: scale -> backend."""
    made = {}

    def at(scale, program):
        key = (scale, program.plan.profile.verdicts is None)
        if key not in made:
            made[key] = Emulated(program.graph.lanes, costs_of(program), scale)
        return made[key]

    yield at
    for backend in made.values():
        backend.stop()


@cache
def by_tokens():
    """The same costs, but verdicts of about 1,000 tokens in two turns, the second after a fetch of 2 s."""
    profile = costs("dancegrpo-vrt")
    prices = {("judge_encode", 1): 100_000, ("judge_prefill", 1): 1_000_000}
    prices |= {("judge_step", b): 20_000 + 500 * b for b in (1, 64)}
    gpu = profile.gpu_kinds[0].name
    more = [TaskCost(kind=kind, gpu_kind=gpu, batch_size=b, samples_us=(us,)) for (kind, b), us in prices.items()]
    turns = (JudgeTurn(frames=8, prompt_tokens=1), JudgeTurn(fetch_us=2_000_000, frames=4, prompt_tokens=1))
    verdicts = Verdicts(turns=turns, ends_after=(0.5,), tokens_per_turn=500, sigma=0.35)
    return profile.model_copy(update={"tasks": (*profile.tasks, *more), "verdicts": verdicts})


def six(schedule, serving="continuous", profile=None, **moved):
    """dancegrpo-vrt at 24 candidates on 4 actors and 2 reward GPUs."""
    profile = profile or costs("dancegrpo-vrt").model_copy(update={"serving": serving})
    workload = load_workload("dancegrpo-vrt", tuple(f"{key}={value}" for key, value in SIX.items()))
    return program_of(workload, place(schedule, 4, 2, **moved), profile)


def costs_of(program):
    plan = program.plan
    return Costs(program.graph, plan.profile, plan.cluster, plan.workload.trained_steps)


@pytest.mark.parametrize(
    "program",
    [
        *(six(name) for name in SCHEDULES if name != "stagebreaker"),
        six("stagebreaker", vae_moved=20, train_moved=(4, 4)),
        six("stagebreaker", scoring="one_batch", vae_moved=20, train_moved=(4, 4)),
        six("stagebreaker", serving="dynamic", vae_moved=20, train_moved=(4, 4)),
        six("stagebreaker", profile=by_tokens(), vae_moved=20, train_moved=(4, 4)),
    ],
    ids=lambda p: (
        f"{p.schedule}-{p.plan.schedules[p.schedule].placement.scoring}-{p.serving}"
        + ("-tokens" if p.plan.profile.verdicts else "")
    ),
)
def test_emulated_steps_take_the_simulated_time(sleepers, program, monkeypatch):
    """The median step within 5 %, task by task: what the controller adds is small beside a step of a few seconds."""
    predicted = simulated_step(program)
    for scale in SCALES:
        backend, steps_us = sleepers(scale, program), []
        monkeypatch.setattr(backend, "_costs", costs_of(program))
        for _ in range(STEPS):
            done = run_step(program.index, program.assignment, program.serving, backend, EmulatedStep())
            measured = scaled(done.timeline, 1 / scale)
            assert measured.makespan_us >= 0.999 * predicted.makespan_us  # a sleep is never short
            check_spans(predicted, measured)
            steps_us.append(measured.makespan_us)
        if statistics.median(steps_us) <= 1.05 * predicted.makespan_us:
            return
    pytest.fail(f"{steps_us} us measured, {predicted.makespan_us} us predicted")


def simulated_step(program):
    plan = program.plan
    return simulate(program.graph, program.assignment, plan.profile, plan.cluster, plan.workload.trained_steps)


def check_spans(predicted, measured):
    """Every span of one side is on the other, and a GPU does one thing at a time."""
    served = any(row.kind == "request" for row in predicted.rows)
    found = compare(predicted, measured)
    assert found.unmatched == ()
    assert found.matched == sum(not (served and row.kind == "score") for row in predicted.rows)
    for name in {row.gpu for row in measured.rows}:
        assert all(a.end_us <= b.start_us for a, b in pairwise(measured.spans(name)))


# -- ray: one process per lane


@pytest.fixture(scope="module")
def processes(ray):
    """Two actors and a reward GPU, kept alive for several runs."""
    program = program_of(small(**CLIP), place("stagebreaker", 2, 1, **MOVED))
    backend = RayWorkers(small(**CLIP), program.graph.lanes, program.kinds(), "cpu", "float32")
    yield backend
    backend.stop()
    assert ray.is_initialized()


@pytest.fixture
def shared(processes, monkeypatch):
    """``train`` gets the running processes instead of new ones."""

    class Kept:
        def __new__(cls, *args):
            return processes

    monkeypatch.setattr(runner.backends, "RayWorkers", Kept)
    monkeypatch.setattr(processes, "stop", lambda: None)
    return processes


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Three inline steps on one actor and one reward GPU."""
    return run(small(**CLIP), place("merged_replay"), tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    "placement", [place("stagebreaker", 2, 1, **MOVED), place("merged_replay", 2, 1)], ids=lambda p: p.schedule
)
def test_processes_give_the_bits_of_one_process(shared, alone, tmp_path, placement):
    """After a warm-up step, which must leave no trace in them."""
    result = run(small(**CLIP), placement, tmp_path, backend="ray", warmup=True)
    shas = [line["sb/adapter_sha256"] for line in result.metrics]
    assert shas == [line["sb/adapter_sha256"] for line in alone.metrics]
    assert [shared.call(lane, "adapter_state")[1] for lane in range(2)] == [result.adapter_sha256] * 2
    timeline = result.timelines[-1]
    for lane in timeline.lanes:
        assert all(a.end_us <= b.start_us for a, b in pairwise(timeline.spans(lane.name)))
    wanted = {task.id for task in program_of(small(**CLIP), placement).graph.tasks if task.kind != "advantage"}
    assert wanted <= {row.task for row in timeline.rows}


def test_processes_tell_task_and_lane_of_a_failure(shared):
    with pytest.raises(TaskFailedError, match=r"task call_me on reward0 failed: AttributeError") as caught:
        shared.call(2, "call_me")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match="no such file"):
        shared.call(0, "restore", "no/such/folder")
    stale = Task("generate:0", "generate", (Need("encode_prompt:0", "embeddings"),), candidate=0, group=0)
    shared.run(1, Order(stale, 0, 99, ("a", "b")), None)
    with pytest.raises(TaskFailedError, match=r"task generate:0 on actor1 failed: VersionError: adapter version 99"):
        shared.wait()


def test_a_process_that_dies_ends_the_run_with_its_name(shared, ray, tmp_path):
    """Last: it takes a process down."""
    run(small(**CLIP), place("merged_replay", 2, 1), tmp_path, steps=1, backend="ray", warmup=True)
    ray.kill(shared._actors[2])
    with pytest.raises(RunFailedError, match=r"(?s)on reward0 failed: .*resume after step 1 with --resume"):
        run(small(**CLIP), place("merged_replay", 2, 1), tmp_path, steps=2, backend="ray", resume=True)


def test_a_plan_for_more_gpus_than_the_cluster_has_is_refused(ray):
    with pytest.raises(InputError, match="the plan needs 2 GPUs, this Ray cluster has 0: missing 2"):
        RayWorkers(small(), LANES, {}, "cuda", "float32")
    assert ray.is_initialized()
