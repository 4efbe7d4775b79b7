"""A lookup in the head's matrix that runs outside torch.compile's graph, so that it can share the head's gradient."""

from __future__ import annotations

import torch

from bowline.functional.deferred.graph_breaks import in_one_graph, uncompiled
from bowline.nn.modules.deferring_head import PLAIN
from bowline.nn.modules.tied_embedding import TiedEmbedding

__all__ = ["UncompiledLookup"]


class UncompiledLookup(TiedEmbedding):
    """Ends a compiled graph before the lookup if allowed, because inside it the lookup has its own dense gradient."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name that torch gives it
        learns = torch.is_grad_enabled() and self.weight.requires_grad and type(self.weight) in PLAIN
        if learns and torch.compiler.is_compiling() and not in_one_graph():
            return _looked_up(self, input)
        return super().forward(input)


@uncompiled
def _looked_up(table: TiedEmbedding, ids: torch.Tensor) -> torch.Tensor:
    return TiedEmbedding.forward(table, ids)
