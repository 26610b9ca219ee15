"""What the algorithms and kernels need from a model: two protocols.

A ``Policy`` predicts the velocity of one chunk given the context of the chunks before it; an ``Adapter`` is
the trained part of it, seen as one flat vector. Context is a constant of the graph: ``commit`` appends
detached keys and values made by the adapter that is loaded now. That is why a denoising step can be
back-propagated as soon as its forward is done, and why a replay must rebuild the context whenever the adapter
has moved. Neither protocol knows rewards, ratios or schedules.

Shapes: B batch (always 1: one candidate), D channels, F frames of a chunk, H W latent height and width, T
text tokens, E text width, P adapter parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class Policy(Protocol):
    """A chunk-wise causal video model; the cache is its own affair."""

    def new_cache(self) -> Any:
        """An empty context, as before the first chunk."""

    def velocity(self, x_BDFHW: Tensor, sigma: float, text_BTE: Tensor, cache: Any) -> Tensor:
        """v_BDFHW at noise level ``sigma`` (0..1); reads the cache and never writes it."""

    def commit(self, x_BDFHW: Tensor, text_BTE: Tensor, cache: Any) -> None:
        """Append a clean chunk to the cache, without a graph, under the adapter that is loaded."""


class Adapter(Protocol):
    """The trained parameters as one flat vector with a version."""

    @property
    def params(self) -> Sequence[Tensor]: ...

    @property
    def numel(self) -> int: ...

    @property
    def version(self) -> int: ...

    def vector(self) -> Tensor:
        """A copy of all parameters, [P]."""

    def load(self, vector_P: Tensor, version: int) -> None:
        """Overwrite the parameters in place."""

    def set_grad(self, flat_P: Tensor | None) -> None:
        """Make every ``p.grad`` a view of ``flat_P``, so that a backward adds into it; None drops them."""
