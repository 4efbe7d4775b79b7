"""A GGUF file's tokenizer in the form in which the tokens that stay are chosen, and the `tokenizer.json` beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.gguf.value_bytes import array_items, value_numbers
from bowline.checkpoint.formats.strict_json import shown
from bowline.edit.gguf.gguf_draft import GGUFDraft
from bowline.edit.gguf.gguf_vocabulary import (
    CONVERT_AGAIN,
    MERGES,
    PREFIX,
    SCORES,
    UNUSED,
    GGUFVocabulary,
    texts_of,
)
from bowline.edit.tokenizer import Kind, StoredTokenizer, read_tokenizer
from bowline.edit.tokenizer.stored_tokenizer import BYTE_PIECES
from bowline.errors import BowlineError, FormatError, UsageError

__all__ = ["GGUFTokenizer", "gguf_tokenizer", "tokenizer_beside"]

BYTE_LEVEL, BY_SCORE = "gpt2", "llama"
NOT_BYTE_LEVEL = ("gemma4", "sarvam-moe", "whitespace")
"""Values of `tokenizer.ggml.pre` with which llama.cpp does not spell a text by the letters of its bytes."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Types of tokens, as `tokenizer.ggml.token_type` has them."""
# fmt: off
FOUND_BY_TEXT = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>",
    "[EOT]", "<\uff5cend▁of▁sentence\uff5c>", "<end_of_utterance>", "<|eom_id|>", "<|fim_prefix|>", "<fim-prefix>",
    "<fim_prefix>", "<\uff5cfim▁begin\uff5c>", "<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>",
    "<fim-suffix>", "<fim_suffix>", "<\uff5cfim▁hole\uff5c>", "<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>",
    "<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim▁end\uff5c>", "<MID>", "▁<MID>", "<|code_middle|>",
    "<|middle|>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "</s>",
    "[EOS]", "<eos>", "<turn|>", "<|tool_response>", "[e~[", "<|channel|>", "<|message|>", "<|start|>",
    "<|constrain|>", "<|plamo:eos|>",
})
# fmt: on
"""The tokens that llama.cpp finds by their text, whatever their type (the commit of the loaders' table)."""
NAMED_ID = re.compile(rb"\w*token_ids?\b")
SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTokenizer:
    """The tokenizer as `tokenizer.json` would say it, and its scores by id, where tokens merge by score."""

    stored: StoredTokenizer
    scores: Mapping[int, float] | None

    @property
    def normal(self) -> list[int]:
        """The ids of tokens that text is split into."""
        return [number for number in self.stored.texts if number not in self.stored.added]


def gguf_tokenizer(draft: GGUFDraft, vocabulary: GGUFVocabulary) -> GGUFTokenizer:
    """The tokenizer of a file of the model `gpt2` or `llama`.

    Raises:
        UsageError: it is of another model, or a chat template uses token ids.
        FormatError: a token, a merge or a score is malformed.
    """
    pre = draft.header.values.get(PREFIX + "pre")
    if vocabulary.model not in (BYTE_LEVEL, BY_SCORE) or pre in NOT_BYTE_LEVEL:
        seen = f"the model {vocabulary.model!r}" + (f" with the pre-tokenizer {pre!r}" if pre else "")
        raise UsageError(
            f"the tokenizer is of {seen}, expected '{BYTE_LEVEL}' (byte-level BPE) or '{BY_SCORE}' (merges by score)",
            help="prune the checkpoint that it was converted from, and convert again",
        )
    _refuse_ids_in_templates(draft)
    texts = texts_of(draft, vocabulary)
    by_score = vocabulary.model == BY_SCORE
    content: Mapping[str, Any] = {"model": {"type": "BPE"}}
    if by_score:
        content = {"model": {"type": "BPE", "byte_fallback": True}, "normalizer": SPACE}
        content = {**content, "decoder": {"type": "ByteFallback"}}
    stored = StoredTokenizer(
        data=b"",
        content=content,
        kind=Kind.BYTE_FALLBACK_BPE if by_score else Kind.BYTE_LEVEL_BPE,
        ids={text: number for number, text in enumerate(texts)},
        texts=dict(enumerate(texts)),
        size=len(texts),
        added=_added(vocabulary, texts),
        merges=() if by_score else _merges(draft),
        named={**_fixed(vocabulary), **_found_by_text(texts), **vocabulary.named},
    )
    return GGUFTokenizer(stored=stored, scores=_scores(draft) if by_score else None)


def tokenizer_beside(source: Checkpoint, tokenizer: GGUFTokenizer, vocabulary: GGUFVocabulary) -> StoredTokenizer:
    """The tokenizer of the `tokenizer.json` beside the file, with which its text is counted.

    Raises:
        UsageError: there is none, or it does not have the same tokens with the same ids and the same merges.
    """
    way_out = "list the tokens to keep in a file for --keep-tokens, or prune the checkpoint and convert again"
    if tokenizer.scores is not None:
        raise UsageError(
            f"the tokenizer merges by score (the model '{BY_SCORE}'), which no tokenizer.json says, so the tokens of a "
            "corpus cannot be counted",
            help=way_out,
            argument="corpus",
        )
    if not source.files.has("tokenizer.json"):
        raise UsageError(
            f"there is no tokenizer.json beside {source.location}, so the tokens of a corpus cannot be counted",
            help=f"put that of the model there, or {way_out}",
            argument="corpus",
        )
    try:
        beside = read_tokenizer(source.files)
    except BowlineError as error:
        raise UsageError(f"the tokenizer.json beside it cannot count: {error.message}", help=way_out) from None
    said = _disagreement(beside, tokenizer.stored, vocabulary)
    if said is not None:
        raise UsageError(f"the tokenizer.json beside it is another tokenizer: {said}", help=way_out, argument="corpus")
    return beside


def _disagreement(beside: StoredTokenizer, own: StoredTokenizer, vocabulary: GGUFVocabulary) -> str | None:
    if beside.kind is not own.kind:
        return f"{beside.kind}, expected {own.kind}"
    for number, text in sorted(own.texts.items()):
        other = beside.texts.get(number)
        if other != text and not (other is None and vocabulary.types[number] == UNUSED):
            seen = "has no token" if other is None else f"has {shown(other)}"
            return f"it {seen} under the id {number}, expected {shown(text)}"
    if beside.size > own.size:
        return f"it has ids up to {beside.size - 1}, expected {own.size - 1}"
    if beside.merges != own.merges:
        return f"its {len(beside.merges)} merges differ from the {len(own.merges)} of the file"
    return None


def _refuse_ids_in_templates(draft: GGUFDraft) -> None:
    for key in draft.extents:
        if key == "tokenizer.chat_template" or key.startswith("tokenizer.chat_template."):
            found = NAMED_ID.search(draft.value(key) or b"")
            if found:
                raise UsageError(
                    f"{key}: uses {found.group().decode()!r}, and ids in a template cannot be rewritten safely",
                    help=CONVERT_AGAIN,
                )


def _added(vocabulary: GGUFVocabulary, texts: tuple[str, ...]) -> dict[int, bool]:
    """The ids that text is split at before any merge, and whether each is special."""
    pieces = frozenset(BYTE_PIECES)
    return {
        number: kind in (CONTROL, UNKNOWN)
        for number, kind in enumerate(vocabulary.types)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) or (kind == BYTE and texts[number] not in pieces)
    }


def _fixed(vocabulary: GGUFVocabulary) -> dict[int, str]:
    return dict.fromkeys(range(vocabulary.fixed), "stands before a default id of llama.cpp")


def _found_by_text(texts: tuple[str, ...]) -> dict[int, str]:
    return {number: "llama.cpp finds it by its text" for number, text in enumerate(texts) if text in FOUND_BY_TEXT}


def _merges(draft: GGUFDraft) -> tuple[tuple[str, str], ...]:
    value = draft.value(MERGES)
    if value is None:
        raise FormatError(
            f"{draft.header.file}: there is no {MERGES}, so tokens are not built from others",
            help="llama.cpp refuses most such files too; convert the model again",
        )
    pairs = []
    for rank, raw in enumerate(array_items(value)[1]):
        text = raw.decode("utf-8", "replace")
        rest, _, right = text[1:].partition(" ")  # as llama.cpp: the first space after the first letter
        if not right:
            raise FormatError(
                f"{draft.header.file}: {MERGES}[{rank}]: {shown(text)}, expected two tokens",
                help="convert the model again",
            )
        pairs.append((text[:1] + rest, right))
    if len(set(pairs)) < len(pairs):
        raise FormatError(
            f"{draft.header.file}: {MERGES} has a pair twice, whose rank readers understand differently",
            help="convert the model again",
        )
    return tuple(pairs)


def _scores(draft: GGUFDraft) -> dict[int, float]:
    value = draft.value(SCORES)
    if value is None:
        return {}
    scores: npt.NDArray[np.float64] = np.array(value_numbers(value), np.float64)
    if not all(map(isfinite, scores.tolist())):
        raise FormatError(f"{draft.header.file}: {SCORES} has a score that is not finite", help=CONVERT_AGAIN)
    return dict(enumerate(scores.tolist()))
