"""Refuses, by name, to prune a tokenizer whose files use token ids in a place that cannot be rewritten."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.tokenizer.stored_tokenizer import SETTINGS, TOKENIZER, StoredTokenizer, read_json_object
from bowline.errors import FormatError, UsageError

__all__ = ["check_prunable"]

_NAMED_ID = re.compile(r"\w*token_ids?\b")


def check_prunable(files: FileSet, tokenizer: StoredTokenizer) -> None:
    """Refuse a tokenizer that cannot be pruned so that its files still agree.

    Raises:
        UsageError: BPE has a dropout, a chat template speaks of token ids, or the checkpoint has the Python code of a
            tokenizer.
    """
    if dropout := tokenizer.model.get("dropout"):
        raise UsageError(
            f"{TOKENIZER}: BPE has a dropout of {shown(dropout)}, so that a text splits differently every time",
            help=f"set model.dropout to null in {TOKENIZER}",
        )
    for place, template in _chat_templates(files):
        if found := _NAMED_ID.search(template):
            raise UsageError(
                f"{place}: the chat template uses {found.group()!r}, and ids in a template cannot be rewritten safely",
                help="write the token's text in the template in place of its id",
            )
    for name in files.sizes():
        if name.startswith("tokenization_") and name.endswith(".py"):
            raise UsageError(
                f"{name}: Python code of a tokenizer, which can hold token ids of its own",
                help=f"if {TOKENIZER} alone splits text in the same way, remove {name}",
            )


def _chat_templates(files: FileSet) -> Iterator[tuple[str, str]]:
    for name in (SETTINGS, "chat_template.json"):
        for text in _texts(read_json_object(files, name).get("chat_template")):
            yield name, text
    for name in files.sizes():
        folder, _, file = name.rpartition("/")
        if folder in ("", "additional_chat_templates") and file.endswith(".jinja"):
            try:
                yield name, files.read(name).decode("utf-8")
            except UnicodeDecodeError as error:
                raise FormatError(f"{name}: not UTF-8 at byte {error.start}", help="fetch the file again") from None


def _texts(value: Any) -> Iterator[str]:
    """A template, or several: by name in an object, or in a list of objects with a name and a template."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for one in value if isinstance(value, list) else value.values():
            yield from _texts(one)
