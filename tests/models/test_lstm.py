"""The tied LSTM against recurrences spelled out, and its tie against two matrices that are not tied."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.auditing import Severity, audit
from bowline.errors import ConfigError, UsageError
from bowline.models.lstm import LockedDropout, LSTMConfig, LSTMLMHeadModel, LSTMModel, LSTMState
from bowline.nn import check_ties

V, E, H = 70, 6, 10
SHAPES: list[dict[str, Any]] = [
    {"embedding_size": None},
    {"embedding_size": E},
    {"embedding_size": E, "projection": False, "num_layers": 3},
    {"projection": True, "num_layers": 1, "head_bias": False},
]


def config(**values: Any) -> LSTMConfig:
    dropouts = {"embd_pdrop": 0.0, "hidden_pdrop": 0.0, "output_pdrop": 0.0}
    return LSTMConfig(**{"vocab_size": V, "hidden_size": H, "embedding_size": E, **dropouts, **values})


def model(seed: int = 0, **values: Any) -> LSTMLMHeadModel:
    torch.manual_seed(seed)
    made = LSTMLMHeadModel(config(**{"initializer_range": 0.5, **values})).double()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "bias" in name:
                parameter.normal_()
    return made


def tokens(rows: int = 3, length: int = 7, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def by_hand(lm: LSTMLMHeadModel, ids: list[int]) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """The logits (T, V) of one row, gate by gate and step by step, and the last h and c of each layer."""
    tensors = lm.state_dict()
    depth = lm.config.num_layers
    sizes = [tensors[f"lstm.layers.{at}.weight_hh_l0"].shape[1] for at in range(depth)]
    state = [(torch.zeros(size).double(), torch.zeros(size).double()) for size in sizes]
    logits = []
    for token in ids:
        x = tensors["lstm.wte.weight"][token]
        for at in range(depth):
            w, u, b, d = (
                tensors[f"lstm.layers.{at}.{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            h, c = state[at]
            i, f, g, o = (w @ x + b + u @ h + d).split(sizes[at])
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            x = o.sigmoid() * c.tanh()
            state[at] = x, c
        if "lstm.projection.weight" in tensors:
            x = tensors["lstm.projection.weight"] @ x
        logits.append(tensors["lm_head.weight"] @ x + tensors.get("lm_head.bias", torch.zeros(V).double()))
    return torch.stack(logits), state


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_loss_and_state_are_those_of_the_recurrence_spelled_out(shape: dict[str, Any], tied: bool) -> None:
    lm = model(tie_word_embeddings=tied, **shape)
    ids = tokens()
    out = lm(ids, labels=ids, use_cache=True)
    expected = torch.stack([by_hand(lm, row)[0] for row in ids.tolist()])
    torch.testing.assert_close(out.logits, expected)
    torch.testing.assert_close(out.loss, F.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    for layer, (h, c) in enumerate(out.past_key_values.layers):
        for row, line in enumerate(ids.tolist()):
            torch.testing.assert_close((h[0, row], c[0, row]), by_hand(lm, line)[1][layer])


def test_a_layer_and_its_gradients_are_those_of_torchs_lstm() -> None:
    lm = model(num_layers=1, projection=False, embedding_size=None)
    theirs = nn.LSTM(H, H, batch_first=True).double()
    theirs.load_state_dict(lm.lstm.layers[0].state_dict())
    x = torch.randn(3, 7, H).double()
    ours = lm.lstm(inputs_embeds=x).last_hidden_state
    torch.testing.assert_close(ours, theirs(x)[0])
    ours.square().sum().backward()
    theirs(x)[0].square().sum().backward()
    grads = {name: parameter.grad for name, parameter in lm.lstm.layers[0].named_parameters()}
    torch.testing.assert_close(grads, {name: parameter.grad for name, parameter in theirs.named_parameters()})


def test_in_bfloat16_the_logits_are_near_those_of_float64() -> None:
    lm = model().eval()
    ids = tokens()
    expected = lm(ids).logits
    torch.testing.assert_close(lm.bfloat16()(ids).logits.double(), expected, rtol=0.05, atol=0.1)


# --- the tie ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_tie_is_one_parameter_whose_gradient_is_the_sum_of_both_ends(shape: dict[str, Any]) -> None:
    tied, untied = model(**shape), model(tie_word_embeddings=False, **shape)
    assert tied.lm_head.weight is tied.lstm.wte.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())
    assert check_ties(tied, dict(tied.ties))
    untied.load_state_dict(tied.state_dict())
    assert untied.lm_head.weight is not untied.lstm.wte.weight
    ids = tokens()
    for lm in (tied, untied):
        lm(ids, labels=ids).loss.backward()
    head, table = untied.lm_head.weight.grad, untied.lstm.wte.weight.grad
    assert head is not None and head.abs().max() > 1e-4
    assert table is not None and table.abs().max() > 1e-4
    torch.testing.assert_close(tied.lstm.wte.weight.grad, head + table)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_untied_model_has_the_heads_v_times_e_more_parameters(shape: dict[str, Any]) -> None:
    tied, untied = model(**shape), model(tie_word_embeddings=False, **shape)
    assert untied.num_parameters() - tied.num_parameters() == V * tied.config.width
    assert list(tied.state_dict()) == list(untied.state_dict())


def test_the_tie_survives_new_ends_copies_and_casts() -> None:
    lm = model()
    lm.set_input_embeddings(nn.Embedding(V, E).double())
    assert lm.get_output_embeddings().weight is lm.get_input_embeddings().weight  # type: ignore[union-attr]
    lm = copy.deepcopy(lm).float()
    assert lm.lm_head.weight is lm.lstm.wte.weight


@pytest.mark.parametrize("tied", [True, False])
def test_a_resize_reaches_both_ends_and_the_bias(tied: bool) -> None:
    lm = model(tie_word_embeddings=tied).eval()
    ids = tokens()
    before = lm(ids).logits
    lm.resize_token_embeddings(V + 5)
    assert lm.lstm.wte.weight.shape == lm.lm_head.weight.shape == (V + 5, E)
    assert lm.lm_head.bias.shape == (V + 5,)
    assert lm.config.vocab_size == V + 5
    assert (lm.lm_head.weight is lm.lstm.wte.weight) is tied
    torch.testing.assert_close(lm(ids).logits[..., :V], before)
    lm(ids + 5)
    lm.resize_token_embeddings(V - 5)
    assert lm.lm_head.bias.shape == (V - 5,)


@pytest.mark.parametrize("policy", ["keep", "mask"])
def test_the_padding_row_begins_at_zero_and_stays_there_only_if_its_logit_is_masked(policy: str) -> None:
    lm = model(pad_token_id=0, pad_logit=policy)
    assert not lm.lstm.wte.weight[0].any()
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.5)
    ids = tokens()  # without 0
    for _ in range(3):
        optimizer.zero_grad()
        lm(ids, labels=ids).loss.backward()
        optimizer.step()
    assert bool(lm.lstm.wte.weight[0].any()) is (policy == "keep")


# --- projection -------------------------------------------------------------------------------------------------------


def test_the_projection_comes_where_the_widths_differ() -> None:
    assert model(embedding_size=None).lstm.projection is None
    assert model().get_parameter("lstm.projection.weight").shape == (E, H)
    assert model(projection=True, embedding_size=None).get_parameter("lstm.projection.weight").shape == (H, H)
    narrow = model(projection=False)
    assert narrow.lstm.projection is None
    assert narrow.lstm.layers[-1].hidden_size == E


def test_the_penalty_is_the_projections_norm_and_only_in_training() -> None:
    plain, penalised = model(), model(projection_penalty=0.15)
    ids = tokens()
    loss = plain(ids, labels=ids).loss
    norm = plain.get_parameter("lstm.projection.weight").square().sum().sqrt()
    torch.testing.assert_close(penalised(ids, labels=ids).loss, loss + 0.15 * norm)
    torch.testing.assert_close(penalised.eval()(ids, labels=ids).loss, loss)


# --- locked dropout ---------------------------------------------------------------------------------------------------


def test_locked_dropout_has_one_mask_for_all_steps_of_a_sequence_and_another_for_the_next() -> None:
    torch.manual_seed(0)
    x = torch.rand(4, 9, 500) + 1
    y = LockedDropout(0.3)(x)
    dropped = y == 0
    assert bool((dropped == dropped[:, :1]).all())
    assert not torch.equal(dropped[0], dropped[1])
    torch.testing.assert_close(y[~dropped], x[~dropped] / 0.7)
    assert abs(dropped.float().mean().item() - 0.3) < 0.04


def test_locked_dropout_changes_nothing_in_evaluation_or_without_a_rate() -> None:
    x = torch.rand(2, 3, 4)
    assert LockedDropout(0.5).eval()(x) is x
    assert LockedDropout(0.0)(x) is x


def test_each_dropout_of_the_model_is_locked_and_in_its_place() -> None:
    torch.manual_seed(0)
    lm = LSTMLMHeadModel(config(num_layers=3, embd_pdrop=0.5, hidden_pdrop=0.5, output_pdrop=0.5))
    calls: list[tuple[str, torch.Tensor]] = []
    for name, module in lm.named_modules():
        if isinstance(module, LockedDropout):
            module.register_forward_hook(lambda _, __, out, name=name: calls.append((name, out)))
    lm(tokens())
    assert [name for name, _ in calls] == [
        "lstm.embd_drop",
        "lstm.hidden_drop",
        "lstm.hidden_drop",
        "lstm.output_drop",
    ]
    for _, out in calls:
        dropped = out == 0
        assert dropped.any() and not dropped.all()
        assert bool((dropped == dropped[:, :1]).all())


# --- masks and state --------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0, 1]])


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_padding_left_right_or_between_changes_nothing(shape: dict[str, Any], use_cache: bool) -> None:
    lm = model(**shape).eval()
    ids = tokens(4)
    out = lm(ids, attention_mask=MASK, use_cache=use_cache)
    for row in range(4):
        kept = MASK[row] == 1
        expected, state = by_hand(lm, ids[row][kept].tolist())
        torch.testing.assert_close(out.logits[row][kept], expected)
        torch.testing.assert_close(out.logits[row, -1], expected[-1])  # held: right-padded prompts go on from there
        if use_cache:
            for layer, (h, c) in enumerate(out.past_key_values.layers):
                torch.testing.assert_close((h[0, row], c[0, row]), state[layer])


def test_hidden_states_are_the_same_under_a_mask_and_end_with_the_last() -> None:
    lm = model().eval()
    ids = tokens(4)
    masked = lm(ids, attention_mask=MASK, output_hidden_states=True).hidden_states
    assert [tuple(part.shape) for part in masked] == [(4, 7, E), (4, 7, H), (4, 7, E)]
    short = lm.lstm(ids[1:2, 3:], output_hidden_states=True)
    for ours, expected in zip(masked, short.hidden_states, strict=True):
        torch.testing.assert_close(ours[1:2, 3:], expected)
    assert short.hidden_states[-1] is short.last_hidden_state


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_piece_by_piece_gives_what_the_whole_gives(chunk: int, masked: bool) -> None:
    lm = model().eval()
    ids = tokens(4)
    whole = lm(ids, attention_mask=MASK if masked else None, use_cache=True)
    state, logits = None, []
    for begin in range(0, 7, chunk):
        end = min(begin + chunk, 7)
        out = lm(
            ids[:, begin:end],
            attention_mask=MASK[:, :end] if masked else None,
            past_key_values=state,
            use_cache=True,
        )
        state = out.past_key_values
        assert len(state) == state.get_seq_length() == end
        logits.append(out.logits)
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits)
    torch.testing.assert_close(state.layers, whole.past_key_values.layers)  # type: ignore[union-attr]


def test_the_state_of_a_row_of_which_no_step_counts_stays() -> None:
    lm = model().eval()
    before = lm(tokens(2), use_cache=True).past_key_values
    layers, mask = list(before.layers), torch.ones(2, 10, dtype=torch.long)
    mask[1, 7:] = 0
    after = lm(tokens(2, 3), attention_mask=mask, past_key_values=before).past_key_values
    for old, new in zip(layers, after.layers, strict=True):
        for one, other in zip(old, new, strict=True):
            assert torch.equal(one[:, 1], other[:, 1])
            assert not torch.allclose(one[:, 0], other[:, 0])


def test_reordered_rows_go_on_as_the_rows_that_they_were() -> None:
    lm = model().eval()
    first, then = tokens(3), tokens(3, 2, seed=2)
    rows = torch.tensor([2, 2, 0])
    state = lm(first, use_cache=True).past_key_values
    state.reorder(rows)
    expected = lm(torch.cat([first[rows], then], 1)).logits[:, -2:]
    torch.testing.assert_close(lm(then, past_key_values=state).logits, expected)


def test_a_detached_state_carries_values_and_no_gradient() -> None:
    lm = model()
    one, two = tokens(), tokens(seed=2)
    state = lm(one, use_cache=True).past_key_values
    assert state.layers[0][0].requires_grad
    loss = lm(two, labels=two, past_key_values=state.detach()).loss
    loss.backward()  # the first piece's graph is not needed
    looked_up = torch.zeros(V, dtype=torch.bool)
    looked_up[two[:, :-1].unique()] = True
    untied = model(tie_word_embeddings=False)
    state = untied(one, use_cache=True).past_key_values.detach()
    untied(two, labels=two, past_key_values=state).loss.backward()
    assert torch.equal(untied.lstm.wte.weight.grad.abs().sum(1) > 0, looked_up)  # type: ignore[union-attr]


def test_only_the_last_logits_are_made_where_only_they_are_wanted() -> None:
    lm = model().eval()
    ids = tokens()
    torch.testing.assert_close(lm(ids, logits_to_keep=1).logits, lm(ids).logits[:, -1:])
    assert lm(ids).past_key_values is None


@pytest.mark.parametrize("shape", SHAPES)
def test_generation_takes_the_likeliest_token_with_and_without_the_state(shape: dict[str, Any]) -> None:
    lm = model(**shape).eval()
    prompt = tokens(2)
    rows = []
    for row in prompt.tolist():
        for _ in range(6):
            row = [*row, int(by_hand(lm, row)[0][-1].argmax())]
        rows.append(row)
    for use_cache in (True, False):
        assert lm.generate(prompt, max_new_tokens=6, use_cache=use_cache).tolist() == rows


@pytest.mark.parametrize("num_beams", [1, 3])
def test_left_padded_prompts_of_a_batch_go_on_as_they_do_alone(num_beams: int) -> None:
    lm = model().eval()
    prompts, mask = tokens(2), MASK[:2]
    together = lm.generate(prompts, attention_mask=mask, max_new_tokens=5, num_beams=num_beams)
    for row in range(2):
        alone = prompts[row : row + 1, mask[row] == 1]
        expected = lm.generate(alone, max_new_tokens=5, num_beams=num_beams, use_cache=False)
        assert torch.equal(together[row, -5:], expected[0, -5:])


# --- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_a_short_text_is_learned_by_heart(tied: bool) -> None:
    torch.manual_seed(0)
    text = "a bowline turns the rope back onto itself and does not slip. "
    letters = sorted(set(text))
    ids = torch.tensor([[letters.index(letter) for letter in text * 2]])
    lm = LSTMLMHeadModel(
        config(vocab_size=len(letters), hidden_size=48, embedding_size=24, num_layers=1, tie_word_embeddings=tied)
    )
    optimizer = torch.optim.Adam(lm.parameters(), lr=0.02)
    first = lm(ids, labels=ids).loss.item()
    assert abs(first - torch.tensor(float(len(letters))).log().item()) < 0.1  # knows nothing
    for _ in range(150):
        optimizer.zero_grad()
        loss = lm(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        if loss.item() < 0.1:
            break
    assert loss.item() < 0.1
    assert (lm.lm_head.weight is lm.lstm.wte.weight) is tied


@pytest.mark.parametrize("masked", [False, True])
def test_checkpointed_layers_give_the_same_gradients(masked: bool) -> None:
    ids, mask = tokens(4), MASK if masked else None
    plain, checkpointed = model(), model()
    checkpointed.gradient_checkpointing_enable()
    for lm in (plain, checkpointed):
        lm(ids, labels=ids, attention_mask=mask).loss.backward()
    for one, other in zip(plain.parameters(), checkpointed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, while it traces
@pytest.mark.parametrize("masked", [False, True])
def test_the_training_step_compiles_into_one_graph(masked: bool) -> None:
    lm = LSTMLMHeadModel(config(embd_pdrop=0.1, hidden_pdrop=0.1, output_pdrop=0.1)).eval()
    ids, mask = tokens(4), MASK if masked else None
    expected = lm(ids, labels=ids, attention_mask=mask).loss
    compiled = torch.compile(lm, fullgraph=True, backend="aot_eager")
    loss = compiled(ids, labels=ids, attention_mask=mask).loss
    torch.testing.assert_close(loss, expected)
    lm.train()
    compiled(ids, labels=ids, attention_mask=mask).loss.backward()
    assert all(parameter.grad is not None for parameter in lm.parameters())
    torch.compiler.reset()


def test_a_weight_put_in_anothers_place_is_the_one_that_counts() -> None:
    lm, other = model().eval(), model(seed=5).eval()
    lm(tokens())
    for mine, theirs in zip(lm.modules(), other.modules(), strict=True):
        mine._parameters.update(theirs._parameters)
    torch.testing.assert_close(lm(tokens()).logits, other(tokens()).logits)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_saved_loads_the_same_and_the_audit_is_clean(tmp_path: Path, shape: dict[str, Any], tied: bool) -> None:
    lm = model(tie_word_embeddings=tied, **shape).float().eval()
    lm.save_pretrained(tmp_path)
    again, info = LSTMLMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert info
    assert (again.lm_head.weight is again.lstm.wte.weight) is tied
    assert torch.equal(again(tokens()).logits, lm(tokens()).logits)
    values = dataclasses.asdict(again.config)
    assert {name: values[name] for name in shape} == shape
    assert [finding for finding in audit(tmp_path).findings if finding.severity is not Severity.INFO] == []


def test_layers_whose_parameters_share_one_memory_save_and_load_as_others_do(tmp_path: Path) -> None:
    """On a GPU, cuDNN has the four parameters of a layer lie in one piece of memory, one after the other."""
    lm = model().float().eval()
    expected = lm(tokens()).logits
    for layer in lm.lstm.layers:
        named = dict(layer.named_parameters())
        flat = torch.cat([parameter.detach().flatten() for parameter in named.values()])
        for parameter, piece in zip(named.values(), flat.split([one.numel() for one in named.values()]), strict=True):
            parameter.data = piece.view_as(parameter)
    lm.save_pretrained(tmp_path)
    torch.testing.assert_close(LSTMLMHeadModel.from_pretrained(tmp_path)(tokens()).logits, expected)
    lm.resize_token_embeddings(V + 1)
    torch.testing.assert_close(lm(tokens()).logits[..., :V], expected)


def test_a_base_model_is_loaded_from_a_model_with_a_head_and_the_other_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lm = model().float().eval()
    lm.save_pretrained(tmp_path / "head")
    base = LSTMModel.from_pretrained(tmp_path / "head")
    expected = lm.lstm(tokens()).last_hidden_state
    torch.testing.assert_close(base(tokens()).last_hidden_state, expected)
    base.save_pretrained(tmp_path / "base")
    again, info = LSTMLMHeadModel.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert info.missing_keys == ("lm_head.bias",)
    assert "lm_head.bias" in caplog.text
    torch.testing.assert_close(again.lstm(tokens()).last_hidden_state, expected)
    assert again.lm_head.weight is again.lstm.wte.weight


def test_unknown_keys_of_a_config_are_kept() -> None:
    content = {"model_type": "lstm", "hidden_size": 8, "vocab_size": 9, "num_hidden_layers": 3, "author": "someone"}
    read = LSTMConfig.from_dict(content)
    assert (read.num_layers, read.width, read.author) == (3, 8, "someone")
    assert LSTMConfig.from_dict(read.to_dict()) == read


def test_weights_are_drawn_evenly_within_the_range_and_biases_are_zero() -> None:
    torch.manual_seed(0)
    for name, parameter in LSTMLMHeadModel(config(hidden_size=64, embedding_size=32)).named_parameters():
        if "bias" in name:
            assert not parameter.any()
        else:
            assert 0.099 < parameter.abs().max() <= 0.1
            assert abs(parameter.std().item() - 0.1 / 3**0.5) < 0.003  # of an even distribution


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"embedding_size": -1}, "embedding_size is -1"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"embd_pdrop": 1.0}, "embd_pdrop is 1.0"),
        ({"projection": "yes"}, "projection is 'yes'"),
        ({"pad_token_id": V}, "pad_token_id is 70"),
    ],
)
def test_a_config_that_means_nothing_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**values)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "expected exactly one of them"),
        ({"input_ids": tokens(), "inputs_embeds": torch.zeros(3, 7, E)}, "expected exactly one of them"),
        ({"input_ids": torch.tensor([[V]])}, f"has {V}, and the table has {V} rows"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "an empty batch"),
        ({"inputs_embeds": torch.zeros(3, 7, E + 1)}, rf"expected floating point of shape \(batch, length, {E}\)"),
        ({"input_ids": tokens(), "attention_mask": torch.ones(3, 6)}, r"\(3, 6\): expected \(3, 7\)"),
        ({"input_ids": tokens(), "attention_mask": torch.ones(3, 7, 7)}, r"expected \(3, 7\)"),
        ({"input_ids": tokens(), "past_key_values": object()}, "is a object, expected an LSTMState"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        model()(**inputs)


def test_a_state_of_another_batch_is_refused() -> None:
    lm = model().eval()
    state = lm(tokens(2), use_cache=True).past_key_values
    assert isinstance(state, LSTMState)
    with pytest.raises(UsageError, match="has 2 rows and the input 3"):
        lm(tokens(3), past_key_values=state)
    with pytest.raises(UsageError, match=r"expected \(2, 14\)"):
        lm(tokens(2), past_key_values=state, attention_mask=torch.ones(2, 7))


def test_there_are_no_heads_to_prune() -> None:
    with pytest.raises(UsageError, match="heads"):
        model().prune_heads({0: [1]})
