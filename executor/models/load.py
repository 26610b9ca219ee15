"""Engines from a source: "tiny", a directory of weights, or (policy only) an original causal checkpoint.


One function per engine, all with the same arguments. Everything is read from disk, never from a network, and
a bad source is refused with what was given and what is allowed. Whatever the source, the policy's modules
that diffusers keeps in fp32 stay fp32 on a half-precision base. It does not know the KV cache, adapters or
rewards.

Shapes: B candidates, D channels, F latent frames, H W latent height and width, T tokens, E text width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, AutoTokenizer, UMT5EncoderModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stagebreaker.executor.models.original import load_original, read_config
from stagebreaker.executor.models.tiny import (
    TEXT_TOKENS,
    FrameProcessor,
    tiny_judge,
    tiny_text_encoder,
    tiny_transformer,
    tiny_vae,
)
from stagebreaker.profiles.document import InputError


class TextEncoder:
    """Prompts to conditioning: T tokens, zero where padded and unmasked, as causal Wan was trained."""

    def __init__(self, model: Any, tokenizer: Any, tokens: int) -> None:
        self.model, self.tokenizer, self.tokens = model, tokenizer, tokens

    @torch.no_grad()
    def encode(self, prompt: str) -> Tensor:
        """text_BTE of one prompt (B=1), cut or zero-padded to `tokens`."""
        batch = self.tokenizer(
            [prompt], padding="max_length", max_length=self.tokens, truncation=True, return_tensors="pt"
        ).to(self.model.device)
        hidden_BTE = self.model(batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
        text_BTE = hidden_BTE * batch.attention_mask[..., None].to(hidden_BTE.dtype)
        assert isinstance(text_BTE, Tensor)
        return text_BTE


class VaeDecoder:
    """Latents of one candidate to pixels."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        stats = torch.tensor([vae.config.latents_mean, vae.config.latents_std], dtype=torch.float32, device=vae.device)
        self.mean, self.std = stats.view(2, 1, -1, 1, 1, 1)

    @torch.no_grad()
    def decode(self, latents_BDFHW: Tensor) -> np.ndarray:
        """uint8 frames [4F-3, 8H, 8W, 3] of normalised latents (B=1).

        If any pixel is not finite the frames come back as float32, unclamped: a cast would hide it, and the
        judge has to be able to call the video unscorable.
        """
        if latents_BDFHW.ndim != 5 or latents_BDFHW.shape[0] != 1:
            raise ValueError(
                f"latents of shape {tuple(latents_BDFHW.shape)} must be [1, D, F, H, W]; decode one candidate"
            )
        latents_BDFHW = latents_BDFHW.to(self.mean.device) * self.std + self.mean
        pixels = self.vae.decode(latents_BDFHW.to(self.vae.dtype), return_dict=False)[0][0].float()
        if bool(torch.isfinite(pixels).all()):
            pixels = ((pixels.clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
        frames: np.ndarray = pixels.permute(1, 2, 3, 0).contiguous().cpu().numpy()
        return frames


def load_policy(
    source: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> WanTransformer3DModel:
    """An eval-mode, frozen transformer. `seed` matters for "tiny" only."""
    if str(source) == "tiny":
        model = tiny_transformer(seed)
    elif (folder := _diffusers_dir(Path(source), "transformer", "WanTransformer3DModel")) is not None:
        precision = dtype if dtype.itemsize < 4 else torch.float32
        model = _read(WanTransformer3DModel, folder, torch_dtype=precision)
    else:
        model = load_original(Path(source))
    return _cast(model, dtype).requires_grad_(False).eval().to(device)


def load_vae(source: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> VaeDecoder:
    if str(source) == "tiny":
        vae = _cast(tiny_vae(seed), dtype)
    else:
        folder = _diffusers_dir(Path(source), "vae", "AutoencoderKLWan")
        if folder is None:
            raise InputError(
                f"vae={source} must be tiny or a directory with an AutoencoderKLWan (itself or under vae/)"
            )
        vae = _read(AutoencoderKLWan, folder, torch_dtype=dtype)
    return VaeDecoder(vae.requires_grad_(False).eval().to(device))


def load_text_encoder(
    source: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    tokens: int = 512,
) -> TextEncoder:
    """`tokens` is the padded length of a real model (Wan: 512); the tiny one has its own."""
    if str(source) == "tiny":
        model, tokenizer = tiny_text_encoder(seed)
        return TextEncoder(model.requires_grad_(False).to(device, dtype), tokenizer, TEXT_TOKENS)
    root = Path(source)
    if not (root / "text_encoder" / "config.json").is_file() or not (root / "tokenizer").is_dir():
        raise InputError(f"text_encoder={source} must be tiny or a directory that holds text_encoder/ and tokenizer/")
    model = _read(UMT5EncoderModel, root / "text_encoder", dtype=dtype)
    tokenizer = _read(AutoTokenizer, root / "tokenizer")
    return TextEncoder(
        model.requires_grad_(False).eval().to(device), tokenizer, min(tokens, int(tokenizer.model_max_length))
    )


def load_judge_model(
    source: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> tuple[Any, Any]:
    """(model, processor) of a vision-language model, left-padding; from a directory or its judge/."""
    if str(source) == "tiny":
        model, processor = tiny_judge(seed)
        return model.requires_grad_(False).to(device, dtype), processor
    root = Path(source)
    folder = root / "judge" if (root / "judge").is_dir() else root
    if not (folder / "config.json").is_file():
        raise InputError(f"judge={source} must be tiny or a directory with a vision-language model and its config.json")
    model = _read(AutoModelForImageTextToText, folder, dtype=dtype)
    return model.requires_grad_(False).eval().to(device), _load_processor(folder)


def _load_processor(folder: Path) -> Any:
    """AutoProcessor, or where torchvision is missing (it fails, or is a bare tokenizer) FrameProcessor."""
    try:
        processor = _read(AutoProcessor, folder)
    except ImportError:
        processor = None
    if getattr(processor, "image_processor", None) is None:
        tokenizer = _read(AutoTokenizer, folder)
        if "<|image_pad|>" not in tokenizer.get_vocab():
            raise InputError(f"judge={folder} is no Qwen-VL model and needs torchvision: pip install torchvision")
        images = _read(Qwen2VLImageProcessorPil, folder)
        processor = FrameProcessor(images, tokenizer)
    processor.tokenizer.padding_side = "left"
    return processor


def _read(kind: Any, folder: Path, **settings: Any) -> Any:
    """kind.from_pretrained on a local folder; what is missing or malformed in it is the user's to mend."""
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, **settings)
    except (OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{folder} cannot be read as {kind.__name__}; save it there again: {reason}") from error


def _diffusers_dir(root: Path, subfolder: str, class_name: str) -> Path | None:
    """root or root/subfolder, whichever holds a diffusers config of class_name; None if neither does."""
    for folder in (root, root / subfolder):
        if read_config(folder).get("_class_name") == class_name:
            return folder
    return None


def _cast(model: Any, dtype: torch.dtype) -> Any:
    """Cast as from_pretrained does: in half precision, norms, time embedder and modulation stay fp32.


    from_pretrained would keep them in fp32 in a float64 model too, hence the cast here for every source.
    """
    kept = set(model._keep_in_fp32_modules or ()) if dtype.itemsize < 4 else set()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not kept.intersection(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return model
