"""Advantages: z-scores, ties, scopes, and what happens without a score."""

import math

import numpy as np
import pytest

from stagebreaker.executor.algorithms.advantages import UnscorableError, advantages
from stagebreaker.executor.algorithms.dancegrpo import DanceGRPO
from stagebreaker.profiles.document import InputError

ONE_GROUP = dict.fromkeys(range(4), 0)
NAN = math.nan


def scored(*values):
    return dict(enumerate(values))


def test_group_z_scores_use_the_unbiased_std():
    result = advantages(scored(1.0, 2.0, 3.0, 4.0), ONE_GROUP, eps=0.0)
    std = math.sqrt(5 / 3)
    assert list(result.values.values()) == pytest.approx([-1.5 / std, -0.5 / std, 0.5 / std, 1.5 / std])
    assert result.masked == {}


@pytest.mark.parametrize("missing", [NAN, None, math.inf])
def test_a_masked_candidate_leaves_mean_and_std(missing):
    result = advantages(scored(1.0, missing, 3.0, 4.0), ONE_GROUP, on_unscorable="mask_candidate")
    assert result.values == pytest.approx({0: -1.0911, 2: 0.2182, 3: 0.8729}, abs=5e-5)
    assert result.masked == {1: f"unscorable (score {missing})"}


def test_fail_names_the_candidates():
    with pytest.raises(UnscorableError, match=r"candidates \[1, 3\]"):
        advantages(scored(1.0, NAN, 3.0, None), ONE_GROUP, on_unscorable="fail")


def test_drop_group_keeps_the_others():
    groups = {0: 0, 1: 0, 2: 1, 3: 1}
    result = advantages(scored(1.0, NAN, 3.0, 4.0), groups, on_unscorable="drop_group")
    assert set(result.values) == {2, 3}
    assert result.masked[0] == "group 0 dropped: candidate 1 is unscorable"


def test_a_survivor_left_alone_is_masked_with_its_reason():
    groups = {0: 0, 1: 0, 2: 1, 3: 1}
    result = advantages(scored(1.0, None, 3.0, 4.0), groups, on_unscorable="mask_candidate")
    assert result.masked[0] == "the only scored candidate of group 0"
    assert set(result.values) == {2, 3}


def test_everything_unscorable_leaves_nothing():
    result = advantages(scored(None, NAN), {0: 0, 1: 0}, on_unscorable="mask_candidate")
    assert result.values == {}
    assert set(result.masked) == {0, 1}


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_tied_float32_scores_give_exactly_zero(scope):
    scores = dict(enumerate(np.full(12, 0.8345, dtype=np.float32)))
    assert set(advantages(scores, dict.fromkeys(range(12), 0), scope=scope).values.values()) == {0.0}


def test_a_tied_group_is_zero_also_under_a_wider_scope():
    result = advantages(scored(0.1, 0.1, 0.1, 5.0, 7.0), {0: 0, 1: 0, 2: 0, 3: 1, 4: 1}, scope="batch")
    assert [result.values[i] for i in range(3)] == [0.0, 0.0, 0.0]


def test_batch_scope_takes_the_mean_of_the_group_and_the_std_of_the_batch():
    rewards, groups = [1.0, 2.0, 5.0, 9.0], {0: 0, 1: 0, 2: 1, 3: 1}
    std = np.std(rewards, ddof=1)
    result = advantages(scored(*rewards), groups, scope="batch", eps=0.0)
    assert list(result.values.values()) == pytest.approx([-0.5 / std, 0.5 / std, -2 / std, 2 / std])


def test_minibatch_scope_takes_the_std_of_the_minibatch():
    rewards = [1.0, 2.0, 5.0, 9.0]
    halves = {0: 0, 1: 0, 2: 1, 3: 1}
    result = advantages(scored(*rewards), ONE_GROUP, scope="minibatch", eps=0.0, mini_batches=halves)
    low, high = np.std(rewards[:2], ddof=1), np.std(rewards[2:], ddof=1)
    assert list(result.values.values()) == pytest.approx([-3.25 / low, -2.25 / low, 0.75 / high, 4.75 / high])


def test_order_of_the_scores_changes_nothing():
    scores = scored(0.3, 0.1, 0.7, 0.9)
    backwards = dict(reversed(scores.items()))
    assert advantages(scores, ONE_GROUP) == advantages(backwards, ONE_GROUP)


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ({0: 0, 1: 7, 2: 0}, {}, r"group 7 has one candidate \(1\)"),
        ({0: 0, 1: 0}, {}, r"candidates \[2\] have a score but no entry in groups"),
        ({0: 0, 1: 0, 2: 0, 3: 0}, {}, r"candidates \[3\] belong to a scored group but have no score"),
        ({0: 0, 1: 0, 2: 0}, {"scope": "world"}, "group, minibatch, batch"),
        ({0: 0, 1: 0, 2: 0}, {"on_unscorable": "ignore"}, "fail, drop_group, mask_candidate"),
        ({0: 0, 1: 0, 2: 0}, {"scope": "minibatch"}, "needs mini_batches"),
        (
            {0: 0, 1: 0, 2: 0},
            {"scope": "minibatch", "mini_batches": {0: 0, 1: 0, 2: 1}},
            r"minibatch 1 has one candidate \(2\)",
        ),
    ],
)
def test_bad_input_is_named(groups, options, message):
    with pytest.raises(InputError, match=message):
        advantages(scored(1.0, 2.0, 3.0), groups, **options)


def test_dancegrpo_clamps_advantages():
    rewards = dict.fromkeys(range(40), 0.0) | {39: 1.0}
    raw = advantages(rewards, dict.fromkeys(range(40), 0)).values[39]
    clamped = DanceGRPO(trained_steps=3).advantages(rewards, dict.fromkeys(range(40), 0)).values
    assert raw == pytest.approx(39 / math.sqrt(40))
    assert clamped[39] == 5.0
    assert clamped[0] == pytest.approx(-1 / math.sqrt(40))
