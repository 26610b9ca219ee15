"""Serving: the judge's contract by hand, verdicts token by token, and draws that no placement can change."""

import math
import statistics

import pytest
from builders import profile_of, workload_of
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import JudgeTurn, TaskCost, Verdicts
from stagebreaker.sim.engine import simulate
from stagebreaker.sim.plan import Placement
from stagebreaker.sim.schedules import build
from stagebreaker.sim.serving import CurveService, TokenService, Turn, draw_tokens, serve_all_us
from stagebreaker.sim.workload import Cluster

STEP = {n: 10 + n for n in range(1, 65)}
"""us per token of n writers."""


def run(service, arrivals):
    """(arrival us -> request) served alone on a GPU: request -> us when it is done."""
    now, ends, waiting = 0, {}, sorted(arrivals.items(), key=lambda item: item[1])
    while True:
        while waiting and waiting[0][1] <= now:
            service.join(waiting.pop(0)[0])
        due = service.due_us()
        if due is None and not waiting:
            return ends
        step = min([d for d in (due, waiting[0][1] - now if waiting else None) if d is not None])
        for request in service.advance(step):
            ends[request] = now + step
        now += step


def test_worked_example_of_the_curve():
    """t(b) = 10 + b s, 12 videos every 5 s from 5 s on: continuous ends at 71.8 s (dataflow), in us."""
    curve = {b: (10 + b) * 1_000_000 for b in range(1, 13)}
    ends = run(CurveService(curve), {str(i): 5_000_000 * (i + 1) for i in range(12)})
    assert max(ends.values()) / 1e6 == pytest.approx(71.8, abs=0.1)
    assert serve_all_us(CurveService(curve), map(str, range(12))) == 22_000_000


def test_two_verdicts_by_hand():
    """Each reads 100 us, then writes 10 and 20 tokens. Reading is one by one and nobody writes meanwhile.

    a reads 0..100, b 100..200; both write at 12 us a token until a has its 10 at 320; b writes 10 more at 11: 430.
    """
    turns = {"a": (Turn(0, 100, 10),), "b": (Turn(0, 100, 20),)}
    assert run(TokenService(turns, STEP), {"a": 0, "b": 0}) == {"a": 320, "b": 430}


def test_a_second_turn_fetches_beside_the_others():
    """a: reads 50, writes 10 (11 us each: 160), fetches 40 (200), reads 30 (230), writes 2 (252)."""
    turns = {"a": (Turn(0, 50, 10), Turn(40, 30, 2))}
    assert run(TokenService(turns, STEP), {"a": 0}) == {"a": 252}
    turns["b"] = (Turn(0, 1000, 1),)
    ends = run(TokenService(turns, STEP), {"a": 0, "b": 170})  # b reads 170..1170, a's second turn reads after it
    assert ends["a"] == 1170 + 30 + 12 + 11  # both write one token at 12, then a its last at 11
    assert ends["b"] == 1170 + 30 + 12


def test_who_does_not_fit_waits_for_room():
    turns = {name: (Turn(0, 0.5, 10),) for name in "abc"}
    alone = serve_all_us(TokenService(turns, STEP), "a")
    assert serve_all_us(TokenService(turns, STEP, most_active=1), "abc") == 3 * alone
    assert serve_all_us(TokenService(turns, STEP), "abc") < 2 * alone


def test_a_pause_stops_all_but_fetching():
    turns = {"a": (Turn(60, 10, 1),), "b": (Turn(0, 10, 5),)}
    service = TokenService(turns, STEP)
    service.join("a")
    service.join("b")
    assert service.advance(10) == []  # b has read
    assert service.advance(1000, paused=True) == []
    assert service.due_us() == 10  # a's pictures came meanwhile: it reads, b waits
    assert service.advance(10) == []
    assert service.due_us() == 12
    assert service.advance(12) == ["a"]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 40), st.integers(0, 300)), min_size=1, max_size=8))
def test_no_order_of_arrival_makes_or_loses_work(jobs):
    """The engine is never idle while something is active: the end is at most all the work after the last arrival."""
    turns = {str(i): (Turn(0, read, tokens),) for i, (read, tokens, _) in enumerate(jobs)}
    arrivals = {str(i): at for i, (_, _, at) in enumerate(jobs)}
    ends = run(TokenService(turns, STEP), arrivals)
    assert set(ends) == set(turns)
    for name, (turn,) in turns.items():
        assert ends[name] >= arrivals[name] + turn.read_us + turn.tokens * STEP[1] - 1
    total = sum(read + tokens * STEP[1] for read, tokens, _ in jobs)
    assert max(ends.values()) <= max(arrivals.values()) + total + 2 * len(jobs)


# -- draws


VERDICTS = Verdicts(
    turns=(JudgeTurn(frames=8, prompt_tokens=100), JudgeTurn(fetch_us=30, frames=4, prompt_tokens=200)),
    ends_after=(0.5,),
    tokens_per_turn=1000,
    sigma=0.35,
    max_tokens=2000,
)


def test_draws_depend_on_seed_and_name_alone():
    drawn = {name: draw_tokens(VERDICTS, name) for name in map(str, range(2000))}
    assert drawn == {name: draw_tokens(VERDICTS, name) for name in reversed(drawn)}
    assert draw_tokens(VERDICTS.model_copy(update={"seed": 1}), "0") != drawn["0"]
    first = [tokens[0] for tokens in drawn.values()]
    assert statistics.median(first) == pytest.approx(1000, rel=0.03)
    assert statistics.pstdev(map(math.log, first)) == pytest.approx(0.35, rel=0.05)
    assert max(first) == 2000  # z = 2: about 2 %
    assert 0.01 < sum(n == 2000 for n in first) / 2000 < 0.04
    assert sum(len(tokens) == 1 for tokens in drawn.values()) / 2000 == pytest.approx(0.5, abs=0.04)


def test_too_many_ends_are_refused():
    with pytest.raises(ValidationError, match="ends_after has 2 entries, a verdict of 2 turns has at most 1"):
        Verdicts(turns=VERDICTS.turns, ends_after=(0.5, 0.5), tokens_per_turn=1)


def with_verdicts(serving="continuous", **changes):
    """A profile whose judge is known token by token; ``score`` says something else, which must not count."""
    profile = profile_of(serving, t0=5, t1=5, generate=1, vae_decode=1, grad_replay=2, fold=0, update=0)
    gpu = profile.gpu_kinds[0].name
    costs = {("judge_encode", 1): 1000, ("judge_prefill", 100): 20_000, ("judge_prefill", 200): 40_000}
    costs |= {("judge_step", n): 1000 + 50 * n for n in range(1, 13)}
    more = [TaskCost(kind=k, gpu_kind=gpu, batch_size=b, samples_us=(us,)) for (k, b), us in costs.items()]
    verdicts = VERDICTS.model_copy(update=changes)
    return profile.model_copy(update={"tasks": (*profile.tasks, *more), "verdicts": verdicts})


def step(profile, schedule="stagebreaker", scoring="on_arrival", **moved):
    workload = workload_of(candidates=6, group_size=3, mini_batches=1)
    placement = Placement(schedule=schedule, actors=2, rewards=1, scoring=scoring, **moved)
    graph, assignment = build(workload, placement)
    cluster = Cluster.equal(3, profile.gpu_kinds[0].name)
    return simulate(graph, assignment, profile, cluster, workload.trained_steps)


def test_one_batch_takes_what_the_tokens_take():
    """Without spread: 6 x (8 x 1 ms + 20 ms) of reading, then 1,000 tokens of 1.3 ms."""
    profile = with_verdicts(sigma=0.0, ends_after=(1.0,))
    timeline = step(profile, scoring="one_batch")
    (score,) = [row for row in timeline.rows if row.kind == "score"]
    assert score.end_us - score.start_us == 6 * 28_000 + 1000 * 1300


@pytest.mark.parametrize("serving", ["serial", "dynamic", "continuous"])
def test_placements_meet_the_same_verdicts(serving):
    """Moving decodes changes when a verdict starts, not how long it is; serial serving adds them up."""
    profile = with_verdicts(serving)
    steps = [step(profile, vae_moved=n) for n in (0, 6)]
    for timeline in steps:
        requests = [row for row in timeline.rows if row.kind == "request"]
        assert len(requests) == 6
        if serving == "serial":
            assert all(row.end_us > row.start_us for row in requests)
    if serving == "serial":
        lengths = [{r.task: r.end_us - r.start_us for r in t.rows if r.kind == "request"} for t in steps]
        assert lengths[0] == lengths[1]
        assert len(set(lengths[0].values())) > 3


def test_a_missing_cost_is_named():
    profile = with_verdicts()
    without = tuple(task for task in profile.tasks if task.kind != "judge_prefill")
    with pytest.raises(InputError, match="has no task 'judge_prefill'"):
        step(profile.model_copy(update={"tasks": without}))
