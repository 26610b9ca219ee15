"""A LoRA adapter seen as one flat vector.

peft adds the low-rank layers; FlatAdapter fixes their order (by name), so that a version of the policy is a
vector of P numbers that can be sent, hashed and summed, and a gradient buffer is a flat tensor of which each
parameter's `.grad` is a
view: autograd then accumulates straight into it. The initial values depend on the seed alone, not on device
or process. Parameters are fp32 (fp64 on an fp64 base); the base is frozen. It does not know optimisers,
losses or schedules.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stagebreaker.profiles.document import InputError

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
ALL_LINEAR = (*ATTENTION, "ffn.net.0.proj", "ffn.net.2")
WEIGHTS_NAME = "adapter_model.safetensors"
_NAME = "default"
_PEFT_PREFIX = "base_model.model."


class FlatAdapter:
    """Adds a LoRA to a WanTransformer3DModel and exposes it as a vector of `numel` values at `version`.

    alpha defaults to rank (scale 1). targets name linear layers of the transformer blocks; ("all-linear",)
    means all six.
    """

    def __init__(
        self,
        transformer: Any,
        rank: int,
        alpha: float | None = None,
        targets: Sequence[str] = ATTENTION,
        seed: int = 0,
    ) -> None:
        if rank < 1:
            raise InputError(f"lora_rank={rank} must be >= 1")
        if tuple(targets) == ("all-linear",):
            targets = ALL_LINEAR
        unknown = [t for t in targets if t not in ALL_LINEAR]
        if unknown or not targets:
            raise InputError(f"lora_targets={list(targets)} must be all-linear or some of {', '.join(ALL_LINEAR)}")
        self.transformer = transformer
        self.version = 0
        self.config = LoraConfig(r=rank, lora_alpha=rank if alpha is None else alpha, target_modules=sorted(targets))
        transformer.requires_grad_(False)
        transformer.add_adapter(self.config, adapter_name=_NAME)
        named = sorted((n, p) for n, p in transformer.named_parameters() if ".lora_" in n)
        self.names: tuple[str, ...] = tuple(n.replace(f".{_NAME}.", ".") for n, _ in named)
        self.params: tuple[nn.Parameter, ...] = tuple(p for _, p in named)
        self.numel = sum(p.numel() for p in self.params)
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)  # on the CPU: the same values whatever the device
        for name, param in zip(self.names, self.params, strict=True):
            param.data = param.data.to(torch.promote_types(param.dtype, torch.float32))
            if ".lora_A." in name:
                bound = 1.0 / math.sqrt(param.shape[1])
                param.data.copy_(torch.empty(param.shape).uniform_(-bound, bound, generator=generator))
            else:
                param.data.zero_()

    def vector(self) -> Tensor:
        """A copy of the parameters, shape [P]."""
        return torch.cat([p.detach().flatten() for p in self.params])

    def load(self, vector_P: Tensor, version: int) -> None:
        """Set the parameters to vector_P, and the version with them."""
        with torch.no_grad():
            for param, values in zip(self.params, self.views(vector_P), strict=True):
                param.copy_(values)
        self.version = version

    def sha256(self, vector_P: Tensor | None = None) -> str:
        """Hex digest of the vector's fp32 bytes: equal digests mean the same policy."""
        values = self.vector() if vector_P is None else vector_P
        return hashlib.sha256(values.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()).hexdigest()

    def views(self, flat_P: Tensor) -> list[Tensor]:
        """Views of a flat buffer in the shape and order of `params`."""
        if flat_P.shape != (self.numel,):
            raise ValueError(f"flat buffer of shape {tuple(flat_P.shape)} must be ({self.numel},)")
        pieces = torch.split(flat_P, [p.numel() for p in self.params])
        return [piece.view(param.shape) for piece, param in zip(pieces, self.params, strict=True)]

    def set_grad(self, flat_P: Tensor | None) -> None:
        """Point every `.grad` into flat_P, so that backward adds to it in place; None clears them."""
        grads: Sequence[Tensor | None] = [None] * len(self.params) if flat_P is None else self.views(flat_P)
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = grad

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The reference policy: the base model without the adapter, with no second copy of it."""
        self.transformer.disable_adapters()
        try:
            yield
        finally:
            self.transformer.enable_adapters()

    def save(self, directory: str | Path) -> None:
        """Write what `peft.PeftModel.from_pretrained(base, directory)` reads without this package."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.config.save_pretrained(str(directory))
        tensors = {
            _PEFT_PREFIX + n: p.detach().cpu().clone().contiguous()
            for n, p in zip(self.names, self.params, strict=True)
        }
        save_file(tensors, directory / WEIGHTS_NAME, metadata={"format": "pt", "version": str(self.version)})

    def load_dir(self, directory: str | Path) -> None:
        """Read what `save` wrote, with its version (0 if another tool wrote it). Shapes must match."""
        path = Path(directory) / WEIGHTS_NAME
        if not path.is_file():
            raise InputError(f"{directory} holds no {WEIGHTS_NAME}; give a directory that a peft adapter was saved to")
        config = LoraConfig.from_pretrained(str(directory))
        if config.lora_alpha / config.r != self.config.lora_alpha / self.config.r:
            raise InputError(
                f"{directory} has alpha/rank={config.lora_alpha}/{config.r}, the run wants "
                f"{self.config.lora_alpha}/{self.config.r}; set lora_rank and alpha to the adapter's"
            )
        with safe_open(path, framework="pt") as file:
            version = int((file.metadata() or {}).get("version", 0))
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        wanted = {_PEFT_PREFIX + n: tuple(p.shape) for n, p in zip(self.names, self.params, strict=True)}
        odd = sorted(
            k for k in wanted.keys() | found.keys() if k not in found or wanted.get(k) != tuple(found[k].shape)
        )
        if odd:
            raise InputError(
                f"{path} does not fit lora_rank={self.config.r} and "
                f"lora_targets={sorted(self.config.target_modules)}: "
                f"{len(odd)} tensors differ, the first is {odd[0]}; set both to the adapter's"
            )
        self.load(torch.cat([found[key].flatten() for key in wanted]), version)
