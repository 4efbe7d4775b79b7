"""GPT-2 against transformers' on the same weights, against float64, and against brute force."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from torch import nn

from bowline.auditing import Severity, audit
from bowline.errors import CheckpointError, ConfigError, UsageError
from bowline.models.common.attention import packed_mask
from bowline.models.gpt2 import GPT2Config, GPT2LMHeadModel, GPT2Model
from bowline.nn import LMHead, find_ties, load_checkpoint, resize_vocab

pytestmark = pytest.mark.usefixtures("quiet_transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "n_positions": 24,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,  # such that attention is not flat
}
CONFIGS: dict[str, dict[str, Any]] = {
    "as_published": {},
    "relu": {"activation_function": "relu"},
    "silu_and_narrow": {"activation_function": "silu", "n_inner": 20},
    "exact_gelu": {"activation_function": "gelu"},
    "scaled_by_layer": {"scale_attn_by_inverse_layer_idx": True},
    "unscaled": {"scale_attn_weights": False},
    "both_scales": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True},
    "untied": {"tie_word_embeddings": False},
    "one_head": {"n_head": 1, "n_layer": 1},
    "other_epsilon": {"layer_norm_epsilon": 1e-3},
}
BATCH, LENGTH = 2, 11


def pair(seed: int = 0, **options: Any) -> tuple[GPT2LMHeadModel, Any]:
    """Ours and transformers' with the same random weights, biases and norms among them."""
    torch.manual_seed(seed)
    theirs: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL | options))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    ours = GPT2LMHeadModel(GPT2Config(**SMALL | options))
    ours.load_state_dict(theirs.state_dict())
    return ours.eval(), theirs.eval()


def tokens(batch: int = BATCH, length: int = LENGTH, seed: int = 1) -> torch.Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    scale = other.abs().max().double().item()
    return (one.double() - other.double()).abs().max().item() / (scale or 1.0)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def step(model: Any, **inputs: Any) -> Any:
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out


def exactly(theirs: Any, **inputs: Any) -> Any:
    """A step of transformers' model in float64, the loss as well: its own loss is computed in float32 always."""
    exact = copy.deepcopy(theirs).double()
    out = exact(**{name: value for name, value in inputs.items() if name != "labels"})
    out.loss = nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
    out.loss.backward()
    return out, gradients(exact)


def assert_alike(ours: Any, theirs: Any, inputs: dict[str, Any], seen: torch.Tensor | None = None) -> None:
    """Logits, loss and all gradients; of a padded batch the logits that mean something."""
    mine, his = step(ours, **inputs), step(theirs, **inputs)
    rows = seen.bool() if seen is not None else torch.ones(his.logits.shape[:2], dtype=torch.bool)
    assert off(mine.logits[rows], his.logits[rows]) < 1e-5
    assert off(mine.loss, his.loss) < 1e-5
    expected = gradients(theirs)
    assert gradients(ours).keys() == expected.keys()
    for name, gradient in gradients(ours).items():
        assert off(gradient, expected[name]) < 1e-4, name


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
def test_logits_loss_and_gradients_are_those_of_transformers(options: dict[str, Any]) -> None:
    ours, theirs = pair(**options)
    assert_alike(ours, theirs, {"input_ids": tokens(), "labels": tokens()})


@pytest.mark.parametrize("length", [2, 7, 24])
def test_odd_lengths_are_alike_up_to_the_last_position(length: int) -> None:
    ours, theirs = pair()
    assert_alike(ours, theirs, {"input_ids": tokens(1, length), "labels": tokens(1, length)})


def test_a_single_token_has_the_same_logits() -> None:
    ours, theirs = pair()
    assert off(ours(tokens(3, 1)).logits, theirs(tokens(3, 1)).logits) < 1e-5


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_is_alike(side: str) -> None:
    ours, theirs = pair()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, :4] = 0
    if side == "right":
        mask = mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    labels = tokens().masked_fill(mask == 0, -100)
    if side == "left":  # the token after padding is predicted by a query that sees nothing
        labels[1, 4] = -100
    inputs = {"input_ids": tokens(), "attention_mask": mask, "position_ids": positions, "labels": labels}
    assert_alike(ours, theirs, inputs, mask)


def test_a_query_that_sees_nothing_leaves_every_gradient_finite() -> None:
    ours, _ = pair()
    mask = torch.ones(BATCH, LENGTH)
    mask[0] = 0
    out = step(ours, input_ids=tokens(), attention_mask=mask, labels=tokens())
    assert out.logits.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(ours).values())


POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]])


def test_packed_sequences_by_a_mask_and_by_positions_are_what_transformers_makes_of_them() -> None:
    ours, theirs = pair()
    seen = packed_mask(POSITIONS)
    four = (seen & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())[:, None]
    reference = theirs(tokens(), position_ids=POSITIONS, attention_mask=four).logits
    by_positions = theirs(tokens(), position_ids=POSITIONS, use_cache=False).logits
    assert off(by_positions, reference) < 1e-5
    for mask in (None, seen, seen[:, None], four):
        assert off(ours(tokens(), position_ids=POSITIONS, attention_mask=mask).logits, reference) < 1e-5


def test_packed_sequences_are_as_if_each_were_alone() -> None:
    ours, _ = pair()
    packed = ours(tokens()[:1], position_ids=POSITIONS[:1]).logits
    alone = torch.cat([ours(tokens()[:1, :4]).logits, ours(tokens()[:1, 4:]).logits], 1)
    assert off(packed, alone) < 1e-5


def test_packed_rows_may_be_longer_than_the_position_table() -> None:
    ours, _ = pair(n_positions=6)
    ids = tokens(1, 12)
    packed = ours(ids, position_ids=torch.arange(6).repeat(2)[None]).logits
    assert off(packed, torch.cat([ours(ids[:, :6]).logits, ours(ids[:, 6:]).logits], 1)) < 1e-5


def test_embeddings_instead_of_ids_and_token_types_are_alike() -> None:
    ours, theirs = pair()
    embeds = ours.get_input_embeddings()(tokens()).detach()
    assert off(ours(inputs_embeds=embeds).logits, ours(tokens()).logits) < 1e-6
    assert_alike(ours, theirs, {"inputs_embeds": embeds, "labels": tokens()})
    assert_alike(ours, theirs, {"input_ids": tokens(), "token_type_ids": tokens(seed=5), "labels": tokens()})


def test_labels_that_do_not_count_are_left_out_alike() -> None:
    ours, theirs = pair()
    labels = tokens()
    labels[:, ::3] = -100
    assert_alike(ours, theirs, {"input_ids": tokens(), "labels": labels})


@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": False}, {"scale_attn_weights": False}])
def test_it_is_no_further_from_float64_than_transformers(options: dict[str, Any]) -> None:
    ours, theirs = pair(**options)
    inputs = {"input_ids": tokens(), "labels": tokens()}
    truth, expected = exactly(theirs, **inputs)
    mine, his = step(ours, **inputs), step(theirs, **inputs)
    noise = 1e-7
    assert off(mine.logits, truth.logits) < 2 * off(his.logits, truth.logits) + noise
    assert off(mine.loss, truth.loss) < 2 * off(his.loss, truth.loss) + noise
    for name, gradient in expected.items():
        bound = 2 * off(gradients(theirs)[name], gradient) + noise
        assert off(gradients(ours)[name], gradient) < bound, name


def test_in_float64_both_are_the_same_function() -> None:
    ours, theirs = pair()
    inputs = {"input_ids": tokens(), "labels": tokens()}
    truth, expected = exactly(theirs, **inputs)
    mine = step(ours.double(), **inputs)
    assert off(mine.logits, truth.logits) < 1e-13
    assert off(mine.loss, truth.loss) < 1e-13
    assert all(off(gradient, expected[name]) < 1e-12 for name, gradient in gradients(ours).items())


def test_bfloat16_is_as_near_to_float32_as_transformers_is() -> None:
    ours, theirs = pair()
    truth = theirs(tokens(), labels=tokens())
    mine = copy.deepcopy(ours).bfloat16()(tokens(), labels=tokens())
    his = copy.deepcopy(theirs).bfloat16()(tokens(), labels=tokens())
    assert mine.logits.dtype is torch.bfloat16
    assert off(mine.logits, truth.logits) < 2 * off(his.logits, truth.logits) + 1e-3
    assert abs(mine.loss.item() - truth.loss.item()) < 2 * abs(his.loss.item() - truth.loss.item()) + 0.02


def test_hidden_states_are_those_of_transformers() -> None:
    ours, theirs = pair()
    mine, his = ours(tokens(), output_hidden_states=True), theirs(tokens(), output_hidden_states=True)
    assert len(mine.hidden_states) == len(his.hidden_states)
    for one, other in zip(mine.hidden_states, his.hidden_states, strict=True):
        assert off(one, other) < 1e-5


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(1,) * LENGTH, (5, 1, 1, 4), (10, 1), (3, 8)])
@pytest.mark.parametrize("grad", [False, True])
def test_steps_with_a_cache_are_the_whole_at_once(cuts: tuple[int, ...], grad: bool) -> None:
    ours, _ = pair()
    with torch.set_grad_enabled(grad):
        whole = ours(tokens()).logits
        cache, parts = None, []
        for part in tokens().split(cuts, 1):
            out = ours(part, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            parts.append(out.logits)
    assert off(torch.cat(parts, 1), whole) < 1e-5
    assert len(cache) == LENGTH  # type: ignore[arg-type]


def test_a_left_padded_batch_with_a_cache_is_the_whole_at_once() -> None:
    ours, theirs = pair()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, :3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = theirs(tokens(), attention_mask=mask, position_ids=positions).logits
        first = ours(tokens()[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8], use_cache=True)
        rest = ours(
            tokens()[:, 8:], attention_mask=mask, position_ids=positions[:, 8:], past_key_values=first.past_key_values
        )
    assert off(rest.logits, expected[:, 8:]) < 1e-5


def test_gradients_flow_through_a_cache() -> None:
    ours, _ = pair()
    expected = step(ours, input_ids=tokens(), labels=tokens()) and copy.deepcopy(gradients(ours))
    ours.zero_grad()
    first = ours(tokens()[:, :6], use_cache=True)
    rest = ours(tokens()[:, 6:], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, rest.logits], 1)[:, :-1]
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten()).backward()
    assert all(off(gradient, expected[name]) < 1e-4 for name, gradient in gradients(ours).items())


def test_only_the_last_logits_are_made_when_only_they_are_asked_for() -> None:
    ours, _ = pair()
    last = ours(tokens(), logits_to_keep=2).logits
    assert last.shape == (BATCH, 2, SMALL["vocab_size"])
    assert off(last, ours(tokens()).logits[:, -2:]) < 1e-6


# --- names, counts, the tie -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_names_shapes_and_counts_are_those_of_transformers(tied: bool) -> None:
    ours, theirs = pair(tie_word_embeddings=tied)
    mine, his = ours.state_dict(), theirs.state_dict()
    assert {name: value.shape for name, value in mine.items()} == {name: value.shape for name, value in his.items()}
    assert ours.num_parameters() == theirs.num_parameters()
    assert ours.num_parameters(exclude_embeddings=True) == theirs.num_parameters(exclude_embeddings=True)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    base = GPT2Model(ours.config)
    assert base.state_dict().keys() == transformers.GPT2Model(theirs.config).state_dict().keys()


def test_gpt2_small_has_124_million_parameters_tied_and_163_untied() -> None:
    with torch.device("meta"):
        tied = GPT2LMHeadModel(GPT2Config())
        untied = GPT2LMHeadModel(GPT2Config(tie_word_embeddings=False))
    assert tied.num_parameters() == 124_439_808
    assert untied.num_parameters() == 124_439_808 + 50257 * 768


def test_the_tied_head_is_in_the_state_dict_and_no_parameter_of_its_own() -> None:
    model = GPT2LMHeadModel(GPT2Config(**SMALL))
    assert "lm_head.weight" in model.state_dict()
    assert "lm_head.weight" not in dict(model.named_parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert isinstance(model.lm_head, LMHead)
    assert [(tie.target, tie.source) for tie in find_ties(model)] == [("lm_head.weight", "transformer.wte.weight")]


def test_tuning_the_head_moves_the_embedding_where_they_are_tied_and_not_where_they_are_not() -> None:
    for tied in (True, False):
        model = GPT2LMHeadModel(GPT2Config(**SMALL, tie_word_embeddings=tied))
        before = model.transformer.wte.weight.detach().clone()
        optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=1.0)
        model(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        assert torch.equal(before, model.transformer.wte.weight) is not tied


def test_the_gradient_of_the_tied_matrix_is_the_sum_of_both_ends() -> None:
    tied, _ = pair()
    untied = GPT2LMHeadModel(GPT2Config(**SMALL, tie_word_embeddings=False)).eval()
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        step(model, input_ids=tokens(), labels=tokens())
    both = untied.lm_head.weight.grad + untied.transformer.wte.weight.grad  # type: ignore[operator]
    assert off(tied.lm_head.weight.grad, both) < 1e-6  # type: ignore[arg-type]


# --- files ------------------------------------------------------------------------------------------------------------


def assert_same_tensors(one: Any, other: Any) -> None:
    mine, his = one.state_dict(), other.state_dict()
    assert mine.keys() == his.keys()
    assert all(torch.equal(mine[name], his[name]) for name in mine)


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_goes_from_transformers_to_here_and_back(tmp_path: Path, tied: bool) -> None:
    _, theirs = pair(tie_word_embeddings=tied)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = GPT2LMHeadModel.from_pretrained(tmp_path / "theirs")
    assert_same_tensors(ours, theirs)
    ours.save_pretrained(tmp_path / "ours")
    back: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert_same_tensors(ours, back)
    assert torch.equal(theirs(tokens()).logits, back(tokens()).logits)
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "ours")
    assert torch.equal(ours(tokens()).logits, again(tokens()).logits)
    assert back.config.tie_word_embeddings is again.config.tie_word_embeddings is tied
    assert back.config.architectures == ["GPT2LMHeadModel"]
    found = [one for one in audit(tmp_path / "ours").findings if one.severity is not Severity.INFO]
    assert not found, [one.message for one in found]


def test_a_base_checkpoint_loads_into_the_model_with_a_head_and_back(tmp_path: Path) -> None:
    ours, theirs = pair()
    theirs.transformer.save_pretrained(tmp_path / "base")
    headed, info = GPT2LMHeadModel.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert info
    assert_same_tensors(headed, ours)
    ours.save_pretrained(tmp_path / "headed")
    base, info = GPT2Model.from_pretrained(tmp_path / "headed", output_loading_info=True)
    assert info.missing_keys == ()
    assert_same_tensors(base, ours.transformer)


def old_file(model: GPT2LMHeadModel, directory: Path) -> Path:
    """As OpenAI's was ported: without the prefix, without the head, with the causal masks of every layer."""
    state = {
        name.removeprefix("transformer."): value
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    for layer in range(model.config.n_layer):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 24, 24).tril()
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    directory.mkdir()
    torch.save(state, directory / "pytorch_model.bin")
    model.config.save_pretrained(directory)
    return directory


def test_an_old_file_with_masks_and_without_the_prefix_loads_whole(tmp_path: Path) -> None:
    ours, _ = pair()
    loaded, info = GPT2LMHeadModel.from_pretrained(old_file(ours, tmp_path / "old"), output_loading_info=True)
    assert info, info
    assert_same_tensors(loaded, ours)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight


def test_a_missing_bias_of_the_projections_is_not_taken_for_an_old_mask(tmp_path: Path) -> None:
    ours, _ = pair()
    state = {name: value for name, value in ours.state_dict().items() if name != "transformer.h.1.attn.c_attn.bias"}
    torch.save(state, tmp_path / "pytorch_model.bin")
    ours.config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"h\.1\.attn\.c_attn\.bias"):
        load_checkpoint(GPT2LMHeadModel(ours.config), tmp_path)
    _, info = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert info.missing_keys == ("transformer.h.1.attn.c_attn.bias",)


# --- pruned heads -----------------------------------------------------------------------------------------------------


def without(model: GPT2LMHeadModel, heads: dict[int, list[int]]) -> GPT2LMHeadModel:
    """The same model with what these heads add made zero."""
    model = copy.deepcopy(model)
    size = model.config.n_embd // model.config.n_head
    with torch.no_grad():
        for layer, some in heads.items():
            for head in some:
                model.transformer.h[layer].attn.c_proj.weight[head * size : (head + 1) * size] = 0  # type: ignore
    return model


def test_pruning_is_as_if_the_heads_gave_zeros_also_in_several_steps() -> None:
    ours, _ = pair()
    expected = without(ours, {0: [1], 2: [0, 2, 3]})(tokens()).logits
    ours.prune_heads({0: [1], 2: [0]})
    before = ours.num_parameters()
    ours.prune_heads({2: [0, 3]})  # by their first numbers: 0 is gone already
    ours.prune_heads({2: [2]})
    assert off(ours(tokens()).logits, expected) < 1e-5
    width, size = SMALL["n_embd"], SMALL["n_embd"] // SMALL["n_head"]
    assert before - ours.num_parameters() == 2 * (4 * width * size + 3 * size)
    assert ours.config.pruned_heads == {0: [1], 2: [0, 2, 3]}


def test_pruned_heads_are_remembered_in_the_file(tmp_path: Path) -> None:
    ours, _ = pair()
    ours.prune_heads({0: [1, 2], 1: [3]})
    ours.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert loaded.config.pruned_heads == {0: [1, 2], 1: [3]}
    assert_same_tensors(loaded, ours)
    assert torch.equal(loaded(tokens()).logits, ours(tokens()).logits)
    assert GPT2LMHeadModel(loaded.config).num_parameters() == ours.num_parameters()


@pytest.mark.parametrize("heads", [{3: [0]}, {-1: [0]}, {0: [4]}, {0: [-1]}, {0: [0, 1, 2, 3]}])
def test_heads_that_are_not_there_and_all_heads_at_once_are_refused(heads: dict[int, list[int]]) -> None:
    ours, _ = pair()
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(UsageError, match="pruned_heads"):
        ours.prune_heads({1: [0], **heads})
    assert all(torch.equal(before[name], value) for name, value in ours.state_dict().items())
    assert ours.config.pruned_heads == {}
    with pytest.raises(ConfigError, match="pruned_heads"):
        GPT2LMHeadModel(GPT2Config(**SMALL, pruned_heads=heads))


# --- training ---------------------------------------------------------------------------------------------------------


def test_gradient_checkpointing_changes_no_gradient_and_keeps_less() -> None:
    ours, _ = pair()
    ours.train()
    step(ours, input_ids=tokens(), labels=tokens())
    expected = copy.deepcopy(gradients(ours))

    def kept() -> int:
        sizes = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step(ours, input_ids=tokens(), labels=tokens())
        return sum(sizes)

    everything = kept()
    ours.gradient_checkpointing_enable()
    ours.zero_grad()
    step(ours, input_ids=tokens(), labels=tokens())
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients(ours).items())
    assert kept() < everything
    step(ours, input_ids=tokens(), labels=tokens(), use_cache=True)
    assert all(off(gradient, expected[name]) < 1e-6 for name, gradient in gradients(ours).items())
    ours.gradient_checkpointing_disable()
    assert kept() == everything


@pytest.mark.parametrize("tied", [True, False])
def test_the_training_step_compiles_without_a_graph_break(tied: bool) -> None:
    ours, _ = pair(tie_word_embeddings=tied)
    ours.train()
    expected = step(ours, input_ids=tokens(), labels=tokens())
    before = copy.deepcopy(gradients(ours))
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    ours.zero_grad()
    out = compiled(tokens(), labels=tokens())
    out.loss.backward()
    assert off(out.loss, expected.loss) < 1e-6
    assert all(off(gradient, before[name]) < 1e-5 for name, gradient in gradients(ours).items())
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[:, -2:] = 0
    masked = compiled(tokens(), attention_mask=mask, labels=tokens())
    assert off(masked.loss, ours(tokens(), attention_mask=mask, labels=tokens()).loss) < 1e-6


def test_initial_weights_are_spread_as_those_of_transformers() -> None:
    """The spread of n normal numbers is off by 1 / sqrt(2 n); five of that: less than one in 10^5 over all matrices."""
    options = {**SMALL, "n_embd": 64, "vocab_size": 300, "n_positions": 100, "initializer_range": 0.02}
    torch.manual_seed(0)
    ours, theirs = (
        GPT2LMHeadModel(GPT2Config(**options, tie_word_embeddings=False)),
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, tie_word_embeddings=False)),
    )
    for (name, mine), (_, his) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        if mine.ndim == 1:
            assert torch.equal(mine, his), name
            continue
        std = 0.02 / (math.sqrt(2 * 3) if name.endswith("c_proj.weight") else 1.0)
        for matrix in (mine, his):
            assert abs(matrix.std().item() / std - 1) < 5 / math.sqrt(2 * matrix.numel()), name
            assert abs(matrix.mean().item()) < 5 * std / math.sqrt(matrix.numel()), name


def test_a_model_with_dropout_differs_from_call_to_call_in_training_alone() -> None:
    model = GPT2LMHeadModel(GPT2Config(**SMALL | {"resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1}))
    assert not torch.equal(model(tokens()).logits, model(tokens()).logits)
    model.eval()
    assert torch.equal(model(tokens()).logits, model(tokens()).logits)


def test_resizing_moves_both_ends_and_training_goes_on() -> None:
    ours, _ = pair()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    old = ours(tokens(), labels=tokens())
    old.loss.backward()
    optimizer.step()
    before = ours(tokens()).logits
    resize_vocab(ours, 70, optimizer=optimizer)
    assert ours.lm_head.weight is ours.transformer.wte.weight
    assert ours.lm_head.weight.shape == (70, 32)
    assert ours.config.vocab_size == ours.transformer.config.vocab_size == 70
    assert off(ours(tokens()).logits[..., :61], before) < 1e-6
    new = tokens() + 9
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = ours(new, labels=new).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    table = ours.resize_token_embeddings(50, pad_to_multiple_of=16)
    assert table.weight.shape == (64, 32)
    assert table is ours.get_input_embeddings()


# --- padding ----------------------------------------------------------------------------------------------------------


def pad_row(policy: str, steps: int = 20) -> torch.Tensor:
    """What twenty steps make of the padding token's row, which is zero before and never a label."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SMALL, pad_token_id=0, pad_logit=policy))
    with torch.no_grad():
        model.transformer.wte.weight[0] = 0
    ids = tokens(4) % 60 + 1
    ids[:, -3:] = 0
    mask = (ids != 0).long()
    labels = ids.masked_fill(ids == 0, -100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
    return model.transformer.wte.weight[0].detach()


def test_through_the_softmax_a_tied_head_moves_a_padding_row_that_is_never_a_label() -> None:
    assert pad_row("keep").norm() > 0


def test_with_its_logit_masked_the_padding_row_stays_zero() -> None:
    assert not pad_row("mask").any()


def test_a_masked_padding_logit_is_minus_infinity_and_the_loss_is_over_the_others() -> None:
    ours, _ = pair(pad_token_id=0)
    masked = GPT2LMHeadModel(dataclasses.replace(ours.config, pad_logit="mask")).eval()
    masked.load_state_dict(ours.state_dict())
    ids = tokens() % 60 + 1
    out, plain = masked(ids, labels=ids), ours(ids).logits.detach()
    assert (out.logits[..., 0] == -torch.inf).all()
    assert torch.equal(out.logits[..., 1:], plain[..., 1:])
    expected = nn.functional.cross_entropy(plain[:, :-1, 1:].flatten(0, 1), ids[:, 1:].flatten() - 1)
    assert off(out.loss, expected) < 1e-6


def test_a_masked_padding_token_as_a_label_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(**SMALL, pad_token_id=0, pad_logit="mask"))
    ids = torch.tensor([[5, 6, 0]])
    with pytest.raises(UsageError, match="label 0: is masked"):
        model(ids, labels=ids)


# --- bad input --------------------------------------------------------------------------------------------------------


def with_label(value: int, at: int) -> Callable[[], dict[str, Any]]:
    def inputs() -> dict[str, Any]:
        labels = tokens()
        labels[0, at] = value
        return {"input_ids": tokens(), "labels": labels}

    return inputs


ids_of = torch.tensor
BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "id_past_the_table": (lambda: {"input_ids": ids_of([[3, 61]])}, r"input_ids has 61.*61 rows"),
    "negative_id": (lambda: {"input_ids": ids_of([[3, -1]])}, r"input_ids has -1"),
    "float_ids": (lambda: {"input_ids": ids_of([[3.0, 1.0]])}, r"torch\.float32"),
    "a_list": (lambda: {"input_ids": [[3, 1]]}, r"input_ids is a list: expected a tensor"),
    "negative_count": (lambda: {"input_ids": tokens(), "logits_to_keep": -2}, r"logits_to_keep=-2"),
    "one_axis": (lambda: {"input_ids": ids_of([3, 1])}, r"\(2,\).*\(batch, length\)"),
    "no_rows": (lambda: {"input_ids": tokens(0)}, r"\(0, 11\).*empty"),
    "no_tokens": (lambda: {"input_ids": tokens(2, 0)}, r"\(2, 0\).*empty"),
    "nothing": (dict, "input_ids and inputs_embeds"),
    "both": (lambda: {"input_ids": tokens(), "inputs_embeds": torch.zeros(2, 11, 32)}, "input_ids and inputs_embeds"),
    "narrow_embeddings": (lambda: {"inputs_embeds": torch.zeros(2, 11, 31)}, r"\(2, 11, 31\).*\(batch, length, 32\)"),
    "no_embeddings": (lambda: {"inputs_embeds": torch.zeros(2, 0, 32)}, r"\(2, 0, 32\).*empty"),
    "too_long": (lambda: {"input_ids": tokens(1, 25)}, r"25 positions.*24"),
    "position_past_the_table": (
        lambda: {"input_ids": tokens(1, 2), "position_ids": ids_of([[0, 24]])},
        r"position_ids has 24.*24 rows",
    ),
    "positions_of_another_length": (
        lambda: {"input_ids": tokens(1, 2), "position_ids": ids_of([[0, 1, 2]])},
        r"position_ids \(1, 3\).*\(1, 2\)",
    ),
    "positions_of_another_batch": (
        lambda: {"input_ids": tokens(1, 2), "position_ids": ids_of([[0, 1], [0, 1]])},
        r"position_ids \(2, 2\).*\(1, 2\)",
    ),
    "type_past_the_table": (
        lambda: {"input_ids": tokens(1, 2), "token_type_ids": ids_of([[0, 61]])},
        r"token_type_ids has 61",
    ),
    "types_of_another_length": (
        lambda: {"input_ids": tokens(1, 2), "token_type_ids": ids_of([[0]])},
        r"token_type_ids \(1, 1\).*\(1, 2\)",
    ),
    "short_mask": (
        lambda: {"input_ids": tokens(), "attention_mask": torch.ones(2, 10)},
        r"attention_mask \(2, 10\).*\(2, 11\)",
    ),
    "mask_of_another_batch": (
        lambda: {"input_ids": tokens(), "attention_mask": torch.ones(3, 11)},
        r"attention_mask \(3, 11\)",
    ),
    "mask_of_another_square": (
        lambda: {"input_ids": tokens(), "attention_mask": torch.ones(2, 11, 10)},
        r"attention_mask \(2, 11, 10\)",
    ),
    "label_past_the_table": (with_label(61, 5), r"label 61: expected 0 to 60"),
    "negative_label": (with_label(-1, 5), r"label -1: expected 0 to 60, or -100"),
    "label_that_the_shift_drops": (with_label(61, 0), r"label 61: expected 0 to 60"),
    "labels_of_another_length": (
        lambda: {"input_ids": tokens(), "labels": tokens(2, 10)},
        r"labels \(2, 10\).*\(2, 11\)",
    ),
    "labels_of_one_axis": (lambda: {"input_ids": tokens(), "labels": tokens()[0]}, r"labels \(11,\)"),
    "labels_of_int32": (lambda: {"input_ids": tokens(), "labels": tokens().int()}, r"torch\.int32.*torch\.int64"),
}


@pytest.mark.parametrize(("inputs", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_with_names_and_numbers(inputs: Callable[[], dict[str, Any]], message: str) -> None:
    model = GPT2LMHeadModel(GPT2Config(**SMALL))
    with pytest.raises(UsageError, match=message):
        model(**inputs())


def test_a_cache_that_outgrows_the_position_table_is_refused() -> None:
    ours, _ = pair()
    with torch.no_grad():
        cache = ours(tokens(1, 24), use_cache=True).past_key_values
        with pytest.raises(UsageError, match=r"25 positions.*24"):
            ours(tokens(1, 1), past_key_values=cache)


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'swoosh'.*gelu_new"):
        GPT2LMHeadModel(GPT2Config(**SMALL, activation_function="swoosh"))
