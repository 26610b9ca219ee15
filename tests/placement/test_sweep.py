"""Branch and bound against brute force: the same two best, and every placement accounted for."""

import pytest
from builders import profile_of, workload_of
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from strategies import profiles, workloads

from stagebreaker.placement import search as searching
from stagebreaker.placement.certificate import certify, verify
from stagebreaker.placement.search import _Simulated, search
from stagebreaker.placement.space import Region, Space
from stagebreaker.placement.sweep import Tally, two_best
from stagebreaker.profiles.document import InputError
from stagebreaker.profiles.table import LinkCost
from stagebreaker.sim.plan import SCORING
from stagebreaker.sim.workload import Cluster

RANDOM = settings(deadline=None, suppress_health_check=list(HealthCheck))


def sweep_is_brute_force(region, profile, rivals=()):
    cluster = Cluster.equal(region.actors + region.rewards, profile.gpu_kinds[0].name)
    simulated = _Simulated(region.workload, cluster, profile, region)
    if not simulated.can_sweep or region.size > 2_000:
        return False
    tally = Tally()
    own = simulated.sweep().optimum(list(rivals), tally)
    assert tally.evaluated + sum(tally.pruned.values()) == region.size
    everything = [(simulated.step_us(p), p.key(), p) for p in region.placements()]
    assert two_best([*own, *rivals]) == two_best([*everything, *rivals])
    return True


@settings(RANDOM, max_examples=144)
@given(workloads(), st.integers(1, 3), st.integers(1, 3), st.sampled_from(SCORING), profiles())
def test_the_two_best_are_those_of_brute_force(workload, actors, rewards, scoring, profile):
    assume(sweep_is_brute_force(Region(workload, actors, rewards, scoring), profile))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(RANDOM, max_examples=5_000)
@given(workloads(), st.integers(1, 3), st.integers(1, 3), st.sampled_from(SCORING), profiles())
def test_the_two_best_are_those_of_brute_force_in_5000(workload, actors, rewards, scoring, profile):
    assume(sweep_is_brute_force(Region(workload, actors, rewards, scoring), profile))


COSTS = {"generate": 7, "vae_decode": 3, "old_replay": 2, "ref_replay": 3, "grad_replay": 11, "update": 1, "fold": 0.1}


@pytest.mark.parametrize("scoring", SCORING)
@pytest.mark.parametrize("fields", [{}, {"reference_replay": True}, {"old_logprob_source": "first_replay"}], ids=str)
def test_usual_costs_and_links(scoring, fields):
    sizes = {"latents": 4_000_000, "trajectory": 20_000_000, "frames": 97_000_000, "gradient": 10**9, "adapter": 10**9}
    link = LinkCost(latency_us=20, bytes_per_s=10_000_000_000)
    profile = profile_of("continuous", t0=5, t1=1, link=link, sizes_bytes=sizes, **COSTS)
    workload = workload_of(candidates=6, group_size=3, mini_batches=2, **fields)
    region = Region(workload, 2, 2, scoring)
    assert sweep_is_brute_force(region, profile)
    placement = region.base().model_copy(update={"vae_moved": 1})
    sweep_is_brute_force(region, profile, [(1, placement.key(), placement)])  # a rival that nothing here can beat


def test_links_that_are_busy_are_left_to_the_simulator():
    """A trajectory that takes longer than a decode may delay the latents behind it: ends of requests depend on it."""
    workload = workload_of(candidates=4, group_size=2)
    cluster = Cluster.equal(3, "gpu")
    for size, can_sweep in ((10, True), (50_000_000_000, False)):
        profile = profile_of("continuous", t0=1, **COSTS, sizes_bytes={"trajectory": size})
        for scoring in SCORING:
            simulated = _Simulated(workload, cluster, profile, Region(workload, 2, 1, scoring))
            assert simulated.can_sweep == (can_sweep or scoring != "on_arrival")


# -- the search around it


def large(scoring="one_batch", candidates=12, **fields):
    profile = profile_of("continuous", t0=5, t1=1, **COSTS)
    workload = workload_of(candidates=candidates, group_size=candidates // 2, mini_batches=2, **fields)
    cluster = Cluster.equal(4, "gpu")
    return workload, cluster, profile, Space.of(workload, 4, None, (scoring,))


@pytest.mark.parametrize("scoring", SCORING)
def test_both_searches_find_the_same(scoring):
    problem = large(scoring, candidates=6)
    whole, bounded = (search(*problem, method=method) for method in ("exhaustive", "bound"))
    assert (bounded.best.step_us, bounded.best.best) == (whole.best.step_us, whole.best.best)
    certificates = [certify(*problem[:3], found) for found in (whole, bounded)]
    assert certificates[0].runner_up == certificates[1].runner_up
    assert certificates[0].runner_up_step_us == certificates[1].runner_up_step_us
    assert (whole.simulated, bounded.simulated) == (problem[3].size, 0)
    assert bounded.evaluated + sum(bounded.pruned.values()) == problem[3].size
    assert bounded.evaluated < whole.simulated / 10
    assert [verify(c) for c in certificates] == [[], []]


def test_a_space_of_millions_is_certified():
    problem = large(candidates=24, reference_replay=True)
    assert problem[3].size > 2_000_000
    found = search(*problem)
    certificate = certify(*problem[:3], found)
    assert certificate.space_size == certificate.evaluated + sum(certificate.pruned.values())
    assert set(certificate.pruned) <= {"chain", "work"}
    assert verify(certificate) == []
    with pytest.raises(InputError, match="would be simulated, the limit is 200000"):
        search(*problem, method="exhaustive")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda c: {"evaluated": c.evaluated + 1}, "evaluated="),
        (lambda c: {"pruned": {**c.pruned, "work": 0}}, "pruned="),
        (lambda c: {"step_us": c.step_us - 1}, "step_us="),
        (lambda c: {"best": c.best.model_copy(update={"vae_moved": 0})}, "best is"),
        (lambda c: {"runner_up_step_us": c.runner_up_step_us + 1}, "takes"),
        (
            lambda c: {
                "evaluated": c.evaluated + 1,
                "pruned": {**c.pruned, "chain": c.pruned["chain"] - 1},
                "regions": (
                    c.regions[0].model_copy(
                        update={
                            "evaluated": c.regions[0].evaluated + 1,
                            "pruned": {**c.regions[0].pruned, "chain": c.regions[0].pruned["chain"] - 1},
                        }
                    ),
                    *c.regions[1:],
                ),
            },
            "again it is",
        ),
    ],
)
def test_a_certificate_that_was_changed_is_noticed(change, problem):
    made = large()
    certificate = certify(*made[:3], search(*made, method="bound"))
    assert verify(certificate) == []
    changed = certificate.model_copy(update=change(certificate))
    assert any(problem in line for line in verify(changed))


def test_a_wrong_bound_would_be_noticed(monkeypatch):
    """Were a bound too high, the sample that SimPy simulates would find something better than the winner."""
    monkeypatch.setattr(searching.Sweep, "_bounds", lambda self, s, k: {"chain": s.far * 3, "work": s.far})
    monkeypatch.setattr(
        searching.Sweep, "_dive", lambda self: iter([(0, self.region.placement((n, 0, 0))) for n in (0, 1)])
    )
    monkeypatch.setattr(searching, "SAMPLE", 2_000)
    problem = large(candidates=6)
    with pytest.raises(RuntimeError, match="branch and bound missed"):
        search(*problem, method="bound")
