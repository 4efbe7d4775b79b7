"""Where no table helps: the embedding and the head by the names and shapes that the field gives them."""

from __future__ import annotations

import pytest

from bowline.families.name_patterns import infer_ties, infer_vocabulary

V, D = 512, 16

LAYOUTS = {
    "gpt2": ("transformer.wte.weight", "lm_head.weight"),
    "llama": ("model.embed_tokens.weight", "lm_head.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"),
    "roberta": ("roberta.embeddings.word_embeddings.weight", "lm_head.decoder.weight"),
    "neox": ("gpt_neox.embed_in.weight", "embed_out.weight"),
    "t5": ("shared.weight", "lm_head.weight"),
    "bart": ("model.shared.weight", "lm_head.weight"),
    "whisper": ("model.decoder.embed_tokens.weight", "proj_out.weight"),
    "bloom": ("transformer.word_embeddings.weight", "lm_head.weight"),
    "mamba": ("backbone.embeddings.weight", "lm_head.weight"),
    "meta-llama": ("tok_embeddings.weight", "output.weight"),
    "distilbert": ("distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight"),
    "openai-gpt": ("transformer.tokens_embed.weight", "lm_head.weight"),
    "xlnet": ("transformer.word_embedding.weight", "lm_loss.weight"),
    "lstm": ("encoder.weight", "decoder.weight"),
    "minigpt": ("tok_emb.weight", "head.weight"),
    "llava": ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"),
    "wrapped": ("_orig_mod.transformer.wte.weight", "_orig_mod.lm_head.weight"),
}
OTHERS = {"transformer.h.0.mlp.weight": (4 * D, D), "wpe.weight": (128, D), "norm.weight": (D,), "bias": (V,)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_ends_of_a_common_layout_are_found(layout: str) -> None:
    embedding, head = LAYOUTS[layout]
    found = infer_ties({**OTHERS, embedding: (V, D), head: (V, D)}, V, None)
    assert found == (embedding, head, head)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_ends_are_found_without_a_size_in_the_config(layout: str) -> None:
    embedding, head = LAYOUTS[layout]
    assert infer_ties({**OTHERS, embedding: (V, D), head: (V, D)}, None, None) == (embedding, head, head)


@pytest.mark.parametrize(
    "architecture", ["XForCausalLM", "XLMHeadModel", "XForConditionalGeneration", "XForMaskedLM", "XForPreTraining"]
)
def test_a_class_that_writes_tokens_is_expected_to_have_a_head(architecture: str) -> None:
    found = infer_ties({**OTHERS, "model.embed_tokens.weight": (V, D)}, V, architecture)
    assert found == ("model.embed_tokens.weight", None, "lm_head.weight")


@pytest.mark.parametrize("architecture", ["XModel", "XForSequenceClassification", None])
def test_any_other_class_is_not(architecture: str | None) -> None:
    found = infer_ties({**OTHERS, "model.embed_tokens.weight": (V, D)}, V, architecture)
    assert found == ("model.embed_tokens.weight", None, None)


def test_of_several_embeddings_the_vocabularys_is_taken() -> None:
    shapes = {
        "vision.embeddings.weight": (V, D),
        "position.embed_tokens.weight": (77, D),
        "text.embed_tokens.weight": (V, D),
    }
    assert infer_ties(shapes, V, None)[0] == "text.embed_tokens.weight"


def test_of_several_alike_the_outermost_is_taken_and_always_the_same_one() -> None:
    shapes = {
        "model.decoder.embed_tokens.weight": (V, D),
        "b.embed_tokens.weight": (V, D),
        "a.embed_tokens.weight": (V, D),
    }
    assert infer_ties(shapes, V, None)[0] == "a.embed_tokens.weight"
    assert infer_ties(dict(reversed(shapes.items())), V, None)[0] == "a.embed_tokens.weight"


def test_a_size_that_the_config_has_wrong_does_not_hide_the_table() -> None:
    assert infer_ties({"wte.weight": (V, D), "lm_head.weight": (V, D)}, 999, None) == (
        "wte.weight",
        "lm_head.weight",
        "lm_head.weight",
    )


def test_a_classifiers_head_is_no_head() -> None:
    shapes = {"wte.weight": (V, D), "head.weight": (100, D), "output.weight": (64, D)}
    assert infer_ties(shapes, V, None) == ("wte.weight", None, None)


@pytest.mark.parametrize("shape", [(V,), (8, D), (1, V, D), ()])
def test_what_is_no_table_is_no_embedding(shape: tuple[int, ...]) -> None:
    assert infer_ties({"wte.weight": shape}, V, "XForCausalLM") == (None, None, None)


def test_the_last_part_of_a_name_counts_as_a_whole() -> None:
    shapes = {"my_wte.weight": (V, D), "wte.weight_scale": (V, D), "awteb.weight": (V, D)}
    assert infer_ties(shapes, V, None) == (None, None, None)


def test_nothing_is_inferred_from_nothing() -> None:
    assert infer_ties({}, None, None) == (None, None, None)
    assert infer_vocabulary({}, None, None) == {}


def test_vocabulary_tensors_are_the_tables_and_what_is_as_long() -> None:
    shapes = {
        "wte.weight": (V, D),
        "lm_head.weight": (V, D),
        "lm_head.bias": (V,),
        "norm.weight": (D,),
        "other": (V, D),
    }
    found = infer_vocabulary(shapes, "wte.weight", "lm_head.weight")
    assert found == {"wte.weight": 0, "lm_head.weight": 0, "lm_head.bias": 0}
