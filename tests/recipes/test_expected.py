"""The predicted first loss compared with measurements on real shapes, and the signal that a config implies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bowline.errors import ConfigError, UsageError
from bowline.recipes import RECIPES, Architecture, Recipe, Role, Scale, expected_loss, normal, uniform, usual
from bowline.recipes.activations import ACTIVATIONS, kernel, mean_square

GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
BERT = {
    "model_type": "bert",
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "intermediate_size": 8192,
}
GEMMA = {
    "model_type": "gemma",
    "vocab_size": 256000,
    "hidden_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "intermediate_size": 16384,
}


def t5(layers: int, **more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_heads": 12}
    return {"model_type": "t5", **sizes, "num_layers": layers, **more}


def gpt2(std: float, *, embed: float = 1.0, logits: float = 1.0) -> Recipe:
    """GPT-2 with another table and other multipliers."""
    plain = RECIPES["transformers-gpt2"]
    roles = {**plain.roles, Role.INPUT_EMBEDDING: normal(std), Role.POSITIONS: normal(0.02)}
    return replace(plain, roles=roles, embed_scale=Scale(embed), logit_scale=Scale(logits))


def headed(how: Any) -> Recipe:
    plain = RECIPES["transformers-t5"]
    return replace(plain, roles={**plain.roles, Role.HEAD: how})


ROOT = 768**0.5
UNSCALED = replace(RECIPES["transformers-t5"], logit_scale=Scale())
TENSORFLOW = replace(
    RECIPES["transformers-t5"],
    roles={**RECIPES["transformers-t5"].roles, Role.INPUT_EMBEDDING: normal(hidden_size=-0.5)},
)
MEASURED: dict[str, tuple[Any, Any, bool, float]] = {
    "GPT-2 tied": (GPT2, "transformers-gpt2", True, 10.978),
    "GPT-2 untied": (GPT2, "transformers-gpt2", False, 10.978),
    "GPT-2, input times root d": (GPT2, gpt2(0.02, embed=ROOT), True, 13.926),
    "GPT-2, scaled embedding": (GPT2, gpt2(1 / ROOT, embed=ROOT), True, 26.788),
    "GPT-2, table of std 1": (GPT2, gpt2(1.0), True, 743.5),
    "the same, logits over root d": (GPT2, gpt2(1.0, logits=1 / ROOT), True, 26.886),
    "BERT tied": (BERT, "transformers-bert", True, 10.479),
    "BERT untied": (BERT, "transformers-bert", False, 10.480),
    "BERT as Google's": (BERT, "google-bert", True, 10.444),
    "ALBERT": (
        {**BERT, "model_type": "albert", "embedding_size": 128, "vocab_size": 30000},
        "transformers-bert",
        True,
        10.334,
    ),
    "T5 scaled, 2 layers": (t5(2), "transformers-t5", True, 16.001),
    "T5 scaled, 12 layers": (t5(12), "transformers-t5", True, 10.884),
    "T5 unscaled": (t5(12), UNSCALED, True, 161.04),
    "T5 unscaled, 2 layers": (t5(2), UNSCALED, True, 437),
    "T5 v1.1, head of nn.Linear": (t5(12, feed_forward_proj="gated-gelu"), "transformers-t5-4.19", False, 10.544),
    "T5 v1.1, head of std 1": (t5(12, feed_forward_proj="gated-gelu"), "transformers-t5", False, 114.6),
    "T5 v1.1, head by width": (t5(12, feed_forward_proj="gated-gelu"), headed(normal(hidden_size=-0.5)), False, 10.878),
    "T5, table by width, untied": (t5(12), TENSORFLOW, False, 114.8),
    "T5, table by width, tied": (t5(12), TENSORFLOW, True, 10.378),
    "Llama, 2 layers": (LLAMA, "transformers-llama", True, 12.171),
    "Gemma, 2 layers": ({**GEMMA, "num_hidden_layers": 2}, "transformers-gemma", True, 17.429),
    "Gemma, 8 layers": ({**GEMMA, "num_hidden_layers": 8}, "transformers-gemma", True, 12.898),
}
"""Real widths and vocabularies, and the mean loss that torch measured on models so drawn."""


@pytest.mark.parametrize("case", MEASURED)
def test_the_prediction_is_within_five_percent_of_what_was_measured(case: str) -> None:
    config, recipe, tied, measured = MEASURED[case]
    assert expected_loss(config, recipe, tied=tied, length=64).loss == pytest.approx(measured, rel=0.05)


def test_twenty_of_the_predictions_are_within_one_percent() -> None:
    """What README and docs/recipes.md say, of sequences of 64 tokens."""
    losses = {
        case: expected_loss(config, recipe, tied=tied, length=64).loss
        for case, (config, recipe, tied, _) in MEASURED.items()
    }
    near = [case for case, loss in losses.items() if loss == pytest.approx(MEASURED[case][3], rel=0.01)]
    assert (len(near), len(MEASURED)) == (20, 22)


def test_a_hidden_state_that_forgets_its_token_gives_the_plain_sum() -> None:
    """BERT's transform turns the last state into another space: tied and untied are then the same."""
    tied, untied = (expected_loss(BERT, "transformers-bert", tied=tie) for tie in (True, False))
    assert tied.loss == untied.loss == tied.without_self
    assert tied.similarity == 0
    assert tied.width == pytest.approx(0.02 * ROOT)


def test_what_the_token_itself_adds_is_told_apart() -> None:
    shallow, deep = (expected_loss(t5(layers), "transformers-t5") for layers in (2, 12))
    assert shallow.without_self == pytest.approx(deep.without_self)
    assert shallow.similarity > 2 * deep.similarity
    assert shallow.loss - shallow.without_self > 4
    assert deep.loss - deep.without_self < 0.2


def test_the_verdict_is_by_how_many_times_ln_v() -> None:
    assert expected_loss(t5(2), UNSCALED, tied=True).explodes
    assert "explodes: logits of std 27.7" in expected_loss(t5(2), UNSCALED, tied=True).conclusion
    assert "the input's own token" in expected_loss(t5(2), UNSCALED, tied=True).conclusion
    assert "one token by chance" in expected_loss(t5(2), "transformers-t5", tied=False).conclusion
    assert "sees the input's own token" in expected_loss(t5(2), "transformers-t5", tied=True).conclusion
    assert expected_loss(t5(2), TENSORFLOW, tied=True).conclusion.startswith("starts at ln V")
    assert "above ln V, as logits of std 0.88 do" in expected_loss(t5(2), "t5-mesh", tied=False).conclusion


def test_the_multipliers_are_the_recipes_or_the_models() -> None:
    by_recipe = expected_loss(GPT2, "vaswani")
    by_model = expected_loss(GPT2, "vaswani", scales="model")
    assert by_recipe.similarity > 3 * by_model.similarity
    scaled = expected_loss({**GPT2, "embed_scale": ROOT}, "vaswani", scales="model")
    assert scaled.loss == pytest.approx(by_recipe.loss)
    unscaled = expected_loss(t5(2, scale_decoder_outputs=False), "transformers-t5", scales="model")
    assert unscaled.explodes


def test_spread_is_that_of_one_tokens_loss() -> None:
    """Label and sum: a logit of the label has the width, and the sum hardly moves."""
    assert expected_loss(GPT2, "transformers-gpt2", tied=False).spread == pytest.approx(0.554, abs=1e-3)


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "lstm", "llama", "gemma"])
@pytest.mark.parametrize("vocab_size", [1, 2, 50])
def test_tiny_models_have_a_prediction_too(family: str, vocab_size: int) -> None:
    configs = {"bert": BERT, "gpt2": GPT2, "t5": t5(1), "llama": LLAMA, "gemma": {**GEMMA, "num_hidden_layers": 1}}
    config = configs.get(family, {"model_type": "lstm", "hidden_size": 16, "num_layers": 1})
    for length in (1, 2, 5):
        expected = expected_loss({**config, "vocab_size": vocab_size}, usual(family), length=length)
        assert math.isfinite(expected.loss)
        assert expected.uniform == math.log(vocab_size)


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(UsageError, match="recipe='bert': expected one of google-bert"):
        expected_loss(GPT2, "bert")
    with pytest.raises(UsageError, match="of the family 'mamba': expected one of bert"):
        expected_loss({"model_type": "mamba"}, "torch")
    with pytest.raises(ConfigError, match="the config has no n_embd"):
        expected_loss({"model_type": "gpt2", "vocab_size": 9}, "torch")
    with pytest.raises(UsageError, match="length=0"):
        expected_loss(GPT2, "torch", length=0)
    with pytest.raises(UsageError, match="scales='both'"):
        expected_loss(GPT2, "torch", scales="both")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has no distribution for 'any other matrix'"):
        Recipe(name="half", title="", source="", roles={Role.INPUT_EMBEDDING: normal()})


def test_every_recipe_says_where_it_was_read_and_has_a_name_of_its_own() -> None:
    for name, recipe in RECIPES.items():
        assert name == recipe.name
        assert "/" in recipe.source or " et al." in recipe.source
        assert recipe.families
        for family in recipe.families:
            assert usual(family)


def test_a_role_that_a_recipe_is_silent_about_is_drawn_as_its_base() -> None:
    recipe = RECIPES["awd-lstm"]
    assert recipe.of(Role.QUERY) == recipe.of(Role.LINEAR) == uniform(0.1)
    assert recipe.of(Role.NORM_WEIGHT).mean({}) == 1.0
    assert recipe.of(Role.HEAD_BIAS) == recipe.of(Role.BIAS)


# --- activations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("correlation", [0.0, 0.4, 0.9, 1.0])
def test_a_kernel_is_the_mean_product_of_correlated_draws(name: str, correlation: float) -> None:
    random = np.random.default_rng(0)
    u, w = math.sqrt(0.7) * random.standard_normal((2, 400_000))
    v = correlation * u + math.sqrt(1 - correlation**2) * w
    products = ACTIVATIONS[name](u[:20_000] if "gelu" in name else u) * ACTIVATIONS[name](
        v[:20_000] if "gelu" in name else v
    )
    found = float(kernel(name, 0.7, np.array([correlation]))[0])
    assert abs(found - products.mean()) < 5 * products.std() / math.sqrt(len(products)) + 2e-3
    if correlation == 1.0:
        assert found == pytest.approx(mean_square(name, 0.7), rel=1e-6)


def test_reads_the_same_from_a_mapping_and_from_an_object() -> None:
    class Config:
        model_type = "gpt2"
        vocab_size, n_embd, n_layer, n_head = 50257, 768, 12, 12

    class Model:
        config = Config()

    assert Architecture.of(Model()) == Architecture.of(Config()) == Architecture.of(GPT2)
    assert Architecture.of(Architecture.of(GPT2)) == Architecture.of(GPT2)


def test_a_recipe_that_is_always_tied_is_not_taken_for_a_head_of_its_own() -> None:
    with pytest.raises(UsageError, match=r"recipe='gemma': is for a tied head, and the model has an untied one"):
        expected_loss({**GEMMA, "num_hidden_layers": 1}, "gemma", tied=False)
    free = replace(RECIPES["gemma"], ties=(True, False))
    assert expected_loss({**GEMMA, "num_hidden_layers": 1}, free, tied=False).loss > 0


def test_a_heads_bias_is_part_of_its_logits() -> None:
    """torch draws an LSTM's biases too."""
    config = {"model_type": "lstm", "vocab_size": 500, "hidden_size": 16, "num_layers": 1}
    bias = 16**-0.5 / math.sqrt(3)
    without = expected_loss({**config, "head_bias": False}, "torch", tied=False).width
    assert expected_loss(config, "torch", tied=False).width == pytest.approx(math.hypot(without, bias), rel=0.02)
