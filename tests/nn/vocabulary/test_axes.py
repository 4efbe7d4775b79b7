"""Which tensors have a vocabulary axis: by structure, by declaration, by the caller's word; and what is refused."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from bowline.errors import TieError, UsageError
from bowline.nn.vocabulary.axis_search import find_vocabulary
from bowline.nn.vocabulary.resize import resize_vocab
from tests.nn.vocabulary.models import LM, VOCAB, WIDTH, seeded, state, unchanged


def axes(model: nn.Module) -> dict[str, int]:
    return {slot.name: axis.axis for axis in find_vocabulary(model).axes for slot in axis.slots}


class Head(nn.Module):
    """BERT's: a bias of its own beside the decoder's, and a matrix that need not be a `Linear`'s."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, WIDTH))
        self.bias = nn.Parameter(torch.randn(VOCAB))


class WithBuffer(LM):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("final_logits_bias", torch.arange(VOCAB, dtype=torch.float32)[None])


class Declared(nn.Module):
    """Two tables and two biases that are declared tied, and are not."""

    ties = (("decoder.weight", "encoder.weight"), ("head.bias", "bias"))

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(VOCAB, WIDTH)
        self.decoder = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)
        self.bias = nn.Parameter(torch.randn(VOCAB))


def test_a_tied_model_has_one_table_under_two_names_and_a_bias() -> None:
    assert axes(LM(bias=True)) == {"wte.weight": 0, "lm_head.weight": 0, "lm_head.bias": 0}


def test_an_untied_head_is_the_one_linear_with_as_many_outputs() -> None:
    assert axes(LM(tied=False, bias=True)) == {"wte.weight": 0, "lm_head.weight": 0, "lm_head.bias": 0}


def test_a_head_that_is_no_linear_and_its_bias_are_found() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(VOCAB, WIDTH), "cls": Head()})
    assert axes(model) == {"wte.weight": 0, "cls.weight": 0, "cls.bias": 0}


def test_a_row_of_logit_biases_is_resized_along_its_second_axis() -> None:
    model = seeded(WithBuffer())
    assert axes(model)["final_logits_bias"] == 1
    resize_vocab(model, 13)
    mean = sum(range(VOCAB)) / VOCAB
    assert model.final_logits_bias.tolist() == [[*map(float, range(VOCAB)), mean, mean]]


def test_what_is_declared_tied_is_the_vocabulary_even_where_it_is_untied() -> None:
    names = {"encoder.weight", "decoder.weight", "head.weight", "head.bias", "bias"}
    assert set(axes(Declared())) == names


def test_a_class_that_names_its_embedding_is_believed() -> None:
    class Named(LM):
        def __init__(self) -> None:
            super().__init__(tied=False)
            self.positions = nn.Embedding(512, WIDTH)

        def get_input_embeddings(self) -> nn.Module:
            return self.wte

    assert set(axes(Named())) == {"wte.weight", "lm_head.weight"}


def test_a_longer_table_of_positions_is_not_taken_for_the_tied_vocabulary() -> None:
    model = LM()
    model.wpe = nn.Embedding(512, WIDTH)
    assert set(axes(model)) == {"wte.weight", "lm_head.weight"}


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("wpe", nn.Embedding(VOCAB, WIDTH)),
        ("up", nn.Linear(WIDTH, VOCAB)),
        ("down", nn.Linear(VOCAB, WIDTH)),
        ("norm", nn.LayerNorm(VOCAB)),
        ("conv", nn.Conv1d(VOCAB, 3, 1)),
    ],
)
def test_another_axis_of_that_length_is_refused_by_name(name: str, other: nn.Module) -> None:
    model = seeded(LM())
    model.add_module(name, other)
    before = state(model)
    with pytest.raises(TieError, match=rf"wte\.weight has {VOCAB} rows.*{name}\.weight") as caught:
        resize_vocab(model, 20)
    assert "axes=" in str(caught.value)
    assert unchanged(model, before)


def test_axes_decide_what_structure_cannot() -> None:
    model = seeded(LM())
    model.wpe = nn.Embedding(VOCAB, WIDTH)
    change = resize_vocab(model, 20, axes={"wte.weight": 0})
    assert set(change.tensors) == {"wte.weight", "lm_head.weight"}
    assert model.wpe.num_embeddings == VOCAB
    assert model.lm_head.out_features == 20


def test_axes_may_name_a_transposed_matrix() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(VOCAB, WIDTH), "dense": nn.Linear(VOCAB, WIDTH, bias=False)})
    dense = cast(nn.Linear, model["dense"])
    old = dense.weight.detach().clone()
    resize_vocab(model, [4, 0], axes={"wte.weight": 0, "dense.weight": -1})
    assert torch.equal(dense.weight, old[:, [4, 0]])
    assert (dense.in_features, dense.out_features) == (2, WIDTH)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({}, UsageError, "expected"),
        ({"wte.weight": 2}, UsageError, r"shape \(11, 4\)"),
        ({"wte.weight": True}, UsageError, "expected one of its axes"),
        ({"wte.wieght": 0}, TieError, r"nearest are.*wte\.weight"),
        ({"wte.weight": 0, "layer.weight": 0}, TieError, r"11 entries.*layer\.weight has 4"),
        ({"wte.weight": 0, "lm_head.weight": 1}, TieError, r"11 entries.*lm_head\.weight has 4"),
    ],
)
def test_axes_that_cannot_be_are_refused(wrong: dict[str, int], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        resize_vocab(LM(), 20, axes=wrong)


def test_a_square_table_is_refused() -> None:
    with pytest.raises(TieError, match="it is unclear which axis is the vocabulary's"):
        resize_vocab(nn.ModuleDict({"wte": nn.Embedding(WIDTH, WIDTH)}), 20)


def test_a_model_without_an_embedding_is_refused() -> None:
    with pytest.raises(TieError, match=r"no nn\.Embedding"):
        resize_vocab(nn.Linear(2, 3), 20)


def test_an_alias_is_refused_because_resizing_would_part_it() -> None:
    model = LM(tied=False)
    model.lm_head.weight = nn.Parameter(model.wte.weight.detach())
    with pytest.raises(TieError, match=r"wte\.weight|lm_head\.weight.*one memory") as caught:
        resize_vocab(model, 20)
    assert "tie_weights" in str(caught.value)


def test_a_subclass_that_computes_is_refused() -> None:
    class Packed(torch.Tensor):
        pass

    model = LM(tied=False)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(Packed))
    with pytest.raises(TieError, match=r"lm_head\.weight: is a Packed"):
        resize_vocab(model, 20)


def test_a_parametrized_head_is_refused() -> None:
    model = LM(tied=False)
    nn.utils.parametrizations.weight_norm(model.lm_head)
    with pytest.raises(TieError, match="parametrizations"):
        resize_vocab(model, 20)


def test_a_head_that_was_quantised_into_another_module_is_refused() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out_features = VOCAB
            self.register_buffer("packed", torch.zeros(3, dtype=torch.uint8))

    model = LM(tied=False)
    model.lm_head = Packed()  # type: ignore[assignment]
    with pytest.raises(TieError, match="lm_head: is a Packed"):
        resize_vocab(model, 20)


def test_a_distributed_wrapper_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    with pytest.raises(UsageError, match="DistributedDataParallel"):
        resize_vocab(wrapper, 20)


class BertModel(nn.Module):
    """A class of a known name, with its embedding under the known name: what it calls its tensors is believed."""

    def __init__(self, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {"word_embeddings": nn.Embedding(vocab, WIDTH), "position_embeddings": nn.Embedding(VOCAB, WIDTH)}
        )


def test_a_known_class_needs_no_inference_and_no_transformers() -> None:
    assert axes(BertModel()) == {"embeddings.word_embeddings.weight": 0}


def test_a_head_around_a_known_class_is_part_of_its_vocabulary() -> None:
    model = nn.ModuleDict({"bert": BertModel(), "norm": nn.LayerNorm(WIDTH), "head": nn.Linear(WIDTH, VOCAB)})
    names = {"bert.embeddings.word_embeddings.weight", "head.weight", "head.bias"}
    assert set(axes(model)) == names


def test_a_second_model_beside_a_known_class_is_refused() -> None:
    model = nn.ModuleDict({"bert": BertModel(), "wte": nn.Embedding(40, WIDTH), "head": nn.Linear(WIDTH, 40)})
    with pytest.raises(TieError, match=r"two vocabularies: bert\.embeddings\.word_embeddings\.weight, and wte\.weight"):
        resize_vocab(model, 50)
    assert set(resize_vocab(model, 50, axes={"wte.weight": 0, "head.weight": 0}).tensors) == {
        "wte.weight",
        "head.weight",
        "head.bias",
    }


def test_two_known_classes_with_a_table_each_are_refused() -> None:
    model = nn.ModuleDict({"encoder": BertModel(), "decoder": BertModel()})
    with pytest.raises(TieError, match="two vocabularies") as caught:
        resize_vocab(model, 50)
    assert "model.decoder" in str(caught.value)


def test_a_subclass_of_a_known_class_may_add_a_head() -> None:
    class Mine(BertModel):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, VOCAB)
            self.embeddings["position_embeddings"] = nn.Embedding(64, WIDTH)

    assert set(axes(Mine())) == {"embeddings.word_embeddings.weight", "head.weight", "head.bias"}
