"""The declaration that every stage reads: which tensor borrows which, and how the two are found to stand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Tie", "TieState", "owner_chain"]


@dataclass(frozen=True, slots=True, order=True)
class Tie:
    """`target` is `source`: the borrower (the output head) uses the owner's matrix (the input embedding).

    Both are tensor names, as `transformers` writes them in `{target: source}`. Bias ties and ties between the
    embeddings of an encoder and a decoder are ties like any other.

    Example:
        >>> print(Tie("lm_head.weight", "transformer.wte.weight"))
        lm_head.weight <- transformer.wte.weight
    """

    target: str
    source: str

    def __str__(self) -> str:
        return f"{self.target} <- {self.source}"


class TieState(StrEnum):
    """How the two ends of a tie stand, on disk or live.

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
    """Only the source is there, and nothing says that the target is it."""
    SOURCE_MISSING = "SOURCE_MISSING"
    """Only the target is there."""
    BOTH_MISSING = "BOTH_MISSING"
    """Neither is there."""


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
