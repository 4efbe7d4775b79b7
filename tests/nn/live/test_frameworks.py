"""accelerate and transformers beside plain torch: what they do to a tie on meta, and what they do not see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bowline.errors import TieError
from bowline.nn import check_ties, find_ties, tie_weights
from bowline.nn.guards.keep_tied import keep_tied
from bowline.nn.state.load_checkpoint import load_checkpoint
from bowline.nn.state.save_checkpoint import save_checkpoint
from tests.nn.models import HEAD, TinyLM, tied

accelerate = pytest.importorskip("accelerate")
modeling = pytest.importorskip("accelerate.utils.modeling")

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


class BornTied(TinyLM):
    """Tied in its constructor, as most models are."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.emb.weight


def empty(build: Any) -> Any:
    with accelerate.init_empty_weights():
        return build()


def is_tied(model: Any) -> bool:
    return model.head.weight is model.emb.weight


# --- accelerate -------------------------------------------------------------------------------------------------------


def test_accelerate_unties_what_is_built_on_meta_and_its_own_look_finds_nothing_wrong() -> None:
    model = empty(BornTied)
    assert not is_tied(model)
    assert modeling.find_tied_parameters(model) == []
    assert check_ties(model)["head.weight"].state == "ALIAS"


def test_tie_weights_mends_it_on_meta() -> None:
    model = empty(BornTied)
    tie_weights(model)
    assert is_tied(model)
    assert model.emb.weight.is_meta
    assert modeling.find_tied_parameters(model) == [sorted(HEAD)]


def test_tying_under_init_empty_weights_works_with_tie_weights_and_not_by_assignment() -> None:
    with accelerate.init_empty_weights():
        by_assignment, by_name = tied(TinyLM()), TinyLM()
        tie_weights(by_name)
    assert not is_tied(by_assignment)
    assert is_tied(by_name)


def test_a_checkpoint_of_one_matrix_leaves_accelerates_head_on_meta(tmp_path: Path) -> None:
    save_checkpoint(tied(TinyLM(seed=1)), tmp_path)
    model = empty(BornTied)
    accelerate.load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"})
    assert model.head.weight.is_meta, "and nothing was said"

    model = empty(BornTied)
    tie_weights(model)
    accelerate.load_checkpoint_in_model(model, tmp_path, device_map={"": "cpu"})
    assert is_tied(model)
    assert torch.equal(model(IDS), tied(TinyLM(seed=1))(IDS))


def test_load_checkpoint_ties_what_is_declared(tmp_path: Path) -> None:
    save_checkpoint(tied(TinyLM(seed=1)), tmp_path)
    model = empty(BornTied)
    report = load_checkpoint(model, tmp_path)
    assert [(tie.target, tie.source) for tie in report.tied] == [HEAD]
    assert is_tied(model)
    assert torch.equal(model(IDS), tied(TinyLM(seed=1))(IDS))


def test_accelerate_sees_no_alias_and_find_ties_does() -> None:
    model = tied(TinyLM())
    assert modeling.find_tied_parameters(model) == [sorted(HEAD)]
    model.head.weight = nn.Parameter(model.emb.weight.detach())
    assert modeling.find_tied_parameters(model) == []
    assert [(tie.target, tie.source) for tie in find_ties(model).aliases] == [HEAD]


def test_a_head_that_is_rebuilt_empty_inside_takes_the_values_that_are_there() -> None:
    model = tied(TinyLM())
    expected = model(IDS).detach()
    with keep_tied(model), accelerate.init_empty_weights():
        model.head = nn.Linear(4, 11, bias=False)
    assert is_tied(model)
    assert torch.equal(model(IDS), expected)


def test_both_ends_rebuilt_empty_inside_are_one_on_meta() -> None:
    model = tied(TinyLM())
    with keep_tied(model), accelerate.init_empty_weights():
        model.head, model.emb = nn.Linear(4, 11, bias=False), nn.Embedding(11, 4)
    assert is_tied(model)
    assert model.emb.weight.is_meta


@pytest.mark.filterwarnings("ignore")  # whatever accelerate says of the machine it finds
def test_a_prepared_model_and_its_optimizer_are_right_when_tied_first() -> None:
    model = tied(TinyLM())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, wrapped = accelerate.Accelerator(cpu=True).prepare(model, optimizer)
    prepared(IDS).square().sum().backward()
    wrapped.step()
    assert check_ties(prepared, optimizer=wrapped)


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).eval()


def gpt2_is_tied(model: Any) -> bool:
    return model.lm_head.weight is model.transformer.wte.weight


def test_a_transformers_model_is_untied_by_a_trip_over_meta_and_kept_inside(gpt2: Any) -> None:
    state = {name: value.clone() for name, value in gpt2.state_dict().items()}
    expected = gpt2(IDS).logits.detach()
    with keep_tied(gpt2):
        gpt2.to("meta")
        gpt2.load_state_dict(state, assign=True)
    assert gpt2_is_tied(gpt2)
    assert check_ties(gpt2)
    assert torch.equal(gpt2(IDS).logits, expected)

    gpt2.to("meta").to_empty(device="cpu")
    gpt2.load_state_dict(state)
    assert not gpt2_is_tied(gpt2)
    assert gpt2.config.tie_word_embeddings, "and its config says that it is tied"
    assert check_ties(gpt2)["lm_head.weight"].state == "EQUAL"


def test_resizing_by_transformers_inside_keeps_the_tie(gpt2: Any) -> None:
    with keep_tied(gpt2):
        gpt2.resize_token_embeddings(40, mean_resizing=False)
    assert gpt2_is_tied(gpt2)
    assert gpt2.lm_head.out_features == gpt2.transformer.wte.num_embeddings == 40
    assert check_ties(gpt2)


def test_setting_an_embedding_of_other_values_leaves_transformers_head_old_and_is_a_conflict_inside(gpt2: Any) -> None:
    fresh = nn.Embedding(32, 8)
    with pytest.raises(TieError, match=r"the module of transformer\.wte\.weight was replaced"), keep_tied(gpt2):
        gpt2.set_input_embeddings(fresh)
        assert gpt2.lm_head.weight is not fresh.weight, "transformers waits for its own tie_weights()"


def test_a_policy_says_that_the_new_embedding_is_meant(gpt2: Any) -> None:
    fresh = nn.Embedding(32, 8)
    values = fresh.weight.detach().clone()
    with keep_tied(gpt2, on_conflict="source"):
        gpt2.set_input_embeddings(fresh)
    assert gpt2_is_tied(gpt2)
    assert torch.equal(gpt2.lm_head.weight, values)
