"""Predictions for families of transformers with the layers of Llama or Gemma, and for a checkpoint's directory."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bowline
from bowline.errors import ConfigError, UsageError
from bowline.nn import init_weights
from bowline.nn.init import measure_loss
from bowline.recipes import RECIPES, Architecture, expected_loss, usual

pytestmark = pytest.mark.usefixtures("quiet_transformers")

TINY: dict[str, Any] = {
    "vocab_size": 4000,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def drawn(family: str, *, seed: int = 0, **more: Any) -> Any:
    """A new model of transformers, as transformers draws it."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    cls = getattr(transformers, FAMILIES[family])
    torch.manual_seed(seed)
    return cls(cls.config_class(**{**TINY, "tie_word_embeddings": True, **more}))


@pytest.mark.parametrize("range_", [0.02, 0.08])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_loss_of_a_model_as_transformers_draws_it_is_predicted(
    family: str, tied: bool, range_: float
) -> None:
    model = drawn(family, tie_word_embeddings=tied, initializer_range=range_)
    expected = expected_loss(model)
    measured = measure_loss(model, batch=16)
    assert expected.uniform == math.log(4000)
    assert expected.loss == pytest.approx(measured.loss, rel=0.02, abs=4 * measured.error)
    assert expected.spread == pytest.approx(measured.spread, rel=0.2)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text"])
@pytest.mark.parametrize("recipe", ["transformers-llama", "megatron", "gemma"])
def test_the_first_loss_by_a_recipe_is_what_init_weights_draws(family: str, recipe: str) -> None:
    model = drawn(family)
    init_weights(model, recipe, seed=0, scales="model")
    expected = expected_loss(model, recipe, scales="model")
    assert expected.loss == pytest.approx(measure_loss(model, batch=16).loss, rel=0.02)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logit_of_the_inputs_own_token_is_predicted(family: str) -> None:
    """It tells the layers apart: Gemma 3 normalises what a layer adds, and adds more to the embedding than Gemma."""
    torch = pytest.importorskip("torch")
    ids = torch.randint(4000, (32, 32), generator=torch.Generator().manual_seed(1))
    means = []
    for seed in range(6):
        model = drawn(family, seed=seed, initializer_range=0.05).eval()
        with torch.no_grad():
            means.append(float(model(ids).logits.gather(-1, ids[..., None]).mean()))
    error = statistics.stdev(means) / math.sqrt(len(means))
    expected = expected_loss(model)
    assert error < 0.02
    assert expected.self_logit == pytest.approx(statistics.mean(means), rel=0.0, abs=4 * error)
    uncapped = expected_loss(replace(Architecture.of(model), logit_cap=None))
    assert expected.similarity == pytest.approx(uncapped.self_logit / (0.05 * 128), rel=1e-6)


CAPS: list[dict[str, Any]] = [
    {"final_logit_softcapping": 3.0},
    {"final_logit_softcapping": 12.0, "initializer_range": 0.15},
    {"attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 1, "initializer_range": 0.1},
    {"final_logit_softcapping": None, "attn_logit_softcapping": None},
]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_softcap_is_part_of_the_prediction(family: str, caps: dict[str, Any], tied: bool) -> None:
    model = drawn(family, tie_word_embeddings=tied, **{"initializer_range": 0.08, **caps})
    expected = expected_loss(model)
    measured = measure_loss(model, batch=16)
    assert expected.loss == pytest.approx(measured.loss, rel=0.02, abs=4 * measured.error)
    assert expected.spread == pytest.approx(measured.spread, rel=0.2)


def test_the_softcap_of_the_logits_decides_a_loss_that_the_inputs_own_token_makes() -> None:
    """With the sizes and the range of Gemma 2 2B, and two layers: the own token's logit is 20 without the cap."""
    config = {"model_type": "gemma2", **sizes(256000, 2304, 9216, 8, 256)}
    capped, free = expected_loss(config), expected_loss({**config, "final_logit_softcapping": None})
    assert free.self_logit > 1.1 * capped.self_logit
    assert free.loss - capped.loss > 1.0


@pytest.mark.parametrize("wrong", [0, -30.0, True, "30", float("nan")])
@pytest.mark.parametrize("key", ["final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"])
def test_a_softcap_that_caps_nothing_is_refused(key: str, wrong: Any) -> None:
    for family in ("gemma2", "gemma3_text"):
        with pytest.raises(ConfigError, match=rf"{key} is .*, expected a number above 0"):
            expected_loss({**TINY, "model_type": family, key: wrong})


def sizes(rows: int, width: int, inner: int, heads: int, head: int, **more: Any) -> dict[str, Any]:
    named = {"vocab_size": rows, "hidden_size": width, "intermediate_size": inner, "num_attention_heads": heads}
    return {**named, "head_dim": head, "num_hidden_layers": 2, **more}


TRUE_WIDTHS: dict[str, tuple[str, dict[str, Any], float, float]] = {
    "SmolLM2-135M": ("llama", sizes(49152, 576, 1536, 9, 64, tie_word_embeddings=True), 10.952, 0.028),
    "Gemma 2 2B": ("gemma2", sizes(256000, 2304, 9216, 8, 256), 17.502, 0.071),
    "Gemma 3 270M": ("gemma3_text", sizes(262144, 640, 2048, 4, 256, query_pre_attn_scalar=256), 12.647, 0.032),
    "Gemma 3 1B": ("gemma3_text", sizes(262144, 1152, 6912, 4, 256, query_pre_attn_scalar=256), 12.702, 0.043),
    "Qwen2.5-0.5B": ("qwen2", sizes(151936, 896, 4864, 14, 64, tie_word_embeddings=True), 12.168, 0.038),
    "Qwen3-0.6B": ("qwen3", sizes(151936, 1024, 3072, 16, 128, tie_word_embeddings=True), 12.078, 0.038),
    "Mistral 7B": ("mistral", sizes(32000, 4096, 14336, 32, 128), 11.318, 0.081),
}
"""True widths with two layers, drawn by transformers 5.23.0: the loss that `measure_loss` found, and its error."""


@pytest.mark.parametrize("name", TRUE_WIDTHS)
def test_the_first_loss_at_a_models_true_width_is_predicted(name: str) -> None:
    family, config, measured, error = TRUE_WIDTHS[name]
    expected = expected_loss({"model_type": family, **config}, length=64)
    assert abs(expected.loss - measured) < 2 * error
    assert expected.loss == pytest.approx(measured, rel=0.012)


def saved(place: Path, config: object) -> Path:
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return place


def test_a_checkpoints_directory_is_read(tmp_path: Path) -> None:
    config = {**TINY, "model_type": "llama", "tie_word_embeddings": True, "initializer_range": 0.04}
    place = saved(tmp_path, config)
    expected = expected_loss(config)
    assert bowline.expected_loss(place) == bowline.expected_loss(str(place)) == expected
    assert expected_loss(place, "transformers-llama").loss < expected.loss
    assert Architecture.of(place) == Architecture.of(config)


def test_a_saved_model_has_the_prediction_of_the_live_one(tmp_path: Path) -> None:
    for family in FAMILIES:
        model = drawn(family, num_hidden_layers=1)
        model.save_pretrained(tmp_path / family)
        assert expected_loss(tmp_path / family) == expected_loss(model), family


def test_the_text_model_inside_another_is_read_with_the_outer_flag() -> None:
    inner = {**TINY, "model_type": "gemma3_text"}
    assert Architecture.of({"model_type": "gemma3", "text_config": inner}) == Architecture.of(inner)
    untied = Architecture.of({"model_type": "gemma3", "text_config": inner, "tie_word_embeddings": False})
    assert not untied.tied and Architecture.of(inner).tied


def test_a_flag_that_is_absent_is_the_familys() -> None:
    """transformers leaves a key out of `config.json` that is its base class's default."""
    ties = {family: Architecture.of({**TINY, "model_type": family}).tied for family in FAMILIES}
    assert [family for family, tied in ties.items() if tied] == ["gemma", "gemma2", "gemma3_text"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no config.json"),
        ("{", "config.json is not JSON"),
        ("[1]", "config.json holds a list, expected an object"),
        ("[" * 100_000, "config.json is not JSON"),
        ('{"model_type": "mamba"}', "'mamba'"),
    ],
)
def test_a_directory_without_a_config_that_can_be_read_says_so(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        saved(tmp_path, content)
    with pytest.raises((ConfigError, UsageError), match=said) as error:
        expected_loss(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("wrong", [0, -0.02, True, "0.02", float("nan"), [0.02]])
def test_a_range_that_draws_nothing_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"initializer_range is .*, expected a number above 0"):
        expected_loss({**TINY, "model_type": "llama", "initializer_range": wrong})


def test_a_recipe_of_transformers_follows_the_range_and_others_do_not() -> None:
    base = {**TINY, "model_type": "llama", "tie_word_embeddings": True}
    assert (
        expected_loss(base) == expected_loss({**base, "initializer_range": 0.02}) == expected_loss(base, usual("llama"))
    )
    wide = {**base, "initializer_range": 0.2}
    assert expected_loss(wide).width == pytest.approx(10 * expected_loss(base).width)
    assert expected_loss(wide, RECIPES["transformers-llama"]) == expected_loss(base)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_usual_recipe_of_each_family_is_transformers(family: str) -> None:
    assert usual(family).name in ("transformers-llama", "transformers-gemma")
