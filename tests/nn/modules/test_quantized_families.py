"""`quantize_tied` on models of transformers: scaled lookups, and what the calls for ties make of the shared table."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
import transformers
from torch import nn

from bowline.errors import TieError
from bowline.nn import (
    TieGuard,
    check_ties,
    declared_ties,
    find_ties,
    keep_tied,
    quantize_tied,
    resize_vocab,
    tie_weights,
    untie_weights,
)
from bowline.nn.modules.quantized_ends import QuantizedEmbedding, QuantizedHead
from tests.nn.models import EncoderDecoder, TinyLM

ROWS = 96
IDS = torch.arange(40).reshape(2, 20)
SMALL: Any = {"vocab_size": ROWS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def gemma() -> Any:
    config = transformers.Gemma3TextConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=8,
        tie_word_embeddings=True,
        **SMALL,
    )
    return transformers.Gemma3ForCausalLM(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
        **SMALL,
    )
    return transformers.LlamaForCausalLM(config)


def bart() -> Any:
    config = transformers.BartConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=32,
        scale_embedding=True,
        decoder_start_token_id=2,
        **SMALL,
    )
    return transformers.BartForConditionalGeneration(config)


def xglm() -> Any:
    config = transformers.XGLMConfig(
        d_model=16,
        ffn_dim=24,
        num_layers=1,
        attention_heads=2,
        max_position_embeddings=32,
        scale_embedding=True,
        **SMALL,
    )
    return transformers.XGLMForCausalLM(config)


def t5() -> Any:
    config = transformers.T5Config(d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, **SMALL)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config)


BUILDERS = {build.__name__: build for build in (gemma, llama, bart, xglm, t5)}


def built(name: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return BUILDERS[name]().to(dtype).eval()


def logits(model: Any) -> torch.Tensor:
    more = {"decoder_input_ids": IDS.flip(1)} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return cast(torch.Tensor, model(input_ids=IDS, **more).logits)


# --- what is quantised ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", BUILDERS)
def test_each_family_computes_what_the_rounded_matrix_gives_in_its_own_modules(name: str, dtype: torch.dtype) -> None:
    model, plain = built(name, dtype), built(name, dtype)
    quantize_tied(model)
    end = next(module for module in model.modules() if isinstance(module, QuantizedEmbedding))
    with torch.no_grad():
        plain.get_input_embeddings().weight.copy_(end.weight)
    lookups = [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, type(end))]
    for lookup in lookups:
        mine, theirs = model.get_submodule(lookup)(IDS), plain.get_submodule(lookup)(IDS)
        assert mine.dtype is dtype
        assert torch.equal(mine, theirs), lookup
    tolerance = 1e-5 if dtype is torch.float32 else 0.05
    torch.testing.assert_close(logits(model), logits(plain), rtol=tolerance, atol=tolerance)


def test_a_scaled_embedding_on_meta_keeps_its_factor() -> None:
    with torch.device("meta"):
        model = gemma()
    quantize_tied(model)
    assert model.get_input_embeddings().embed_scale.shape == ()
    assert model.get_input_embeddings().multiplier.number == pytest.approx(4.0)


class Scaled(nn.Embedding):
    """It multiplies by its factor, and by something else at one id: not a plain multiplier."""

    embed_scale = 2.0

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return super().forward(input) * torch.where(input == 7, 3.0, self.embed_scale)[..., None]


def test_a_scaled_embedding_that_does_more_at_one_id_is_refused() -> None:
    model = nn.ModuleDict({"wte": Scaled(9000, 4), "head": nn.Linear(4, 9000, bias=False)})
    model["head"].weight = model["wte"].weight
    with pytest.raises(TieError, match=r"wte\.weight: belongs to a Scaled, whose output is not its rows times embed"):
        quantize_tied(model)
    assert type(model["wte"]) is Scaled


# --- what the other calls make of it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILDERS)
def test_the_ties_are_found_and_checked_by_the_names_they_had(name: str) -> None:
    model = built(name)
    before = find_ties(model)
    assert len(quantize_tied(model)) == len(before.ties)
    assert set(find_ties(model)) == set(before)
    assert find_ties(model).aliases == ()
    assert set(declared_ties(model)) == set(declared_ties(built(name)))
    report = check_ties(model)
    assert report
    assert len(report) == len(check_ties(built(name)))
    assert {str(check.state) for check in report.checks} == {"SHARED"}
    report.raise_if_broken()
    assert tie_weights(model)


def test_two_tables_are_compared_by_the_matrices_they_stand_for() -> None:
    model = built("llama")
    quantize_tied(model)
    head = cast(QuantizedHead, model.lm_head)
    own = copy.deepcopy(head.table)
    head._shared = (own,)
    assert str(check_ties(model).checks[0].state) == "EQUAL"
    own.scale[3] *= 2
    check = check_ties(model).checks[0]
    assert str(check.state) == "DIVERGED"
    assert "1 of 96 rows differ" in str(check)


@pytest.mark.parametrize("name", BUILDERS)
def test_untying_gives_each_end_a_float_matrix_and_the_same_logits(name: str) -> None:
    model, plain = built(name), built(name)
    kinds = {path: type(module) for path, module in plain.named_modules(remove_duplicate=False)}
    quantize_tied(model)
    before = logits(model)
    undone = untie_weights(model)
    assert undone == untie_weights(plain)
    assert {path: type(module) for path, module in model.named_modules(remove_duplicate=False)} == kinds
    known = dict(model.named_parameters(remove_duplicate=False))
    for tie in undone:
        assert known[tie.target] is not known[tie.source]
        assert known[tie.target].requires_grad
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    assert model.config.tie_word_embeddings is plain.config.tie_word_embeddings


def test_untying_one_of_three_ties_leaves_the_others_tied_in_float() -> None:
    model = EncoderDecoder()
    tie_weights(model, on_conflict="source")
    every = quantize_tied(model)
    untie_weights(model, [("head.weight", "shared.weight")])
    assert model.encoder.weight is model.shared.weight
    assert model.head.weight is not model.shared.weight
    assert len(find_ties(model)) == len(every) - 1


def test_an_unknown_end_leaves_the_table_as_it_was() -> None:
    model = built("llama")
    quantize_tied(model)
    with pytest.raises(TieError, match="no such tensor"):
        untie_weights(model, [("lm_head.weight", "nothing.weight")])
    assert isinstance(model.lm_head, QuantizedHead)
    assert check_ties(model)


def test_the_error_of_a_call_that_needs_a_parameter_names_the_way_back() -> None:
    model = built("llama")
    quantize_tied(model)
    with pytest.raises(TieError, match=r"lm_head\.weight: is computed from a table that quantize_tied made.*untie_wei"):
        tie_weights(model, [("lm_head.weight", "model.norm.weight")])


# --- a vocabulary of another size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["mean", "gaussian", "zeros", "copy:7"])
@pytest.mark.parametrize("name", BUILDERS)
def test_a_resized_table_keeps_the_codes_of_its_rows_and_stays_shared(name: str, rule: str) -> None:
    model, plain = built(name), built(name)
    quantize_tied(model)
    end = next(module for module in model.modules() if isinstance(module, QuantizedEmbedding))
    with torch.no_grad():
        plain.get_input_embeddings().weight.copy_(end.weight)
    before, values, scale = logits(model), end.table.values.clone(), end.table.scale.clone()
    torch.manual_seed(1)
    change = resize_vocab(model, ROWS + 9, new_rows=rule)
    torch.manual_seed(1)
    expected = resize_vocab(plain, ROWS + 9, new_rows=rule)
    assert set(change.tensors) == set(expected.tensors)
    assert torch.equal(end.table.values[:ROWS], values)
    assert torch.equal(end.table.scale[:ROWS], scale)
    assert end.table.values.shape == (ROWS + 9, 16)
    assert end.table.scale.shape == (ROWS + 9,)
    fresh = plain.get_input_embeddings().weight[ROWS:]
    assert bool(((end.weight[ROWS:] - fresh).abs() <= fresh.abs().amax(1, keepdim=True) / 250).all())
    if rule == "copy:7":
        assert torch.equal(end.table.values[ROWS:], values[7].expand(9, 16))
    assert end.num_embeddings == model.config.vocab_size == ROWS + 9
    head = next(module for module in model.modules() if isinstance(module, QuantizedHead))
    assert head.out_features == ROWS + 9
    assert check_ties(model)
    assert logits(model).shape[-1] == ROWS + 9
    torch.testing.assert_close(logits(model)[..., :ROWS], before, rtol=1e-5, atol=1e-5)


def test_tokens_are_picked_by_id_from_a_table_that_is_found_by_structure() -> None:
    model = TinyLM(ROWS, 8, bias=True).eval()
    tie_weights(model, on_conflict="source")
    quantize_tied(model)
    before, ids = model(torch.arange(5)), [0, 7, 2, 3, 4, 9]
    matrix = model.emb.weight
    change = resize_vocab(model, ids, pad_to_multiple_of=8)
    assert set(change.tensors) == {"emb.weight", "head.weight", "head.bias"}
    assert torch.equal(model.emb.weight[:6], matrix[ids])
    kept = torch.tensor([0, 2, 3, 4])
    again = model(torch.tensor([0, 2, 3, 4]))
    torch.testing.assert_close(again[:, :6], before[kept][:, torch.tensor(ids)], rtol=1e-5, atol=1e-5)
    assert untie_weights(model)
    assert (model.emb.num_embeddings, model.head.out_features) == (8, 8)


# --- what may come between the two ends -------------------------------------------------------------------------------


def test_keep_tied_keeps_the_table_through_conversions_copies_and_loads() -> None:
    model = built("gemma")
    quantize_tied(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = logits(model)
    with keep_tied(model):
        model.to(torch.float64).to(torch.float32)
        other = copy.deepcopy(model)
        model.load_state_dict(state)
    assert check_ties(model)
    assert check_ties(other)
    assert torch.equal(logits(model), before)
    model.load_state_dict(state, assign=True)
    assert check_ties(model)


def test_keep_tied_accepts_a_matrix_that_is_quantised_inside() -> None:
    model = built("llama")
    with keep_tied(model):
        quantize_tied(model)
    assert check_ties(model)
    with keep_tied(model, [("lm_head.weight", "model.embed_tokens.weight")]):
        pass


def test_keep_tied_puts_the_table_back_where_a_copy_took_its_place() -> None:
    model = built("llama")
    quantize_tied(model)
    with keep_tied(model):
        model.lm_head = copy.deepcopy(model.lm_head)
        assert str(check_ties(model).checks[0].state) == "EQUAL"
    assert model.lm_head.table is model.model.embed_tokens.table


def test_keep_tied_says_that_a_quantised_end_was_replaced() -> None:
    model = built("llama")
    quantize_tied(model)
    with (
        pytest.raises(TieError, match=r"broken inside .*was QuantizedHead, is now Linear"),
        keep_tied(model),
    ):
        model.lm_head = nn.Linear(16, ROWS, bias=False)


def test_keep_tied_says_that_two_tables_differ() -> None:
    model = built("llama")
    quantize_tied(model)
    with pytest.raises(TieError, match="1 of 96 rows differ"), keep_tied(model):
        model.lm_head = copy.deepcopy(model.lm_head)
        model.lm_head.table.scale[3] *= 2


def test_a_guard_watches_the_table() -> None:
    model = built("llama")
    quantize_tied(model)
    guard = TieGuard(model)
    guard.check()
    model.lm_head = copy.deepcopy(model.lm_head)
    with pytest.raises(TieError, match="EQUAL"):
        guard.check()
