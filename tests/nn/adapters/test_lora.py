"""Merging LoRA under ties: what peft does, what the adapter model computed, and that the merged model computes it.

Everything is float64, and what an adapter model computes is worked out by hand from its factors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel

from bowline.errors import TieError, UsageError
from bowline.nn import check_ties, find_ties, untie_weights
from bowline.nn.adapters.lora import merge_lora

pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True` and a tied layer"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

ROWS, WIDTH, RANK, SCALING = 48, 16, 4, 2.0
IDS = torch.arange(ROWS).reshape(4, 12)
SIZES: dict[str, Any] = {
    "vocab_size": ROWS,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=ROWS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, tie_word_embeddings=True))


def gemma() -> Any:
    """Its embedding multiplies by the root of its width."""
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES, head_dim=8, tie_word_embeddings=True))


def t5(kind: str = "T5") -> Any:
    """A table in three places and a head, whose input is scaled while it is tied."""
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=ROWS, d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def switch() -> Any:
    """As a T5; its class asks the flag whether to scale."""
    return t5("SwitchTransformers")


@dataclass(frozen=True)
class Family:
    build: Callable[[], Any]
    table: str
    head: str
    elsewhere: str


FAMILIES = {
    "llama": Family(llama, "embed_tokens", "lm_head", "q_proj"),
    "gpt2": Family(gpt2, "wte", "lm_head", "c_attn"),
    "bert": Family(bert, "word_embeddings", "decoder", "query"),
    "gemma": Family(gemma, "embed_tokens", "lm_head", "q_proj"),
    "t5": Family(t5, "shared", "lm_head", "q"),
    "switch": Family(switch, "shared", "lm_head", "q"),
}


def built(build: Callable[[], Any]) -> Any:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return build().double().eval()


def adapted(base: nn.Module, **options: Any) -> PeftModel:
    """With an adapter that has been trained, in effect: every matrix of it is drawn, B too."""
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=int(RANK * SCALING), **options)).eval()
    generator = torch.Generator().manual_seed(1)
    drawn = set()
    for name, parameter in model.named_parameters():
        is_adapter = any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens_delta"))
        if is_adapter and parameter.data_ptr() not in drawn:  # what the ends share is drawn once
            drawn.add(parameter.data_ptr())
            parameter.data.normal_(0, 0.3, generator=generator)
    return model


def logits(model: Any) -> torch.Tensor:
    ids = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {})
    with torch.no_grad():
        out: torch.Tensor = model(**ids).logits
    return out


def by_hand(base: Any, table: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """A Llama's logits with these two matrices at its ends; the model gives the layers between."""
    with torch.no_grad():
        hidden = base.model(inputs_embeds=F.embedding(IDS, table)).last_hidden_state
    out: torch.Tensor = hidden @ head.T
    return out


def head_delta(model: Any) -> torch.Tensor:
    layer = model.base_model.model.lm_head
    delta: torch.Tensor = SCALING * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    return delta.detach()


def table_delta(model: Any) -> torch.Tensor:
    layer = model.base_model.model.model.embed_tokens
    delta: torch.Tensor = SCALING * (layer.lora_embedding_B["default"] @ layer.lora_embedding_A["default"]).T
    return delta.detach()


def plainly_merged(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return model.merge_and_unload()


def reloaded(model: PreTrainedModel, place: Path) -> Any:
    model.save_pretrained(place)
    return type(model).from_pretrained(place, dtype=torch.float64).eval()


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-12)


# --- what peft does -------------------------------------------------------------------------------------------------


def test_plain_merge_of_a_heads_adapter_changes_the_embedding_too() -> None:
    model = adapted(base := built(llama), target_modules=["lm_head"])
    matrix, delta = base.model.embed_tokens.weight.detach().clone(), head_delta(model)
    before = by_hand(built(llama), matrix, matrix + delta)
    assert close(logits(model), before)
    merged = plainly_merged(model)
    assert close(merged.model.embed_tokens.weight, matrix + delta)
    assert (logits(merged) - before).abs().max() > 0.1


def test_plain_merge_of_an_embeddings_adapter_changes_the_head_too() -> None:
    model = adapted(base := built(llama), target_modules=["embed_tokens"])
    matrix, delta = base.lm_head.weight.detach().clone(), table_delta(model)
    before = by_hand(built(llama), matrix + delta, matrix)
    assert close(logits(model), before)
    merged = plainly_merged(model)
    assert close(merged.lm_head.weight, matrix + delta)
    assert (logits(merged) - before).abs().max() > 0.1


def test_plain_merge_adds_the_delta_of_a_tied_adapter_twice() -> None:
    model = adapted(base := built(llama), target_modules=["embed_tokens"], ensure_weight_tying=True)
    matrix, delta = base.lm_head.weight.detach().clone(), table_delta(model)
    assert close(delta, head_delta(model))
    before = by_hand(built(llama), matrix + delta, matrix + delta)
    assert close(logits(model), before)
    merged = plainly_merged(model)
    assert close(merged.lm_head.weight - matrix, 2 * delta)
    assert (logits(merged) - before).abs().max() > 0.1


def test_plain_merge_that_unties_leaves_the_flag_at_other_levels_and_a_reload_computes_something_else(
    tmp_path: Path,
) -> None:
    model = adapted(built(t5), target_modules=["q"], modules_to_save=["shared"])
    before = logits(model)
    merged = plainly_merged(model)
    assert close(logits(merged), before)
    assert not merged.config.tie_word_embeddings
    assert merged.encoder.config.tie_word_embeddings
    assert (logits(reloaded(merged, tmp_path)) - before).abs().max() > 0.1


# --- what Bowline does ----------------------------------------------------------------------------------------------


def one_sided(family: Family) -> list[dict[str, Any]]:
    table, head, elsewhere = [family.table], [family.head], [family.elsewhere]
    return [
        {"target_modules": head},
        {"target_modules": table},
        {"target_modules": table + head},
        {"target_modules": head, "use_dora": True},
        {"target_modules": elsewhere, "modules_to_save": head},
        {"target_modules": elsewhere, "modules_to_save": table},
        {"target_modules": elsewhere, "modules_to_save": table + head},
        {"target_modules": elsewhere, "trainable_token_indices": {family.head: [1, 2, 3]}},
        {"target_modules": elsewhere, "trainable_token_indices": {family.table: [1, 2], family.head: [2, 3]}},
    ]


ONE_SIDED = [
    pytest.param(family, options, id=f"{name}-{'-'.join(str(value) for value in options.values())}")
    for name, family in FAMILIES.items()
    for options in one_sided(family)
]


@pytest.mark.parametrize(("family", "options"), ONE_SIDED)
def test_a_tie_that_cannot_stay_is_refused_and_on_request_undone(
    family: Family, options: dict[str, Any], tmp_path: Path
) -> None:
    base = built(family.build)
    tensors = list(base.state_dict())
    model = adapted(base, **options)
    before, names = logits(model), [name for name, _ in model.named_parameters(remove_duplicate=False)]
    with pytest.raises(TieError, match=r"\.weight <- .*; one matrix cannot hold both"):
        merge_lora(model)
    assert torch.equal(logits(model), before)
    assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == names

    merged: Any = merge_lora(model, on_tie="untie")
    assert merged is base
    assert list(merged.state_dict()) == tensors
    assert close(logits(merged), before)
    assert not find_ties(merged)
    assert check_ties(merged)
    assert close(logits(reloaded(merged, tmp_path)), before)


def test_each_end_gets_exactly_its_own_delta() -> None:
    model = adapted(base := built(llama), target_modules=["embed_tokens", "lm_head"])
    matrix, head, table = base.lm_head.weight.detach().clone(), head_delta(model), table_delta(model)
    before = by_hand(built(llama), matrix + table, matrix + head)
    merged: Any = merge_lora(model, on_tie="untie")
    assert close(merged.lm_head.weight - matrix, head)
    assert close(merged.model.embed_tokens.weight - matrix, table)
    assert close(logits(merged), before)
    assert merged.config.tie_word_embeddings is False


@pytest.mark.parametrize("on_tie", ["raise", "untie"])
@pytest.mark.parametrize("name", ["llama", "gemma"])
@pytest.mark.parametrize("side", ["table", "head"])
def test_a_tied_adapter_is_merged_once_and_the_tie_stays(
    name: str, side: str, on_tie: Literal["raise", "untie"], tmp_path: Path
) -> None:
    family = FAMILIES[name]
    base = built(family.build)
    matrix = base.lm_head.weight.detach().clone()
    model = adapted(base, target_modules=[getattr(family, side)], ensure_weight_tying=True)
    before, delta = logits(model), table_delta(model)
    merged: Any = merge_lora(model, on_tie=on_tie)
    assert close(merged.lm_head.weight - matrix, delta)
    assert close(logits(merged), before)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert merged.config.tie_word_embeddings
    assert len(check_ties(merged)) == 1
    assert check_ties(merged)
    assert merged.state_dict().keys() == built(family.build).state_dict().keys()
    assert close(logits(reloaded(merged, tmp_path)), before)


def test_a_tied_adapter_whose_ends_have_drifted_apart_is_no_longer_one() -> None:
    model: Any = adapted(built(llama), target_modules=["embed_tokens"], ensure_weight_tying=True)
    layer = model.base_model.model.lm_head
    layer.lora_A["default"].weight.data = layer.lora_A["default"].weight.data.clone() + 1
    before = logits(model)
    with pytest.raises(TieError, match="one matrix cannot hold both"):
        merge_lora(model)
    assert close(logits(merge_lora(model, on_tie="untie")), before)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2, 3]},
    ],
    ids=["attention", "modules_to_save", "trainable_token_indices"],
)
def test_a_tie_that_no_adapter_touches_or_that_is_trained_as_one_stays(options: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(built(llama), **copy.deepcopy(options))  # peft writes into the lists
    before = logits(model)
    merged: Any = merge_lora(model)
    expected = plainly_merged(adapted(built(llama), **copy.deepcopy(options)))
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in merged.state_dict().items())
    assert close(logits(merged), before)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert check_ties(merged)
    assert close(logits(reloaded(merged, tmp_path)), before)


def test_a_bias_tie_stays_when_the_heads_adapter_has_no_bias() -> None:
    model = adapted(built(bert), target_modules=["query"])
    merged: Any = merge_lora(model)
    assert merged.cls.predictions.decoder.bias is merged.cls.predictions.bias
    assert len(check_ties(merged)) == 2


def test_an_untied_model_merges_as_peft_merges_it() -> None:
    base = built(llama)
    untie_weights(base)
    other = adapted(copy.deepcopy(base), target_modules=["lm_head"])
    merged = merge_lora(adapted(base, target_modules=["lm_head"]))
    expected = plainly_merged(other).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in merged.state_dict().items())


def test_two_active_adapters_at_one_end_are_both_merged_there() -> None:
    tuner: Any = adapted(built(llama), target_modules=["lm_head"]).base_model
    layer = tuner.model.lm_head
    tuner.peft_config["second"] = LoraConfig(r=3, target_modules=["lm_head"])
    tuner.inject_adapter(tuner.model, "second")
    layer.lora_B["second"].weight.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    tuner.set_adapter(["default", "second"])
    before = logits(tuner.model)
    with pytest.raises(TieError, match=r"'default' \(LoRA .*\) and the adapter 'second' \(LoRA "):
        merge_lora(tuner)
    assert close(logits(merge_lora(tuner, on_tie="untie")), before)


def test_only_active_adapters_count() -> None:
    model: Any = adapted(built(llama), target_modules=["lm_head"])
    model.add_adapter("attention", LoraConfig(target_modules=["q_proj"]))
    model.set_adapter("attention")
    before = logits(model)
    merged: Any = merge_lora(model)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    assert close(logits(merged), before)


def test_a_heads_adapter_of_another_kind_than_lora_is_merged_there_alone() -> None:
    config = AdaLoraConfig(target_modules=["lm_head"], init_r=4, total_step=10, tinit=1, tfinal=2, deltaT=1)
    model: Any = get_peft_model(built(gpt2), config).eval()
    model.base_model.model.lm_head.lora_E["default"].data.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    before = logits(model)
    with pytest.raises(TieError, match=r"lm_head\.weight has the adapter 'default' \(SVDLinear\)"):
        merge_lora(model)
    merged: Any = merge_lora(model, on_tie="untie")
    assert close(logits(merged), before)
    assert not torch.equal(merged.lm_head.weight, merged.transformer.wte.weight)


# --- what is refused ------------------------------------------------------------------------------------------------


def test_both_deltas_are_named() -> None:
    model = adapted(built(llama), target_modules=["lm_head"])
    with pytest.raises(TieError) as caught:
        merge_lora(model)
    assert caught.value.message == (
        "lm_head.weight <- model.embed_tokens.weight: lm_head.weight has the adapter 'default' (LoRA of rank 4, "
        "scaling 2.0) and model.embed_tokens.weight no adapter; one matrix cannot hold both"
    )
    assert 'on_tie="untie"' in str(caught.value.help)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"target_modules": ["embed_tokens", "lm_head"]},
            r"rank 4, scaling 2.0\), .*: their factors differ by at most \d",
        ),
        (
            {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
            r"trained copy \(modules_to_save\), .*: 48 of 48 rows differ, by at most \d",
        ),
        (
            {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [2, 3]}},
            r"\(2 trained rows\), .*: they are rows of different tokens",
        ),
    ],
    ids=["lora", "modules_to_save", "trainable_token_indices"],
)
def test_two_adapters_that_look_alike_are_said_to_be_trained_separately(options: dict[str, Any], said: str) -> None:
    model: Any = adapted(built(llama), **copy.deepcopy(options))
    with pytest.raises(TieError, match=said.replace(".*", "trained separately")) as caught:
        merge_lora(model)
    assert caught.value.help is not None
    assert caught.value.help.endswith(
        "to keep the tie, train again with ensure_weight_tying=True in LoraConfig, which makes one adapter for both"
    )


def test_adapters_of_other_ranks_are_said_to_be_trained_separately() -> None:
    model: Any = adapted(built(llama), target_modules=["embed_tokens", "lm_head"], rank_pattern={"lm_head": 2})
    with pytest.raises(TieError, match=r"rank 2, .* rank 4, scaling [\d.]+\), trained separately; one matrix"):
        merge_lora(model)


def test_adapters_that_cannot_be_compared_are_not_said_to_differ() -> None:
    model: Any = adapted(built(llama), target_modules=["embed_tokens"], ensure_weight_tying=True, use_dora=True)
    with pytest.raises(TieError, match=r"\), and deltas of these kinds cannot be compared; one matrix") as caught:
        merge_lora(model)
    assert caught.value.help is not None
    assert caught.value.help.endswith("to keep the tie, train plain LoRA with ensure_weight_tying=True in LoraConfig")


def test_an_adapter_that_was_merged_onto_the_tie_in_place_is_refused() -> None:
    model: Any = adapted(built(llama), target_modules=["lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        model.merge_adapter()
    for on_tie in ("raise", "untie"):
        with pytest.raises(TieError, match="'default' is merged into the shared matrix already"):
            merge_lora(model, on_tie=on_tie)
    model.unmerge_adapter()
    before = logits(model)
    assert close(logits(merge_lora(model, on_tie="untie")), before)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_a_bias_that_no_layer_can_take_is_refused_before_anything_is_merged() -> None:
    model = adapted(built(llama), target_modules=["q_proj", "lm_head"], lora_bias=True)
    before = logits(model)
    with pytest.raises(UsageError, match=r"q_proj.weight: the adapter 'default' has a bias"):
        merge_lora(model, on_tie="untie")
    assert torch.equal(logits(model), before)


def test_a_model_without_adapters_is_refused() -> None:
    for model in (nn.Linear(2, 2), built(llama)):
        with pytest.raises(UsageError, match="has no adapters to merge, expected a peft model"):
            merge_lora(model)


def test_a_model_that_was_merged_is_used_up() -> None:
    model = adapted(built(llama), target_modules=["q_proj"])
    merge_lora(model)
    with pytest.raises(UsageError, match=r"PeftModel: its adapters are merged already \(help: use the model that"):
        merge_lora(model)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UsageError, match="expected 'raise' or 'untie'"):
        merge_lora(adapted(built(llama), target_modules=["lm_head"]), on_tie="average")  # type: ignore[arg-type]


def test_a_merge_that_fails_in_peft_leaves_the_ends_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = adapted(built(llama), target_modules=["lm_head"])
    before = logits(model)

    def fail(**_: object) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(model.base_model.model.lm_head, "merge", fail)
    with pytest.raises(RuntimeError, match="no room"):
        merge_lora(model, on_tie="untie")
    assert torch.equal(logits(model), before)
    assert model.base_model.model.lm_head.base_layer.weight is model.base_model.model.model.embed_tokens.weight


@pytest.mark.parametrize("name", FAMILIES)
def test_an_adapter_inside_an_adapter_is_refused_since_peft_merges_only_the_outer(name: str) -> None:
    """Rows of a tied embedding are trained at the head too, where a LoRA of the head's wraps them."""
    family = FAMILIES[name]
    options = {"target_modules": [family.head], "trainable_token_indices": {family.table: [1, 2]}}
    plain: Any = plainly_merged(adapted(built(family.build), **copy.deepcopy(options)))
    assert any(hasattr(module, "token_adapter") for module in plain.modules())
    model = adapted(built(family.build), **copy.deepcopy(options))
    before = logits(model)
    with pytest.raises(
        UsageError, match=r"has adapters one inside the other .*TrainableTokens.*, and PEFT merges only"
    ):
        merge_lora(model, on_tie="untie")
    assert torch.equal(logits(model), before)
