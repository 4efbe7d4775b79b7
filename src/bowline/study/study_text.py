"""The text of the experiments: the standard library's source, tokenised once for each family."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bowline.errors import BowlineError
from bowline.study.experiment_sizes import ExperimentSizes
from bowline.train.loop.batches import Batches
from bowline.train.text.corpus import Corpus, find_text
from bowline.train.text.objectives import CausalBatches, MaskedBatches, SpanBatches
from bowline.train.text.packed_tokens import Packed, held_out_documents, pack, training_documents
from bowline.train.text.tokenizer_training import TextTokenizer, take_tokenizer, train_tokenizer

__all__ = ["Padded", "StudyText", "prepared"]


@dataclass(frozen=True, eq=False)
class StudyText:
    """The tokenizer and packed text of one family; `counts` (V,) are the tokens' counts in the training text."""

    family: str
    setting: ExperimentSizes
    tokenizer: TextTokenizer
    packed: Packed
    counts: npt.NDArray[np.float64]

    @property
    def pad(self) -> int:
        """The id of the padding token."""
        assert self.tokenizer.pad is not None, "asked of families that have one"
        return self.tokenizer.pad

    def batches(self, *, seed: int, tokens: int | None = None) -> Batches:
        """Make batches for the family's objective, ordered by `seed`, from the first `tokens` tokens or from all."""
        this, setting = self.tokenizer, self.setting
        train = self.packed.train[:tokens]
        options: dict[str, Any] = {
            "length": setting.length,
            "batch_size": setting.batch,
            "seed": seed,
            "held_out_tokens": setting.held_out_batches * setting.tokens,
        }
        if self.family == "bert":
            assert this.begin is not None and this.mask is not None, "BERT's tokenizer has both"
            return MaskedBatches(
                train,
                self.packed.held_out,
                begin=this.begin,
                separator=this.separator,
                mask=this.mask,
                vocab_size=setting.vocab_size,
                special=this.special,
                **options,
            )
        if self.family == "t5":
            assert this.eos is not None, "T5's tokenizer has one"
            return SpanBatches(train, self.packed.held_out, sentinels=this.sentinels, eos=this.eos, **options)
        return CausalBatches(train, self.packed.held_out, **options)


@cache
def prepared(place: Path, family: str, setting: ExperimentSizes) -> StudyText:
    """Prepare the text of a family below `place`, or open it there if it exists.

    Raises:
        UsageError: the text does not support the vocabulary, or `place` cannot be written.
    """
    everything = find_text("stdlib")
    corpus = Corpus(everything.files[:: setting.every_file])
    survey = corpus.survey
    configured = json.dumps([survey.fingerprint, setting.vocab_size])
    directory = place / f"{family}-{hashlib.sha256(configured.encode()).hexdigest()[:12]}"
    tokenizer = _kept_tokenizer(family, directory / "tokenizer")
    if tokenizer is None:
        documents = training_documents(corpus, held_out_documents(survey, setting.held_out_share))
        tokenizer = train_tokenizer(family, documents, setting.vocab_size, characters=survey.characters, exactly=True)
        tokenizer.save(directory / "tokenizer")
    packed = pack(corpus, tokenizer, directory / "packed", share=setting.held_out_share)
    counts = np.bincount(packed.train, minlength=setting.vocab_size).astype(np.float64)
    return StudyText(family, setting, tokenizer, packed, counts)


def _kept_tokenizer(family: str, directory: Path) -> TextTokenizer | None:
    """Load the tokenizer that was trained before; `None` if it is missing or incomplete."""
    if not directory.is_dir():
        return None
    try:
        return take_tokenizer(family, directory)
    except (BowlineError, ValueError):
        return None


@dataclass(frozen=True)
class Padded:
    """Batches whose rows end early. The rest is padding, which is masked out and never a label.

    Lengths are uniform between a quarter of a row and a whole row, drawn for each batch by its number.
    """

    batches: Batches
    pad: int
    seed: int

    def at(self, step: int, micro: int = 0) -> dict[str, torch.Tensor]:
        """Return the batch of a step."""
        return self._cut(self.batches.at(step, micro), (self.seed, step, micro))

    def held_out(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the held-out batches, cut in the same way in every call."""
        for number, batch in enumerate(self.batches.held_out()):
            yield self._cut(batch, (number,))

    def _cut(self, batch: dict[str, torch.Tensor], key: tuple[int, ...]) -> dict[str, torch.Tensor]:
        rows, length = batch["input_ids"].shape
        random = np.random.default_rng(key)
        ends = torch.from_numpy(random.integers(max(1, length // 4), length + 1, size=rows))
        here = torch.arange(length)[None] < ends[:, None]  # (B, T)
        return {
            "input_ids": batch["input_ids"].masked_fill(~here, self.pad),
            "attention_mask": here.long(),
            "labels": batch["labels"].masked_fill(~here, -100),
        }
