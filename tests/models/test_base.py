"""What every family inherits, on the smallest of them: drawing, tying, the two ends, copies, and `bowline.nn` on it."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bowline.errors import TieError, UsageError
from bowline.models.common.pretrained_model import PreTrainedModel
from bowline.models.gpt2 import GPT2Config, GPT2LMHeadModel, GPT2Model
from bowline.nn import (
    LMHead,
    TieGuard,
    check_ties,
    declared_ties,
    find_ties,
    keep_tied,
    load_checkpoint,
    resize_vocab,
    save_checkpoint,
    tie_weights,
    untie_weights,
)

TINY: dict[str, Any] = {"vocab_size": 50, "n_positions": 20, "n_embd": 16, "n_layer": 2, "n_head": 4}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def tiny(**options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**TINY, **options)).eval()


def same(one: nn.Module, other: nn.Module) -> bool:
    mine, his = one.state_dict(), other.state_dict()
    return mine.keys() == his.keys() and all(torch.equal(mine[name], his[name]) for name in mine)


# --- drawing ----------------------------------------------------------------------------------------------------------


class Counting(GPT2LMHeadModel):
    """Counts how often each matrix is drawn."""

    drawn: dict[int, int]

    def _init_weights(self, module: nn.Module) -> None:
        self.__dict__.setdefault("drawn", {})
        self.drawn[id(module)] = self.drawn.get(id(module), 0) + 1
        super()._init_weights(module)


def test_a_seed_reproduces_a_model_and_another_gives_another() -> None:
    assert same(tiny(), tiny())
    torch.manual_seed(1)
    assert not torch.equal(GPT2LMHeadModel(GPT2Config(**TINY)).lm_head.weight, tiny().lm_head.weight)


def test_a_class_draws_only_what_it_adds_to_the_model_inside_it() -> None:
    model = Counting(GPT2Config(**TINY))
    inner = {id(module) for module in model.transformer.modules()}
    assert not inner & model.drawn.keys()
    assert model.drawn[id(model.lm_head)] == 1


def test_a_tied_model_begins_with_the_inner_model_s_own_table() -> None:
    torch.manual_seed(0)
    inner = GPT2Model(GPT2Config(**TINY))
    assert torch.equal(tiny().lm_head.weight, inner.wte.weight)


def test_init_weights_draws_everything_anew_and_ties() -> None:
    model = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    model.lm_head.weight = nn.Parameter(torch.zeros(50, 16))
    torch.manual_seed(5)
    model.init_weights()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not any((parameter == 7.0).any() for parameter in model.parameters())
    again = tiny()
    torch.manual_seed(5)
    again.init_weights()
    assert same(model, again)


def test_a_model_on_meta_is_tied_and_draws_nothing() -> None:
    state = torch.get_rng_state()
    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(**TINY))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_drawing_leaves_no_graph_and_all_that_was_trained_is() -> None:
    model = tiny()
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in model.parameters())


def test_another_family_s_config_is_refused_and_a_mapping_too() -> None:
    for config in ({"vocab_size": 9}, None, object()):
        with pytest.raises(UsageError, match="expected a GPT2Config"):
            GPT2LMHeadModel(config)  # type: ignore[arg-type]


def test_from_config_is_the_constructor() -> None:
    torch.manual_seed(0)
    assert same(GPT2LMHeadModel.from_config(GPT2Config(**TINY)), tiny())


# --- the two ends -----------------------------------------------------------------------------------------------------


def test_the_ends_are_found_by_every_class() -> None:
    model = tiny()
    assert model.get_input_embeddings() is model.transformer.wte
    assert model.get_output_embeddings() is model.lm_head
    assert model.transformer.get_input_embeddings() is model.transformer.wte
    assert model.transformer.get_output_embeddings() is None
    assert model.base_model is model.transformer.base_model is model.transformer


def test_a_new_table_takes_the_tied_head_with_it() -> None:
    model = tiny()
    table = nn.Embedding(50, 16)
    model.set_input_embeddings(table)
    assert model.lm_head.weight is table.weight
    assert model.get_input_embeddings() is table


def test_a_new_table_that_a_tied_head_cannot_follow_is_refused_and_the_old_one_stays() -> None:
    model = tiny()
    table = model.transformer.wte
    with pytest.raises(TieError, match=r"\(50, 16\).*\(60, 16\).*resize_vocab"):
        model.set_input_embeddings(nn.Embedding(60, 16))
    assert model.get_input_embeddings() is table
    assert model.lm_head.weight is table.weight


def test_a_new_table_leaves_an_untied_head_alone() -> None:
    model = tiny(tie_word_embeddings=False)
    head = model.lm_head.weight
    model.set_input_embeddings(nn.Embedding(50, 16))
    assert model.lm_head.weight is head


def test_a_new_head_stays_until_the_model_is_tied_again() -> None:
    model = tiny()
    head = nn.Linear(16, 50, bias=False)
    model.set_output_embeddings(head)
    assert model.get_output_embeddings() is head
    assert head.weight is not model.transformer.wte.weight
    model.tie_weights()
    assert head.weight is model.transformer.wte.weight


def test_a_class_without_a_head_takes_none() -> None:
    with pytest.raises(UsageError, match="GPT2Model has no head"):
        GPT2Model(GPT2Config(**TINY)).set_output_embeddings(nn.Linear(16, 50))


# --- counts -----------------------------------------------------------------------------------------------------------


def test_each_storage_is_counted_once() -> None:
    tied, untied = tiny(), tiny(tie_word_embeddings=False)
    assert untied.num_parameters() - tied.num_parameters() == 50 * 16
    assert tied.num_parameters() == sum(parameter.numel() for parameter in tied.parameters())
    alias = tiny(tie_word_embeddings=False)
    alias.lm_head.weight = nn.Parameter(alias.transformer.wte.weight.detach())
    assert alias.num_parameters() == tied.num_parameters()


def test_counts_leave_out_what_is_asked_to_be_left_out() -> None:
    model = tiny()
    everything = model.num_parameters()
    assert everything - model.num_parameters(exclude_embeddings=True) == 50 * 16 + 20 * 16
    model.transformer.wte.weight.requires_grad_(False)
    assert everything - model.num_parameters(only_trainable=True) == 50 * 16


# --- copies, casts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_a_copy_is_tied_within_itself_and_apart_from_the_original(how: str) -> None:
    model = tiny()
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert same(twin, model)
    assert twin.lm_head.weight is twin.transformer.wte.weight
    assert twin.lm_head.weight is not model.lm_head.weight
    assert twin.config == model.config
    assert torch.equal(twin(IDS).logits, model(IDS).logits)
    untie_weights(twin)
    assert model.config.tie_word_embeddings is True


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_keeps_the_tie(dtype: torch.dtype) -> None:
    model = tiny().to(dtype)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.dtype is dtype
    assert model.device.type == "cpu"
    assert model(IDS).logits.dtype is dtype


# --- bowline.nn on it -------------------------------------------------------------------------------------------------


def test_the_declaration_is_read_found_and_checked() -> None:
    model = tiny()
    assert [(tie.target, tie.source) for tie in declared_ties(model)] == [("lm_head.weight", "transformer.wte.weight")]
    assert [(tie.target, tie.source) for tie in find_ties(model)] == [("lm_head.weight", "transformer.wte.weight")]
    assert check_ties(model)
    model.lm_head.weight = nn.Parameter(torch.zeros(50, 16))
    assert not check_ties(model)
    assert not declared_ties(tiny(tie_word_embeddings=False))


def test_untying_and_tying_write_the_flag_of_the_frozen_config() -> None:
    model = tiny()
    untie_weights(model)
    assert model.lm_head.weight is not model.transformer.wte.weight
    assert torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    assert model.config.tie_word_embeddings is model.transformer.config.tie_word_embeddings is False
    model.tie_weights()  # the flag is false now, so this does nothing
    assert model.lm_head.weight is not model.transformer.wte.weight
    tie_weights(model)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.config.tie_word_embeddings is True
    assert check_ties(model)


def test_saving_and_loading_by_the_toolkit_is_the_model_s_own(tmp_path: Path) -> None:
    for name, model in (("tied", tiny()), ("untied", untie_weights_of(tiny()))):
        save_checkpoint(model, tmp_path / name)
        with torch.device("meta"):
            other = GPT2LMHeadModel(GPT2Config.from_pretrained(tmp_path / name))
        load_checkpoint(other, tmp_path / name)
        assert same(other, model)
        assert (other.lm_head.weight is other.transformer.wte.weight) is (name == "tied")
        assert same(GPT2LMHeadModel.from_pretrained(tmp_path / name), model)


def untie_weights_of(model: GPT2LMHeadModel) -> GPT2LMHeadModel:
    untie_weights(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    return model


def test_a_missing_head_of_an_untied_model_is_refused_by_the_toolkit(tmp_path: Path) -> None:
    save_checkpoint(tiny(), tmp_path)
    with pytest.raises(TieError, match=r"lm_head\.weight: not in the state"):
        load_checkpoint(tiny(tie_word_embeddings=False), tmp_path)


def test_a_vocabulary_is_resized_with_its_optimizer_and_config() -> None:
    model = tiny(pad_token_id=49)
    optimizer = torch.optim.Adam(model.parameters())
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    table = model.transformer.wte.weight
    resize_vocab(model, 64, optimizer=optimizer)
    assert model.lm_head.weight is model.transformer.wte.weight is table
    assert optimizer.state[table]["exp_avg"].shape == (64, 16)
    assert model.config.vocab_size == model.lm_head.out_features == 64
    with pytest.raises(UsageError):
        resize_vocab(model, 30)  # the padding token would go
    assert model.config.vocab_size == 64


def test_a_guard_holds_the_tie_through_training() -> None:
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = TieGuard(model, optimizer=optimizer)
    with guard.attach(optimizer):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        model.lm_head = LMHead(16, 50, bias=False)
        with pytest.raises(TieError, match=r"lm_head\.weight <- transformer\.wte\.weight"):
            optimizer.step()


def test_a_conversion_that_makes_new_parameters_keeps_the_tie_where_that_is_asked_for() -> None:
    model = tiny()
    with keep_tied(model):
        model.to("meta").to_empty(device="cpu")
    assert model.lm_head.weight is model.transformer.wte.weight
    model.init_weights()
    assert model(IDS).logits.isfinite().all()


# --- checkpointing ----------------------------------------------------------------------------------------------------


def test_gradient_checkpointing_reaches_every_part() -> None:
    model = tiny()
    model.gradient_checkpointing_enable()
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    assert len(parts) == 2
    assert all(part.gradient_checkpointing for part in parts)
    model.gradient_checkpointing_disable()
    assert not any(part.gradient_checkpointing for part in parts)


def test_outputs_are_reached_by_name_by_key_and_by_place() -> None:
    out = tiny()(IDS, labels=IDS)
    assert out.keys() == ("loss", "logits")
    assert out[0] is out["loss"] is out.loss
    assert out[1] is out[:2][1] is out.logits
    assert len(out) == 2
    loss, logits = out
    assert (loss, logits) == out.to_tuple()
    assert tiny()(IDS)[0].shape == (1, 8, 50)


def test_what_changes_a_model_does_not_change_another_of_the_same_config() -> None:
    """The config that was given stays as it is too; the model's own is one object at all levels."""
    config = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=1)
    one, other = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
    one.resize_token_embeddings(24)
    untie_weights(one)
    assert (one.config.vocab_size, one.config.tie_word_embeddings) == (24, False)
    assert one.transformer.config is one.config
    assert other.config == config
    assert (config.vocab_size, config.tie_word_embeddings) == (20, True)
