"""What people report, each done to a healthy checkpoint: the story, the deed, and the codes that must find it."""

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
    """One checkpoint of the demo: `expected` are all the errors and warnings that an audit has to find in it."""

    name: str
    """Also the name of its directory."""
    title: str
    story: str
    build: Callable[[], Layout]
    expected: frozenset[str] = frozenset()

    @property
    def healthy(self) -> bool:
        """Whether nothing is to be found."""
        return not self.expected


def flag_flipped() -> Layout:
    """GPT-2 tied while it ran, saved while its config said false: the save leaves the shared head out."""
    return layouts.gpt2().with_config(tie_word_embeddings=False)


def lora_merged_on_head() -> Layout:
    """GPT-2 with a low-rank delta merged into the head alone: two tensors now, one flag still."""
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
    """Llama saved in shards over an older save in one file, which stays."""
    older = layouts.llama(seed=1, shards=False)
    return layouts.llama().with_file(layouts.SINGLE_FILE, older.files[layouts.SINGLE_FILE])


def padding_zeroed() -> Layout:
    """BERT with the padding row zeroed, as `padding_idx` suggests; but the row is an output row too."""
    model = layouts.bert()
    embedding = model.tensor("bert.embeddings.word_embeddings.weight").copy()
    embedding[model.config["pad_token_id"]] = 0.0
    return model.with_tensor("bert.embeddings.word_embeddings.weight", embedding)


def head_lost() -> Layout:
    """Llama without its head, taken for a copy of the embedding by a tool that removes duplicates by name."""
    return layouts.llama(shards=False).without_tensor("lm_head.weight")


CASES: tuple[Case, ...] = (
    Case(name="gpt2", title="GPT-2", story="Tied; the head is not stored.", build=layouts.gpt2),
    Case(name="bert", title="BERT with its head", story="Tied, weight and bias.", build=layouts.bert),
    Case(name="t5-v1.0", title="T5 v1.0", story="Tied, the logits scaled.", build=layouts.t5_v1_0),
    Case(name="t5-v1.1", title="T5 v1.1", story="Untied, as transformers 4 wrote it.", build=layouts.t5_v1_1),
    Case(name="llama", title="Llama, in two shards", story="Untied.", build=layouts.llama),
    Case(
        name="gpt2-flag-flipped",
        title="GPT-2, flag flipped",
        story="Tied while it trained, saved while config.json said false: the save left the shared head out.",
        build=flag_flipped,
        expected=frozenset({"BW102"}),
    ),
    Case(
        name="gpt2-lora-on-head",
        title="GPT-2, LoRA merged into head",
        story="The merge moved lm_head away from the embedding; the flag still says that they are one.",
        build=lora_merged_on_head,
        expected=frozenset({"BW101"}),
    ),
    Case(
        name="t5-v1.1-saved-again",
        title="T5 v1.1, saved again by 5.x",
        story="transformers 5 writes the flag as true, which has transformers 4 tie the head and scale the logits.",
        build=t5_saved_again,
        expected=frozenset({"BW101", "BW109"}),
    ),
    Case(
        name="llama-stale-file",
        title="Llama, stale file and index",
        story="Saved in shards over an older save in one file: some loaders read the old model, others the new.",
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
        story="A tool took lm_head for a copy of the embedding and left it out; the flag rightly says untied.",
        build=head_lost,
        expected=frozenset({"BW102"}),
    ),
)
"""The healthy ones first."""
