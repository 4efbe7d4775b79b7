"""What a GGUF file declares: its tensors' names, and the sizes and special tokens in its metadata.

GGUF has no flag. A file that stores no `output.weight` is tied if llama.cpp falls back to `token_embd.weight` for its
architecture; which architectures those are is in the table of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping

from bowline.families.declaration import Declaration, DeclaredTie, Flag, StatedSize
from bowline.families.loader_tables import loader_table
from bowline.tie import Tie

__all__ = [
    "GGUF_EMBEDDING",
    "GGUF_HEAD",
    "GGUF_LOADER",
    "GGUF_PADDING",
    "gguf_declaration",
    "head_when_missing",
    "head_when_stored",
]

GGUF_EMBEDDING, GGUF_HEAD = "token_embd.weight", "output.weight"
GGUF_HEAD_BIAS = "output.bias"
GGUF_LOADER = "llama.cpp"
GGUF_PADDING = "tokenizer.ggml.padding_token_id"
ARCHITECTURE = "general.architecture"
TOKENS = "tokenizer.ggml.tokens"

Shapes = Mapping[str, tuple[int, ...]]


def gguf_declaration(metadata: Mapping[str, object], shapes: Shapes, tokens: int | None) -> Declaration:
    """Find what a GGUF file declares, by its metadata, the shapes of its tensors (rows first) and its number of tokens.

    Example:
        >>> shapes = {"token_embd.weight": (49152, 576)}
        >>> declaration = gguf_declaration({"general.architecture": "llama"}, shapes, 49152)
        >>> print(declaration.ties[0].tie, declaration.flag.value)
        output.weight <- token_embd.weight True
    """
    stated = metadata.get(ARCHITECTURE)
    architecture = stated if isinstance(stated, str) else None
    missing = head_when_missing(architecture)
    falls_back = missing == "tied" and GGUF_HEAD not in shapes
    flag = Flag(value=True if falls_back else None, path=None)
    has_tie = missing != "none" and (GGUF_EMBEDDING in shapes or GGUF_HEAD in shapes)
    tie = DeclaredTie(tie=Tie(GGUF_HEAD, GGUF_EMBEDDING), flag=flag, asked={})
    size = _vocabulary(metadata, architecture, tokens)
    vocabulary = {name: 0 for name in (GGUF_EMBEDDING, GGUF_HEAD, GGUF_HEAD_BIAS) if name in shapes}
    return Declaration(
        architecture=None,
        family=architecture,
        inferred=False,
        ties=(tie,) if has_tie else (),
        made={},
        flag=flag,
        embedding=GGUF_EMBEDDING,
        head=GGUF_HEAD if has_tie else None,
        vocabulary=vocabulary,
        expected_lengths={GGUF_LOADER: dict.fromkeys(vocabulary, size.value) if size else {}},
        vocab_size=size,
        hidden_size=_number(metadata, f"{architecture}.embedding_length"),
        levels={},
        not_boolean={},
        loaders=frozenset(),
    )


def head_when_missing(architecture: str | None) -> str | None:
    """What llama.cpp does if a file of this architecture stores no head; `None` for one that the table lacks.

    It is `"tied"` (the embedding serves), `"refused"`, or `"none"` for models without a head.

    Example:
        >>> head_when_missing("llama"), head_when_missing("phi2"), head_when_missing("bert"), head_when_missing("new")
        ('tied', 'refused', 'none', None)
    """
    return next((entry.get("head_when_missing") for entry in _table_entries(architecture)), None)


def head_when_stored(architecture: str | None) -> bool:
    """Whether llama.cpp is known to read a stored head of this architecture.

    For some architectures the converter never writes one, and the runtime was not tried with one.
    """
    writes = ("kept", "dropped-if-flag", "dropped-if-equal")
    return any(entry.get("head_when_stored") in writes for entry in _table_entries(architecture))


def _table_entries(architecture: str | None) -> list[Mapping[str, str]]:
    """The classes that llama.cpp converts to this architecture."""
    classes: Mapping[str, Mapping[str, str]] = loader_table("llama_cpp")["architectures"]
    return [entry for entry in classes.values() if entry.get("gguf") == architecture]


def _vocabulary(metadata: Mapping[str, object], architecture: str | None, tokens: int | None) -> StatedSize | None:
    """The number of rows that llama.cpp expects: the number of tokens, or the stated size of a file without any."""
    if tokens is not None:
        return StatedSize(path=TOKENS, value=tokens)
    return _number(metadata, f"{architecture}.vocab_size")


def _number(metadata: Mapping[str, object], key: str) -> StatedSize | None:
    value = metadata.get(key)
    return StatedSize(path=key, value=value) if type(value) is int else None
