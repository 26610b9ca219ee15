"""The coarse search beside the whole space, where that is quick to simulate."""

import pytest

from stagebreaker.placement.coarse import Simulated, coarse_placement
from stagebreaker.placement.search import search
from stagebreaker.placement.space import SCHEDULE, Space
from stagebreaker.profiles.document import InputError
from stagebreaker.sim.plan import SCORING, Placement
from stagebreaker.sim.published import shipped_profile
from stagebreaker.sim.workload import Cluster, load_workload

CASES = [
    ("dancegrpo-vrt", 6, {}, (2, 1)),
    ("dancegrpo-vrt", 6, {"mini_batches": 3}, (4, 2)),
    ("dancegrpo-vrt", 12, {"mini_batches": 1}, (4, 2)),
    ("dancegrpo-vrt", 6, {"old_logprob_source": "first_replay"}, (2, 2)),
    ("dancegrpo-urflex", 8, {}, (3, 3)),
    ("kvpo-urflex", 4, {}, (2, 2)),
]


def problem(pair, candidates, changes, split):
    workload = load_workload(pair).with_(candidates=candidates, group_size=candidates // 2, **changes)
    profile = shipped_profile(f"fitted-{pair}")
    cluster = Cluster.equal(sum(split), profile.gpu_kinds[0].name)
    return workload, profile, cluster, Space.of(workload, sum(split), split, SCORING)


@pytest.mark.parametrize(("pair", "candidates", "changes", "split"), CASES)
def test_within_one_percent_of_the_whole_space(pair, candidates, changes, split):
    workload, profile, cluster, space = problem(pair, candidates, changes, split)
    placement, step_us = coarse_placement(workload, profile, cluster, space)
    optimum_us = search(workload, cluster, profile, space).best.step_us
    assert optimum_us <= step_us <= 1.01 * optimum_us
    placement.check(workload)
    assert Simulated(placement, workload, profile, cluster).step_us(placement) == step_us


@pytest.mark.parametrize("pair", ["dancegrpo-urflex", "kvpo-vrt"])
def test_never_worse_than_moving_nothing(pair):
    workload, profile, cluster, _ = problem(pair, 12, {}, (4, 2))
    space = Space.of(workload, 6, None, SCORING)
    _, step_us = coarse_placement(workload, profile, cluster, space)
    for actors in range(1, 6):
        still = Placement(schedule="merged_replay", actors=actors, rewards=6 - actors, scoring="on_arrival")
        assert step_us <= Simulated(still, workload, profile, cluster).step_us(still)


def test_what_does_not_fit_is_not_found():
    workload, profile, _, space = problem("dancegrpo-vrt", 6, {}, (1, 1))
    kinds = {
        "policy_weights": 3, "adapter": 0, "kv_cache": 0, "gradient_buffer": 1, "optimizer": 0, "vae_weights": 0,
        "text_encoder_weights": 0, "judge_weights": 1, "judge_reserve": 0, "encode_prompt_activations": 0,
        "generate_activations": 0, "replay_activations": 0, "grad_replay_activations": 0, "vae_decode_activations": 0,
        "score_activations": 0,
    }  # fmt: skip
    weighed = profile.model_copy(update={"memory_bytes": {kind: gb * 10**9 for kind, gb in kinds.items()}})
    name = profile.gpu_kinds[0].name

    def found(gigabytes):
        return coarse_placement(workload, weighed, Cluster.equal(2, name, gigabytes * 10**9), space)

    roomy, _ = found(40)
    assert roomy.schedule == SCHEDULE
    with pytest.raises(InputError, match="on 2 GPUs fits into memory; take larger GPUs"):
        found(2)
