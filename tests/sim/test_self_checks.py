"""Arithmetic that published figures and users' reports give, as checks of the simulator. Times by hand, in seconds."""

import pytest
from builders import placement_of, profile_of, simulated, step_s, workload_of

from stagebreaker.sim.published import busy_share, scoring_behind_rollout, wait_for_reward_share, wasted_share


def test_scoring_that_is_busy_036_and_exposed_036_makes_actors_wait_013():
    """4 + 2 GPUs, 16 candidates. Rollouts end every 7.68 s on each actor, the last at 30.72. Each judge serves 8
    requests of 4.5 s without a pause from 7.68 to 43.68; four replays of 14.08 s follow, to 100. So 0.36 of scoring is
    exposed: 0.36 x 0.36 = 13 % of the step; and 4/6 x 13 % + 2/6 x 64 % = 30 % of all GPU time is wasted.
    """
    profile = profile_of("serial", t0=4.5, generate=7.68, grad_replay=14.08)
    workload = workload_of(candidates=16, group_size=4)
    placement = placement_of("async_reward_merged", 4, 2, scoring="on_arrival")
    timeline, _ = simulated(workload, placement, profile)
    assert timeline.makespan_us == 100_000_000
    assert busy_share(timeline, "reward") == pytest.approx(0.36, abs=1e-9)
    assert scoring_behind_rollout(timeline) == pytest.approx(0.64, abs=1e-9)
    assert wait_for_reward_share(timeline) == pytest.approx(0.36 * 0.36, abs=1e-9)
    assert wasted_share(timeline) == pytest.approx(4 / 6 * 0.1296 + 2 / 6 * 0.64, abs=1e-9)
    assert round(wait_for_reward_share(timeline), 2) == 0.13
    assert round(wasted_share(timeline), 2) == 0.30


@pytest.mark.parametrize(("generate", "train"), [(4, 8), (20, 40)], ids=["gap of 12 s", "gap of 60 s"])
def test_engine_switches_pay_only_for_a_gap_that_is_longer(generate, train):
    """Two GPUs, two candidates. A reward GPU of its own idles for one rollout and one replay; lending it to the policy
    costs a switch of 8 s each way: step times differ by the gap less 16 s, for better or worse.
    """
    profile = profile_of("serial", t0=3, generate=generate, grad_replay=train, switch=8)
    workload = workload_of()
    apart = step_s(workload, placement_of("async_reward_merged", scoring="on_arrival"), profile)
    lent = step_s(workload, placement_of("colocated_merged"), profile)
    assert lent - apart == 2 * 8 - (generate + train)
    assert (lent < apart) == (generate + train > 16)


def test_two_switches_of_six_seconds_show_as_twelve_on_every_gpu():
    profile = profile_of("serial", t0=5, generate=10, grad_replay=20, switch=6)
    timeline, graph = simulated(workload_of(), placement_of("colocated"), profile)
    assert [use.overhead_us for use in timeline.use(graph)] == [12_000_000] * 2


def test_old_log_probabilities_need_no_reward():
    """Recomputed behind the rollout they hide in the wait for scores; stage by stage they come after it."""
    profile = profile_of("serial", t0=30, generate=10, old_replay=20, grad_replay=20)
    workload = workload_of(old_logprob_source="recompute")
    early, graph = simulated(workload, placement_of("merged_replay", scoring="on_arrival"), profile)
    assert not any(
        need.task.startswith(("score", "request", "advantage")) for t in graph.of_kind("old_replay") for need in t.needs
    )
    late, _ = simulated(workload, placement_of("async_reward", scoring="on_arrival"), profile)
    scored = max(row.end_us for row in late.rows if row.kind == "score")
    assert min(row.start_us for row in early.rows if row.kind == "old_replay") == 20_000_000
    assert min(row.start_us for row in late.rows if row.kind == "old_replay") >= scored
