"""Original Self-Forcing and LongLive checkpoints as a diffusers WanTransformer3DModel.

They hold `generator_ema` or `generator` (and LongLive `generator_lora`) under Wan's own key names. RENAMES
turns those into diffusers' names; the dimensions follow from the tensors' shapes, except the head count. A
LongLive LoRA is merged into the base, so that the adapter we train starts from it. Files are read as plain
tensors: no code in them is run. It does not know precision, devices or the KV cache.
"""

from __future__ import annotations

import json
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stagebreaker.profiles.document import InputError

# Ordered: each (old, new) is applied to the whole key after the ones above it. Wan numbers the norm before
# cross-attention 3 and the one before the feed-forward 2, diffusers the other way round: hence the swap.
RENAMES: tuple[tuple[str, str], ...] = (
    ("time_embedding.0.", "condition_embedder.time_embedder.linear_1."),
    ("time_embedding.2.", "condition_embedder.time_embedder.linear_2."),
    ("text_embedding.0.", "condition_embedder.text_embedder.linear_1."),
    ("text_embedding.2.", "condition_embedder.text_embedder.linear_2."),
    ("time_projection.1.", "condition_embedder.time_proj."),
    ("head.modulation", "scale_shift_table"),
    ("head.head.", "proj_out."),
    (".modulation", ".scale_shift_table"),
    (".self_attn.", ".attn1."),
    (".cross_attn.", ".attn2."),
    (".q.", ".to_q."),
    (".k.", ".to_k."),
    (".v.", ".to_v."),
    (".o.", ".to_out.0."),
    (".ffn.0.", ".ffn.net.0.proj."),
    (".ffn.2.", ".ffn.net.2."),
    (".norm2.", ".norm_swap."),
    (".norm3.", ".norm2."),
    (".norm_swap.", ".norm3."),
)
_WRAPPERS = re.compile(r"(_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|_orig_mod\.|base_model\.model\.)")
CHECKPOINT_SUFFIXES = (".pt", ".pth", ".safetensors")
_WAN_HEAD_DIM = 128  # of every released Wan; tensors do not show it


def read_config(folder: Path) -> Mapping[str, Any]:
    """folder's config.json, or nothing if it has none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise InputError(f"{path} must be a JSON object; it is malformed: {error}") from None
    return config if isinstance(config, dict) else {}


def load_original(source: Path) -> Any:
    """A WanTransformer3DModel in fp32 from a checkpoint file, or from the checkpoint files of a directory."""
    found = [source] if source.is_file() else sorted(source.glob("*"))
    files = [p for p in found if p.suffix in CHECKPOINT_SUFFIXES]
    if not files:
        raise InputError(
            f"policy={source} must be tiny, a directory with a diffusers WanTransformer3DModel (itself or "
            f"under transformer/), or an original checkpoint (.pt, .pth, .safetensors); check the path"
        )
    base: dict[str, Tensor] = {}
    lora: dict[str, Tensor] = {}
    for file in files:
        for key, tensor in _read_tensors(file).items():
            (lora if ".lora_" in key else base)[key] = tensor
    if "patch_embedding.weight" not in base:
        raise InputError(
            f"policy={source} holds no Wan generator (generator_ema or generator with "
            f"model.patch_embedding.weight); put a LoRA file in one directory with its base checkpoint"
        )
    folder = source.parent if source.is_file() else source
    model = WanTransformer3DModel(**_dimensions(base, read_config(folder).get("num_heads"), source))
    merge_lora(base, lora, source)
    try:
        model.load_state_dict(base, strict=True)
    except RuntimeError as error:
        detail = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise InputError(f"policy={source} is not a text-to-video Wan checkpoint: {detail}") from None
    return model


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """Renamed tensors of generator_ema (else generator, else the file itself) and of generator_lora."""
    try:
        if file.suffix == ".safetensors":
            raw: Any = load_file(file)
        else:
            raw = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, SafetensorError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{file} cannot be read as a checkpoint of plain tensors: {reason}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{file} holds a {type(raw).__name__}, must hold a dict of tensors; check the file")
    lora = raw.get("generator_lora", {})
    base = raw.get("generator_ema") or raw.get("generator") or ({} if lora else raw)
    return {rename(k): v.float() for k, v in {**base, **lora}.items() if isinstance(v, Tensor)}


def rename(key: str) -> str:
    """An original Wan key (wrappers and the leading `model.` allowed) as diffusers names it."""
    key = _WRAPPERS.sub("", key).removeprefix("model.")
    for old, new in RENAMES:
        key = key.replace(old, new)
    return key


def merge_lora(base: dict[str, Tensor], lora: Mapping[str, Tensor], source: Path) -> None:
    """Add B @ A to each base weight, in place. LongLive trains with alpha = rank, so the scale is 1."""
    for key, down in lora.items():
        if ".lora_A." not in key:
            continue
        up = lora.get(key.replace(".lora_A.", ".lora_B."))
        target = key.split(".lora_A.")[0] + ".weight"
        if up is None or target not in base:
            raise InputError(f"policy={source}: LoRA tensor {key} has no lora_B partner or no base weight {target}")
        base[target] = base[target] + up @ down


def _dimensions(tensors: Mapping[str, Tensor], heads: int | None, source: Path) -> dict[str, Any]:
    """WanTransformer3DModel's arguments from tensor shapes; heads from config.json, else width / 128."""
    width, channels, *patch = tensors["patch_embedding.weight"].shape
    heads = heads or width // _WAN_HEAD_DIM
    if heads < 1 or width % heads:
        raise InputError(
            f"policy={source} has width {width}, no multiple of {_WAN_HEAD_DIM}; "
            f"put a config.json with its num_heads beside the checkpoint"
        )
    layers = {int(key.split(".")[1]) for key in tensors if key.startswith("blocks.")}
    return {
        "patch_size": tuple(patch),
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "in_channels": channels,
        "out_channels": tensors["proj_out.weight"].shape[0] // math.prod(patch),
        "text_dim": tensors["condition_embedder.text_embedder.linear_1.weight"].shape[1],
        "freq_dim": tensors["condition_embedder.time_embedder.linear_1.weight"].shape[1],
        "ffn_dim": tensors["blocks.0.ffn.net.0.proj.weight"].shape[0],
        "num_layers": len(layers),
        "cross_attn_norm": "blocks.0.norm2.weight" in tensors,
    }
