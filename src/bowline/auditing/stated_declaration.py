"""The declaration of an open checkpoint: by its class and config, a GGUF file's metadata, or a graph's nodes."""

from __future__ import annotations

from bowline.checkpoint.checkpoint import Checkpoint
from bowline.families.declaration import Declaration
from bowline.families.gguf_names import gguf_declaration
from bowline.families.graph_ends import graph_declaration
from bowline.families.resolver import resolve

__all__ = ["declaration_of"]


def declaration_of(checkpoint: Checkpoint) -> Declaration:
    """What the checkpoint declares about its ties, by the names in its files."""
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
    if checkpoint.graph is not None:
        model = checkpoint.graph
        return graph_declaration(checkpoint.config or {}, shapes, model.table, model.heads, model.copies)
    if checkpoint.gguf is None:
        return resolve(checkpoint.config, shapes)
    from bowline.checkpoint.formats.gguf.text_arrays import TOKENS  # imported only for GGUF files

    tokens = checkpoint.gguf.text_array(TOKENS)
    return gguf_declaration(checkpoint.gguf.plain_values, shapes, tokens.length if tokens else None)
