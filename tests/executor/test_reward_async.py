"""Folding: the normaliser, the order, masks, and what is refused."""

import math

import pytest
import torch

from stagebreaker.executor.kernels.reward_async import Accumulator, ClipCounts, FoldError, SignGradients
from stagebreaker.profiles.document import InputError


def fold(gradients):
    accumulator = Accumulator(dict.fromkeys(range(len(gradients)), 1), len(gradients[0]), gradients[0].dtype)
    for i, g_P in enumerate(gradients):
        accumulator.add(i, g_P)
    return accumulator.finish()


def test_the_mean_is_over_candidates_not_over_gpus():
    """Three candidates on one GPU and one on another: (1+1+1+5)/4, not the mean of the two GPUs' means."""
    assert float(fold([torch.tensor([g]) for g in (1.0, 1.0, 1.0, 5.0)])) == 2.0


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_order_of_arrival_changes_no_bit(order):
    gradients = 10.0 ** torch.arange(5)[:, None] * torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    accumulator = Accumulator(dict.fromkeys(range(5), 1), 64, torch.float32)
    for i in order:
        accumulator.add(i, gradients[i])
    assert torch.equal(accumulator.finish(), fold(list(gradients)))
    assert not torch.equal(accumulator.finish(), fold(list(gradients.flip(0))))


def test_a_masked_candidate_leaves_the_normaliser():
    accumulator = Accumulator({0: 1, 1: 2, 2: 1}, 1, torch.bfloat16)
    accumulator.add(2, torch.tensor([4.0], dtype=torch.bfloat16))
    accumulator.mask(1)
    accumulator.add(0, torch.tensor([1.0]))
    assert accumulator.finish() == torch.tensor([2.5])
    assert accumulator.finish().dtype == torch.float32


def test_a_fold_refuses_what_is_missing_doubled_or_empty():
    accumulator = Accumulator({3: 2, 5: 1}, 1, torch.float32)
    one = torch.ones(1)
    accumulator.add(3, one, part=1)
    with pytest.raises(FoldError, match=r"3\.0, 5\.0 are missing"):
        accumulator.finish()
    with pytest.raises(FoldError, match="candidate 3 part 1"):
        accumulator.add(3, one, part=1)
    with pytest.raises(FoldError, match="candidate 4"):
        accumulator.add(4, one)
    with pytest.raises(FoldError, match="candidate 3 cannot be masked"):
        accumulator.mask(3)
    with pytest.raises(InputError, match="shape"):
        accumulator.add(5, torch.ones(2))
    empty = Accumulator({0: 1}, 1, torch.float32)
    empty.mask(0)
    with pytest.raises(FoldError, match="nothing to update with"):
        empty.finish()


def test_a_zero_advantage_never_touches_an_overflow():
    broken = torch.tensor([math.inf, math.nan])
    assert torch.equal(SignGradients(broken, broken, ClipCounts()).apply(0.0), torch.zeros(2))
    with pytest.raises(InputError, match="must be finite"):
        SignGradients(broken, broken, ClipCounts()).apply(math.nan)
