"""The sizes of `--size`: what a model has, and how it is trained unless somebody says otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from bowline.errors import UsageError

__all__ = ["FAMILIES", "HEAD_BIASES", "SIZES", "Preset", "preset"]

FAMILIES = ("gpt2", "bert", "t5", "lstm")
SIZES = ("nano", "small", "base")
HEAD_BIASES = ("zero", "unigram")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One size of one family.

    `model` are keys of the family's config; what is not among them has the config's own default, which is the published
    model's. `vocab_size` is what a new tokenizer is to have; `batch_size` rows of `length` tokens are one batch, and
    `accumulation` batches one step. `mask_share` is BERT's and T5's, and `head_bias` belongs to families whose head has
    one; why T5 has an `embedding_rate` stands in `bowline.train.loop.adamw`.
    """

    model: Mapping[str, Any]
    vocab_size: int
    length: int
    batch_size: int
    accumulation: int = 1
    steps: int
    learning_rate: float
    mask_share: float | None = None
    head_bias: str | None = None
    embedding_rate: float = 1.0


def _gpt2(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"n_embd": width, "n_layer": layers, "n_head": heads, **more}


def _bert(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * width, **more}


def _t5(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"d_model": width, "num_layers": layers, "num_heads": heads, "d_ff": 4 * width, **more}


NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
    "lstm": {"embd_pdrop": 0.0, "hidden_pdrop": 0.0, "output_pdrop": 0.0},
}
"""A nano model sees its text about once: there is nothing to learn by heart."""
NANO: dict[str, Any] = {"vocab_size": 4096, "steps": 1000}
PUBLISHED: dict[str, Any] = {"steps": 100_000, "accumulation": 8}

PRESETS: Mapping[tuple[str, str], Preset] = MappingProxyType(
    {
        # Narrow layers learn sooner from wider draws than 0.02, which was chosen for 768.
        ("gpt2", "nano"): Preset(
            model=_gpt2(192, 4, 6, initializer_range=0.05, **NO_DROPOUT["gpt2"]),
            length=256, batch_size=8, learning_rate=3e-3, **NANO,
        ),
        # Its norms stand behind the sums, and a table alone tells how often tokens come by giving every position the
        # same vector, from which it is long in coming back, or does not: that is the bias's to tell, from the start.
        ("bert", "nano"): Preset(
            model=_bert(256, 2, 8, **NO_DROPOUT["bert"]),
            length=64, batch_size=32, learning_rate=2e-3, mask_share=0.4, head_bias="unigram",
            **NANO | {"steps": 1800},
        ),
        ("t5", "nano"): Preset(
            model=_t5(192, 3, 6, d_kv=32, **NO_DROPOUT["t5"]),
            length=64, batch_size=32, learning_rate=1.5e-3, embedding_rate=192**0.5, mask_share=0.3,
            **NANO | {"steps": 750},
        ),
        # Drawn twice as wide as Zaremba's: else it tells how often tokens come, and no more, for hundreds of steps.
        ("lstm", "nano"): Preset(
            model={"hidden_size": 256, "num_layers": 1, "initializer_range": 0.2, **NO_DROPOUT["lstm"]},
            length=128, batch_size=16, learning_rate=3e-3, head_bias="unigram", **NANO,
        ),
        ("gpt2", "small"): Preset(  # GPT-2 small, 124 million
            model=_gpt2(768, 12, 12), vocab_size=50257, length=1024, batch_size=8, learning_rate=6e-4, **PUBLISHED
        ),
        ("gpt2", "base"): Preset(  # GPT-2 medium, 355 million
            model=_gpt2(1024, 24, 16), vocab_size=50257, length=1024, batch_size=8, learning_rate=3e-4, **PUBLISHED
        ),
        ("bert", "small"): Preset(  # google/bert_uncased_L-4_H-512_A-8, 29 million
            model=_bert(512, 4, 8), vocab_size=30522, length=512, batch_size=8, learning_rate=5e-4, mask_share=0.15,
            **PUBLISHED,
        ),
        ("bert", "base"): Preset(  # BERT base, 110 million
            model=_bert(768, 12, 12), vocab_size=30522, length=512, batch_size=8, learning_rate=1e-4, mask_share=0.15,
            **PUBLISHED,
        ),
        ("t5", "small"): Preset(  # T5 small, 60 million
            model=_t5(512, 6, 8), vocab_size=32128, length=512, batch_size=8, learning_rate=1e-3, mask_share=0.15,
            **PUBLISHED,
        ),
        ("t5", "base"): Preset(  # T5 base, 220 million
            model=_t5(768, 12, 12), vocab_size=32128, length=512, batch_size=8, learning_rate=1e-3, mask_share=0.15,
            **PUBLISHED,
        ),
        ("lstm", "small"): Preset(  # Zaremba's medium model of Penn Treebank, 650 units
            model={"hidden_size": 650}, vocab_size=10000, length=64, batch_size=32, steps=40_000, learning_rate=1e-3
        ),
        ("lstm", "base"): Preset(  # Zaremba's large one, 1500 units
            model={"hidden_size": 1500, "embd_pdrop": 0.65, "hidden_pdrop": 0.65, "output_pdrop": 0.65},
            vocab_size=10000, length=64, batch_size=32, steps=80_000, learning_rate=5e-4,
        ),
    }
)  # fmt: skip


def preset(family: str, size: str) -> Preset:
    """The preset of that name.

    Raises:
        UsageError: there is none.

    Example:
        >>> preset("gpt2", "small").model["n_embd"], preset("gpt2", "nano").vocab_size
        (768, 4096)
    """
    for what, value, known in (("family", family, FAMILIES), ("size", size, SIZES)):
        if value not in known:
            raise UsageError(f"{what}={value!r:.60}: expected one of {', '.join(known)}", argument=what)
    return PRESETS[family, size]
