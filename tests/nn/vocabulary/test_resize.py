"""Every vocabulary axis grows and shrinks together, each tensor stays itself, and old tokens say what they said."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bowline.errors import UsageError
from bowline.nn.vocabulary import new_rows, resize
from bowline.nn.vocabulary.resize import resize_vocab
from tests.nn.vocabulary.models import LM, VOCAB, WIDTH, Configured, seeded, state, unchanged


@pytest.mark.parametrize("tied", [True, False])
def test_old_tokens_keep_their_logits_when_the_vocabulary_grows(tied: bool) -> None:
    model = seeded(LM(tied=tied, bias=True))
    ids = torch.arange(VOCAB)[None]
    before = model(ids)
    change = resize_vocab(model, 15)
    after = model(torch.arange(15)[None])
    assert after.shape == (1, 15, 15)
    torch.testing.assert_close(after[:, :VOCAB, :VOCAB], before)
    assert (change.old_size, change.new_size, change.kept.tolist()) == (VOCAB, 15, list(range(VOCAB)))
    assert set(change.tensors) == {"wte.weight", "lm_head.weight", "lm_head.bias"}


def test_parameters_are_the_same_objects_and_a_tie_stays_one() -> None:
    model = seeded(LM(tied=True))
    before = dict(model.named_parameters(remove_duplicate=False))
    resize_vocab(model, 20)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is before[name] for name in before)
    assert model.lm_head.weight is model.wte.weight
    assert (model.wte.num_embeddings, model.lm_head.out_features) == (20, 20)


def test_an_untied_head_stays_untied_and_keeps_its_trained_rows() -> None:
    model = seeded(LM(tied=False))
    head = model.lm_head.weight.detach().clone()
    resize_vocab(model, 20)
    assert model.lm_head.weight is not model.wte.weight
    assert torch.equal(model.lm_head.weight[:VOCAB], head)


def test_a_list_keeps_tokens_and_gives_them_new_ids() -> None:
    model = seeded(LM(tied=True, bias=True))
    before = model(torch.tensor([[7, 2, 9]]))
    change = resize_vocab(model, [9, 2, 7])
    torch.testing.assert_close(model(torch.tensor([[2, 1, 0]])), before[..., [9, 2, 7]])
    assert change.remap.tolist() == [-1, -1, 1, -1, -1, -1, -1, 2, -1, 0, -1]
    assert change.kept.tolist() == [9, 2, 7]


def test_ids_to_keep_may_be_a_tensor_or_a_range() -> None:
    one, other = seeded(LM()), seeded(LM())
    resize_vocab(one, torch.tensor([0, 1, 2]))
    resize_vocab(other, range(3))
    assert torch.equal(one.wte.weight, other.wte.weight)


def test_a_multiple_rounds_up_and_the_rows_beyond_are_new() -> None:
    model = seeded(LM())
    old = model.wte.weight.detach().clone()
    change = resize_vocab(model, 6, pad_to_multiple_of=4, new_rows="zeros")
    assert (change.new_size, len(change.kept)) == (8, 6)
    assert torch.equal(model.wte.weight[:6], old[:6])
    assert not model.wte.weight[6:].any()


@settings(max_examples=40)
@given(
    more=st.integers(0, 30),
    tied=st.booleans(),
    rule=st.sampled_from(["mean", "gaussian", "zeros", "copy:3"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_growing_and_shrinking_back_gives_the_old_bits(more: int, tied: bool, rule: str, dtype: torch.dtype) -> None:
    model = seeded(LM(tied=tied, bias=True)).to(dtype)
    before = state(model)
    resize_vocab(model, VOCAB + more, new_rows=rule)
    resize_vocab(model, VOCAB)
    assert unchanged(model, before)


@settings(max_examples=40)
@given(keep=st.lists(st.integers(0, VOCAB - 1), min_size=1, unique=True), multiple=st.sampled_from([None, 1, 4, 16]))
def test_a_kept_token_has_its_old_row_wherever_it_lands(keep: list[int], multiple: int | None) -> None:
    model = seeded(LM(tied=False, bias=True))
    before = state(model)
    change = resize_vocab(model, keep, pad_to_multiple_of=multiple)
    for name in ("wte.weight", "lm_head.weight", "lm_head.bias"):
        now = model.state_dict()[name]
        assert len(now) == math.ceil(len(keep) / (multiple or 1)) * (multiple or 1)
        for old in range(VOCAB):
            new = int(change.remap[old])
            assert (new >= 0) == (old in keep)
            assert new < 0 or torch.equal(now[new], before[name][old])


def test_the_tensors_of_the_rest_are_not_touched() -> None:
    model = seeded(LM())
    layer = model.layer.weight.detach().clone()
    resize_vocab(model, 30)
    assert torch.equal(model.layer.weight, layer)


# --- padding, sizes, gradients, graphs -------------------------------------------------------------------------------


def test_a_padding_row_moves_with_its_token() -> None:
    model = seeded(LM(tied=False, padding_idx=5))
    resize_vocab(model, [5, 1])
    assert model.wte.padding_idx == 0
    model(torch.tensor([[0, 1]])).sum().backward()
    assert model.wte.weight.grad is not None
    assert not model.wte.weight.grad[0].any()
    assert model.wte.weight.grad[1].any()


def test_a_gradient_is_cleared_and_the_next_one_has_the_new_shape() -> None:
    model = seeded(LM())
    model(torch.tensor([[1]])).sum().backward()
    resize_vocab(model, 15)
    assert model.wte.weight.grad is None
    model(torch.tensor([[14]])).sum().backward()
    assert model.get_parameter("wte.weight").grad.shape == (15, WIDTH)


def test_a_loss_that_is_still_held_does_not_stop_the_next_backward() -> None:
    model = seeded(LM())
    held = model(torch.tensor([[1]])).sum()
    resize_vocab(model, 15)
    model(torch.tensor([[14]])).sum().backward()
    assert model.wte.weight.grad.shape == (15, WIDTH)
    del held


def test_hooks_stay() -> None:
    model = seeded(LM())
    seen: list[Any] = []
    model.wte.weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    resize_vocab(model, 15)
    model(torch.tensor([[14]])).sum().backward()
    assert seen == [(15, WIDTH)]


def test_a_frozen_table_stays_frozen() -> None:
    model = seeded(LM())
    model.wte.weight.requires_grad_(False)
    resize_vocab(model, 15)
    assert not model.lm_head.weight.requires_grad


def test_a_resize_inside_inference_mode_leaves_a_model_that_trains() -> None:
    model = seeded(LM())
    with torch.inference_mode():
        resize_vocab(model, 15)
    model(torch.tensor([[14]])).sum().backward()
    assert model.wte.weight.grad is not None


def test_a_model_on_meta_changes_its_shapes() -> None:
    with torch.device("meta"):
        model = LM()
    resize_vocab(model, 15, new_rows="gaussian")
    assert model.lm_head.weight.is_meta
    assert model.lm_head.weight.shape == (15, WIDTH)


# --- configs ---------------------------------------------------------------------------------------------------------


def test_the_config_and_the_module_say_the_new_size() -> None:
    model = seeded(Configured())
    resize_vocab(model, 13, pad_to_multiple_of=8)
    assert model.config.vocab_size == model.vocab_size == 16


def test_a_config_that_was_wrong_before_is_right_afterwards() -> None:
    class BertModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = nn.ModuleDict({"word_embeddings": nn.Embedding(VOCAB, WIDTH)})
            self.config = SimpleNamespace(vocab_size=VOCAB - 2)

    model = BertModel()
    resize_vocab(model, VOCAB + 1)
    assert model.config.vocab_size == VOCAB + 1


def test_special_ids_follow_their_tokens() -> None:
    model = seeded(Configured(pad_token_id=9, eos_token_id=[2, 9], bos_token_id=None, num_tokens=9))
    resize_vocab(model, [2, 9])
    assert (model.config.pad_token_id, model.config.eos_token_id) == (1, [0, 1])
    assert (model.config.bos_token_id, model.config.num_tokens) == (None, 9)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([[[5], -100.0], [[7, 8], 3]], [[[2], -100.0], [[1, 0], 3]]),
        ({(5,): -100.0, (7, 8): 3}, {(2,): -100.0, (1, 0): 3}),
    ],
    ids=["pairs", "mapping"],
)
def test_the_sequences_of_a_bias_follow_and_its_numbers_stay(before: Any, after: Any) -> None:
    model = seeded(Configured())
    model.generation_config = SimpleNamespace(sequence_bias=before)
    resize_vocab(model, [8, 7, 5, 3, 0])
    assert model.generation_config.sequence_bias == after
    with pytest.raises(UsageError, match=r"generation_config\.sequence_bias is token 2, which would be dropped"):
        resize_vocab(model, [0, 1])


def test_the_ids_of_each_task_follow_and_its_other_settings_stay() -> None:
    tasks: dict[str, Any] = {
        "translation": {"forced_bos_token_id": 5, "max_length": 5, "prefix": "to French: "},
        "none": None,
    }
    model = seeded(Configured(task_specific_params=tasks))
    resize_vocab(model, [8, 7, 5, 3, 0])
    moved = {"forced_bos_token_id": 2, "max_length": 5, "prefix": "to French: "}
    assert model.config.task_specific_params == {"translation": moved, "none": None}
    assert tasks["translation"]["forced_bos_token_id"] == 5, "another config may hold the same mapping"
    with pytest.raises(
        UsageError, match=r"config\.task_specific_params\['translation'\]\['forced_bos_token_id'\] is tok"
    ):
        resize_vocab(model, [0, 1])


def test_an_id_that_was_never_in_the_vocabulary_is_left_alone() -> None:
    model = seeded(Configured(eos_token_id=50256))
    resize_vocab(model, 5)
    assert model.config.eos_token_id == 50256


def test_a_config_given_as_a_dict_follows_too() -> None:
    model = seeded(LM())
    model.config = {"model_type": "mine", "vocab_size": VOCAB, "eos_token_id": 4}
    resize_vocab(model, [4, 0])
    assert model.config == {"model_type": "mine", "vocab_size": 2, "eos_token_id": 0}


def test_a_tensor_without_vocabulary_rows_in_a_list_of_modules_is_found_by_its_tie() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(9, 4), "positions": nn.Embedding(32, 4), "out": nn.Linear(4, 9)})
    model["out"].weight = model["emb"].weight
    change = resize_vocab(model, 10)
    assert set(change.tensors) == {"emb.weight", "out.weight", "out.bias"}
    assert model["positions"].num_embeddings == 32


# --- all or nothing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_running_out_of_memory_halfway_leaves_the_model_as_it_was(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(LM(tied=False, bias=True))
    model.config = SimpleNamespace(vocab_size=VOCAB)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    before, moments = state(model), {p: optimizer.state[p]["momentum_buffer"].clone() for p in model.parameters()}
    calls: list[int] = []

    def spread(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == at:
            raise MemoryError("no room")
        return new_rows.spread(*arguments)

    monkeypatch.setattr(resize, "spread", spread)
    with pytest.raises(MemoryError):
        resize_vocab(model, 30, optimizer=optimizer)
    assert unchanged(model, before)
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], moments[p]) for p in model.parameters())
    assert (model.config.vocab_size, model.wte.num_embeddings, model.lm_head.out_features) == (VOCAB,) * 3


def test_a_resize_to_the_same_size_touches_nothing() -> None:
    model = seeded(LM())
    model(torch.tensor([[1]])).sum().backward()
    at, grad = model.wte.weight.data_ptr(), model.wte.weight.grad
    resize_vocab(model, VOCAB)
    assert model.wte.weight.data_ptr() == at
    assert model.wte.weight.grad is grad
