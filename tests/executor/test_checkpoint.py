"""Checkpoints: whole or absent, exact, and readable by peft without this package."""

import json

import peft
import pytest
import torch

from stagebreaker.executor import checkpoint
from stagebreaker.executor.kernels.update import AdamWConfig, FlatAdamW
from stagebreaker.executor.models.lora import FlatAdapter
from stagebreaker.executor.models.tiny import LATENT_CHANNELS, TEXT_DIM, tiny_transformer
from stagebreaker.profiles.document import InputError


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def fresh(seed=0, rank=2):
    adapter = FlatAdapter(tiny_transformer(heads=2, layers=1), rank=rank, alpha=4, seed=seed)
    return adapter, FlatAdamW(adapter, AdamWConfig(lr=1e-2))


def trained(steps=2):
    adapter, optimizer = fresh()
    for n in range(steps):
        optimizer.step(gradient(adapter, n))
    return adapter, optimizer


def gradient(adapter, n):
    return torch.randn(adapter.numel, generator=torch.Generator().manual_seed(n))


def test_what_is_loaded_continues_exactly(tmp_path):
    adapter, optimizer = trained()
    folder = checkpoint.folder_of(tmp_path, 2)
    checkpoint.save(folder, adapter, optimizer, 2)
    other, moments = fresh(seed=9)
    assert checkpoint.load(folder, other, moments)["step"] == 2
    assert torch.equal(other.vector(), adapter.vector())
    assert other.version == adapter.version == 2
    for pair in ((adapter, optimizer), (other, moments)):
        pair[1].step(gradient(adapter, 7))
    assert torch.equal(other.vector(), adapter.vector())
    for name, value in optimizer.state_dict().items():
        assert torch.equal(value, moments.state_dict()[name])


def test_only_the_newest_are_kept_and_the_newest_is_found(tmp_path):
    adapter, optimizer = trained(0)
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2, 9, 10):
        checkpoint.save(checkpoint.folder_of(tmp_path, step), adapter, optimizer, step)
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step-000009", "step-000010"]
    assert checkpoint.latest(tmp_path) == (10, tmp_path / "checkpoints" / "step-000010")


@pytest.mark.parametrize("fails", ["adapter", "optimizer", "rename"])
def test_a_save_that_breaks_off_is_not_seen(tmp_path, monkeypatch, fails):
    adapter, optimizer = trained()
    checkpoint.save(checkpoint.folder_of(tmp_path, 1), adapter, optimizer, 1)

    def broken(*args, **kwargs):
        raise OSError("disk full")

    targets = {
        "adapter": (FlatAdapter, "save"),
        "optimizer": (checkpoint, "save_file"),
        "rename": (type(tmp_path), "rename"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*targets[fails], broken)
        with pytest.raises(OSError, match="disk full"):
            checkpoint.save(checkpoint.folder_of(tmp_path, 2), adapter, optimizer, 2)
    assert checkpoint.latest(tmp_path) == (1, checkpoint.folder_of(tmp_path, 1))
    checkpoint.save(checkpoint.folder_of(tmp_path, 2), adapter, optimizer, 2)
    assert checkpoint.latest(tmp_path)[0] == 2
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_an_adapter_that_is_not_the_one_saved_is_refused(tmp_path):
    adapter, optimizer = trained()
    folder = checkpoint.folder_of(tmp_path, 1)
    checkpoint.save(folder, adapter, optimizer, 1)
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"adapter_sha256": "0" * 64}))
    with pytest.raises(InputError, match=r"checksum is not the one in state\.json; use an older checkpoint"):
        checkpoint.load(folder, *fresh())


def test_an_adapter_of_another_rank_is_refused(tmp_path):
    folder = checkpoint.folder_of(tmp_path, 1)
    checkpoint.save(folder, *trained(), 1)
    with pytest.raises(InputError, match="set lora_rank and alpha to the adapter's"):
        checkpoint.load(folder, *fresh(rank=4))


def test_peft_reads_the_adapter_and_gives_the_same_outputs(tmp_path):
    adapter, optimizer = trained(3)
    folder = checkpoint.folder_of(tmp_path, 3)
    checkpoint.save(folder, adapter, optimizer, 3)
    base = tiny_transformer(heads=2, layers=1)
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, LATENT_CHANNELS, 2, 4, 4, generator=generator),
        "encoder_hidden_states": torch.randn(1, 3, TEXT_DIM, generator=generator),
        "timestep": torch.tensor([500.0]),
        "return_dict": False,
    }
    with torch.no_grad():
        before = base(**inputs)[0]
        ours = adapter.transformer(**inputs)[0]
        theirs = peft.PeftModel.from_pretrained(base, str(folder / "adapter"))(**inputs)[0]
    assert torch.equal(theirs, ours)
    assert not torch.equal(before, ours)
    files = {p.name for p in (folder / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
