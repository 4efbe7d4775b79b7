"""Finds the embedding and the head of an unknown class by the usual names and shapes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

__all__ = ["infer_ties", "infer_vocabulary"]

EMBEDDINGS = (
    "shared",
    "embed_tokens",
    "wte",
    "word_embeddings",
    "word_embedding",
    "tok_embeddings",
    "tokens_embed",
    "token_embeddings",
    "token_embedding",
    "embed_in",
    "tok_emb",
    "embeddings",
    "embed",
    "encoder",
)
HEADS = (
    "lm_head",
    "embed_out",
    "predictions.decoder",
    "lm_head.decoder",
    "output_projection",
    "proj_out",
    "lm_loss",
    "vocab_projector",
    "generator_lm_head",
    "pred_layer.proj",
    "output",
    "decoder",
    "head",
)
"""Last parts of names, the most specific first."""

WRITES_TOKENS = re.compile(r"CausalLM|LMHead|ConditionalGeneration|MaskedLM|PreTraining")
SMALLEST_VOCABULARY = 64

Shapes = Mapping[str, tuple[int, ...]]


def infer_ties(
    shapes: Shapes, vocab_size: int | None, architecture: str | None
) -> tuple[str | None, str | None, str | None]:
    """Find the stored embedding, the stored head, and the name that the head has or would have.

    A table is two-dimensional. If the config states `vocab_size` and any table has as many rows, the table is one of
    those. A head has as many rows as the embedding. Without a stored head, one is expected only if the class writes
    tokens.

    Example:
        >>> infer_ties({"model.embed_tokens.weight": (512, 64), "lm_head.weight": (512, 64)}, 512, None)
        ('model.embed_tokens.weight', 'lm_head.weight', 'lm_head.weight')
    """
    tables = {name: shape[0] for name, shape in shapes.items() if len(shape) == 2 and shape[0] >= SMALLEST_VOCABULARY}
    embedding = _find(EMBEDDINGS, tables, vocab_size) or _find(EMBEDDINGS, tables, None)
    rows = tables[embedding] if embedding else vocab_size
    head = _find(HEADS, {name: count for name, count in tables.items() if name != embedding}, rows)
    if head is None and embedding and architecture and WRITES_TOKENS.search(architecture):
        return embedding, None, "lm_head.weight"
    return embedding, head, head


def infer_vocabulary(shapes: Shapes, embedding: str | None, head: str | None) -> dict[str, int]:
    """The embedding, the head, and every vector that is as long as they are, with the axis of the vocabulary."""
    tables = [name for name in (embedding, head) if name]
    rows = {shapes[name][0] for name in tables}
    biases = [name for name, shape in shapes.items() if len(shape) == 1 and shape[0] in rows]
    return dict.fromkeys([*tables, *biases], 0)


def _find(endings: Sequence[str], tables: Mapping[str, int], rows: int | None) -> str | None:
    for ending in endings:
        pattern = re.compile(rf"(?:^|\.){re.escape(ending)}\.weight$")
        matches = [name for name, count in tables.items() if pattern.search(name) and rows in (None, count)]
        if matches:
            return min(matches, key=lambda name: (len(name), name))
    return None
