"""The adapter as a vector: identical everywhere, readable by peft alone, gradients in a flat buffer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from stagebreaker.executor.models.lora import ALL_LINEAR, FlatAdapter
from stagebreaker.executor.models.tiny import TEXT_DIM, tiny_transformer
from stagebreaker.profiles.document import InputError


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def forward(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    dtype = model.patch_embedding.weight.dtype
    x = torch.randn(1, 16, 2, 4, 4, generator=generator).to(dtype)
    text = torch.randn(1, 5, TEXT_DIM, generator=generator).to(dtype)
    out: Tensor = model(x, torch.tensor([500.0]), text, return_dict=False)[0]
    return out


def perturbed(dtype: torch.dtype = torch.float32, **kwargs: Any) -> FlatAdapter:
    adapter = FlatAdapter(tiny_transformer().to(dtype), rank=4, **kwargs)
    noise = torch.randn(adapter.numel, generator=torch.Generator().manual_seed(9))
    adapter.load(adapter.vector() + 0.1 * noise.to(adapter.vector().dtype), version=7)
    return adapter


def test_only_the_adapter_trains_and_it_starts_as_the_base() -> None:
    model = tiny_transformer()
    expected = forward(model)
    adapter = FlatAdapter(model, rank=4)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert {id(p) for p in trainable} == {id(p) for p in adapter.params}
    assert adapter.numel == sum(p.numel() for p in trainable) == adapter.vector().numel()
    assert list(adapter.names) == sorted(adapter.names)
    assert adapter.version == 0
    assert torch.equal(forward(model), expected)


@pytest.mark.parametrize(
    ("targets", "layers"),
    [(("to_q",), 4), (("to_q", "to_k", "to_v", "to_out.0"), 16), (("all-linear",), 20), (ALL_LINEAR, 20)],
)
def test_targets(targets: tuple[str, ...], layers: int) -> None:
    adapter = FlatAdapter(tiny_transformer(), rank=2, targets=targets)
    assert len(adapter.params) == 2 * layers
    assert all(name.startswith("blocks.") for name in adapter.names)


def test_seed_alone_fixes_the_values() -> None:
    torch.manual_seed(123)
    here = FlatAdapter(tiny_transformer(), rank=4, seed=11).sha256()
    torch.manual_seed(321)
    assert FlatAdapter(tiny_transformer(), rank=4, seed=11).sha256() == here
    assert FlatAdapter(tiny_transformer(), rank=4, seed=12).sha256() != here


def test_vector_is_a_copy_and_load_sets_it() -> None:
    adapter = perturbed()
    vector, digest = adapter.vector(), adapter.sha256()
    assert vector.dtype == torch.float32
    assert digest == adapter.sha256(vector)
    vector.zero_()
    assert adapter.sha256() == digest
    adapter.load(vector, version=8)
    assert adapter.version == 8
    assert adapter.sha256() != digest
    assert not adapter.vector().any()
    with pytest.raises(ValueError, match=r"flat buffer of shape \(3,\) must be"):
        adapter.load(torch.zeros(3), version=9)
    assert adapter.version == 8


def test_gradients_land_in_the_flat_buffer() -> None:
    adapter = perturbed()
    expected = torch.autograd.grad(forward(adapter.transformer).square().sum(), adapter.params)
    flat = torch.zeros(adapter.numel)
    adapter.set_grad(flat)
    for _ in range(2):  # accumulates, as two units of one candidate do
        forward(adapter.transformer).square().sum().backward()
    assert torch.equal(flat, 2 * torch.cat([g.flatten() for g in expected]))
    views = adapter.views(flat)
    assert all(
        p.grad is not None and p.grad.data_ptr() == v.data_ptr() for p, v in zip(adapter.params, views, strict=True)
    )
    adapter.set_grad(None)
    assert all(p.grad is None for p in adapter.params)


def test_disabled_is_the_reference_policy() -> None:
    reference = forward(tiny_transformer())
    adapter = perturbed()
    tuned = forward(adapter.transformer)
    with adapter.disabled():
        assert torch.equal(forward(adapter.transformer), reference)
    assert torch.equal(forward(adapter.transformer), tuned)
    assert not torch.equal(tuned, reference)
    assert all(p.requires_grad for p in adapter.params)
    with pytest.raises(KeyError), adapter.disabled():
        raise KeyError
    assert torch.equal(forward(adapter.transformer), tuned)


@pytest.mark.parametrize("base", [torch.float32, torch.float64, torch.bfloat16])
def test_precision_of_the_parameters(base: torch.dtype) -> None:
    adapter = FlatAdapter(tiny_transformer().to(base), rank=4)
    expected = torch.float64 if base == torch.float64 else torch.float32
    assert adapter.vector().dtype == expected
    assert adapter.sha256() == FlatAdapter(tiny_transformer(), rank=4).sha256()
    assert forward(adapter.transformer).dtype == base


@pytest.mark.parametrize("targets", [("to_q", "to_k", "to_v", "to_out.0"), ("all-linear",)])
def test_peft_alone_reads_what_save_wrote(tmp_path: Path, targets: tuple[str, ...]) -> None:
    adapter = perturbed(targets=targets, alpha=6.0)
    adapter.save(tmp_path)
    names = {p.name for p in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
    alone = PeftModel.from_pretrained(tiny_transformer(), str(tmp_path))
    assert torch.equal(forward(adapter.transformer), forward(alone.base_model.model))


def test_save_and_load_dir_round_trip(tmp_path: Path) -> None:
    adapter = perturbed()
    adapter.save(tmp_path)
    other = FlatAdapter(tiny_transformer(), rank=4, seed=99)
    other.load_dir(tmp_path)
    assert other.sha256() == adapter.sha256()
    assert other.version == 7


def test_load_dir_reads_what_peft_wrote(tmp_path: Path) -> None:
    adapter = perturbed()
    adapter.save(tmp_path / "ours")
    PeftModel.from_pretrained(tiny_transformer(), str(tmp_path / "ours")).save_pretrained(str(tmp_path / "peft"))
    other = FlatAdapter(tiny_transformer(), rank=4, seed=99)
    other.load_dir(tmp_path / "peft")
    assert (other.sha256(), other.version) == (adapter.sha256(), 0)


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lora_rank=0 must be >= 1"):
        FlatAdapter(tiny_transformer(), rank=0)
    with pytest.raises(InputError, match=r"to_x.*must be all-linear or some of to_q"):
        FlatAdapter(tiny_transformer(), rank=2, targets=("to_x",))
    with pytest.raises(InputError, match=r"holds no adapter_model\.safetensors"):
        perturbed().load_dir(tmp_path)
    perturbed().save(tmp_path)
    with pytest.raises(InputError, match=r"tensors differ, the first is base_model\.model\.blocks\.0"):
        FlatAdapter(tiny_transformer(), rank=2).load_dir(tmp_path)
    with pytest.raises(InputError, match="tensors differ"):
        FlatAdapter(tiny_transformer(), rank=4, targets=("to_q",)).load_dir(tmp_path)
    with pytest.raises(InputError, match="alpha/rank=4/4, the run wants 8/4"):
        FlatAdapter(tiny_transformer(), rank=4, alpha=8).load_dir(tmp_path)
