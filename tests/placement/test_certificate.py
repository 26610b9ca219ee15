"""Certificates: a fresh one is confirmed from nothing, and no single claim in it can be changed unnoticed."""

import json

import pytest
from builders import profile_of, workload_of

from stagebreaker.placement.certificate import Certificate, evaluate, verify
from stagebreaker.placement.planner import make_plan
from stagebreaker.sim.workload import Cluster

PROFILE = profile_of("dynamic", t0=25, t1=2, generate=10, vae_decode=3, grad_replay=20, update=2)


@pytest.fixture(scope="module")
def fresh():
    """Two splits in two scoring modes; one of the modes is served as requests arrive."""
    workload = workload_of(candidates=6, group_size=3, mini_batches=2)
    return make_plan(workload, Cluster.equal(3, "gpu"), PROFILE, None, ("one_batch", "on_arrival")).certificate


def changed(certificate, path, value):
    """The same certificate with the field at ``path`` set to ``value`` (called with the old one if it can be)."""
    data = json.loads(certificate.to_json())
    *way, last = path
    part = data
    for step in way:
        part = part[step]
    part[last] = value(part[last]) if callable(value) else value
    return Certificate.parse(data, "changed")


def test_a_fresh_certificate_is_confirmed(fresh, tmp_path):
    assert verify(fresh) == []
    fresh.save(tmp_path / "certificate.json")
    assert Certificate.load(tmp_path / "certificate.json") == fresh
    assert verify(Certificate.load(tmp_path / "certificate.json")) == []


def test_it_accounts_for_every_placement(fresh):
    assert fresh.space_size == 2 * 2 * 7 * 4 * 4
    assert fresh.space_size == fresh.simulated + fresh.evaluated + sum(fresh.pruned.values())
    assert [r.size for r in fresh.regions] == [7 * 4 * 4] * 4


def test_winner_is_confirmed_by_other_code_than_found_it(fresh):
    gathered = [r for r in fresh.regions if r.scoring == "one_batch"]
    assert gathered
    for region in gathered:
        assert evaluate(fresh, region.best) == region.step_us


def more(value):
    return value + 1


def less(value):
    return value - 1


TAMPERINGS = {
    "step time of the best, lower": (("step_us",), less, "step_us="),
    "step time of the best, higher": (("step_us",), more, "step_us="),
    "size": (("space_size",), more, "are accounted for"),
    "simulated": (("simulated",), less, "are accounted for"),
    "evaluated": (("evaluated",), 1, "are accounted for"),
    "pruned": (("pruned",), {"work": 3}, "are accounted for"),
    "infeasible": (("infeasible",), {"memory": 3}, "are accounted for"),
    "best placement": (("best", "vae_moved"), lambda n: (n + 1) % 7, "best is"),
    "best placement, another schedule": (("best", "schedule"), "merged_replay", "best is"),
    "lower bound, lower": (("lower_bound_us",), less, "but the regions' bounds give"),
    "lower bound, higher": (("lower_bound_us",), more, "but the regions' bounds give"),
    "runner-up": (("runner_up_step_us",), more, "the certificate says"),
    "runner-up gone": (("runner_up",), None, "runner_up"),
    "region size": (("regions", 1, "size"), less, "but listing it gives"),
    "region simulated": (("regions", 1, "simulated"), less, "but the regions add up to"),
    "region step time, lower": (("regions", 2, "step_us"), less, "the certificate says"),
    "region step time, higher": (("regions", 2, "step_us"), more, "the certificate says"),
    "region best": (("regions", 0, "best", "train_moved"), [3, 3], "the certificate says"),
    "region best, out of range": (("regions", 0, "best", "vae_moved"), 7, "is not a placement of this region"),
    "region bound": (("regions", 3, "bounds_us", "work"), more, "the bounds are"),
    "region bound gone": (("regions", 3, "bounds_us"), {}, "the bounds are"),
    "region twice": (("regions", 1, "scoring"), "one_batch", "regions must be at least one, and each another"),
    "region split": (("regions", 0, "actors"), 2, "no split of 3 GPUs"),
    "region of no GPU": (("regions", 0, "actors"), 0, "no split of 3 GPUs"),
    "region of more GPUs": (("regions", 0, "rewards"), 3, "no split of 3 GPUs"),
    "a region left out": (("regions",), lambda regions: regions[1:], "but the regions add up to"),
    "no region": (("regions",), [], "regions must be at least one"),
    "workload": (("workload", "candidates"), 9, "listing it gives"),
    "a duration in the profile": (("profile", "tasks", 7, "samples_us"), [19_000_000], "the certificate says"),
}


@pytest.mark.parametrize("what", TAMPERINGS)
def test_every_single_tampering_is_caught(fresh, what):
    path, value, message = TAMPERINGS[what]
    if path[0] == "profile":
        path = (*path[:2], next(n for n, t in enumerate(PROFILE.tasks) if t.kind == "grad_replay"), path[3])
    problems = verify(changed(fresh, path, value), samples=5)
    assert any(message in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


def test_a_worse_placement_sold_as_the_best_everywhere_is_caught_by_looking_for_a_better_one(fresh):
    """Consistent lies: the region's best, its time, and all totals are another placement's."""
    data = json.loads(fresh.to_json())
    data["regions"] = data["regions"][:1]
    region = data["regions"][0]
    region["best"].update(vae_moved=6, train_moved=[3, 3])
    worse = Certificate.parse({**data, "best": region["best"]}, "changed").best
    region["step_us"] = evaluate(fresh, worse)
    assert region["step_us"] > fresh.step_us
    data.update(
        best=region["best"], step_us=region["step_us"], space_size=region["size"], simulated=region["simulated"]
    )
    problems = verify(Certificate.parse(data, "changed"))
    assert any("less than the best" in problem for problem in problems)


def test_verifying_twice_says_the_same(fresh):
    tampered = changed(fresh, ("step_us",), less)
    assert verify(tampered, 5) == verify(tampered, 5)
