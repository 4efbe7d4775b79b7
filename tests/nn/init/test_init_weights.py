"""Drawing a whole model: each storage once, by its source; reproducible; all or nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

from bowline import models
from bowline.errors import UsageError
from bowline.nn import find_ties, quantize_tied, tie_weights
from bowline.nn.init import InitReport, find_roles, init_weights
from bowline.nn.init.draw import draw_
from bowline.recipes import RECIPES, Recipe, Role, constant, normal, uniform
from tests.nn.init.statistics import LIMIT, z_of_std
from tests.nn.init.tiny import bowlines, transformers_model
from tests.nn.models import BertLike, TinyLM

pytestmark = pytest.mark.usefixtures("quiet_transformers")
FAMILY = pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "lstm"])


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def alike(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- what is drawn ----------------------------------------------------------------------------------------------------


@FAMILY
@pytest.mark.parametrize("recipe", ["google-bert", "transformers-gpt2", "t5-mesh", "torch", "awd-lstm"])
def test_every_tensor_is_drawn_as_the_report_says(family: str, recipe: str) -> None:
    # 4 families, 5 recipes, some 25 tensors each: with new seeds one of 3000 such runs fails
    model, _ = bowlines()[family]
    report = init_weights(model, recipe, seed=1)
    names = [one.name for one in report.drawn]
    assert list(dict.fromkeys(names)) == list(find_roles(model))
    for one in report.drawn:
        tensor = model.get_parameter(one.name)
        assert one.distribution == RECIPES[recipe].of(one.role)
        if not one.std:
            assert set(tensor.detach().flatten().tolist()) == {one.mean}
        elif names.count(one.name) == 1:
            padded = recipe == "torch" and family == "bert" and one.role is Role.INPUT_EMBEDDING
            sample = tensor[1:] if padded else tensor
            assert abs(z_of_std(sample, one.std, one.distribution.kind)) < LIMIT, one


def test_fans_are_those_of_the_matrix_whichever_way_it_lies() -> None:
    model, _ = bowlines()["gpt2"]
    glorot = Recipe(
        name="glorot",
        title="",
        source="",
        roles={Role.INPUT_EMBEDDING: normal(fan_in=-0.5), Role.LINEAR: uniform(fan_in=-0.5, fan_out=-0.25)},
    )
    report = init_weights(model, glorot, seed=0)
    bound = {name: report[f"transformer.h.0.{name}.weight"].std * math.sqrt(3) for name in ("mlp.c_fc", "mlp.c_proj")}
    assert bound["mlp.c_fc"] == pytest.approx(16**-0.5 * 64**-0.25)
    assert bound["mlp.c_proj"] == pytest.approx(64**-0.5 * 16**-0.25)
    assert report["transformer.wte.weight"].std == 16**-0.5  # the head's that it is
    query = report["transformer.h.0.attn.c_attn.weight"]  # one of three matrices (16, 16), and not a third of (16, 48)
    assert query.role is Role.QUERY
    assert query.std * math.sqrt(3) == pytest.approx(16**-0.75)


def test_torchs_recipe_has_torchs_own_bounds() -> None:
    model = nn.ModuleDict(
        {"wte": nn.Embedding(30, 6), "rnn": nn.LSTM(6, 5, 2), "projection": nn.Linear(5, 6), "head": nn.Linear(6, 30)}
    )
    report = init_weights(model, "torch", seed=0)
    for name, fan in (("rnn.weight_ih_l0", 5), ("rnn.bias_hh_l1", 5), ("projection.bias", 5), ("head.weight", 6)):
        assert report[name].std == pytest.approx(fan**-0.5 / math.sqrt(3))
    model["head"].weight = model["wte"].weight
    assert init_weights(model, "torch", seed=0)["head.bias"].std == pytest.approx(6**-0.5 / math.sqrt(3))


def test_a_recurrent_layer_has_a_hidden_size_of_its_own() -> None:
    config = models.LSTMConfig(vocab_size=30, hidden_size=9, embedding_size=4, projection=False)
    report = init_weights(models.LSTMLMHeadModel(config), "torch", seed=0)
    for layer, hidden in ((0, 9), (1, 4)):
        assert report[f"lstm.layers.{layer}.weight_ih_l0"].std == pytest.approx(hidden**-0.5 / math.sqrt(3))


def test_a_heads_bias_that_hangs_above_it_has_its_fans() -> None:
    for tied in (True, False):
        report = init_weights(bowlines(tied=tied)["bert"][0], "torch", seed=0)
        assert report["cls.predictions.bias"].std == pytest.approx(16**-0.5 / math.sqrt(3))


def test_a_norm_that_adds_one_to_its_weight_gets_one_less() -> None:
    gemma, llama = transformers_model("gemma"), transformers_model("llama")
    for model, value in ((gemma, 0.0), (llama, 1.0)):
        init_weights(model, "transformers-llama", scales="model")
        assert set(model.get_parameter("model.norm.weight").tolist()) == {value}
    roles = {**RECIPES["transformers-llama"].roles, Role.NORM_WEIGHT: constant(2.0)}
    doubled = Recipe(name="doubled", title="", source="", roles=roles)
    init_weights(gemma, doubled, scales="model")
    x = torch.randn(1, 3, 16)
    norm: Any = gemma.get_submodule("model.norm")
    torch.testing.assert_close(norm(x), 2 * x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt())


def test_sizes_of_a_model_without_a_config_are_read_off_its_matrices() -> None:
    parts = {"wte": nn.Embedding(30, 12), "body": nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 20), 4)}
    model = nn.ModuleDict({**parts, "head": nn.Linear(12, 30)})
    report = init_weights(model, "transformers-gpt2", seed=0)
    assert report["body.layers.0.linear2.weight"].std == pytest.approx(0.02 / math.sqrt(8))
    report = init_weights(model, "transformers-t5", seed=0, scales="model")
    assert report["body.layers.3.linear2.weight"].std == pytest.approx(20**-0.5)
    assert report["body.layers.3.self_attn.in_proj_weight"].std == pytest.approx((12 * 4) ** -0.5)


def test_a_size_that_nothing_states_is_asked_for() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "q_proj": nn.Linear(4, 4)})
    with pytest.raises(UsageError, match=r"q_proj\.weight, query: .*needs head_size"):
        init_weights(model, "transformers-t5", scales="model")


# --- the tie ----------------------------------------------------------------------------------------------------------


@FAMILY
@pytest.mark.parametrize("tied", [True, False])
def test_each_storage_is_drawn_once_and_ties_stay(family: str, tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = bowlines(tied=tied)[family]
    before, ties, held = [], find_ties(model), list(model.parameters())

    def counted(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        before.append(tensor.numel())
        return draw_(tensor, *args)

    module = import_module("bowline.nn.init.init_weights")  # the package has the function under that name
    monkeypatch.setattr(module, "draw_", counted)
    report = init_weights(model, "transformers-t5", seed=0)
    assert sum(before) == sum(parameter.numel() for parameter in held)  # no number twice, and none left out
    assert find_ties(model) == ties
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert report.tied is tied


def test_the_source_decides_how_a_shared_matrix_is_drawn() -> None:
    for build in (lambda: TinyLM(300, 20), lambda: BertLike(300, 20)):
        model = build()
        tie_weights(model, on_conflict="source")
        report = init_weights(model, "torch", seed=0, roles=_transform(model))
        assert report["emb.weight"].role is Role.INPUT_EMBEDDING
        assert abs(z_of_std(model.get_parameter("emb.weight"), 1.0)) < LIMIT


def _transform(model: nn.Module) -> dict[str, Role]:
    return {"transform.weight": Role.TRANSFORM} if isinstance(model, BertLike) else {}


def test_an_alias_is_drawn_once_and_stays_one() -> None:
    model = TinyLM(300, 20)
    model.head.weight = nn.Parameter(model.emb.weight.detach())
    init_weights(model, "transformers-gpt2", seed=0)
    assert model.head.weight.data_ptr() == model.emb.weight.data_ptr()
    assert torch.equal(model.head.weight, model.emb.weight)


@FAMILY
def test_tied_and_untied_models_have_equal_bodies(family: str) -> None:
    (tied, _), (untied, _) = (bowlines(tied=flag)[family] for flag in (True, False))
    for model in (tied, untied):
        init_weights(model, "transformers-gpt2", seed=3)
    assert alike(state(tied), {name: untied.get_parameter(name) for name in state(tied)})
    assert len(state(untied)) > len(state(tied))


# --- seeds ------------------------------------------------------------------------------------------------------------


def test_one_seed_draws_the_same_and_another_does_not() -> None:
    model = TinyLM(50, 8)
    init_weights(model, "transformers-gpt2", seed=0)
    first = state(model)
    init_weights(model, "transformers-gpt2", seed=1)
    assert not torch.equal(first["emb.weight"], model.emb.weight)
    init_weights(model, "transformers-gpt2", seed=0)
    assert alike(first, state(model))


def test_without_a_seed_torchs_global_generator_gives_one_that_the_report_has() -> None:
    model = TinyLM(50, 8)
    torch.manual_seed(5)
    report = init_weights(model, "transformers-gpt2")
    first = state(model)
    assert init_weights(model, "transformers-gpt2").seed != report.seed
    torch.manual_seed(5)
    init_weights(model, "transformers-gpt2")
    assert alike(first, state(model))
    init_weights(model, "transformers-gpt2", seed=report.seed)
    assert alike(first, state(model))


def test_the_order_in_which_modules_are_registered_means_nothing() -> None:
    def build(order: list[str]) -> nn.Module:
        parts = {
            "wte": nn.Embedding(30, 8),
            "fc1": nn.Linear(8, 9),
            "fc2": nn.Linear(9, 8),
            "lm_head": nn.Linear(8, 30),
        }
        model = nn.ModuleDict({name: parts[name] for name in order})
        model["lm_head"].weight = model["wte"].weight
        return model

    one, other = build(["wte", "fc1", "fc2", "lm_head"]), build(["lm_head", "fc2", "wte", "fc1"])
    for model in (one, other):
        init_weights(model, "torch", seed=0)
    assert all(torch.equal(tensor, other.get_parameter(name)) for name, tensor in state(one).items())


def test_a_model_with_a_head_or_in_a_wrapper_is_drawn_as_the_one_inside() -> None:
    config = models.GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    whole, base = models.GPT2LMHeadModel(config), models.GPT2Model(config)
    wrapped = nn.Sequential(models.GPT2LMHeadModel(config))
    for model in (whole, base, wrapped):
        init_weights(model, "transformers-gpt2", seed=0)
    assert alike(state(base), state(whole.transformer))
    assert alike(state(whole), state(wrapped[0]))


def test_no_two_tensors_are_drawn_alike() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(9, 4), **{f"fc{at}": nn.Linear(4, 4) for at in (1, 2)}})
    init_weights(model, "transformers-gpt2", seed=0)
    assert not torch.equal(model.get_parameter("fc1.weight"), model.get_parameter("fc2.weight"))


# --- padding ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeroed", [True, False])
def test_the_padding_row_is_zero_where_the_recipe_says_so(zeroed: bool) -> None:
    model = TinyLM(30, 8)
    model.emb = nn.Embedding(30, 8, padding_idx=7)
    model.head.weight = model.emb.weight
    init_weights(model, "transformers-bert" if zeroed else "google-bert", seed=0)
    empty = (~model.emb.weight.detach().any(1)).nonzero().flatten().tolist()
    assert empty == ([7] if zeroed else [])


# --- multipliers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2", "lstm"])
def test_keys_of_the_config_are_set_to_what_the_recipe_says(family: str) -> None:
    model, _ = bowlines()[family]
    config: Any = model.config
    width = config.hidden_size
    report = init_weights(model, "vaswani", seed=0)
    assert (config.embed_scale, config.logit_scale) == (pytest.approx(math.sqrt(width)), 1.0)
    assert (report.embed_scale, report.logit_scale) == (config.embed_scale, config.logit_scale)
    assert config.to_dict()["embed_scale"] == config.embed_scale  # and so it is in a file
    init_weights(model, "t5-mesh", seed=0)
    assert (config.embed_scale, config.logit_scale) == (1.0, pytest.approx(width**-0.5))
    init_weights(model, "transformers-gpt2", seed=0)
    assert (config.embed_scale, config.logit_scale) == (1.0, 1.0)


@pytest.mark.parametrize("tied", [True, False])
def test_t5s_flag_is_set_in_place_of_a_multiplier(tied: bool) -> None:
    model, _ = bowlines(tied=tied)["t5"]
    config: Any = model.config
    for recipe, embed, scaled in (("t5-mesh", 1.0, tied), ("t5-mesh-scaled-embedding", 4.0, False), ("t5x", 1.0, tied)):
        init_weights(model, recipe, seed=0)
        assert (config.embed_scale, config.logit_scale, config.scale_decoder_outputs) == (embed, 1.0, scaled)


def test_a_multiplier_between_t5s_two_is_the_keys() -> None:
    model, _ = bowlines()["t5"]
    config: Any = model.config
    thirds = Recipe(name="thirds", title="", source="", roles=RECIPES["t5-mesh"].roles, logit_scale=normal(0.3).scale)
    assert init_weights(model, thirds, seed=0).logit_scale == 0.3
    own = 0.25 if config.scale_decoder_outputs else 1.0
    assert own * config.logit_scale == pytest.approx(0.3)


def test_transformers_t5_is_set_at_every_level_of_its_config() -> None:
    model: Any = transformers_model("t5-gated")  # asked for an untied head, it is tied and unscaled
    assert model.config.scale_decoder_outputs is False
    init_weights(model, "transformers-t5", seed=0)
    levels = (model.config, model.encoder.config, model.decoder.config)
    assert all(level.scale_decoder_outputs is True for level in levels)


@pytest.mark.parametrize(
    ("name", "recipe", "message"),
    [
        (
            "gpt2",
            "vaswani",
            "multiplies looked-up embeddings by 1, but the recipe 'vaswani' multiplies looked-up embeddings by 4",
        ),
        ("gpt2", "t5-mesh", "multiplies logits by 1, but the recipe 't5-mesh' multiplies logits by 0.25"),
        ("mt5", "t5-mesh", "MT5ForConditionalGeneration multiplies logits by 1"),
        ("umt5", "transformers-gpt2", "UMT5ForConditionalGeneration multiplies logits by 0.25"),
        (
            "gemma",
            "t5x",
            "by 4 and logits by 1, but the recipe 't5x' multiplies looked-up embeddings by 1 and logits by 0.25",
        ),
        ("gemma2", "transformers-llama", "Gemma2ForCausalLM multiplies looked-up embeddings by 4"),
    ],
)
def test_a_multiplier_that_cannot_be_set_is_refused_with_both_numbers(name: str, recipe: str, message: str) -> None:
    model: Any = transformers_model(name)
    before, config = state(model), model.config.to_dict()
    with pytest.raises(UsageError) as caught:
        init_weights(model, recipe, seed=0)
    assert message in caught.value.message
    assert caught.value.help is not None and 'scales="model"' in caught.value.help
    assert alike(before, state(model)) and model.config.to_dict() == config
    report = init_weights(model, recipe, seed=0, scales="model")
    assert not alike(before, state(model)) and model.config.to_dict() == config
    assert report.embed_scale == (4.0 if name.startswith("gemma") else 1.0)


def test_keys_of_a_config_that_nobody_reads_are_left_alone() -> None:
    @dataclass(frozen=True)
    class Config:
        embed_scale: float = 1.0
        logit_scale: float = 1.0

    own, foreign = Config, type("Foreign", (Config,), {"__module__": "transformers.models.foreign"})
    for kind in (own, foreign):
        model: Any = TinyLM(30, 16)
        model.config = kind()
        if kind is own:
            init_weights(model, "vaswani", seed=0)
            assert model.config.embed_scale == 4.0
        else:
            with pytest.raises(UsageError, match="'vaswani' multiplies looked-up embeddings by 4"):
                init_weights(model, "vaswani", seed=0)
            assert model.config.embed_scale == 1.0


def test_barts_scaled_table_is_seen() -> None:
    model = transformers_model("bart", scale_embedding=True)
    assert init_weights(model, "vaswani", seed=0).embed_scale == 4.0
    with pytest.raises(UsageError, match="embeddings by 4, but the recipe"):
        init_weights(model, "transformers-bert", seed=0)


# --- refusals ---------------------------------------------------------------------------------------------------------


def _meta(model: TinyLM) -> None:
    model.head.to("meta")


def _int8(model: TinyLM) -> None:
    model.head.weight = nn.Parameter(torch.zeros(11, 4, dtype=torch.int8), requires_grad=False)


def _float8(model: TinyLM) -> None:
    model.head.weight = nn.Parameter(torch.zeros(11, 4).to(torch.float8_e4m3fn), requires_grad=False)


def _expanded(model: TinyLM) -> None:
    model.head.weight = nn.Parameter(torch.zeros(1, 4).expand(11, 4))


def _inference(model: TinyLM) -> None:
    with torch.inference_mode():
        model.head.weight = nn.Parameter(torch.zeros(11, 4))


def _quantised(model: TinyLM) -> None:
    tie_weights(model, on_conflict="source")
    quantize_tied(model)


def _unknown(model: TinyLM) -> None:
    model.gate = nn.Linear(4, 2)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_meta, "head.weight: has no values"),
        (_int8, r"head.weight: is torch.int8"),
        (_float8, r"head.weight: is torch.float8_e4m3fn"),
        (_expanded, "head.weight: is expanded"),
        (_inference, "head.weight: is an inference tensor"),
        (_quantised, r"table.values: is quantised \(torch.int8\)"),
        (_unknown, "gate.weight .* and others|gate.weight"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_what_cannot_be_drawn_is_refused_before_anything_is(spoil: Callable[[TinyLM], None], message: str) -> None:
    model = TinyLM()
    spoil(model)
    before = {name: one for name, one in state(model).items() if not one.is_meta}
    with pytest.raises(UsageError, match=message):
        init_weights(model, "transformers-gpt2", seed=0)
    after = state(model)
    assert all(torch.equal(one, after[name]) for name, one in before.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "gpt-2"}, "'gpt-2'.*expected one of"),
        ({"seed": 0.5}, "seed=0.5"),
        ({"seed": True}, "seed=True"),
        ({"scales": "mine"}, "scales='mine'"),
        ({"roles": {"nothing": Role.HEAD}}, "no parameter"),
    ],
)
def test_an_argument_that_means_nothing_is_refused(options: dict[str, Any], message: str) -> None:
    model = TinyLM()
    before, generator = state(model), torch.get_rng_state()
    with pytest.raises(UsageError, match=message):
        init_weights(model, **{"recipe": "transformers-gpt2", **options})
    assert alike(before, state(model)) and torch.equal(generator, torch.get_rng_state())
    with pytest.raises(UsageError, match=r"expected a torch\.nn\.Module"):
        init_weights("gpt2", "transformers-gpt2")  # type: ignore[arg-type]


# --- the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_and_what_is_trained_stay(dtype: torch.dtype) -> None:
    model = TinyLM(50, 8).to(dtype)
    model.emb.weight.requires_grad_(False)
    init_weights(model, "transformers-gpt2", seed=0)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["emb.weight"]


def test_a_report_reads_as_a_table() -> None:
    model, _ = bowlines()["gpt2"]
    report = init_weights(model, "transformers-gpt2", seed=0)
    assert isinstance(report, InitReport)
    lines = str(report).splitlines()
    assert lines[0] == "transformers-gpt2, seed 0: embeddings times 1, logits times 1, tied"
    assert lines[2].split("  ")[0] == "input embedding"
    assert any(line.endswith("transformer.h.*.attn.c_proj.weight") and "0.01414" in line for line in lines)
    with pytest.raises(KeyError):
        report["lm_head.weight"]  # it is the table's
