"""Every engine from every kind of source, offline; bad sources are refused with one clear line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stagebreaker.executor.models.load import load_judge_model, load_policy, load_text_encoder, load_vae
from stagebreaker.executor.models.original import RENAMES, rename
from stagebreaker.executor.models.prompts import load_prompts
from stagebreaker.executor.models.tiny import (
    TEXT_DIM,
    TEXT_TOKENS,
    save_tiny,
    seeded,
    tiny_text_encoder,
    tiny_transformer,
    tiny_vae,
)
from stagebreaker.profiles.document import InputError

# Keys as the original code names them, for the shapes that the rename table has to cover.
ORIGINAL_BLOCK_KEYS = {
    "blocks.0.modulation": "blocks.0.scale_shift_table",
    "blocks.0.norm3.weight": "blocks.0.norm2.weight",
    "blocks.0.self_attn.q.weight": "blocks.0.attn1.to_q.weight",
    "blocks.0.self_attn.o.bias": "blocks.0.attn1.to_out.0.bias",
    "blocks.0.self_attn.norm_q.weight": "blocks.0.attn1.norm_q.weight",
    "blocks.0.cross_attn.k.weight": "blocks.0.attn2.to_k.weight",
    "blocks.0.ffn.0.weight": "blocks.0.ffn.net.0.proj.weight",
    "blocks.0.ffn.2.bias": "blocks.0.ffn.net.2.bias",
    "head.modulation": "scale_shift_table",
    "head.head.weight": "proj_out.weight",
    "patch_embedding.weight": "patch_embedding.weight",
    "text_embedding.0.weight": "condition_embedder.text_embedder.linear_1.weight",
    "time_embedding.2.bias": "condition_embedder.time_embedder.linear_2.bias",
    "time_projection.1.weight": "condition_embedder.time_proj.weight",
}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("family")
    save_tiny(directory, seed=4)
    return directory


def forward(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    dtype = model.patch_embedding.weight.dtype
    x = torch.randn(1, 16, 2, 4, 4, generator=generator).to(dtype)
    text = torch.randn(1, 5, TEXT_DIM, generator=generator).to(dtype)
    out: Tensor = model(x, torch.tensor([500.0]), text, return_dict=False)[0]
    return out


def original_key(key: str) -> str:
    """The inverse of the rename table, for a key of a diffusers model."""
    if key == "scale_shift_table":
        return "head.modulation"
    for old, new in reversed(RENAMES):
        if old != "head.modulation":
            key = key.replace(new, old)
    return key


def original_state(model: Any) -> dict[str, Tensor]:
    return {"model." + original_key(k): v.clone() for k, v in model.state_dict().items()}


def assert_same(loaded: Any, expected: Any) -> None:
    loaded_state, expected_state = loaded.state_dict(), expected.state_dict()
    assert loaded_state.keys() == expected_state.keys()
    assert all(torch.equal(loaded_state[k], expected_state[k]) for k in expected_state)
    assert torch.equal(forward(loaded), forward(expected))


@pytest.mark.parametrize("key", ORIGINAL_BLOCK_KEYS)
@pytest.mark.parametrize("prefix", ["", "model.", "model._fsdp_wrapped_module."])
def test_rename_table(key: str, prefix: str) -> None:
    assert rename(prefix + key) == ORIGINAL_BLOCK_KEYS[key]


def test_every_key_of_the_model_has_an_original_name() -> None:
    keys = list(tiny_transformer().state_dict())
    assert [rename("model." + original_key(k)) for k in keys] == keys
    assert not any("attn1" in original_key(k) or "scale_shift" in original_key(k) for k in keys)


def test_rename_table_agrees_with_the_converter_of_diffusers() -> None:
    """Theirs is private and may move; ours must not depend on it, but while both exist they agree."""
    convert = pytest.importorskip("diffusers.loaders.single_file_utils").convert_wan_transformer_to_diffusers
    model = tiny_transformer()
    state = {original_key(k): v for k, v in model.state_dict().items()}
    ours = {rename(k): v for k, v in state.items()}
    theirs = convert(dict(state))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


def test_tiny_is_seeded_and_frozen() -> None:
    model = load_policy("tiny", seed=4)
    assert_same(model, tiny_transformer(4))
    assert not any(p.requires_grad for p in model.parameters())
    assert not torch.equal(forward(load_policy("tiny", seed=5)), forward(model))


def test_family_is_the_same_in_every_process() -> None:
    code = (
        "import hashlib, torch\n"
        "from stagebreaker.executor.models.lora import FlatAdapter\n"
        "from stagebreaker.executor.models import tiny\n"
        "torch.manual_seed(123)\n"
        "policy, (encoder, words), (judge, processor) = (\n"
        "    tiny.tiny_transformer(), tiny.tiny_text_encoder(), tiny.tiny_judge())\n"
        "digest = hashlib.sha256(FlatAdapter(policy, rank=4, seed=11).sha256().encode())\n"
        "for model in (policy, tiny.tiny_vae(), encoder, judge):\n"
        "    for name, tensor in sorted(model.state_dict().items()):\n"
        "        digest.update(name.encode() + tensor.numpy().tobytes())\n"
        "for tokenizer in (words, processor.tokenizer):\n"
        "    digest.update(tokenizer.backend_tokenizer.to_str().encode())\n"
        "result = digest.hexdigest()\n"
    )
    here: dict[str, Any] = {}
    exec(code, here)  # the same lines in this process and in another one
    run = [sys.executable, "-c", code + "print(result)"]
    there = subprocess.run(run, capture_output=True, text=True, check=True)
    assert there.stdout.split()[-1] == here["result"]


def test_seeded_leaves_the_callers_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    seeded(lambda: torch.rand(5), 77)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("sub", ["", "transformer"])
def test_policy_from_a_diffusers_directory(family: Path, sub: str) -> None:
    assert_same(load_policy(family / sub), tiny_transformer(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_every_source_gives_the_same_precisions(family: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    torch.save({"generator": original_state(tiny_transformer(4))}, tmp_path / "model.pt")
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "WanModel", "num_heads": 4}))
    models = [load_policy(source, dtype=dtype, seed=4) for source in ("tiny", family, tmp_path / "model.pt")]
    for model in models:
        norm, linear = model.blocks[0].norm2.weight, model.blocks[0].attn1.to_q.weight
        assert linear.dtype == dtype
        assert norm.dtype == (torch.float32 if dtype == torch.bfloat16 else torch.float64)
        assert_same(model, models[0])


@pytest.mark.parametrize("name", ["generator", "generator_ema"])
def test_original_checkpoint_round_trip(tmp_path: Path, name: str) -> None:
    """128-wide heads are the rule in Wan, so no config.json is needed for them."""
    model = tiny_transformer(seed=6, heads=1, head_dim=128, layers=1)
    content = {name: original_state(model)}
    if name == "generator_ema":
        content["generator"] = {k: torch.zeros_like(v) for k, v in content[name].items()}
    torch.save(content, tmp_path / "self_forcing.pt")
    assert_same(load_policy(tmp_path / "self_forcing.pt"), model)


def test_bare_safetensors_with_a_config_beside_it(tmp_path: Path) -> None:
    model = tiny_transformer(seed=6)
    save_file(original_state(model), tmp_path / "wan.safetensors")
    with pytest.raises(InputError, match=r"width 48, no multiple of 128; put a config\.json with its num_heads"):
        load_policy(tmp_path / "wan.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "WanModel", "num_heads": 4}))
    assert_same(load_policy(tmp_path), model)


def test_longlive_lora_is_merged_into_its_base(tmp_path: Path) -> None:
    base = tiny_transformer(seed=6, heads=1, head_dim=128, layers=1)
    down, up = torch.randn(2, 128), torch.randn(128, 2)
    lora = {
        "base_model.model.blocks.0.self_attn.q.lora_A.weight": down,
        "base_model.model.blocks.0.self_attn.q.lora_B.weight": up,
    }
    torch.save({"generator": original_state(base)}, tmp_path / "longlive_base.pt")
    torch.save({"generator_lora": lora}, tmp_path / "lora.pt")
    with pytest.raises(InputError, match="put a LoRA file in one directory with its base checkpoint"):
        load_policy(tmp_path / "lora.pt")
    with torch.no_grad():
        base.blocks[0].attn1.to_q.weight.add_(up @ down)
    assert_same(load_policy(tmp_path), base)
    lora.popitem()
    torch.save({"generator_lora": lora}, tmp_path / "lora.pt")
    with pytest.raises(InputError, match="has no lora_B partner or no base weight"):
        load_policy(tmp_path)


def test_bad_policies_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="policy=nowhere must be tiny, a directory with"):
        load_policy("nowhere")
    (tmp_path / "junk.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(InputError, match=r"junk\.pt cannot be read as a checkpoint of plain tensors"):
        load_policy(tmp_path / "junk.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(InputError, match="holds a list, must hold a dict of tensors"):
        load_policy(tmp_path / "list.pt")
    state = original_state(tiny_transformer(heads=1, head_dim=128, layers=1))
    state["model.img_emb.proj.0.weight"] = torch.zeros(2)
    torch.save({"generator": state}, tmp_path / "i2v.pt")
    with pytest.raises(InputError, match=r"is not a text-to-video Wan checkpoint: .*img_emb"):
        load_policy(tmp_path / "i2v.pt")


@pytest.mark.parametrize("loader", [load_vae, load_text_encoder, load_judge_model])
def test_other_bad_sources_are_named(loader: Any) -> None:
    with pytest.raises(InputError, match=r"=nowhere must be tiny or a directory"):
        loader("nowhere")


def test_broken_directories_are_named(tmp_path: Path) -> None:
    save_tiny(tmp_path)
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(InputError, match="vae cannot be read as AutoencoderKLWan; save it there again"):
        load_vae(tmp_path)
    weights = tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="transformer cannot be read as WanTransformer3DModel"):
        load_policy(tmp_path)
    (tmp_path / "judge" / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="judge cannot be read as"):
        load_judge_model(tmp_path)
    (tmp_path / "transformer" / "config.json").write_text("{")
    with pytest.raises(InputError, match="must be a JSON object; it is malformed"):
        load_policy(tmp_path)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    torch.save({"generator": Path("x")}, tmp_path / "evil.pt")
    with pytest.raises(InputError, match="cannot be read as a checkpoint of plain tensors"):
        load_policy(tmp_path / "evil.pt")


def test_vae_decodes_to_uint8_and_denormalises(family: Path) -> None:
    latents = torch.randn(1, 16, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    frames = load_vae("tiny", seed=4).decode(latents)
    assert frames.shape == (5, 32, 32, 3)
    assert frames.dtype == np.uint8
    assert frames.std() > 5
    assert np.array_equal(load_vae(family).decode(latents), frames)
    vae = tiny_vae(4)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        pixels = vae.decode(latents * std + mean, return_dict=False)[0][0]
    expected = ((pixels.clamp(-1, 1) + 1) * 127.5).round().permute(1, 2, 3, 0).numpy()
    assert np.array_equal(frames, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_vae_does_not_hide_what_is_not_finite(value: float) -> None:
    latents = torch.zeros(1, 16, 1, 4, 4)
    latents[0, 0, 0, 0, 0] = value
    frames = load_vae("tiny").decode(latents)
    assert frames.dtype == np.float32
    assert not np.isfinite(frames).all()


def test_vae_takes_one_candidate() -> None:
    with pytest.raises(ValueError, match=r"must be \[1, D, F, H, W\]; decode one candidate"):
        load_vae("tiny").decode(torch.zeros(2, 16, 1, 4, 4))


def test_text_encoder_pads_with_zeros(family: Path) -> None:
    encoder = load_text_encoder("tiny", seed=4)
    text = encoder.encode("A red kite dives.")
    assert text.shape == (1, TEXT_TOKENS, TEXT_DIM)
    used = int((text[0].abs().sum(-1) > 0).sum())
    assert 3 < used < TEXT_TOKENS
    assert not text[0, used:].any()
    assert not torch.equal(text, encoder.encode("A blue kite dives."))
    assert torch.equal(load_text_encoder(family).encode("A red kite dives."), text)
    assert encoder.encode(max(load_prompts(), key=len)).shape == text.shape


def test_tiny_tokenizer_round_trips() -> None:
    _, tokenizer = tiny_text_encoder()
    assert all(tokenizer.decode(tokenizer(p).input_ids) == p for p in load_prompts()[:8])


def test_judge_from_a_directory_equals_the_tiny_one(family: Path) -> None:
    saved, processor = load_judge_model(family)
    made, other = load_judge_model("tiny", seed=4)
    state = made.state_dict()
    assert all(torch.equal(state[k], v) for k, v in saved.state_dict().items())
    assert processor.tokenizer.padding_side == "left"
    assert processor.tokenizer.get_vocab() == other.tokenizer.get_vocab()
    assert processor.image_processor.size == other.image_processor.size


def test_prompts() -> None:
    prompts = load_prompts()
    lengths = [len(p.split()) for p in prompts]
    assert len(prompts) == len(set(prompts)) == 64
    assert (min(lengths), max(lengths)) == (4, 58)
