"""What a new row is, by each rule, against plain torch in float64; and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bowline.errors import UsageError
from bowline.nn.vocabulary import new_rows
from bowline.nn.vocabulary.resize import resize_vocab
from tests.nn.vocabulary.models import LM, VOCAB, WIDTH, Configured, seeded, state, unchanged


def embedding(vocab: int, width: int, dtype: torch.dtype = torch.float32, padding_idx: int | None = None) -> Any:
    model = nn.ModuleDict({"wte": nn.Embedding(vocab, width, padding_idx=padding_idx)})
    return seeded(model).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_scaled_mean_row_has_the_means_direction_and_the_median_norm(dtype: torch.dtype) -> None:
    model = embedding(101, 7, dtype, padding_idx=2)
    with torch.no_grad():
        model["wte"].weight[5] = torch.inf
    usable = [at for at in range(101) if at not in (2, 5)]
    old = model["wte"].weight.detach().double()[usable]
    expected = old.mean(0) / old.mean(0).norm() * old.norm(dim=1).median()
    resize_vocab(model, 103, new_rows="scaled-mean")
    assert torch.equal(model["wte"].weight[101:], expected.to(dtype).expand(2, 7))


def test_a_scaled_mean_of_a_bias_is_its_mean() -> None:
    model = seeded(LM(tied=False, bias=True))
    before = state(model)
    resize_vocab(model, VOCAB + 1, new_rows="scaled-mean")
    torch.testing.assert_close(model.lm_head.bias[-1], before["lm_head.bias"].mean())
    for name in ("wte.weight", "lm_head.weight"):
        torch.testing.assert_close(model.state_dict()[name][-1].norm(), before[name].norm(dim=1).median())


def test_a_mean_of_zero_has_no_direction_to_scale() -> None:
    model = embedding(4, 3)
    with torch.no_grad():
        model["wte"].weight[2:] = -model["wte"].weight[:2]
    with pytest.raises(UsageError, match=r"new_rows='scaled-mean': the mean row of wte.weight is zero"):
        resize_vocab(model, 5, new_rows="scaled-mean")
    nn.init.zeros_(model["wte"].weight)
    resize_vocab(model, 5, new_rows="scaled-mean")
    assert not model["wte"].weight.any()


@pytest.mark.real
def test_new_rows_of_a_trained_model_have_the_norms_and_first_logits_that_the_guide_shows(smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    text = "The bowline is an ancient and simple knot used to form a fixed loop at the end of a rope."
    ids = transformers.AutoTokenizer.from_pretrained(smollm2)(text, return_tensors="pt").input_ids
    size = model.config.vocab_size
    norm, logit, probability = {}, {}, {}
    for rule in ("zeros", "mean", "gaussian", "scaled-mean"):
        resize_vocab(model, size + 1, new_rows=rule)
        with torch.no_grad():
            logits = model(ids).logits[0].double()
        norm[rule] = float(model.lm_head.weight[-1].detach().norm())
        logit[rule] = float((logits[:, -1] - logits[:, :-1].mean(1)).mean())
        probability[rule] = float(logits.softmax(1)[:, -1].max())
        resize_vocab(model, size)
    typical = float(model.lm_head.weight.detach().norm(dim=1).median())
    assert norm["zeros"] == 0
    assert norm["mean"] == pytest.approx(2.18, abs=0.01)
    assert norm["gaussian"] == pytest.approx(2.18, abs=0.01)
    assert norm["scaled-mean"] == pytest.approx(typical) == pytest.approx(3.15, abs=0.01)
    assert logit["mean"] == pytest.approx(0, abs=1e-3)
    assert logit["zeros"] < -3 < 1 < logit["scaled-mean"] < 5
    assert probability["mean"] < 1e-6 < probability["scaled-mean"] < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mean_row_is_the_float64_mean_rounded_once(dtype: torch.dtype) -> None:
    model = embedding(101, 7, dtype)
    expected = model["wte"].weight.detach().double().mean(0).to(dtype)
    resize_vocab(model, 103)
    assert torch.equal(model["wte"].weight[101:], expected.expand(2, 7))


def test_a_mean_leaves_the_padding_row_out() -> None:
    model = seeded(LM(tied=False, padding_idx=2))
    others = [at for at in range(VOCAB) if at != 2]
    expected = {name: state(model)[name].double()[others].mean(0).float() for name in ("wte.weight", "lm_head.weight")}
    resize_vocab(model, VOCAB + 1)
    for name, row in expected.items():
        assert torch.equal(model.state_dict()[name][-1], row)


def test_every_tensor_takes_the_mean_of_its_own_rows() -> None:
    model = seeded(LM(tied=False, bias=True))
    before = state(model)
    resize_vocab(model, VOCAB + 1)
    for name in ("wte.weight", "lm_head.weight", "lm_head.bias"):
        torch.testing.assert_close(model.state_dict()[name][-1], before[name].mean(0), rtol=1e-6, atol=1e-6)


def test_a_barred_token_does_not_bar_the_new_ones() -> None:
    model = seeded(LM(bias=True))
    with torch.no_grad():
        model.lm_head.bias[3] = -torch.inf
    resize_vocab(model, VOCAB + 1)
    finite = [at for at in range(VOCAB) if at != 3]
    torch.testing.assert_close(model.lm_head.bias[-1], model.lm_head.bias[finite].mean())


def test_gaussian_rows_have_hewitts_mean_and_covariance() -> None:
    torch.manual_seed(0)
    model = embedding(50, 3, torch.float64)
    with torch.no_grad():
        model["wte"].weight[:, 1] += 2 * model["wte"].weight[:, 0]
    old = model["wte"].weight.detach().clone()
    resize_vocab(model, 50 + 40_000, new_rows="gaussian")
    new = model["wte"].weight.detach()[50:]
    covariance = 1e-5 * torch.cov(old.T, correction=0)
    torch.testing.assert_close(torch.cov(new.T, correction=0), covariance, rtol=0.05, atol=1e-7)
    torch.testing.assert_close(new.mean(0), old.mean(0), rtol=0, atol=1e-4)


def test_gaussian_rows_stay_where_a_singular_covariance_lets_them() -> None:
    model = embedding(2, 16, torch.float64)  # two points: all deviations are along one line
    old = model["wte"].weight.detach().clone()
    resize_vocab(model, 9, new_rows="gaussian")
    away = model["wte"].weight.detach()[2:] - old.mean(0)
    line = (old[1] - old[0]) / (old[1] - old[0]).norm()
    torch.testing.assert_close(away - (away @ line)[:, None] * line, torch.zeros(7, 16).double(), rtol=0, atol=1e-12)
    assert (away.norm(dim=1) > 0).all()


def test_gaussian_rows_of_identical_rows_are_that_row() -> None:
    model = embedding(9, 4)
    nn.init.constant_(model["wte"].weight, 0.5)
    resize_vocab(model, 12, new_rows="gaussian")
    assert torch.equal(model["wte"].weight, torch.full((12, 4), 0.5))


def test_blocks_do_not_change_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, blocks = embedding(101, 7, torch.float64), embedding(101, 7, torch.float64)
    keep = torch.randperm(101)[:60].tolist()
    resize_vocab(whole, keep, pad_to_multiple_of=64)
    monkeypatch.setattr(new_rows, "BLOCK_ELEMENTS", 50)
    resize_vocab(blocks, keep, pad_to_multiple_of=64)
    torch.testing.assert_close(blocks["wte"].weight, whole["wte"].weight, rtol=0, atol=1e-15)


def test_a_copy_is_the_old_tokens_row_in_each_tensor() -> None:
    model = seeded(LM(tied=False, bias=True))
    before = state(model)
    resize_vocab(model, [1, 2], pad_to_multiple_of=4, new_rows="copy:7")
    for name in ("wte.weight", "lm_head.weight", "lm_head.bias"):
        assert torch.equal(model.state_dict()[name][2:], before[name][7].expand(2, *before[name].shape[1:]))


def test_a_function_sees_the_vocabulary_first_and_makes_the_rows() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(VOCAB, WIDTH), "dense": nn.Linear(VOCAB, 3, bias=False)})
    seen = []

    def rule(old: torch.Tensor, count: int) -> torch.Tensor:
        seen.append((tuple(old.shape), count))
        return old[:count] * 2

    resize_vocab(seeded(model), VOCAB + 2, new_rows=rule, axes={"wte.weight": 0, "dense.weight": 1})
    dense = model.get_parameter("dense.weight")
    assert seen == [((VOCAB, WIDTH), 2), ((VOCAB, 3), 2)]
    assert torch.equal(dense[:, VOCAB:], dense[:, :2] * 2)


def test_an_integer_table_repeats_its_rows() -> None:
    model = seeded(LM())
    model.register_buffer("expert_of_token", torch.arange(VOCAB)[:, None] % 3)
    axes = {"wte.weight": 0, "expert_of_token": 0}
    resize_vocab(model, VOCAB + 2, axes=axes)
    assert model.get_buffer("expert_of_token")[VOCAB:].tolist() == [[0], [1]]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("median", "'median'"),
        ("copy:", "'copy:'"),
        ("copy:11", "ids 0 to 10"),
        (None, "None"),
        (lambda old, count: None, "NoneType for wte.weight"),
        (lambda old, count: old[: count - 1], r"shape \(1, 4\) for wte.weight, expected a tensor of shape \(2, 4\)"),
    ],
)
def test_a_rule_that_means_nothing_is_refused_before_anything_changes(wrong: Any, says: str) -> None:
    model = seeded(Configured())
    before = state(model)
    with pytest.raises(UsageError, match=says):
        resize_vocab(model, VOCAB + 2, new_rows=wrong)
    assert unchanged(model, before)
    assert model.config.vocab_size == VOCAB


def test_a_function_that_fails_for_the_second_tensor_leaves_the_first() -> None:
    model = seeded(LM(tied=False))
    before = state(model)
    calls = []

    def rule(old: torch.Tensor, count: int) -> torch.Tensor:
        calls.append(count)
        if len(calls) > 1:
            raise RuntimeError("out of ideas")
        return old[:count]

    with pytest.raises(RuntimeError, match="out of ideas"):
        resize_vocab(model, 20, new_rows=rule)
    assert unchanged(model, before)


@pytest.mark.parametrize(
    ("n", "says"),
    [
        (0, "at least one"),
        (-3, "at least one"),
        (True, "a number of tokens"),
        (2.5, "a number of tokens"),
        ("10", "a number of tokens"),
        ([], "empty"),
        ([0, 11], "token 11"),
        ([-1], "token -1"),
        ([4, 5, 4], "n lists token 4 twice"),
        ([1.5], "a sequence of the ids"),
        (
            torch.arange(VOCAB) > 3,
            r"n is a boolean mask, expected .* a sequence of the ids .*mask\.nonzero\(\)\.flatten",
        ),
        (torch.tensor(True), "n is a boolean mask"),
        ([True, False], "a sequence of the ids"),
        ({0: 1, 1: 0}, "n is a dict, expected .* a sequence of the ids"),
        ({0, 1}, "n is a set, expected .* a sequence of the ids"),
    ],
)
def test_a_size_that_means_nothing_is_refused(n: Any, says: str) -> None:
    model = seeded(LM())
    before = state(model)
    with pytest.raises(UsageError, match=says):
        resize_vocab(model, n)
    assert unchanged(model, before)


@pytest.mark.parametrize("multiple", [0, -8, 2.0, True])
def test_a_multiple_that_means_nothing_is_refused(multiple: Any) -> None:
    with pytest.raises(UsageError, match="pad_to_multiple_of"):
        resize_vocab(LM(), 20, pad_to_multiple_of=multiple)


@pytest.mark.parametrize("n", [5, [0, 1, 2]])
def test_a_padding_row_is_not_cut_off(n: Any) -> None:
    model = seeded(LM(padding_idx=7))
    before = state(model)
    with pytest.raises(UsageError, match=r"wte\.padding_idx is token 7.*keep token 7"):
        resize_vocab(model, n)
    assert unchanged(model, before)


@pytest.mark.parametrize("key", ["eos_token_id", "image_token_index", "suppress_tokens"])
def test_a_token_that_the_config_names_is_not_dropped(key: str) -> None:
    value: Any = [1, 8] if key == "suppress_tokens" else 8
    model = seeded(Configured(**{key: value}))
    with pytest.raises(UsageError, match=rf"config\.{key} is token 8"):
        resize_vocab(model, [0, 1])
    assert model.config.vocab_size == VOCAB
    assert len(model.wte.weight) == VOCAB


def test_a_padding_token_from_which_positions_count_has_to_stay() -> None:
    class Roberta(LM):
        def __init__(self) -> None:
            super().__init__(padding_idx=1)
            self.position_embeddings = nn.Embedding(64, WIDTH, padding_idx=1)

    with pytest.raises(UsageError, match="position_embeddings counts positions from the padding token, 1"):
        resize_vocab(seeded(Roberta()), [1, 0, 2])
    resize_vocab(seeded(Roberta()), [0, 1, 5])
