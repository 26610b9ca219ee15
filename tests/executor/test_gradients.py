"""check-gradients: what it covers, that it can fail, and that it cleans up behind itself."""

import pytest
import torch
from runs import quick_engines

from stagebreaker.executor import gradients
from stagebreaker.executor.gradients import TOLERANCE, WRONG, check, keep_float64, log_ratio, rel_error
from stagebreaker.executor.kernels.reward_async import SignGradients
from stagebreaker.profiles.document import InputError
from stagebreaker.sim.workload import load_workload

TINY = load_workload("tiny-dancegrpo", ("lora_rank=2", "denoise_steps=3", "trained_steps=2"))


@pytest.fixture(autouse=True, scope="module")
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        quick_engines(patch)
        yield


@pytest.fixture(scope="module")
def cases():
    return check(TINY)


def worst(cases, dtype):
    return max(case.max_rel_error for case in cases if case.dtype == dtype)


def test_every_case_is_within_tolerance(cases):
    assert len(cases) >= 80
    assert len({(case.name, case.dtype) for case in cases}) == len(cases)
    for dtype, limit in TOLERANCE.items():
        assert 0 < worst(cases, dtype) <= limit


def test_both_samplers_and_dtypes_have_the_same_cases(cases):
    names = {dtype: [case.name for case in cases if case.dtype == dtype] for dtype in TOLERANCE}
    assert names["float64"] == names["float32"]
    bodies = {
        sampler: {n.split(": ", 1)[1] for n in names["float64"] if n.startswith(sampler) and "bound" not in n}
        for sampler in ("dance_sde", "renoise")
    }
    assert bodies["dance_sde"] == bodies["renoise"]


def clipped(cases, part):
    found = {case.name.split(": ", 1)[1]: case.clipped for case in cases if case.name.startswith("dance_sde")}
    return {name: count for name, count in found.items() if part in name}


def test_the_clip_cuts_what_it_should(cases):
    """Two units a candidate: a positive advantage is cut above the upper bound, a negative one below the lower."""
    assert clipped(cases, "ratios") == {
        "ratios inside, A = 1.7": 0,
        "ratios inside, A = -0.6": 0,
        "ratios above, A = 1.7": 2,
        "ratios above, A = -0.6": 0,
        "ratios below, A = 1.7": 0,
        "ratios below, A = -0.6": 2,
        "ratios mixed, A = 1.7": 0,  # below and inside; the third of the choices needs a third unit
        "ratios mixed, A = -0.6": 1,
        "ratios mixed, A = 0": 0,
    }
    cut = {name for name, count in clipped(cases, "bound").items() if count}
    assert cut == {"lower bound -2 ulp, A = -0.6", "upper bound +2 ulp, A = 1.7"}
    assert len(clipped(cases, "bound")) == 12


def test_what_must_be_equal_bit_by_bit_is(cases):
    exact = [c for c in cases if any(word in c.name for word in ("message", "tied", "recomputed", "A = 0"))]
    assert len(exact) == 28
    assert all(case.same_bits and case.max_rel_error == 0 for case in exact)
    assert not all(case.same_bits for case in cases)


def test_a_wrong_kernel_is_caught(monkeypatch):
    monkeypatch.setattr(gradients, "TOLERANCE", {"float32": 1e-5})
    monkeypatch.setattr(gradients, "SAMPLERS", ("dance_sde",))

    def swapped(*args):
        signed = compress(*args)
        return SignGradients(signed.minus_P, signed.plus_P, signed.clip)

    compress = gradients.compress
    monkeypatch.setattr(gradients, "compress", swapped)
    wrong = {case.name.split(": ", 1)[1] for case in check(TINY) if case.max_rel_error > 1e-5}
    assert "ratios above, A = 1.7" in wrong
    assert "ratios mixed, A = -0.6" in wrong
    assert "lower bound -2 ulp, A = -0.6" in wrong
    assert "steps 0 + 1, A = -0.6" in wrong
    assert not any(name.startswith("first replay") for name in wrong)


def test_a_message_that_loses_a_bit_is_caught(monkeypatch):
    monkeypatch.setattr(gradients, "TOLERANCE", {"float32": 1e-5})
    monkeypatch.setattr(gradients, "SAMPLERS", ("renoise",))
    unpack = gradients.unpack

    def lossy(*args):
        value = unpack(*args)
        if isinstance(value, SignGradients):
            return SignGradients(value.plus_P * (1 + 2**-23), value.minus_P, value.clip)
        return value

    monkeypatch.setattr(gradients, "unpack", lossy)
    wrong = [case for case in check(TINY) if case.max_rel_error > 1e-5]
    assert [case.name for case in wrong] == ["renoise: message: g+ and g-, A = 1.7"]
    assert wrong[0].max_rel_error == WRONG


def test_float_is_patched_inside_and_restored_even_after_an_error():
    original = torch.Tensor.float
    with keep_float64():
        assert torch.zeros(1, dtype=torch.float64).float().dtype == torch.float64
        assert torch.zeros(1, dtype=torch.bfloat16).float().dtype == torch.float32
    assert torch.Tensor.float is original
    with pytest.raises(ZeroDivisionError), keep_float64():
        _ = 1 / 0
    assert torch.Tensor.float is original


def test_errors_that_no_ratio_describes_are_wholly_wrong():
    zero, one, nan = torch.zeros(2), torch.ones(2), torch.tensor([1.0, float("nan")])
    assert rel_error(zero, zero) == 0
    assert rel_error(one, zero) == WRONG
    assert rel_error(nan, one) == WRONG
    assert rel_error(torch.tensor([1.0, 1.5]), torch.tensor([1.0, 2.0])) == 0.25


def test_log_ratio_is_exact_or_absent():
    rho = torch.tensor([1 - 1e-4, 1 + 1e-4, 1.0])
    assert torch.equal(log_ratio(rho).exp(), rho)
    assert log_ratio(torch.nextafter(torch.tensor([1331.0]), torch.tensor([0.0]))) is None


@pytest.mark.parametrize("name", ["kvpo-vrt", "kvpo-urflex"])
def test_only_algorithms_with_kernels(name):
    with pytest.raises(InputError, match="algorithm='kvpo' has no kernels yet"):
        check(load_workload(name))
