"""What no model can make sense of is refused by name, with an error of Bowline's, and the model stays as it was."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from bowline import models
from bowline.errors import BowlineError, ConfigError, UsageError

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
SMALL: dict[type[Any], dict[str, Any]] = {
    models.GPT2Config: {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16},
    models.BertConfig: {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "max_position_embeddings": 16,
    },
    models.T5Config: {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4},
    models.LSTMConfig: {"hidden_size": 16},
}
WITH_HEAD = (models.GPT2LMHeadModel, models.BertForMaskedLM, models.T5ForConditionalGeneration, models.LSTMLMHeadModel)
GENERATING = (models.GPT2LMHeadModel, models.T5ForConditionalGeneration, models.LSTMLMHeadModel)


def made(cls: Any, **keys: Any) -> Any:
    own = {"bos_token_id": 1, "eos_token_id": 2} if cls is models.GPT2LMHeadModel else {}
    return cls(cls.config_class(vocab_size=61, **{**SMALL[cls.config_class], **own, **keys}))


def called(model: Any, **inputs: Any) -> Any:
    target = {"decoder_input_ids": IDS} if isinstance(model, models.T5ForConditionalGeneration) else {}
    return model(**{"input_ids": IDS, **({} if "labels" in inputs else target), **inputs})


@pytest.mark.parametrize("cls", WITH_HEAD)
@pytest.mark.parametrize(
    "labels", [[[1, 2]], "ab", IDS[0], torch.tensor(3), IDS.float(), IDS.int(), IDS > 0, IDS + 100, IDS - 50, IDS[None]]
)
def test_labels_that_are_no_tokens_are_refused_by_every_family(cls: Any, labels: Any) -> None:
    with pytest.raises(UsageError, match="label"):
        called(made(cls), labels=labels)


@pytest.mark.parametrize("cls", WITH_HEAD)
@pytest.mark.parametrize("mask", [[[1, 1]], "ab", torch.ones(2, 3), torch.ones(2), torch.ones(3, 4)])
def test_a_mask_that_is_no_tensor_or_does_not_fit_is_refused(cls: Any, mask: Any) -> None:
    with pytest.raises(UsageError, match="attention_mask"):
        called(made(cls), attention_mask=mask)


@pytest.mark.parametrize("cls", [models.GPT2LMHeadModel, models.BertForMaskedLM])
def test_a_mask_of_numbers_to_add_is_refused_and_not_read_as_its_contrary(cls: Any) -> None:
    model = made(cls).eval()
    additive = torch.zeros(2, 1, 4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -torch.inf)
    with pytest.raises(UsageError, match="mask == 0"):
        called(model, attention_mask=additive)
    seen = called(model, attention_mask=additive == 0).logits
    assert torch.equal(seen, called(model, attention_mask=torch.ones(4, 4).tril()[None]).logits)


def test_a_mask_for_each_head_is_refused() -> None:
    with pytest.raises(UsageError, match="attention_mask"):
        called(made(models.GPT2LMHeadModel), attention_mask=torch.ones(2, 4, 4, 4))


@pytest.mark.parametrize("cls", GENERATING)
@pytest.mark.parametrize("number", [-1, "a"])
def test_positions_to_keep_are_counted_from_zero(cls: Any, number: Any) -> None:
    with pytest.raises(UsageError, match="logits_to_keep"):
        called(made(cls), logits_to_keep=number)


@pytest.mark.parametrize("cls", GENERATING)
@pytest.mark.parametrize("past", [((1, 2),), {}, "other rows"])
def test_a_cache_of_another_kind_or_batch_is_refused(cls: Any, past: Any) -> None:
    model = made(cls)
    if past == "other rows":
        past = called(model, use_cache=True).past_key_values
    short = {"decoder_input_ids": IDS[:1]} if cls is models.T5ForConditionalGeneration else {}
    with pytest.raises(UsageError, match="past_key_values"):
        model(IDS[:1], past_key_values=past, **short)


@pytest.mark.parametrize(
    "labels", [[0, 1], torch.tensor([0.5, 1]), torch.tensor([0, 1, 1]), torch.tensor([True, False])]
)
def test_classes_are_whole_numbers_one_for_each_row(labels: Any) -> None:
    with pytest.raises(UsageError, match="next_sentence_label"):
        made(models.BertForPreTraining)(IDS, next_sentence_label=labels)


@pytest.mark.parametrize("memory", ["x", (), (torch.ones(2, 3, 5),)])
def test_an_encoders_output_that_is_none_is_refused(memory: Any) -> None:
    with pytest.raises(UsageError, match="encoder_outputs"):
        made(models.T5ForConditionalGeneration)(encoder_outputs=memory, decoder_input_ids=IDS)


@pytest.mark.parametrize("cls", WITH_HEAD)
@pytest.mark.parametrize("new", [None, "a", nn.Linear(3, 4), nn.Embedding(7, 3)])
def test_a_table_that_does_not_fit_is_refused_and_the_model_still_runs(cls: Any, new: Any) -> None:
    model = made(cls).eval()
    before = called(model).logits
    with pytest.raises(BowlineError):
        model.set_input_embeddings(new)
    assert torch.equal(called(model).logits, before)
    with pytest.raises(UsageError):
        model.set_output_embeddings(None)
    assert torch.equal(called(model).logits, before)


@pytest.mark.parametrize("heads", [[0], {0: 1}, {0: "01"}])
def test_heads_to_prune_are_a_mapping_to_lists(heads: Any) -> None:
    with pytest.raises(UsageError, match="heads_to_prune"):
        made(models.GPT2LMHeadModel).prune_heads(heads)


@pytest.mark.parametrize("cls", GENERATING)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "a"),
        ("temperature", float("inf")),
        pytest.param("temperature", 10**400, id="temperature-huge"),
        ("top_p", "a"),
        ("num_beams", 10**9),
        ("length_penalty", "a"),
        ("length_penalty", float("nan")),
        ("length_penalty", 1e9),
        ("length_penalty", -1e9),
        ("repetition_penalty", "a"),
        ("eos_token_id", "x"),
        ("eos_token_id", -5),
        ("eos_token_id", 2.5),
        ("eos_token_id", [[1]]),
        ("pad_token_id", "x"),
        ("pad_token_id", -1),
        ("pad_token_id", 61),
        ("pad_token_id", [1]),
        ("pad_token_id", True),
        ("stop", "ab"),
        ("stop", 2.5),
        ("stop", [["a"]]),
        ("generator", 3),
        ("streamer", 3),
        ("do_sample", "x"),
        ("use_cache", "x"),
        ("attention_mask", [[1]]),
    ],
)
def test_what_means_nothing_to_generate_is_refused_before_any_work(cls: Any, name: str, value: Any) -> None:
    needed = {"do_sample": name in ("temperature", "top_p", "generator"), "num_beams": 1 + (name == "length_penalty")}
    with pytest.raises(UsageError, match=name):
        made(cls).generate(IDS[:1], max_new_tokens=3, **{**needed, name: value})


@pytest.mark.parametrize(
    ("first", "ends"), [([], [*range(61)]), ([*range(60)], [60]), ([*range(40)], [*range(30, 99)])]
)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}])
def test_bans_that_together_leave_no_token_are_refused_before_any_work(
    first: list[int], ends: list[int], options: Any
) -> None:
    model = made(models.GPT2LMHeadModel)
    banned = {"begin_suppress_tokens": first, "eos_token_id": ends, "max_new_tokens": 3, **options}
    with pytest.raises(UsageError, match=r"min_new_tokens=2: expected 0, since .* leave no other token"):
        model.generate(IDS, min_new_tokens=2, **banned)
    assert model.generate(IDS, min_new_tokens=0, **banned).shape[1] > IDS.shape[1]


def test_an_end_that_is_no_token_pads_nothing() -> None:
    model = made(models.GPT2LMHeadModel, eos_token_id=99).eval()
    plain = model.generate(IDS, max_new_tokens=5)
    assert torch.equal(plain, model.generate(IDS, max_new_tokens=5, eos_token_id=[]))
    with pytest.raises(UsageError, match="rows that stop early need padding"):
        model.generate(IDS, max_new_tokens=5, stop=int(plain[0, 5]))


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (models.GPT2Config, "activation_function"),
        (models.GPT2Config, "scale_attn_weights"),
        (models.GPT2Config, "n_layer"),
        (models.GPT2Config, "n_inner"),
        (models.BertConfig, "type_vocab_size"),
        (models.T5Config, "dropout_rate"),
        (models.T5Config, "layer_norm_epsilon"),
        (models.T5Config, "initializer_factor"),
        (models.T5Config, "num_decoder_layers"),
        (models.LSTMConfig, "initializer_range"),
        (models.LSTMConfig, "projection_penalty"),
        (models.LSTMConfig, "head_bias"),
    ],
)
@pytest.mark.parametrize("value", ["x", [1], -1, float("nan"), 10**30])
def test_a_config_that_means_nothing_is_refused_before_a_model_is_built(config: Any, key: str, value: Any) -> None:
    classes = {cls.config_class: cls for cls in WITH_HEAD}
    with pytest.raises(ConfigError):
        made(classes[config], **{key: value})


@pytest.mark.parametrize("content", [[], None, 5, "x"])
def test_a_config_that_is_no_object_is_refused(content: Any) -> None:
    with pytest.raises(ConfigError, match="expected an object"):
        models.GPT2Config.from_dict(content)


@pytest.mark.parametrize(
    ("options", "seen"),
    [({"device": "nowhere"}, "nowhere"), ({"device": 3.5}, "3.5"), ({"config": {}}, "dict"), ({"dtype": "x"}, "'x'")],
)
def test_options_of_a_load_are_checked_before_it_begins(tmp_path: Any, options: Any, seen: str) -> None:
    made(models.GPT2LMHeadModel).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=seen):
        models.load(tmp_path, **options)


@pytest.mark.parametrize("path", [None, 5])
def test_a_path_that_is_none_is_refused(path: Any) -> None:
    for load in (
        models.load,
        models.load_config,
        models.GPT2LMHeadModel.from_pretrained,
        models.GPT2Config.from_pretrained,
    ):
        with pytest.raises(UsageError, match="path="):
            load(path)


def test_a_config_that_is_a_list_is_called_that_by_load_too(tmp_path: Any) -> None:
    made(models.GPT2LMHeadModel).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ConfigError, match=r"list|array|object"):
        models.load(tmp_path)


def test_the_one_bias_of_an_untied_bert_of_transformers_4_is_the_one_that_acts(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    model = made(models.BertForMaskedLM, tie_word_embeddings=False).eval()
    with torch.no_grad():
        model.cls.predictions.decoder.bias.normal_()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["cls.predictions.bias"] = tensors.pop("cls.predictions.decoder.bias")  # as 4.57.1 writes it
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, info = models.BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info
    torch.testing.assert_close(called(again).logits, called(model).logits)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("cls", WITH_HEAD)
@pytest.mark.parametrize("tied", [True, False])
def test_gradients_of_a_functional_call_are_those_of_backward(cls: Any, tied: bool) -> None:
    model = made(cls, tie_word_embeddings=tied).eval()
    parameters = dict(model.named_parameters())
    called(model, labels=IDS).loss.backward()

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        one: torch.Tensor = torch.func.functional_call(model, values, (IDS,), {"labels": IDS}).loss
        return one

    for name, gradient in torch.func.grad(loss)(parameters).items():
        held = parameters[name].grad
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if held is None else held, rtol=1e-4, atol=1e-6)
