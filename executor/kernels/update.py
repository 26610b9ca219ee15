"""One optimizer step on the adapter: gradient-norm clip, then AdamW, over one flat vector.

    g <- g min(1, max_norm / (|g| + 1e-6)),   then AdamW(g).
Neither is linear in g, so g must be the finished sum of the mini-batch. A gradient that is not finite is
refused by name: skipping the step in silence would change the moments. The parameters live in the adapter;
this holds the moments and the step count, which together with the adapter resume a run exactly. It knows
nothing of candidates.

Shapes: P adapter parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stagebreaker.executor.algorithms.interfaces import Adapter
from stagebreaker.profiles.document import InputError


class NonFiniteGradientError(FloatingPointError):
    """The gradient or its norm is not finite; nothing was updated."""


@dataclass(frozen=True)
class AdamWConfig:
    """torch's AdamW and its clip; the defaults are DanceGRPO's, with a learning rate for LoRA."""

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.lr < math.inf and self.eps > 0 and self.weight_decay >= 0 and self.max_grad_norm > 0):
            raise InputError(f"{self}: lr, eps and max_grad_norm must be > 0, lr finite, weight_decay >= 0")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas={self.betas} must be in [0, 1)")


@dataclass(frozen=True)
class UpdateReport:
    """What one step did; ``grad_norm`` is taken before the clip."""

    grad_norm: float
    clipped: bool
    adapter_version: int


class FlatAdamW:
    """AdamW whose only parameter is the adapter's flat vector."""

    def __init__(self, adapter: Adapter, config: AdamWConfig):
        self._adapter = adapter
        self._config = config
        self._flat_P = torch.nn.Parameter(adapter.vector().detach().clone())
        self._adamw = torch.optim.AdamW(
            [self._flat_P],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=False,
        )

    def step(self, g_P: Tensor) -> UpdateReport:
        """Apply the mini-batch gradient and load the result into the adapter as its next version."""
        if g_P.shape != self._flat_P.shape:
            raise InputError(f"gradient of shape {tuple(g_P.shape)} for an adapter of {self._adapter.numel} parameters")
        version = self._adapter.version
        # A copy: the clip works in place, and the caller's sum is not ours to change.
        self._flat_P.grad = g_P.detach().to(self._flat_P, copy=True)
        norm = float(torch.linalg.vector_norm(self._flat_P.grad))
        if not math.isfinite(norm):
            bad = int((~torch.isfinite(g_P)).sum())
            self._flat_P.grad = None
            raise NonFiniteGradientError(
                f"gradient norm {norm} at adapter version {version}: {bad} of {len(g_P)} elements are not "
                f"finite; the adapter and its moments are unchanged"
            )
        torch.nn.utils.clip_grad_norm_([self._flat_P], self._config.max_grad_norm, foreach=False)
        with torch.no_grad():
            self._flat_P.copy_(self._adapter.vector())
        self._adamw.step()
        self._flat_P.grad = None
        self._adapter.load(self._flat_P.detach(), version + 1)
        return UpdateReport(norm, norm > self._config.max_grad_norm, version + 1)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of ``exp_avg_P``, ``exp_avg_sq_P`` and ``step`` (a scalar): zeros before the first step."""
        state = self._adamw.state[self._flat_P]
        if not state:
            zeros_P = torch.zeros_like(self._flat_P).detach()
            return {"exp_avg_P": zeros_P, "exp_avg_sq_P": zeros_P.clone(), "step": torch.tensor(0.0)}
        return {
            "exp_avg_P": state["exp_avg"].clone(),
            "exp_avg_sq_P": state["exp_avg_sq"].clone(),
            "step": state["step"].clone(),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore moments and step count; the adapter's vector is restored by ``Adapter.load``."""
        if set(state) != {"exp_avg_P", "exp_avg_sq_P", "step"}:
            raise InputError(f"optimizer state has {sorted(state)}, needs exp_avg_P, exp_avg_sq_P, step")
        for name in ("exp_avg_P", "exp_avg_sq_P"):
            if state[name].shape != self._flat_P.shape:
                raise InputError(f"{name} has shape {tuple(state[name].shape)}, the adapter {len(self._flat_P)}")
        self._adamw.state[self._flat_P] = {
            "step": state["step"].clone(),
            "exp_avg": state["exp_avg_P"].to(self._flat_P, copy=True).detach(),
            "exp_avg_sq": state["exp_avg_sq_P"].to(self._flat_P, copy=True).detach(),
        }
