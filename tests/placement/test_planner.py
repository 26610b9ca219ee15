"""Plans: every schedule compared fairly, the fastest chosen whether or not it is ours, the document self-contained."""

import pytest
from builders import placement_of, profile_of, simulated, workload_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import profiles, workloads

from stagebreaker.placement.planner import make_plan
from stagebreaker.placement.report import replay, report
from stagebreaker.profiles.document import InputError
from stagebreaker.sim.plan import SCORING, Plan
from stagebreaker.sim.schedules import SCHEDULES
from stagebreaker.sim.workload import Cluster

SLOW_JUDGE = profile_of("dynamic", t0=40, t1=1, generate=10, vae_decode=5, loss_replay=5, grad_replay=20, switch=10)
FREE_JUDGE = profile_of("dynamic", t1=0.001, generate=10, vae_decode=0.01, loss_replay=5, grad_replay=20)
EIGHT = workload_of(candidates=8, group_size=4, mini_batches=2)


def planned_for(workload, profile, gpus=4, **options):
    options.setdefault("scoring", ("one_batch",))
    return make_plan(workload, Cluster.equal(gpus, profile.gpu_kinds[0].name), profile, **options)


@pytest.fixture(scope="module")
def slow():
    return planned_for(EIGHT, SLOW_JUDGE)


@pytest.fixture(scope="module")
def free():
    return planned_for(EIGHT, FREE_JUDGE)


def test_two_candidates_one_actor_one_judge():
    """Rollout 10, reward 30, train 20 each: waiting takes 110, not waiting 70; nothing can be below 70."""
    planned = planned_for(workload_of(), profile_of(generate=10, t1=30, grad_replay=20), 2, scoring=("on_arrival",))
    steps = {name: row.step_us / 1e6 for name, row in planned.summary.items()}
    assert (steps["async_reward"], steps["async_reward_merged"], steps["merged_replay"]) == (110, 110, 70)
    assert planned.result.best.step_us == planned.result.lower_bound_us == 70_000_000
    assert planned.summary["stagebreaker"].step_us == 70_000_000
    # all GPUs in every role do better still, 10 + 30 + 20, while neither switches nor second replays cost anything
    assert planned.plan.best == "colocated_merged"
    assert planned.summary["colocated"].step_us == planned.summary["colocated_merged"].step_us == 60_000_000


def test_with_switches_the_reward_chain_is_the_optimum_and_the_gap_is_zero():
    profile = profile_of(generate=10, t1=30, loss_replay=10, grad_replay=20, switch=10)
    planned = planned_for(workload_of(), profile, 2, scoring=("on_arrival",))
    assert planned.plan.best == "merged_replay"  # a tie with stagebreaker, which moves nothing
    assert planned.plan.schedules["merged_replay"].step_us == planned.plan.schedules["stagebreaker"].step_us
    shown = report(planned, 0.0)
    assert shown["best"]["step_us"] == 70_000_000
    assert planned.result.lower_bound_us == 70_000_000
    assert shown["best"]["speedup_vs_best_baseline"] == pytest.approx(80 / 70)


def test_nearly_free_scores_need_no_split(free):
    best = free.plan.best
    assert not SCHEDULES[best].ours
    assert best == "colocated_merged"
    assert free.summary[best].speedup_vs_best_baseline == 1.0
    assert report(free, 0.0)["best"]["speedup_vs_best_baseline"] == 1.0
    assert free.best_baseline == best
    assert free.plan.lower_bound_us == free.any_schedule_bound_us


def test_dominating_scores_make_ours_the_best(slow):
    assert SCHEDULES[slow.plan.best].ours
    assert slow.plan.best == "stagebreaker"
    assert slow.best_baseline == "colocated_merged"
    assert slow.summary["stagebreaker"].speedup_vs_best_baseline == pytest.approx(132 / 103)


def test_gain_grows_with_the_wait_for_rewards_from_none_at_all():
    """A sweep of the judge's latency at one GPU split: what not waiting saves over waiting, same replays."""
    speedups = []
    for latency in (0, 0.1, 1, 10, 60):
        profile = profile_of("serial", t1=latency, generate=10, vae_decode=1, grad_replay=20)
        steps = [
            simulated(EIGHT, placement_of(name, 2, 2, scoring="on_arrival"), profile)[0].makespan_us
            for name in ("async_reward_merged", "merged_replay")
        ]
        speedups.append(steps[0] / steps[1])
    assert speedups[:3] == pytest.approx([1, 1, 1], abs=0.02)
    assert speedups[:4] == sorted(speedups[:4])
    assert max(speedups) > 1.2


def test_every_schedule_is_in_the_plan(slow):
    assert list(slow.plan.schedules) == list(SCHEDULES) == list(slow.summary) == list(slow.timelines)
    for name, item in slow.plan.schedules.items():
        assert item.placement.schedule == name
        assert simulated(EIGHT, item.placement, SLOW_JUDGE)[0].makespan_us == item.step_us
        assert item.best_split_step_us <= item.step_us
        assert set(item.lane_of) >= {task for queue in item.order.values() for task in queue}


@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "stagebreaker"])
def test_each_schedule_has_its_own_best_split(slow, name):
    """And its own scoring mode: a serial judge gains from gathered scores, for schedules that are not ours too."""
    steps = [
        simulated(EIGHT, placement_of(name, a, 4 - a, scoring=scoring), SLOW_JUDGE)[0].makespan_us
        for a in range(1, 4)
        for scoring in SCORING
    ]
    assert slow.plan.schedules[name].best_split_step_us == min(steps)


def test_the_headline_is_over_the_best_baseline_at_its_own_best_split(slow):
    others = [name for name, schedule in SCHEDULES.items() if schedule.eligible and not schedule.ours]
    theirs = {name: slow.plan.schedules[name].best_split_step_us for name in others}
    assert theirs[slow.best_baseline] == min(theirs.values())
    for row in slow.summary.values():
        assert row.speedup_vs_best_baseline == min(theirs.values()) / row.step_us
        assert row.speedup_vs_colocated == slow.summary["colocated"].step_us / row.step_us
        assert row.speedup_vs_async_reward == slow.summary["async_reward"].step_us / row.step_us


@settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(workloads().filter(lambda w: w.candidates <= 3), profiles(), st.integers(2, 3))
def test_the_plan_is_never_slower_than_a_baseline_at_any_split(workload, profile, gpus):
    planned = make_plan(workload, Cluster.equal(gpus, "kind0"), profile)
    best = planned.summary[planned.plan.best]
    eligible = [row for name, row in planned.summary.items() if SCHEDULES[name].eligible]
    assert best.step_us == min(row.best_split_step_us for row in eligible)
    assert best.speedup_vs_best_baseline is None or best.speedup_vs_best_baseline >= 1.0
    assert SCHEDULES[planned.plan.best].ours or best.speedup_vs_best_baseline in (None, 1.0)
    assert planned.any_schedule_bound_us <= best.step_us
    assert planned.plan.lower_bound_us <= best.step_us


def test_a_baseline_that_wins_at_another_split_is_the_plan():
    """Scoring in one batch only, a serial judge: on arrival with the other split is faster and is what is planned."""
    workload = workload_of(candidates=4, group_size=4)
    profile = profile_of("serial", t1=10, generate=1, grad_replay=1, switch=50)
    planned = planned_for(workload, profile, 3)
    best = planned.plan.schedules[planned.plan.best]
    assert best.step_us == best.best_split_step_us == min(s.best_split_step_us for s in planned.summary.values())
    assert planned.plan.best != "stagebreaker"
    assert (best.placement.actors, best.placement.rewards, best.placement.scoring) == (1, 2, "on_arrival")


def test_a_split_that_is_given_is_kept_and_counts_its_own_gpus():
    planned = make_plan(EIGHT, Cluster.equal(6, "gpu"), SLOW_JUDGE, (2, 1), ("one_batch",))
    assert {(s.placement.actors, s.placement.rewards) for s in planned.plan.schedules.values()} == {(2, 1)}
    three = make_plan(EIGHT, Cluster.equal(3, "gpu"), SLOW_JUDGE, (2, 1), ("one_batch",))
    assert planned.summary == three.summary  # baselines at the same number of GPUs, not with the idle ones
    assert planned.any_schedule_bound_us == three.any_schedule_bound_us


def test_plan_json_is_all_that_is_needed(slow, tmp_path):
    slow.plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == slow.plan
    assert again.to_json() == (tmp_path / "plan.json").read_text()
    assert (again.workload.digest(), again.profile.digest()) == (again.workload_sha256, again.profile_sha256)
    for name, item in again.schedules.items():
        timeline, _ = replay(again, name)
        assert timeline.makespan_us == item.step_us
        assert timeline.rows == slow.timelines[name].rows


@pytest.mark.parametrize("scoring", [None, SCORING])
def test_same_input_twice_gives_the_same_bytes(tmp_path, scoring):
    workload = workload_of(candidates=4, mini_batches=2, reference_replay=True)
    for n in range(2):
        planned = planned_for(workload.with_(), SLOW_JUDGE.model_copy(), 2, scoring=scoring)
        planned.plan.save(tmp_path / f"plan{n}.json")
        planned.certificate.save(tmp_path / f"certificate{n}.json")
    for name in ("plan", "certificate"):
        assert (tmp_path / f"{name}0.json").read_bytes() == (tmp_path / f"{name}1.json").read_bytes()


def test_automatic_scoring_searches_one_mode_and_never_loses_to_merged_replay():
    for profile in (SLOW_JUDGE, FREE_JUDGE, profile_of("serial", t1=10, generate=1, grad_replay=1, switch=50)):
        planned = planned_for(workload_of(candidates=4, group_size=4), profile, 3, scoring=None)
        assert len({r.scoring for r in planned.certificate.regions}) == 1
        assert planned.summary["stagebreaker"].step_us <= planned.summary["merged_replay"].best_split_step_us


def test_a_step_that_costs_nothing_has_no_speedups():
    planned = planned_for(workload_of(), profile_of(), 2)
    row = planned.summary[planned.plan.best]
    assert (row.step_us, row.speedup_vs_best_baseline, row.speedup_vs_colocated, row.gap) == (0, None, None, None)


@pytest.mark.parametrize("kind", ["switch", "loss_replay", "score", "generate", "update"])
def test_a_task_the_profile_lacks_is_found_before_the_search(monkeypatch, kind):
    profile = SLOW_JUDGE.model_copy(update={"tasks": tuple(t for t in SLOW_JUDGE.tasks if t.kind != kind)})
    monkeypatch.setattr("stagebreaker.placement.planner.search", None)
    with pytest.raises(InputError, match=f"profile 'round' has no task '{kind}' on GPU kind 'gpu'"):
        planned_for(EIGHT, profile)


def test_a_batch_size_that_was_not_measured_is_found_before_the_search(monkeypatch):
    profile = SLOW_JUDGE.model_copy(update={"tasks": tuple(t for t in SLOW_JUDGE.tasks if t.batch_size == 1)})
    monkeypatch.setattr("stagebreaker.placement.planner.search", None)
    with pytest.raises(InputError, match=r"batch size 2 of score on gpu .* is outside the measured 1\.\.1"):
        planned_for(EIGHT, profile)


def test_a_profile_of_other_settings_is_refused():
    profile = profile_of(generate=1).model_copy(update={"settings": {"latent_frames": 21}})
    with pytest.raises(InputError, match=r"was taken with latent_frames=21, workload small has latent_frames=9"):
        planned_for(workload_of(), profile, 2)


def test_a_reward_role_without_a_gpu_is_an_error_and_not_colocation():
    for name in ("async_reward", "stagebreaker", "merged_replay"):
        with pytest.raises(InputError, match="needs a reward GPU, but rewards=0"):
            simulated(EIGHT, placement_of(name, 2, 0), SLOW_JUDGE)


# -- other algorithms and schedules ----------------------------------------------------------------------------


def test_selection_makes_early_training_lose():
    """One of eight is trained: replaying all eight before the scores costs more than waiting for them."""
    profile = profile_of(generate=10, loss_replay=8, grad_replay=20, t1=4, switch=30)
    fields = {"candidates": 8, "group_size": 8}
    few, every = (planned_for(workload_of(**fields, train_per_group=n), profile, 3) for n in (1, None))
    steps = {name: row.best_split_step_us for name, row in few.summary.items()}
    assert steps["async_reward_merged"] < min(steps[n] for n in ("async_train", "merged_replay", "stagebreaker"))
    assert few.plan.best == few.best_baseline
    assert not SCHEDULES[few.plan.best].ours
    assert SCHEDULES[every.plan.best].ours
    assert few.any_schedule_bound_us <= min(steps[n] for n, schedule in SCHEDULES.items() if schedule.eligible)


@pytest.mark.parametrize(("name", "costs", "seconds"), [
    ("lean", {"loss_replay": 18, "t1": 5, "update": 1}, 30),  # 2 rollouts with a backward of 2, a verdict, the update
    ("one_step_off", {"t1": 30, "update": 40}, 100),  # 2 rollouts, 2 replays, the update, while the judge works
])  # fmt: skip
def test_what_is_off_policy_or_only_simulated_is_shown_and_never_chosen(name, costs, seconds):
    profile = profile_of(generate=10, grad_replay=20, switch=100, **costs)
    planned = planned_for(workload_of(), profile, 2, scoring=("on_arrival",))
    shown = report(planned, 0.0)
    assert list(shown["schedules"])[-2:] == ["lean", "one_step_off"]
    assert shown["schedules"][name]["step_us"] == seconds * 1_000_000 < shown["best"]["step_us"]
    assert SCHEDULES[planned.plan.best].eligible
    assert SCHEDULES[planned.best_baseline].eligible
    assert [n for n, row in shown["schedules"].items() if row["off_policy"]] == ["one_step_off"]
    assert [n for n, row in shown["schedules"].items() if row["gap"] is None] == ["lean", "one_step_off"]
    theirs = shown["schedules"][planned.best_baseline]["best_split_step_us"]
    assert shown["schedules"][name]["speedup_vs_best_baseline"] == theirs / (seconds * 1_000_000)


def test_a_schedule_that_a_workload_cannot_have_is_left_out():
    planned = planned_for(workload_of(old_logprob_source="recompute"), SLOW_JUDGE, 2)
    assert list(planned.plan.schedules) == [name for name in SCHEDULES if name != "lean"]


def test_a_gain_under_the_threshold_keeps_the_best_schedule_that_is_not_ours():
    """What is kept is at its own best split, and nothing else about the plan changes."""
    plain = make_plan(EIGHT, Cluster.equal(4, "gpu"), SLOW_JUDGE)
    assert plain.plan.best == "stagebreaker"
    gain = plain.summary["stagebreaker"].speedup_vs_best_baseline - 1
    assert gain > 0
    for threshold, best in ((gain - 1e-6, "stagebreaker"), (gain + 1e-6, plain.best_baseline)):
        kept = make_plan(EIGHT, Cluster.equal(4, "gpu"), SLOW_JUDGE, min_gain=threshold)
        assert kept.plan.best == best
        assert kept.certificate == plain.certificate
        item = kept.plan.schedules[best]
        assert item.step_us == item.best_split_step_us
