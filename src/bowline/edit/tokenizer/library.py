"""Loads a tokenizer with the `tokenizers` library, which is installed with the extra `edit`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from bowline.checkpoint.formats.strict_json import shown
from bowline.edit.tokenizer.stored_tokenizer import TOKENIZER, StoredTokenizer
from bowline.errors import FormatError, UsageError, how_to_install

if TYPE_CHECKING:
    import tokenizers

__all__ = ["check_ids", "load", "load_checked"]


def load(data: bytes) -> tokenizers.Tokenizer:
    """The library's tokenizer from the bytes of `tokenizer.json`, without truncation and padding.

    Raises:
        UsageError: the library is not installed.
        FormatError: the library refuses the file.
    """
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise UsageError(
            "editing a vocabulary needs tokenizers, which is not installed", help=how_to_install("edit")
        ) from None
    try:
        backend = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
    except BaseException as error:  # a Rust panic is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise FormatError(
            f"{TOKENIZER}: tokenizers {tokenizers.__version__} refuses it ({str(error)[:200]})",
            help="update tokenizers, or save the tokenizer again with transformers",
        ) from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def load_checked(tokenizer: StoredTokenizer) -> tokenizers.Tokenizer:
    """The library's tokenizer, with a split that is a function of the text and with the ids that the file states.

    Raises:
        UsageError: BPE has a dropout, so that the split is random.
        FormatError: the library gives an added token another id.
    """
    dropout = tokenizer.model.get("dropout")
    if dropout:
        raise UsageError(
            f"{TOKENIZER}: BPE has a dropout of {json.dumps(dropout)}, so that a text splits differently every time",
            help=f"set model.dropout to null in {TOKENIZER}",
        )
    backend = load(tokenizer.data)
    texts = tokenizer.texts
    check_ids(backend, {texts[number]: number for number in tokenizer.added})
    return backend


def check_ids(backend: tokenizers.Tokenizer, ids: Mapping[str, int]) -> None:
    """Compare the ids of added tokens with those that the library gives them.

    The library numbers added tokens on its own: after the vocabulary, in the order of the file.

    Raises:
        FormatError: the library gives a token another id.
    """
    for text, number in ids.items():
        found = backend.token_to_id(text)
        if found != number:
            raise FormatError(
                f"{TOKENIZER}: the added token {shown(text)} has the id {number} in the file, "
                f"but tokenizers gives it {found}",
                help="save the tokenizer again with transformers; the model's rows must fit the ids",
            )
