"""A tie, the pair of tensor names that share one matrix, and the states that the two tensors can be in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Tie", "TieState", "owner_chain"]


@dataclass(frozen=True, slots=True, order=True)
class Tie:
    """A tie `target` <- `source`: the target (the output head) uses the matrix of the source (the input embedding).

    Both are tensor names, as `transformers` writes them in `{target: source}`. Ties between biases, or
    between the embeddings of an encoder and a decoder, are ties as well.

    Example:
        >>> print(Tie("lm_head.weight", "transformer.wte.weight"))
        lm_head.weight <- transformer.wte.weight
    """

    target: str
    source: str

    def __str__(self) -> str:
        return f"{self.target} <- {self.source}"


class TieState(StrEnum):
    """The state of the two ends of a tie, on disk or in a live model.

    Example:
        >>> TieState.DIVERGED.value
        'DIVERGED'
    """

    SHARED = "SHARED"
    """One parameter, or one stored tensor that serves both ends."""
    ALIAS = "ALIAS"
    """Two parameters, or two stored names, on one storage."""
    EQUAL = "EQUAL"
    """A clone: two tensors with the same values."""
    DIVERGED = "DIVERGED"
    """Two tensors of one shape and dtype with different values."""
    INCOMPATIBLE = "INCOMPATIBLE"
    """Two tensors whose shapes or dtypes cannot be one matrix."""
    TARGET_MISSING = "TARGET_MISSING"
    """Only the source exists, and nothing says that the target is the same matrix."""
    SOURCE_MISSING = "SOURCE_MISSING"
    """Only the target exists."""
    BOTH_MISSING = "BOTH_MISSING"
    """Neither exists."""


def owner_chain(name: str, sources: Mapping[str, str]) -> tuple[str, ...]:
    """A name, its source, that one's source and so on: the last name owns the matrix.

    `sources` maps each target to its source. In a cycle nobody owns the matrix: the chain then ends with the first name
    that comes a second time.

    Example:
        >>> owner_chain("head", {"head": "decoder", "decoder": "shared"})
        ('head', 'decoder', 'shared')
        >>> owner_chain("head", {"head": "decoder", "decoder": "head"})
        ('head', 'decoder', 'head')
    """
    chain = [name]
    while chain[-1] in sources and chain[-1] not in chain[:-1]:
        chain.append(sources[chain[-1]])
    return tuple(chain)
