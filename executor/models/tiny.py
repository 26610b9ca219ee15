"""The whole model family at toy size, with seeded random weights and the real architectures.

Causal Wan policy, Wan VAE, UMT5 text encoder and Qwen2.5-VL judge, small enough for one CPU core, so that
every code path of a run can be tested without a download. The same seed gives the same bytes in every
process: models are built on the CPU under a forked generator and the tokenizers are trained on the shipped
prompts. `save_tiny` writes the directory layout that `load.py` reads. It knows nothing of loading, devices or
precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.processing_utils import ProcessorMixin

from stagebreaker.executor.models.prompts import load_prompts

TEXT_DIM = 32
TEXT_TOKENS = 32
LATENT_CHANNELS = 16
_VOCABULARY = 400

_JUDGE_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

T = TypeVar("T")


def seeded(build: Callable[[], T], seed: int) -> T:
    """What `build` makes when torch's CPU generator starts at `seed`; the caller's generator is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def tiny_transformer(seed: int = 0, heads: int = 4, head_dim: int = 12, layers: int = 2) -> Any:
    """An eval-mode WanTransformer3DModel of width heads * head_dim over 16 latent channels."""
    return seeded(
        lambda: WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_DIM,
            freq_dim=32,
            ffn_dim=2 * heads * head_dim,
            num_layers=layers,
        ),
        seed,
    ).eval()


def tiny_vae(seed: int = 0, base_dim: int = 3) -> Any:
    """An eval-mode AutoencoderKLWan: F latent frames of HxW become 4F-3 frames of 8Hx8W.

    Random kernels average the latents away. So the decoder's lean to the positive side and its last ones are
    centred: brightness then follows the sign of the latents around mid-grey, and a reward can be learned.
    """

    def build() -> Any:
        vae = AutoencoderKLWan(
            base_dim=base_dim,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1, 2, 2],
            num_res_blocks=1,
            attn_scales=[],
            temperal_downsample=[False, True, True],
        )
        with torch.no_grad():
            for weight in (*vae.post_quant_conv.parameters(), *vae.decoder.parameters()):
                if weight.ndim >= 4:
                    weight.add_(0.5 / math.sqrt(3 * weight[0].numel()))  # half the std of torch's default
            last = vae.decoder.conv_out
            last.weight.sub_(last.weight.mean(dim=(1, 2, 3, 4), keepdim=True))
            last.bias.zero_()
        return vae

    return seeded(build, seed).eval()


def tiny_text_encoder(seed: int = 0) -> tuple[Any, Any]:
    """(UMT5EncoderModel, its tokenizer), TEXT_DIM wide."""
    tokenizer = _train_tokenizer(
        ("<pad>", "</s>"),
        pad_token="<pad>",
        eos_token="</s>",
        padding_side="right",
        model_max_length=TEXT_TOKENS,
    )
    config = UMT5Config(
        vocab_size=_VOCABULARY, d_model=TEXT_DIM, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    return seeded(lambda: UMT5EncoderModel(config), seed).eval(), tokenizer


def tiny_judge(seed: int = 0) -> tuple[Any, FrameProcessor]:
    """(Qwen2_5_VLForConditionalGeneration, its processor) with two layers of width 64."""
    tokenizer = _train_tokenizer(
        _JUDGE_TOKENS,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        padding_side="left",
        chat_template=_CHAT_TEMPLATE,
    )
    images = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=56 * 56)
    processor = FrameProcessor(images, tokenizer, _CHAT_TEMPLATE)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": _VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
        image_token_id=processor.image_token_id,
        video_token_id=processor.video_token_id,
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )
    return seeded(lambda: Qwen2_5_VLForConditionalGeneration(config), seed).eval(), processor


def save_tiny(directory: str | Path, seed: int = 0) -> None:
    """Write the family as transformer/, vae/, text_encoder/, tokenizer/ and judge/ under `directory`."""
    directory = Path(directory)
    tiny_transformer(seed).save_pretrained(directory / "transformer")
    tiny_vae(seed).save_pretrained(directory / "vae")
    encoder, tokenizer = tiny_text_encoder(seed)
    encoder.save_pretrained(directory / "text_encoder")
    tokenizer.save_pretrained(directory / "tokenizer")
    judge, processor = tiny_judge(seed)
    judge.save_pretrained(directory / "judge")
    processor.image_processor.save_pretrained(directory / "judge")
    processor.tokenizer.save_pretrained(directory / "judge")


class FrameProcessor(ProcessorMixin):  # type: ignore[misc]  # transformers is untyped here
    """A Qwen-VL processor that takes frames as images: it needs no torchvision and no video processor."""

    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012 (transformers' own convention)

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template or tokenizer.chat_template)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **_: Any) -> str:
        patches = int(image_inputs["image_grid_thw"][image_idx].prod())
        return str(self.image_token * (patches // self.image_processor.merge_size**2))


def _train_tokenizer(special_tokens: Sequence[str], **settings: Any) -> Any:
    """A byte-level BPE of _VOCABULARY entries trained on the shipped prompts."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(load_prompts(), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **settings)
