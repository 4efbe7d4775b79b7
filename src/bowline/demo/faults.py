"""Breaks healthy checkpoints in ways that people have reported; each case lists the codes that an audit must find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bowline.demo import layouts
from bowline.demo.layouts import Layout

__all__ = ["CASES", "Case"]

LORA_RANK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One checkpoint of the demo: `expected` holds the codes of all errors and warnings that an audit must find."""

    name: str
    """Also the name of its directory."""
    title: str
    story: str
    build: Callable[[], Layout]
    expected: frozenset[str] = frozenset()

    @property
    def healthy(self) -> bool:
        """Whether an audit should find no error and no warning."""
        return not self.expected


def flag_flipped() -> Layout:
    """GPT-2, tied in training and saved while its config said false: the save leaves out the shared head."""
    return layouts.gpt2().with_config(tie_word_embeddings=False)


def lora_merged_on_head() -> Layout:
    """GPT-2 with a low-rank delta merged into the head alone: two tensors, but the flag still says tied."""
    model = layouts.gpt2()
    embedding = model.tensor("transformer.wte.weight")
    draw = np.random.default_rng(7)
    rows, columns = embedding.shape
    delta = draw.standard_normal((rows, LORA_RANK)) @ draw.standard_normal((LORA_RANK, columns))
    head = embedding + (0.02 * delta).astype(np.float32)
    return model.with_tensor("lm_head.weight", head)


def t5_saved_again() -> Layout:
    """T5 v1.1 loaded and saved by transformers 5: the flag turns true, the scaling moves to a key of its own."""
    return layouts.t5_v1_1().with_config(
        is_decoder=False, scale_decoder_outputs=False, tie_word_embeddings=True, transformers_version="5.23.0"
    )


def stale_single_file() -> Layout:
    """Llama, saved in shards over an older save in a single file, which is still there."""
    older = layouts.llama(seed=1, shards=False)
    return layouts.llama().with_file(layouts.SINGLE_FILE, older.files[layouts.SINGLE_FILE])


def padding_zeroed() -> Layout:
    """BERT with the padding row zeroed, as `padding_idx` suggests; but the row is an output row too."""
    model = layouts.bert()
    embedding = model.tensor("bert.embeddings.word_embeddings.weight").copy()
    embedding[model.config["pad_token_id"]] = 0.0
    return model.with_tensor("bert.embeddings.word_embeddings.weight", embedding)


def head_lost() -> Layout:
    """Llama without its head: a tool that removes duplicates by name mistook it for a copy of the embedding."""
    return layouts.llama(shards=False).without_tensor("lm_head.weight")


CASES: tuple[Case, ...] = (
    Case(name="gpt2", title="GPT-2", story="Tied; the head is not stored.", build=layouts.gpt2),
    Case(name="bert", title="BERT with its head", story="Tied, weight and bias.", build=layouts.bert),
    Case(name="t5-v1.0", title="T5 v1.0", story="Tied, with scaled logits.", build=layouts.t5_v1_0),
    Case(name="t5-v1.1", title="T5 v1.1", story="Untied, as transformers 4 wrote it.", build=layouts.t5_v1_1),
    Case(name="llama", title="Llama, in two shards", story="Untied.", build=layouts.llama),
    Case(
        name="gpt2-flag-flipped",
        title="GPT-2, flag flipped",
        story="Tied in training, saved while config.json said false: the save left out the shared head.",
        build=flag_flipped,
        expected=frozenset({"BW102"}),
    ),
    Case(
        name="gpt2-lora-on-head",
        title="GPT-2, LoRA merged into head",
        story="The merge changed lm_head but not the embedding; the flag still says tied.",
        build=lora_merged_on_head,
        expected=frozenset({"BW101"}),
    ),
    Case(
        name="t5-v1.1-saved-again",
        title="T5 v1.1, saved again by 5.x",
        story="transformers 5 writes the flag as true, so transformers 4 ties the head and scales the logits.",
        build=t5_saved_again,
        expected=frozenset({"BW101", "BW109"}),
    ),
    Case(
        name="llama-stale-file",
        title="Llama, stale file and index",
        story="Saved in shards over an older single file: some loaders read the old model, others the new one.",
        build=stale_single_file,
        expected=frozenset({"BW301"}),
    ),
    Case(
        name="bert-padding-zeroed",
        title="BERT, padding row zeroed",
        story="A tool zeroed the row of [PAD]; the tied head now gives padding a logit of 0 plus the bias.",
        build=padding_zeroed,
        expected=frozenset({"BW204"}),
    ),
    Case(
        name="llama-head-lost",
        title="Llama, head lost",
        story="A tool mistook lm_head for a copy of the embedding and left it out; the flag correctly says untied.",
        build=head_lost,
        expected=frozenset({"BW102"}),
    ),
)
"""All cases, the healthy ones first."""
