"""What a graph declares: which stored tensors its look-up and its head use. A graph has no flag and no class."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bowline.families.declaration import Declaration, DeclaredTie, Flag, StatedSize
from bowline.tie import Tie

__all__ = ["graph_declaration"]

FLAG, SIZE, TYPE = "tie_word_embeddings", "vocab_size", "model_type"
TEXT = "text_config"

Shapes = Mapping[str, tuple[int, ...]]


def graph_declaration(
    config: Mapping[str, object],
    shapes: Shapes,
    table: str | None,
    heads: Iterable[tuple[str, str]],
    copies: Iterable[str],
) -> Declaration:
    """The ties of a graph: of each head with the table, and of each further table of the same shape.

    A head that uses the table's own tensor has no tensor of its own: the node that multiplies by it stands for it.

    Arguments:
        config: the `config.json` beside the file, if there is one; its flag is compared with the two matrices.
        shapes: the shapes of the tensors, with the vocabulary's rows first.
        table: the tensor of the look-up.
        heads: the tensor of each head, and the node that multiplies by it.
        copies: further tables of look-ups.

    Example:
        >>> declaration = graph_declaration({}, {"wte": (96, 32)}, "wte", [("wte", "/lm_head/MatMul")], [])
        >>> print(declaration.ties[0].tie, declaration.ties[0].flag.value)
        /lm_head/MatMul <- wte True
    """
    stated = _flag(config)
    ties: dict[Tie, Flag] = {}
    for tensor, node in heads if table is not None else ():
        assert table is not None
        if tensor == table:
            ties[Tie(node if node not in shapes else f"{node} (product)", table)] = Flag(value=True, path=None)
        else:
            ties[Tie(tensor, table)] = stated
    head = next(iter(ties)).target if ties else None
    for tensor in copies:
        if table is not None:
            ties.setdefault(Tie(tensor, table), Flag(value=None, path=None))
    ends = {name: 0 for tie in ties for name in (tie.source, tie.target) if name in shapes}
    size, kind = config.get(SIZE), config.get(TYPE)
    return Declaration(
        architecture=None,
        family=kind if isinstance(kind, str) else None,
        inferred=False,
        ties=tuple(DeclaredTie(tie=tie, flag=flag, asked={}) for tie, flag in ties.items()),
        made={},
        flag=stated,
        embedding=table,
        head=head,
        vocabulary=ends,
        expected_lengths={},
        vocab_size=StatedSize(path=SIZE, value=size) if type(size) is int else None,
        hidden_size=None,
        levels={},
        not_boolean={},
        loaders=frozenset(),
    )


def _flag(config: Mapping[str, object]) -> Flag:
    """The flag as the config states it, at the top or in the text config."""
    text = config.get(TEXT)
    for path, level in ((FLAG, config), (f"{TEXT}.{FLAG}", text if isinstance(text, Mapping) else {})):
        value = level.get(FLAG)
        if isinstance(value, bool):
            return Flag(value=value, path=path)
    return Flag(value=None, path=None)
