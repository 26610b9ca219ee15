"""GPUs of several kinds: uneven shares, admissible bounds, certificates; profiles of two machines in one."""

import json
import sys

import pytest
from builders import SECOND, profile_of, workload_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import profiles, workloads

from stagebreaker.placement.bounds import StepCosts, any_schedule_us, fastest_of, region_bound
from stagebreaker.placement.certificate import certify, verify
from stagebreaker.placement.finer import refine, starts
from stagebreaker.placement.planner import make_plan
from stagebreaker.placement.search import search
from stagebreaker.placement.space import Region, Space
from stagebreaker.profiles.__main__ import main
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import GpuKind
from stagebreaker.sim.dispatch import GraphIndex
from stagebreaker.sim.engine import Costs, step_us
from stagebreaker.sim.plan import SCORING
from stagebreaker.sim.schedules import build
from stagebreaker.sim.workload import Cluster, Gpu

KINDS = st.lists(st.sampled_from(("kind0", "kind1")), min_size=2, max_size=4)
RANDOM = settings(deadline=None, suppress_health_check=list(HealthCheck))


def mixed(*kinds):
    return Cluster(gpus=tuple(Gpu(name=f"gpu{n}", kind=kind) for n, kind in enumerate(kinds)))


def two_kinds(**seconds):
    """Kind B takes twice as long as kind A for everything."""
    a = profile_of("continuous", **seconds)
    tasks = [task.model_copy(update={"gpu_kind": "A"}) for task in a.tasks]
    tasks += [t.model_copy(update={"gpu_kind": "B", "samples_us": (2 * t.median_us,)}) for t in a.tasks]
    kinds = tuple(GpuKind(name=name, model="none") for name in "AB")
    return a.model_copy(update={"gpu_kinds": kinds, "tasks": tuple(tasks)})


def test_twelve_equal_tasks_are_eight_and_four():
    """Replays of 1 s on A and 2 s on B: 8 there and 4 here end together at 8 s."""
    workload, profile = workload_of(candidates=12, group_size=12), two_kinds(grad_replay=1)
    found = search(workload, mixed("A", "B"), profile, Space.of(workload, 2, None, ("on_arrival",)))
    assert (found.best.step_us, found.best.best.train_moved) == (8 * SECOND, (4,))
    fine = refine(
        workload,
        mixed("A", "A", "B"),
        profile,
        starts([search(workload, mixed("A", "A", "B"), profile, Space.of(workload, 3, (2, 1), ("on_arrival",)))]),
    )
    assert fine.step_us <= 5 * SECOND  # 24 / 5 = 4.8, in thirds of a second


@settings(RANDOM, max_examples=100)
@given(
    workloads(), profiles(gpu_kinds=2), st.lists(st.sampled_from(("kind0", "kind1")), min_size=2, max_size=4), st.data()
)
def test_no_bound_exceeds_a_simulated_placement(workload, profile, kinds, data):
    cluster, actors = mixed(*kinds), data.draw(st.integers(1, len(kinds) - 1))
    region = Region(workload, actors, len(kinds) - actors, data.draw(st.sampled_from(SCORING)))
    costs = StepCosts.on(workload, profile, cluster)
    bounds = {**region_bound(region, costs), "any": any_schedule_us(workload, len(kinds), costs)}
    placement = region.placement([data.draw(st.integers(0, n)) for n in region.most])
    graph, assignment = build(workload, placement)
    found = step_us(GraphIndex(graph, profile), assignment, Costs(graph, profile, cluster, workload.trained_steps))
    assert not {name: us for name, us in bounds.items() if us > found}


def test_the_fastest_of_two_curves():
    profile = two_kinds(generate=3)
    best = fastest_of(profile, ("A", "B"))
    assert best.duration_us("generate", "fastest") == 3 * SECOND
    assert fastest_of(profile, ("B",)).duration_us("generate", "fastest") == 6 * SECOND


def test_a_mixed_cluster_is_planned_and_certified():
    profile = two_kinds(t0=2, t1=1, generate=4, vae_decode=1, grad_replay=12, update=1)
    workload = workload_of(candidates=6, group_size=3, mini_batches=2)
    plans = {kinds: make_plan(workload, mixed(*kinds), profile) for kinds in ("AAB", "BAA")}
    for kinds, made in plans.items():
        assert verify(made.certificate) == []
        assert made.certificate.simulated == made.certificate.space_size
        best = made.plan.schedules["stagebreaker"].step_us
        assert made.any_schedule_bound_us <= best
        equal = [make_plan(workload, mixed(*(kind * 3)), profile) for kind in "AB"]
        assert equal[0].plan.schedules["stagebreaker"].step_us <= best
        assert best <= equal[1].plan.schedules["stagebreaker"].step_us, kinds
    big = workload_of(candidates=24, group_size=12, mini_batches=3, reference_replay=True)
    with pytest.raises(InputError, match="would be simulated, the limit is 200000"):
        make_plan(big, mixed("A", "B", "B"), profile)
    assert (
        certify(
            workload,
            mixed("A", "B", "B"),
            profile,
            search(workload, mixed("A", "B", "B"), profile, Space.of(workload, 3, None, ("one_batch",))),
        ).pruned
        == {}
    )


# -- profiles of two machines


@pytest.fixture
def merge(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    one = profile_of("continuous", generate=3, grad_replay=5)
    for name, changes in {
        "a": {"workload": "w"},
        "b": {"workload": "w"},
        "other": {"workload": "x"},
    }.items():
        kind = one.gpu_kinds[0].model_copy(update={"name": f"gpu-{name}"})
        tasks = tuple(task.model_copy(update={"gpu_kind": kind.name}) for task in one.tasks)
        one.model_copy(update={"gpu_kinds": (kind,), "tasks": tasks, **changes}).save(tmp_path / f"{name}.json")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["stagebreaker-profile", "merge", *arguments])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


def test_profiles_of_two_machines_become_one(merge, tmp_path):
    code, out, _ = merge("a.json", "b.json", "--out", "ab.json", "--json")
    assert code == 0
    made = json.loads((tmp_path / "ab.json").read_text())
    assert [kind["name"] for kind in made["gpu_kinds"]] == ["gpu-a", "gpu-b"]
    assert len(made["tasks"]) == 2 * len(json.loads((tmp_path / "a.json").read_text())["tasks"])
    assert {task["gpu_kind"] for task in json.loads(out)["tasks"]} == {"gpu-a", "gpu-b"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("a.json", "a.json"), "both have GPU kind gpu-a"),
        (("a.json", "other.json"), "workload='w' and 'x'"),
        (("a.json", "none.json"), "none.json: no such file"),
    ],
)
def test_profiles_that_do_not_fit_together_are_refused(merge, tmp_path, files, message):
    code, out, err = merge(*files, "--out", "made.json")
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "made.json").exists()
