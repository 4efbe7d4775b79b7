"""What each parameter is there for: against tables written by hand, and against what the models compute."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F  # noqa: N812

from bowline.errors import UsageError
from bowline.nn import find_ties, tie_weights
from bowline.nn.init import Fused, find_roles, init_weights
from bowline.recipes import Recipe, Role, constant
from tests.nn.init.tiny import BODIES, bowlines, transformers_model
from tests.nn.models import BertLike, TinyLM

pytestmark = pytest.mark.usefixtures("quiet_transformers")


def expected(model: nn.Module, matrices: dict[str, str]) -> dict[str, str]:
    """The table's word for matrices; of the rest, norms and biases are told by their names."""
    by_name = {}
    for name, parameter in model.named_parameters():
        short = name.removesuffix(".weight")
        if short in matrices:
            by_name[name] = matrices[short]
        elif re.search(r"norm|ln_", name.rpartition(".")[0], re.IGNORECASE):
            by_name[name] = "norm weight" if name.endswith("weight") else "norm bias"
        elif parameter.ndim == 1 and name.endswith("bias"):
            by_name[name] = "bias"
    return by_name


def said(model: nn.Module, roles: dict[str, Role] | None = None) -> dict[str, str]:
    return {name: str(role) for name, role in find_roles(model, roles).items()}


@pytest.mark.parametrize("name", BODIES)
def test_roles_in_transformers_models(name: str) -> None:
    model, matrices = transformers_model(name), BODIES[name][3]
    found = said(model)
    assert found == expected(model, matrices)
    assert set(found) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "t5", "lstm"])
def test_roles_in_the_families(family: str, tied: bool) -> None:
    model, matrices = bowlines(tied=tied)[family]
    found = said(model)
    assert found == expected(model, matrices)
    targets = {tie.target for tie in find_ties(model)}
    assert set(found) == {name for name, _ in model.named_parameters(remove_duplicate=False)} - targets


# --- fused matrices ---------------------------------------------------------------------------------------------------

THREE = Recipe(
    name="three",
    title="queries are 1, keys 2, values 3",
    source="",
    roles={
        Role.INPUT_EMBEDDING: constant(0.5),
        Role.LINEAR: constant(0.25),
        Role.QUERY: constant(1.0),
        Role.KEY: constant(2.0),
        Role.VALUE: constant(3.0),
    },
)
FUSED = [
    "gpt2",
    "gpt2-cross",
    "gpt-bigcode",
    "gpt-bigcode-heads",
    "gpt-neox",
    "bloom",
    "phi3",
    "falcon",
    "falcon-multi-query",
    "falcon-grouped",
]


def products(model: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, ...]]:
    """What the model's own attention takes for its queries, keys and values, at the first position (no rotation)."""
    seen = []
    if name.startswith(("bloom", "falcon")):
        attention = model.transformer.h[0].self_attention
        split = attention._reshape if name == "bloom" else attention._split_heads
        seen.append(split(attention.query_key_value(torch.full((1, 1, 16), 0.5))))
        return seen

    def keep(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append((query, key, value))
        return torch.zeros_like(query)

    monkeypatch.setattr(F, "scaled_dot_product_attention", keep)
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: torch.full_like(x, 0.5))
    inputs = {"encoder_hidden_states": torch.full((1, 1, 16), 0.5)} if name == "gpt2-cross" else {}
    model.eval()(torch.tensor([[1]]), use_cache=False, **inputs)
    return seen


@pytest.mark.parametrize("name", FUSED)
def test_each_block_of_a_fused_matrix_is_what_the_model_takes_it_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = transformers_model(name)
    init_weights(model, THREE)
    three = products(model, name, monkeypatch)
    assert len(three) == (2 if name == "gpt2-cross" else 1)
    for query, key, value in three:
        one = query.flatten()[0]
        assert float(one) != 0
        for tensor, times in ((query, 1), (key, 2), (value, 3)):
            torch.testing.assert_close(tensor, torch.full_like(tensor, float(times * one)))


def test_a_layout_of_a_familys_own_is_not_guessed() -> None:
    config = hf.CodeGenConfig(vocab_size=9, n_embd=16, n_layer=1, n_head=4, n_positions=4, rotary_dim=4)
    with pytest.raises(UsageError, match=r"attn\.qkv_proj\.weight"):  # queries, values, keys, four times
        find_roles(hf.CodeGenForCausalLM(config))


def test_a_fused_matrix_that_nobody_knows_is_asked_about_and_drawn_as_is_said() -> None:
    model = nn.ModuleDict({"emb": nn.Embedding(9, 4), "attn": nn.ModuleDict({"query_key_value": nn.Linear(4, 12)})})
    with pytest.raises(UsageError, match=r"attn\.query_key_value\.weight \(12, 4\)"):
        find_roles(model)
    by_head = Fused(((Role.QUERY, 2), (Role.KEY, 2), (Role.VALUE, 2)), groups=2)
    init_weights(model, THREE, roles={"*.query_key_value.weight": by_head})
    assert model.get_parameter("attn.query_key_value.weight")[:, 0].tolist() == [1, 1, 2, 2, 3, 3] * 2
    with pytest.raises(UsageError, match=r"has 12 outputs, but its Fused \(query, key, value\) has 6"):
        find_roles(model, {"*.query_key_value.weight": Fused(((Role.QUERY, 2), (Role.KEY, 2), (Role.VALUE, 2)))})


# --- plain modules ----------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """An encoder and a decoder as torch has them, tokens and positions, and a head that nobody calls so."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(40, 16)
        self.pos_emb = nn.Parameter(torch.zeros(1, 64, 16))
        self.body = nn.Transformer(16, 4, 1, 1, 24)
        self.output = nn.Linear(16, 40)


def test_roles_in_torchs_own_transformer() -> None:
    roles = said(Plain())
    assert roles["tok_emb.weight"] == "input embedding"
    assert roles["pos_emb"] == "positions"
    assert (roles["output.weight"], roles["output.bias"]) == ("head, untied", "head's bias")
    layer = "body.decoder.layers.0."
    for attention in ("self_attn", "multihead_attn"):
        assert roles[f"{layer}{attention}.in_proj_weight"] == "query, key, value"
        assert roles[f"{layer}{attention}.in_proj_bias"] == "bias"
        assert roles[f"{layer}{attention}.out_proj.weight"] == "attention out"
    assert roles[f"{layer}linear1.weight"] == "feed-forward in"
    assert roles[f"{layer}linear2.weight"] == "feed-forward out"
    assert roles[f"{layer}norm3.weight"] == "norm weight"
    assert len(roles) == len(list(Plain().parameters()))


def test_roles_in_torchs_own_lstm_and_in_attention_of_two_widths() -> None:
    parts = {"encoder": nn.Embedding(9, 4), "rnn": nn.LSTM(4, 6, 2, proj_size=4), "cell": nn.GRUCell(4, 4)}
    roles = said(nn.ModuleDict({**parts, "attn": nn.MultiheadAttention(4, 2, kdim=6)}))
    assert roles["encoder.weight"] == "input embedding"
    assert {roles[f"rnn.weight_{end}_l1"] for end in ("ih", "hh", "hr")} == {"recurrent"} == {roles["cell.weight_ih"]}
    assert roles["rnn.bias_ih_l0"] == roles["cell.bias_hh"] == "recurrent bias"
    assert [roles[f"attn.{one}_proj_weight"] for one in "qkv"] == ["query", "key", "value"]


def test_a_feed_forward_part_may_be_a_sequence_of_two_matrices() -> None:
    mlp = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    roles = said(nn.ModuleDict({"wte": nn.Embedding(9, 4), "mlp": mlp}))
    assert (roles["mlp.0.weight"], roles["mlp.2.weight"]) == ("feed-forward in", "feed-forward out")


def test_a_matrix_with_as_many_outputs_as_tokens_is_no_head_if_it_has_another_name() -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(8, 4), "fc1": nn.Linear(4, 8), "fc2": nn.Linear(8, 4)})
    assert said(model)["fc1.weight"] == "feed-forward in"
    assert said(nn.ModuleDict({**model, "out": nn.Linear(4, 8)}))["out.weight"] == "head, untied"


def test_a_shared_tensor_has_one_role_under_its_sources_name() -> None:
    bert = BertLike()
    tie_weights(bert, on_conflict="source")
    roles = said(bert, {"transform.weight": Role.TRANSFORM})
    assert (roles["emb.weight"], roles["bias"]) == ("input embedding", "head's bias")
    assert not any(name.startswith("decoder") for name in roles)
    model = TinyLM(bias=True)
    model.head.weight = model.emb.weight
    assert said(model) == {
        "emb.weight": "input embedding",
        "norm.weight": "norm weight",
        "norm.bias": "norm bias",
        "head.bias": "head's bias",
    }
    alias = TinyLM()
    alias.head.weight = nn.Parameter(alias.emb.weight.detach())
    assert "head.weight" not in said(alias)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("gate", nn.Linear(4, 2)),
        ("conv", nn.Conv1d(4, 4, 3)),
        ("lora_A", nn.Linear(4, 2)),
        ("table", nn.Embedding(3, 4)),
    ],
)
def test_a_parameter_that_nobody_knows_is_named_with_the_way_out(name: str, part: nn.Module) -> None:
    model = nn.ModuleDict({"wte": nn.Embedding(9, 4), name: part})
    with pytest.raises(UsageError) as caught:
        find_roles(model)
    assert caught.value.message.startswith(f"{name}.weight {tuple(part.weight.shape)}")  # type: ignore[arg-type]
    assert f"roles={{'{name}.weight': Role" in str(caught.value)
    assert find_roles(model, {f"{name}.*": Role.PROJECTION})[f"{name}.weight"] is Role.PROJECTION


@pytest.mark.parametrize("patches", [nn.Conv2d(3, 4, 2), nn.Linear(12, 4)])
def test_what_a_model_of_images_calls_its_input_embedding_is_no_table(patches: nn.Module) -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = patches

        def get_input_embeddings(self) -> nn.Module:
            return self.patches

    with pytest.raises(UsageError, match=r"patches\.weight"):
        find_roles(Images())


def test_what_a_caller_says_goes_before_what_is_found() -> None:
    model = TinyLM()
    assert find_roles(model, {"head.weight": "projection"})["head.weight"] is Role.PROJECTION
    with pytest.raises(UsageError, match=r"roles\['tail'\]: no parameter"):
        find_roles(model, {"tail": Role.HEAD})
    with pytest.raises(UsageError, match=r"'heads'.*expected a Role"):
        find_roles(model, {"head.weight": "heads"})


def test_parameters_that_overlap_in_part_are_refused() -> None:
    memory = torch.zeros(12, 4)
    model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "wpe": nn.Embedding(9, 4)})
    model["wte"].weight, model["wpe"].weight = nn.Parameter(memory[:9]), nn.Parameter(memory[3:])
    with pytest.raises(UsageError, match="overlap in memory"):
        find_roles(model)
