"""BERT: transformers' names, numbers and files; the tie, its bias, and what it does to the padding row."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline import audit
from bowline.errors import ConfigError, UsageError
from bowline.models import bert
from bowline.models.bert import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
)
from bowline.nn.modules.heads import LMHead, MLMHead

pytestmark = pytest.mark.usefixtures("quiet_transformers")

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,  # so that attention and logits are far from even
}
PAD = 0
EPS = torch.finfo(torch.float32).eps
TABLE = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"
BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def tokens(length: int = 7, batch: int = 3) -> torch.Tensor:
    return torch.randint(1, TINY["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(length))


def hidden_labels(ids: torch.Tensor) -> torch.Tensor:
    labels = torch.full_like(ids, -100)
    labels[:, ::3] = ids[:, ::3]
    return labels


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """Ours and transformers' model of one name, with the same weights, biases and norms drawn too."""
    settings = TINY | options
    torch.manual_seed(0)
    theirs = getattr(transformers, name)(transformers.BertConfig(**settings))
    ours = getattr(bert, name)(BertConfig.from_dict(theirs.config.to_dict()))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry of `other`."""
    return float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp_min(1e-30))


def as_theirs(inputs: dict[str, Any]) -> dict[str, Any]:
    """transformers takes a mask of three axes with the heads' axis in it, and as truth values."""
    mask = inputs.get("attention_mask")
    return inputs | ({"attention_mask": mask[:, None] != 0} if mask is not None and mask.ndim == 3 else {})


def padded(length: int) -> dict[str, Any]:
    ids = tokens(length)
    mask = torch.ones_like(ids)
    for row, short in enumerate((0, 2, length - 1)):
        if short:
            ids[row, -short:], mask[row, -short:] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def packed(length: int) -> dict[str, Any]:
    group = torch.arange(length)[None] // 4
    mask = (group[:, :, None] == group[:, None, :]).long().expand(3, -1, -1)
    return {"input_ids": tokens(length), "attention_mask": mask, "position_ids": (torch.arange(length) % 4)[None]}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {"input_ids": tokens(7)}),
    "one token": ({"hidden_act": "gelu_new"}, {"input_ids": tokens(1)}),
    "padding": ({"hidden_act": "relu"}, padded(11)),
    "packed": ({"num_attention_heads": 1}, packed(13)),
    "types": (
        {"type_vocab_size": 3, "pad_token_id": 5},
        {"input_ids": tokens(24), "token_type_ids": tokens(24) % 3, "position_ids": tokens(24) % 24},
    ),
    "no padding token": ({"pad_token_id": None, "layer_norm_eps": 1e-5}, {"input_ids": tokens(5)}),
    "untied": ({"tie_word_embeddings": False}, padded(9)),
}


def losses_and_gradients(name: str, ours: Any, theirs: Any, inputs: dict[str, Any], **labels: Any) -> None:
    """Ours is transformers' to 1e-5, gradients to 1e-4; and of float64 no further off, within the noise of rounding.

    Which of two sums comes out nearer is chance: hence twice their error, and four steps of float32 where a loss, one
    number, happens to be right to the last bit.
    """
    exact = getattr(transformers, name)(theirs.config).double()
    exact.load_state_dict(theirs.state_dict())
    exactly = {key: one.double() if one.is_floating_point() else one for key, one in labels.items()}  # for torch 2.6
    answers = [ours(**inputs, **labels), theirs(**as_theirs(inputs), **labels), exact(**as_theirs(inputs), **exactly)]
    for key in ("loss", "logits", "prediction_logits", "seq_relationship_logits"):
        if getattr(answers[1], key, None) is None:
            continue
        mine, other, truth = (getattr(answer, key) for answer in answers)
        assert far(mine, other) < 1e-5, key
        assert far(mine, truth) <= 2 * far(other, truth) + 4 * EPS, key
    for answer in answers:
        answer.loss.backward()
    gradients = [{key: one.grad for key, one in model.named_parameters()} for model in (ours, theirs, exact)]
    assert gradients[0].keys() == gradients[1].keys()
    largest = max(float(one.abs().max()) for one in gradients[2].values() if one is not None)
    square, errors = 0.0, [0.0, 0.0]
    for key, truth in gradients[2].items():
        mine, other = gradients[0][key], gradients[1][key]
        if truth is None:  # the dead bias
            assert mine is None and other is None, key
            continue
        assert mine is not None and other is not None, key
        # What is zero in truth (the key's bias: the softmax forgets it) is noise in both.
        assert far(mine, other) < 1e-4 or float((mine - other).abs().max()) < 1e-6 * largest, key
        square += float(truth.square().sum())
        errors = [error + float((one - truth).square().sum()) for error, one in zip(errors, (mine, other), strict=True)]
    assert errors[0] ** 0.5 <= 2 * errors[1] ** 0.5 + 4 * EPS * square**0.5


@pytest.mark.parametrize("case", CASES)
def test_masked_lm_has_the_logits_loss_and_gradients_of_transformers(case: str) -> None:
    options, inputs = CASES[case]
    ours, theirs = pair("BertForMaskedLM", **options)
    losses_and_gradients("BertForMaskedLM", ours, theirs, inputs, labels=hidden_labels(inputs["input_ids"]))


@pytest.mark.parametrize("case", ["plain", "padding", "types", "untied"])
def test_pretraining_has_the_logits_loss_and_gradients_of_transformers(case: str) -> None:
    options, inputs = CASES[case]
    ours, theirs = pair("BertForPreTraining", **options)
    labels = {"labels": hidden_labels(inputs["input_ids"]), "next_sentence_label": torch.tensor([0, 1, 1])}
    losses_and_gradients("BertForPreTraining", ours, theirs, inputs, **labels)


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"num_labels": 3}, torch.tensor([2, 0, 1])),
        ({"num_labels": 3}, torch.tensor([[2], [0], [1]])),
        ({"num_labels": 1}, torch.tensor([0.3, -1.0, 2.0])),
        ({"num_labels": 3}, torch.tensor([[1.0, 0, 1], [0, 0, 1], [0, 1, 0]])),
        ({"num_labels": 2, "problem_type": "regression"}, torch.tensor([[0.1, 2.0], [1.0, -1.0], [0.0, 3.0]])),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, torch.tensor([2, 0, -100])),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, torch.tensor([[1.0, 0], [0, 0], [1, 1]])),
    ],
)
def test_classification_has_the_logits_loss_and_gradients_of_transformers(
    options: dict[str, Any], labels: torch.Tensor
) -> None:
    ours, theirs = pair("BertForSequenceClassification", **options)
    losses_and_gradients("BertForSequenceClassification", ours, theirs, padded(9), labels=labels)


@pytest.mark.parametrize("pooling", [True, False])
def test_base_model_has_the_states_of_transformers(pooling: bool) -> None:
    theirs: Any = transformers.BertModel(transformers.BertConfig(**TINY), add_pooling_layer=pooling).eval()
    ours = BertModel(BertConfig.from_dict(TINY), add_pooling_layer=pooling).eval()
    ours.load_state_dict(theirs.state_dict())
    inputs = padded(10)
    mine, other = (model(**inputs, output_hidden_states=True) for model in (ours, theirs))
    assert len(mine.hidden_states) == len(other.hidden_states) == 3
    for one, two in zip(mine.hidden_states, other.hidden_states, strict=True):
        assert far(one, two) < 1e-5
    assert far(mine.last_hidden_state, other.last_hidden_state) < 1e-5
    assert (mine.pooler_output is None) is (other.pooler_output is None) is (not pooling)
    if pooling:
        assert far(mine.pooler_output, other.pooler_output) < 1e-5


def test_head_alone_is_that_of_transformers() -> None:
    from transformers.models.bert.modeling_bert import BertLMPredictionHead

    theirs = BertLMPredictionHead(transformers.BertConfig(**TINY))
    ours = MLMHead(16, 61)
    ours.load_state_dict(theirs.state_dict())
    hidden = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    torch.testing.assert_close(ours(hidden), theirs(hidden))


def test_vectors_in_place_of_ids_give_the_same() -> None:
    model = BertForMaskedLM(BertConfig.from_dict(TINY)).eval()
    ids = tokens(6)
    vectors = model.get_input_embeddings()(ids)
    torch.testing.assert_close(model(inputs_embeds=vectors).logits, model(ids).logits)


def test_bfloat16_is_near_transformers() -> None:
    ours, theirs = pair("BertForMaskedLM")
    inputs = padded(9) | {"labels": hidden_labels(tokens(9))}
    truth = theirs(**inputs)
    mine, other = (model.bfloat16()(**inputs) for model in (ours, theirs))
    assert mine.logits.dtype is torch.bfloat16
    assert far(mine.logits, truth.logits) < max(0.05, 2 * far(other.logits, truth.logits))
    assert abs(float(mine.loss) - float(truth.loss)) < 0.05 * float(truth.loss)


def test_dropout_draws_as_in_transformers() -> None:
    ours, theirs = pair("BertForSequenceClassification", hidden_dropout_prob=0.2, classifier_dropout=0.5)
    answers = []
    for model in (ours.train(), theirs.train()):
        torch.manual_seed(3)
        answers.append(model(tokens(7)).logits)
    assert ours.dropout.p == 0.5
    assert far(*answers) < 1e-5


# --- the tie ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "name", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"]
)
def test_names_and_counts_are_those_of_transformers(name: str, tied: bool) -> None:
    ours, theirs = pair(name, tie_word_embeddings=tied)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert [key for key, _ in ours.named_parameters()] == [key for key, _ in theirs.named_parameters()]
    assert {key: value.shape for key, value in ours.state_dict().items()} == {
        key: value.shape for key, value in theirs.state_dict().items()
    }
    assert ours.num_parameters() == theirs.num_parameters()


@pytest.mark.parametrize("cls", [BertForMaskedLM, BertForPreTraining])
def test_tied_matrix_and_bias_are_one_parameter_each_and_untied_two(cls: type[Any]) -> None:
    tied = cls(BertConfig.from_dict(TINY))
    untied = cls(BertConfig.from_dict(TINY | {"tie_word_embeddings": False}))
    assert tied.cls.predictions.decoder.weight is tied.bert.embeddings.word_embeddings.weight
    assert tied.cls.predictions.decoder.bias is tied.cls.predictions.bias
    assert untied.cls.predictions.decoder.weight is not untied.bert.embeddings.word_embeddings.weight
    assert untied.cls.predictions.decoder.bias is not untied.cls.predictions.bias
    assert untied.num_parameters() - tied.num_parameters() == 61 * 16 + 61


def test_one_bias_acts_under_either_name_when_tied_and_only_the_decoders_untied() -> None:
    for tied in (True, False):
        model = BertForMaskedLM(BertConfig.from_dict(TINY | {"tie_word_embeddings": tied})).eval()
        before = model(tokens()).logits
        with torch.no_grad():
            model.cls.predictions.bias[3] += 1.0
        moved = (model(tokens()).logits - before)[..., 3]
        torch.testing.assert_close(moved, torch.full_like(moved, 1.0 if tied else 0.0))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [64, 50])
def test_resize_changes_both_ends_and_both_biases(tied: bool, size: int) -> None:
    model = BertForMaskedLM(BertConfig.from_dict(TINY | {"tie_word_embeddings": tied}))
    kept = min(size, 61)
    before = model(tokens() % kept).logits[..., :kept]
    model.resize_token_embeddings(size)
    state = model.state_dict()
    assert {len(state[name]) for name in (TABLE, DECODER, *BIASES)} == {size}
    assert model.config.vocab_size == model.cls.predictions.decoder.out_features == size
    assert (model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight) is tied
    assert (model.cls.predictions.decoder.bias is model.cls.predictions.bias) is tied
    after = model(tokens() % kept).logits
    assert after.shape[-1] == size
    torch.testing.assert_close(after[..., :kept], before)


@pytest.mark.parametrize("tied", [True, False])
def test_another_output_head_brings_its_bias(tied: bool) -> None:
    model = BertForMaskedLM(BertConfig.from_dict(TINY | {"tie_word_embeddings": tied}))
    head = LMHead(16, 61)
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is head
    assert model.cls.predictions.bias is head.bias
    model.tie_weights()
    assert (head.weight is model.get_input_embeddings().weight) is tied
    with pytest.raises(UsageError, match="without a bias"):
        model.set_output_embeddings(LMHead(16, 61, bias=False))


# --- the padding row -------------------------------------------------------------------------------------------------


def table_of(model: Any) -> torch.Tensor:
    table: torch.Tensor = model.get_input_embeddings().weight
    return table


def trained(steps: int = 5, **options: Any) -> BertForMaskedLM:
    """A few steps of AdamW on texts with padding, none of it a label."""
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig.from_dict(TINY | options)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = padded(9)
    labels = hidden_labels(inputs["input_ids"]).masked_fill(inputs["input_ids"] == PAD, -100)
    assert not (labels == PAD).any()
    for _ in range(steps):
        optimizer.zero_grad()
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
    return model


def test_padding_row_is_zero_at_first() -> None:
    cases: list[dict[str, Any]] = [{}, {"tie_word_embeddings": False}, {"pad_token_id": 7}]
    for options in cases:
        model = BertForMaskedLM(BertConfig.from_dict(TINY | options))
        for _ in range(2):
            table = table_of(model)
            at = options.get("pad_token_id", PAD)
            assert not table[at].any()
            assert table[at + 1].any()
            model.init_weights()


def test_tied_padding_row_moves_in_training_though_padding_is_never_a_label() -> None:
    assert table_of(trained())[PAD].norm() > 1e-2


def test_tied_padding_row_stays_exactly_zero_where_its_logit_is_masked() -> None:
    model = trained(pad_logit="mask").eval()
    assert not table_of(model)[PAD].any()
    assert (model(tokens()).logits[..., PAD] == -torch.inf).all()


def test_untied_padding_row_of_the_table_stays_zero_and_the_decoders_moves() -> None:
    torch.manual_seed(0)
    before = BertForMaskedLM(BertConfig.from_dict(TINY | {"tie_word_embeddings": False}))
    model = trained(tie_word_embeddings=False)
    assert not table_of(model)[PAD].any()
    moved = model.cls.predictions.decoder.weight[PAD] - before.cls.predictions.decoder.weight[PAD]
    assert moved.norm() > 1e-2


def test_gradient_of_the_padding_row_is_the_mean_of_states_weighted_by_its_probability() -> None:
    model = BertForMaskedLM(BertConfig.from_dict(TINY)).double().eval()
    inputs = padded(9)
    labels = hidden_labels(inputs["input_ids"]).masked_fill(inputs["input_ids"] == PAD, -100)
    model(**inputs, labels=labels).loss.backward()
    with torch.no_grad():
        states = model.cls.predictions.transform(model.bert(**inputs).last_hidden_state)
        table = table_of(model)
        chance = (states @ table.T + model.cls.predictions.bias).softmax(-1)[..., PAD]
        counted = labels != -100
        expected = (chance[..., None] * states)[counted].sum(0) / counted.sum()
        gradient = table.grad
    assert gradient is not None
    torch.testing.assert_close(gradient[PAD], expected, rtol=1e-12, atol=1e-15)


# --- files -----------------------------------------------------------------------------------------------------------


def warnings_of(directory: Path) -> list[str]:
    return [finding.code for finding in audit(directory).findings if finding.severity.value != "info"]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "name", ["BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForSequenceClassification"]
)
def test_files_go_to_transformers_and_back_unchanged(tmp_path: Path, name: str, tied: bool) -> None:
    _, theirs = pair(name, tie_word_embeddings=tied)
    if not tied and hasattr(theirs, "cls"):
        theirs.cls.predictions.decoder.bias.data.copy_(theirs.cls.predictions.bias)
    theirs.save_pretrained(tmp_path / "theirs")
    ours, info = getattr(bert, name).from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert info, info
    ours.save_pretrained(tmp_path / "ours")
    assert warnings_of(tmp_path / "ours") == []
    back, info = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    state, again = theirs.state_dict(), back.state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(state[key], again[key]) for key in state)
    with torch.no_grad():
        before, after, mine = (model.eval()(**padded(8)) for model in (theirs, back, ours))
    assert torch.equal(before[0], after[0])
    assert far(mine[0], before[0]) < 1e-5


def test_dead_bias_of_a_trained_untied_head_comes_back_and_is_what_the_audit_finds(tmp_path: Path) -> None:
    model = trained(tie_word_embeddings=False)
    assert not model.cls.predictions.bias.any()
    assert model.cls.predictions.decoder.bias.any()
    model.save_pretrained(tmp_path)
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in model.state_dict().items())
    assert warnings_of(tmp_path) == ["BW110"]  # transformers 4 would compute with the dead one


def test_base_checkpoint_loads_into_a_class_with_a_head_and_back(tmp_path: Path) -> None:
    base = BertModel(BertConfig.from_dict(TINY))
    base.save_pretrained(tmp_path / "base")
    full, info = BertForPreTraining.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert not info.unexpected_keys
    assert all(key.startswith("cls.") for key in info.missing_keys)
    assert DECODER not in info.missing_keys
    assert not full.cls.predictions.bias.any()
    assert full.cls.predictions.decoder.weight is full.get_input_embeddings().weight
    full.save_pretrained(tmp_path / "full")
    again, info = BertModel.from_pretrained(tmp_path / "full", output_loading_info=True)
    assert not info.missing_keys
    for key, value in base.state_dict().items():
        assert torch.equal(value, again.state_dict()[key])


def test_old_names_and_stored_positions_load(tmp_path: Path) -> None:
    ours, _ = pair("BertForMaskedLM")
    ours.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for key, value in stored.items()
    }
    assert old.keys() != stored.keys()
    old["bert.embeddings.position_ids"] = torch.arange(24)[None]
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded, info = BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info, info
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in ours.state_dict().items())


# --- heads, memory, compilation --------------------------------------------------------------------------------------


def without(model: Any, layer: int, heads: list[int]) -> None:
    """The same by brute force: what these heads add to the projection is zero."""
    with torch.no_grad():
        for head in heads:
            model.bert.encoder.layer[layer].attention.output.dense.weight[:, head * 4 : head * 4 + 4] = 0


def test_pruned_heads_are_heads_that_add_nothing(tmp_path: Path) -> None:
    model = BertForMaskedLM(BertConfig.from_dict(TINY)).eval()
    zeroed = BertForMaskedLM(BertConfig.from_dict(TINY)).eval()
    zeroed.load_state_dict(model.state_dict())
    without(zeroed, 0, [0, 2])
    without(zeroed, 1, [3])
    model.prune_heads({0: [0]})
    model.prune_heads({0: [2, 0], 1: [3]})  # heads keep their first numbers, and a second time is none
    ids = tokens()
    torch.testing.assert_close(model(ids).logits, zeroed(ids).logits)
    first: Any = model.bert.encoder.layer[0].attention
    assert first.self.query.weight.shape == (8, 16)
    assert first.self.query.out_features == first.output.dense.in_features == 8
    assert model.config.pruned_heads == {0: [0, 2], 1: [3]}
    model.save_pretrained(tmp_path)
    loaded, info = BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info, info
    assert loaded.config.pruned_heads == {0: [0, 2], 1: [3]}
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.prune_heads({1: [1]})
    without(zeroed, 1, [1])
    torch.testing.assert_close(loaded(ids).logits, zeroed(ids).logits)


@pytest.mark.parametrize("heads", [{2: [0]}, {0: [4]}, {1: [0], 0: [0, 1, 2, 3]}, {-1: [0]}])
def test_heads_that_cannot_be_pruned_leave_the_model_as_it_was(heads: dict[int, list[int]]) -> None:
    model = BertForMaskedLM(BertConfig.from_dict(TINY))
    before = {key: value.shape for key, value in model.state_dict().items()}
    with pytest.raises(UsageError, match="pruned_heads"):
        model.prune_heads(heads)
    assert model.config.pruned_heads == {}
    assert {key: value.shape for key, value in model.state_dict().items()} == before


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model = BertForMaskedLM(BertConfig.from_dict(TINY | {"hidden_dropout_prob": 0.1})).train()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        torch.manual_seed(1)
        model(**padded(9), labels=hidden_labels(tokens(9))).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])  # type: ignore[union-attr]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_training_step_compiles_without_a_graph_break() -> None:
    model = BertForPreTraining(BertConfig.from_dict(TINY)).train()
    inputs = padded(8) | {"labels": hidden_labels(tokens(8)), "next_sentence_label": torch.tensor([0, 1, 0])}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    loss = compiled(**inputs).loss
    torch.testing.assert_close(loss, model(**inputs).loss)
    loss.backward()
    assert model.get_input_embeddings().weight.grad is not None


def test_pretraining_with_one_kind_of_labels_has_that_loss() -> None:
    model = BertForPreTraining(BertConfig.from_dict(TINY)).eval()
    ids, order = tokens(), torch.tensor([0, 1, 0])
    both = model(ids, labels=hidden_labels(ids), next_sentence_label=order).loss
    words, sentences = model(ids, labels=hidden_labels(ids)), model(ids, next_sentence_label=order)
    torch.testing.assert_close(words.loss + sentences.loss, both)
    torch.testing.assert_close(sentences.loss, F.cross_entropy(sentences.seq_relationship_logits, order))
    assert model(ids).loss is None


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"input_ids": tokens(25)}, "the text has 25 positions, and the table of positions has 24"),
        ({"input_ids": torch.tensor([[61]])}, "61, and the table has 61 rows"),
        ({"input_ids": torch.tensor([[-1]])}, "input_ids has -1"),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, "empty batch"),
        ({"input_ids": torch.ones(2, 3)}, "expected integers"),
        ({}, "expected exactly one of them"),
        ({"input_ids": tokens(3), "inputs_embeds": torch.zeros(3, 3, 16)}, "expected exactly one of them"),
        ({"inputs_embeds": torch.zeros(3, 5, 15)}, r"\(batch, length, 16\)"),
        ({"input_ids": tokens(5), "attention_mask": torch.ones(3, 4)}, r"attention_mask \(3, 4\)"),
        ({"input_ids": tokens(5), "token_type_ids": torch.full((3, 5), 2)}, "token_type_ids has 2"),
        ({"input_ids": tokens(5), "token_type_ids": torch.zeros(3, 4, dtype=torch.long)}, r"expected \(3, 5\)"),
        ({"input_ids": tokens(5), "position_ids": torch.full((1, 5), 24)}, "position_ids has 24"),
        ({"input_ids": tokens(5), "labels": tokens(4)}, r"labels \(3, 4\)"),
        ({"input_ids": tokens(5), "labels": torch.full((3, 5), 61)}, "label 61"),
    ],
)
def test_input_that_does_not_fit_is_named(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BertForMaskedLM(BertConfig.from_dict(TINY))(**inputs)


@pytest.mark.parametrize(
    ("options", "labels", "message"),
    [
        ({"num_labels": 3}, torch.tensor([0, 1, 3]), "label 3"),
        ({"num_labels": 3}, torch.tensor([0, 1]), r"labels \(2,\)"),
        ({"num_labels": 3}, torch.zeros(3, 2), r"labels \(3, 2\): expected \(3, 3\)"),
        ({"num_labels": 3, "problem_type": "regression"}, torch.zeros(9), r"labels \(9,\)"),
        ({"num_labels": 1}, torch.zeros(2), r"labels \(2,\)"),
    ],
)
def test_class_labels_that_do_not_fit_are_named(options: dict[str, Any], labels: torch.Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BertForSequenceClassification(BertConfig.from_dict(TINY | options))(tokens(), labels=labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"is_decoder": True}, "is_decoder is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ({"num_attention_heads": 3}, "a multiple of num_attention_heads, which is 3"),
        ({"type_vocab_size": 0}, "type_vocab_size is 0"),
        ({"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5"),
        ({"classifier_dropout": -1}, "classifier_dropout is -1"),
        ({"pruned_heads": {"1": [4]}}, "head 4 of layer 1"),
        ({"pad_token_id": 61}, "pad_token_id is 61"),
        ({"problem_type": "ranking"}, "problem_type is 'ranking'"),
    ],
)
def test_config_that_means_nothing_or_another_model_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BertModel(BertConfig.from_dict(TINY | options))


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match="'sine'"):
        BertModel(BertConfig.from_dict(TINY | {"hidden_act": "sine"}))


def test_config_has_the_keys_and_defaults_of_transformers() -> None:
    theirs = transformers.BertConfig()
    for field in dataclasses.fields(BertConfig):
        if hasattr(theirs, field.name) and field.name != "dtype":
            assert getattr(BertConfig(), field.name) == getattr(theirs, field.name), field.name
    left_out = set(transformers.BertConfig.__annotations__) - {field.name for field in dataclasses.fields(BertConfig)}
    assert left_out - {"model_type"} <= set(BertConfig.unsupported)
