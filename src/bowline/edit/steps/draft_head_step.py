"""A smaller head for speculative decoding, on disk: the rows of the tokens that a text uses most."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bowline.checkpoint.checkpoint import CONFIG
from bowline.edit.content import ChosenRows, Content, Held
from bowline.edit.draft import Draft, DraftFiles
from bowline.edit.row_selection import named_ids, refuse_quantised
from bowline.edit.tokenizer import CorpusCount, count_tokens, keep_file, read_tokenizer
from bowline.errors import TieError, UsageError
from bowline.families.config_levels import config_levels
from bowline.families.stored_vocabulary import stored_vocabulary
from bowline.wording import listed

__all__ = ["DraftHeadStep", "torch_list"]

HEAD, OFFSETS, MASK = "lm_head.weight", "d2t", "t2d"
"""The names under which SGLang and vLLM read a reduced head and its maps."""
DRAFTER_PARTS = ("fc.weight", "model.fc.weight")
"""The projection that every EAGLE draft model has, and no language model."""
WEIGHTS, TOKEN_MAP, TOKEN_LIST = "model.safetensors", "token_map.json", "token_map.pt"
SCALES = ("logit_scale", "logits_scaling", "final_logit_softcapping")
"""Keys that change logits after the head."""


class Rank(StrEnum):
    """Why a token has a row."""

    KEEP_FILE = "in the keep file"
    NAMED = "named in a config"
    FREQUENT = "most frequent in the corpus"


@dataclass(frozen=True, slots=True)
class DraftHeadStep:
    """Make a head of `count` rows: those of the tokens that a corpus uses most, of the keep file's and the configs'.

    Row i is the target's row `i + d2t[i]`; `t2d` is true for each id of the target that has a row. From a draft model
    with a head of its own the whole model stays, with the smaller head; from any other model the result is the head.
    """

    corpus: tuple[Path, ...]
    keep_tokens: Path | None
    count: int
    verb: ClassVar[str] = "prune"

    def __str__(self) -> str:
        corpus = f" --corpus {listed([str(path) for path in self.corpus], 2)}" if self.corpus else ""
        tokens = f" --keep-tokens {self.keep_tokens}" if self.keep_tokens is not None else ""
        return f"prune{corpus}{tokens} --draft {self.count}"

    def apply(self, draft: Draft) -> Draft:
        """The draft of the head, or of the draft model with it.

        Raises:
            UsageError: no corpus ranks the tokens, it has fewer than `count` of them, or a file is not text.
            TieError: the model has no head of a plain matrix, or one that is quantised.
        """
        if not self.corpus:
            raise UsageError("--draft takes the most frequent tokens, but no corpus says which", help="give --corpus")
        is_drafter = any(name in draft.tensors for name in DRAFTER_PARTS)
        head, levels = _drafter_head(draft) if is_drafter else _target_head(draft)
        size = head.rows
        tokenizer = read_tokenizer(DraftFiles(draft))
        counted = count_tokens(tokenizer, self.corpus)
        listed_ids = keep_file(tokenizer, self.keep_tokens) if self.keep_tokens is not None else []
        reasons = _ranked(self.count, size, counted, listed_ids, named_ids(draft, levels))
        kept = np.array(sorted(reasons), np.int64)
        mask = np.zeros(size, np.uint8)
        mask[kept] = 1
        tensors: dict[str, Content] = {
            HEAD: ChosenRows(head, 0, kept, None),
            OFFSETS: Held("I64", kept - np.arange(len(kept))),
            MASK: Held("BOOL", mask),
        }
        edited = _in_drafter(draft, tensors) if is_drafter else _alone(draft, tensors)
        order = ",\n".join(f'"{old}": {row}' for row, old in enumerate(kept.tolist()))
        texts = {TOKEN_MAP: f"{{\n{order}\n}}\n".encode("ascii"), TOKEN_LIST: torch_list(kept.tolist())}
        return edited.with_texts(texts).with_notes(*self._report(draft, size, reasons, kept, counted))

    def _report(
        self, draft: Draft, size: int, reasons: Mapping[int, Rank], kept: npt.NDArray[np.int64], counted: CorpusCount
    ) -> Iterable[str]:
        found = Counter(reasons.values())
        why = ", ".join(f"{found[rank]:,} {rank}" for rank in Rank if found[rank])
        yield f"{len(kept):,} of {size:,} rows make the draft head: {why}"
        yield f"{counted.covered(kept):.2%} of the corpus' {counted.tokens:,} tokens can be drafted"
        yield f"{TOKEN_LIST} lists their ids for SGLang's --speculative-token-map, which cuts the target's head itself"
        stated = [key for key in SCALES if draft.config.get(key) not in (None, 1, 1.0)]
        if stated:
            yield f"{CONFIG} states {listed(stated, 3)}: logits of the draft head need it too"


def _target_head(draft: Draft) -> tuple[Content, tuple[tuple[str, ...], ...]]:
    """The head of a language model: its own matrix, or the embedding that it is tied to; and its config's levels."""
    declaration = draft.declaration
    name = declaration.architecture or "this model"
    if draft.config.get("is_encoder_decoder") is True:
        raise TieError(
            f"{name} is an encoder-decoder model, expected a decoder: no loader drafts for others",
            help="give the model whose tokens are drafted",
        )
    vocabulary = stored_vocabulary(draft.config, draft.shapes)
    refuse_quantised(draft, vocabulary.axes)
    declared = declaration.find(declaration.head) if declaration.head else None
    ends = [declaration.head, declared.tie.source if declared is not None else None]
    stored = next((end for end in ends if end is not None and end in draft.tensors), None)
    if stored is None:
        raise TieError(f"{name} stores no head", help="give a language model, or a draft model with a head of its own")
    biases = [other for other, axis in vocabulary.axes.items() if len(draft.tensors[other].shape) == 1]
    if biases:
        raise TieError(
            f"{biases[0]}: the head has a bias, for which no draft layout has a place",
            help="a token map alone can do without the head: list the tokens with a corpus of the same tokenizer",
        )
    content = draft.tensors[stored]
    if vocabulary.axes[stored].axis != 0 or len(content.shape) != 2:
        raise TieError(f"{stored}: is {list(content.shape)}, expected a row for each token", help="transpose it first")
    return content, vocabulary.levels


def _drafter_head(draft: Draft) -> tuple[Content, tuple[tuple[str, ...], ...]]:
    """The head of a draft model in the layout of EAGLE."""
    if OFFSETS in draft.tensors:
        raise TieError(
            f"{OFFSETS}: this draft model has a reduced head already ({draft.tensors[OFFSETS].rows:,} rows)",
            help="start from the draft model with the whole vocabulary",
        )
    if HEAD not in draft.tensors:
        raise TieError(
            f"{HEAD}: this draft model stores no head, loaders take the target's",
            help=f"give the target instead of it: {HEAD}, {OFFSETS} and {MASK} of the result belong into the draft",
        )
    refuse_quantised(draft, (HEAD,))
    return draft.tensors[HEAD], tuple(keys for keys, _ in config_levels(draft.config))


def _ranked(
    count: int, size: int, counted: CorpusCount, listed_ids: Iterable[int], named: Iterable[int]
) -> dict[int, Rank]:
    """The reason of each id that gets a row: `count` of them."""
    reasons: dict[int, Rank] = {}
    for ids, rank in ((listed_ids, Rank.KEEP_FILE), (named, Rank.NAMED)):
        for number in ids:
            if number < size:
                reasons.setdefault(number, rank)
    if not 0 < count < size:
        raise UsageError(f"--draft {count}: expected a number of rows from 1 to {size - 1}", argument="draft")
    if len(reasons) > count:
        raise UsageError(
            f"--draft {count}: {len(reasons):,} tokens are named by the keep file and the configs alone",
            help="ask for more rows, or list fewer tokens",
            argument="draft",
        )
    counts = counted.counts[:size]
    order = np.lexsort((np.arange(len(counts)), -counts))  # the most frequent first; of two equals the lower id
    frequent = [number for number in order.tolist() if number not in reasons][: count - len(reasons)]
    used = sum(1 for number in frequent if counts[number])
    if used < count - len(reasons):
        raise UsageError(
            f"--draft {count}: the corpus has only {len(np.flatnonzero(counts)):,} different tokens, and "
            f"{used + len(reasons):,} with those that files name",
            help=f"give more text, or --draft {used + len(reasons)}",
            argument="draft",
        )
    return {**reasons, **dict.fromkeys(frequent, Rank.FREQUENT)}


def _in_drafter(draft: Draft, tensors: Mapping[str, Content]) -> Draft:
    """The draft model with another head, in the head's file."""
    home = draft.homes[HEAD]
    edited = draft
    for name, content in tensors.items():
        edited = edited.with_tensor(name, content, home)
    return edited.with_values(CONFIG, {("draft_vocab_size",): tensors[HEAD].rows})


def _alone(draft: Draft, tensors: Mapping[str, Content]) -> Draft:
    """Only the head, and a config of its sizes."""
    rows, width = tensors[HEAD].shape
    config: dict[str, Any] = {
        "vocab_size": tensors[MASK].rows,
        "draft_vocab_size": rows,
        "hidden_size": width,
        "tie_word_embeddings": False,
    }
    text = (json.dumps(config, indent=2) + "\n").encode("ascii")
    homes = dict.fromkeys(tensors, WEIGHTS)
    return replace(draft, tensors=dict(tensors), homes=homes, texts={CONFIG: text}, alone=True)


def torch_list(numbers: list[int]) -> bytes:
    """A list of integers as `torch.save` writes it: a zip archive of a pickle.

    Example:
        >>> import torch
        >>> torch.load(io.BytesIO(torch_list([3, 5, 8])), weights_only=True)
        [3, 5, 8]
    """
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (("data.pkl", pickle.dumps(numbers, protocol=2)), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"token_map/{name}"), content)
    return whole.getvalue()
