"""The flat AdamW step: same as torch on separate tensors, exact resume, loud refusal."""

import pytest
import torch

from stagebreaker.executor.kernels.update import AdamWConfig, FlatAdamW, NonFiniteGradientError
from stagebreaker.profiles.document import InputError

CONFIG = AdamWConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)


class Flat:
    """An adapter that is one vector."""

    def __init__(self, vector_P):
        self.params = [torch.nn.Parameter(vector_P.clone())]
        self.numel = len(vector_P)
        self.version = 0

    def vector(self):
        return self.params[0].detach().clone()

    def load(self, vector_P, version):
        with torch.no_grad():
            self.params[0].copy_(vector_P)
        self.version = version

    def set_grad(self, flat_P):
        self.params[0].grad = flat_P


@pytest.fixture
def gradients():
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    return [scale * torch.randn(12, generator=generator) for scale in (0.1, 10.0, 1.0, 0.01)]


def start():
    return Flat(torch.linspace(-1, 1, 12))


def test_equals_torch_on_the_separate_parameters(gradients):
    adapter = start()
    update = FlatAdamW(adapter, CONFIG)
    parts = [torch.nn.Parameter(p.clone()) for p in start().vector().split([5, 7])]
    adamw = torch.optim.AdamW(parts, lr=1e-2, weight_decay=0.1, foreach=False)
    for version, g_P in enumerate(gradients, start=1):
        for part, grad in zip(parts, g_P.split([5, 7]), strict=True):
            part.grad = grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(parts, 1.0)
        adamw.step()
        report = update.step(g_P)
        assert report.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert (report.clipped, report.adapter_version) == (float(norm) > 1.0, version)
        torch.testing.assert_close(adapter.vector(), torch.cat([p.detach() for p in parts]), rtol=0, atol=1e-6)


def test_the_callers_gradient_is_left_alone(gradients):
    before = gradients[1].clone()
    FlatAdamW(start(), CONFIG).step(gradients[1])
    assert torch.equal(gradients[1], before)


def test_resume_is_bit_exact(gradients):
    whole, first = start(), start()
    run = FlatAdamW(whole, CONFIG)
    for g_P in gradients:
        run.step(g_P)
    half = FlatAdamW(first, CONFIG)
    for g_P in gradients[:2]:
        half.step(g_P)
    second = start()
    second.load(first.vector(), first.version)
    resumed = FlatAdamW(second, CONFIG)
    resumed.load_state_dict(half.state_dict())
    for g_P in gradients[2:]:
        resumed.step(g_P)
    assert torch.equal(second.vector(), whole.vector())
    assert second.version == whole.version == 4
    for name, value in run.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


def test_state_is_zero_before_the_first_step_and_resumes_from_there(gradients):
    fresh, other = start(), start()
    state = FlatAdamW(fresh, CONFIG).state_dict()
    assert state["step"] == 0
    assert not state["exp_avg_P"].any()
    resumed = FlatAdamW(other, CONFIG)
    resumed.load_state_dict(state)
    resumed.step(gradients[0])
    FlatAdamW(fresh, CONFIG).step(gradients[0])
    assert torch.equal(other.vector(), fresh.vector())


def test_an_adapter_loaded_in_between_is_the_one_that_moves(gradients):
    adapter = start()
    update = FlatAdamW(adapter, CONFIG)
    adapter.load(torch.zeros(12), 9)
    assert update.step(gradients[0]).adapter_version == 10
    assert float(adapter.vector().abs().max()) < 0.011


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_a_gradient_that_is_not_finite_changes_nothing(gradients, bad):
    adapter = start()
    update = FlatAdamW(adapter, CONFIG)
    update.step(gradients[0])
    vector, state = adapter.vector(), update.state_dict()
    broken = gradients[1].clone()
    broken[3:5] = bad
    with pytest.raises(NonFiniteGradientError, match=r"adapter version 1: [02] of 12 elements"):
        update.step(broken)
    assert torch.equal(adapter.vector(), vector)
    assert adapter.version == 1
    for name, value in update.state_dict().items():
        assert torch.equal(value, state[name])


def test_bad_input_is_named(gradients):
    update = FlatAdamW(start(), CONFIG)
    with pytest.raises(InputError, match="adapter of 12 parameters"):
        update.step(gradients[0][:5])
    with pytest.raises(InputError, match="needs exp_avg_P, exp_avg_sq_P, step"):
        update.load_state_dict({"step": torch.tensor(1.0)})
    with pytest.raises(InputError, match="exp_avg_P has shape"):
        update.load_state_dict(update.state_dict() | {"exp_avg_P": torch.zeros(3)})
    with pytest.raises(InputError, match="lr"):
        AdamWConfig(lr=0.0)
    with pytest.raises(InputError, match="betas"):
        AdamWConfig(betas=(0.9, 1.0))
