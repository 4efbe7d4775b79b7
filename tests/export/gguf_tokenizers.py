"""Tokenizers as transformers writes them for Llama 2, Gemma and T5, small; and maps of characters."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from itertools import count
from struct import pack
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.edit.tokenizer.small_tokenizers import BYTES, byte_fallback, byte_level, sentencepiece_bpe, unigram

__all__ = ["TOKENIZERS", "charsmap", "changed", "gemma_like", "llama_like", "t5_like"]


def changed(content: str, **parts: Any) -> str:
    """A tokenizer with other parts in `tokenizer.json`."""
    return json.dumps({**json.loads(content), **parts})


def llama_like() -> str:
    """Llama 2's kind as transformers 5 writes it: the space in front is put there before merging."""
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return changed(byte_fallback(), normalizer=None, pre_tokenizer=metaspace)


def gemma_like() -> str:
    """Gemma's kind: no space in front, runs of spaces and newlines as added tokens, an unused one."""
    learned = json.loads(byte_fallback())["model"]["vocab"]
    pieces = [text for text in learned if text not in BYTES and not text.startswith("<")]
    runs = ["▁" * size for size in range(2, 6)] + ["\n" * size for size in range(1, 5)]
    content = json.loads(sentencepiece_bpe(list(dict.fromkeys([*runs, *pieces, "<unused0>"]))))
    ids = content["model"]["vocab"]
    added = [text for text in [*runs, "<unused0>"] if text != "\n"]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    content["added_tokens"] += [{"id": ids[text], "content": text, **plain, "special": False} for text in added]
    content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    return json.dumps(content)


def t5_like(mapping: Mapping[str, str] | None = None) -> str:
    """T5's kind: the end is added, white space is merged, unknown characters are one token, a hundred sentinels."""
    learned = json.loads(unigram())["model"]["vocab"]
    pieces = [(text, score) for text, score in learned if text not in ("<pad>", "<unk>")]
    sentinels = [f"<extra_id_{number}>" for number in (2, 1, 0)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *pieces, *((text, 0.0) for text in sentinels)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 2, False))
    metaspace = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace])
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    backend.add_special_tokens(["<pad>", "</s>", "<unk>", *sentinels])
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    known = {"\t": " ", "\n": " ", "\r": " ", "ﬁ": "fi", "…": "..."} if mapping is None else mapping
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap(known)).decode()}
    return changed(backend.to_str(), normalizer=normalizer)


def charsmap(mapping: Mapping[str, str]) -> bytes:
    """The map of characters as SentencePiece stores it: a double array over the bytes, and the texts in their place."""
    texts, places = b"", {}
    for text in dict.fromkeys(mapping.values()):
        places[text] = len(texts)
        texts += text.encode() + b"\0"
    children: dict[bytes, set[int]] = {b"": set()}
    for key in mapping:
        raw = key.encode()
        for at in range(len(raw)):
            children.setdefault(raw[:at], set()).add(raw[at])
            children.setdefault(raw[: at + 1], set())
    leaves = {key.encode(): places[text] for key, text in mapping.items()}
    units: dict[int, int] = {0: 0}
    waiting = [(b"", 0)]
    for prefix, node in waiting:
        labels = sorted(children[prefix] | ({0} if prefix in leaves else set()))
        base = next(base for base in count(1) if all(base ^ label not in units for label in labels))
        units[node] |= (node ^ base) << 10 | (1 << 8 if prefix in leaves else 0)
        for label in labels:
            units[base ^ label] = label
            if label:
                waiting.append((prefix + bytes([label]), base ^ label))
            else:
                units[base] = leaves[prefix] | 1 << 31
    size = (max(units) // 256 + 1) * 256
    array = pack(f"<{size}I", *(units.get(place, 0) for place in range(size)))
    return pack("<I", len(array)) + array + texts


TOKENIZERS: Mapping[str, Callable[[], str]] = {
    "byte-level": byte_level,
    "Llama 2": byte_fallback,
    "Llama 2 in transformers 5": llama_like,
    "Gemma": gemma_like,
    "T5": t5_like,
    "Unigram of words": unigram,
}
"""Builders of tokenizers that are written as GGUF, by name."""
