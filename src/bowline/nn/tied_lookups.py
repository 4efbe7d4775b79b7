"""The lookups of a matrix made `tied_embedding`, in place.

By their class, as FSDP2 does: a new one, between an embedding's and `nn.Embedding`, keeps what the embedding's own
forward does with the rows, as a scale.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from bowline.nn.tied_embedding import TiedEmbedding

__all__ = ["lookups_of", "tied_class"]


def lookups_of(model: nn.Module, matrix: nn.Parameter) -> list[nn.Embedding]:
    """The embeddings that look up in it."""
    return [module for module in model.modules() if isinstance(module, nn.Embedding) and module.weight is matrix]


def tied_class(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """A class of embeddings that looks up by `tied_embedding`, wherever `kind` asks `nn.Embedding` to.

    Example:
        >>> class Scaled(nn.Embedding):
        ...     def forward(self, ids):
        ...         return 2 * super().forward(ids)
        >>> [base.__name__ for base in tied_class(Scaled).__mro__[:4]]
        ['Scaled', 'Scaled', 'TiedEmbedding', 'Embedding']
        >>> tied_class(nn.Embedding).__name__
        'TiedEmbedding'
    """
    if issubclass(kind, TiedEmbedding):
        return kind
    if kind is nn.Embedding:
        return TiedEmbedding
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduced}
    return type(kind.__name__, (kind, TiedEmbedding), names)


def _reduced(self: Any, _: Any) -> Any:
    """To copy and pickle it: no module holds its class."""
    return _made, (type(self).__bases__[0],), self.__dict__


def _made(kind: type[nn.Embedding]) -> nn.Embedding:
    made: nn.Embedding = object.__new__(tied_class(kind))
    return made
