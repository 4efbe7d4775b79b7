from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.func import functional_call
from transformers.models.t5.modeling_t5 import T5LayerNorm

from bowline import audit
from bowline.auditing import Severity
from bowline.errors import BowlineError, ConfigError, UsageError
from bowline.models.t5 import T5Config, T5EncoderModel, T5ForConditionalGeneration, T5Model
from bowline.models.t5 import T5LayerNorm as OurLayerNorm
from bowline.nn import tie_weights, untie_weights

pytestmark = pytest.mark.usefixtures("quiet_transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
V1_1: dict[str, Any] = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "v1.0": {},
    "v1.1": V1_1,
    "gated-silu, scaled": {"feed_forward_proj": "gated-silu", "num_decoder_layers": 3},
    "relu, unscaled, few buckets": {
        "scale_decoder_outputs": False,
        "num_decoder_layers": 1,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 10,
    },
    "wide heads": {"d_kv": 10, "feed_forward_proj": "gelu", "layer_norm_epsilon": 1e-3},
}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def theirs(**options: Any) -> Any:
    """A model of transformers, of weights that make every part count; an untied one has a head of its own."""
    config = transformers.T5Config(**SIZES | options)
    config._attn_implementation = "eager"
    model = transformers.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        if options.get("tie_word_embeddings") is False:
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.shared.weight))
        for stack in (model.encoder, model.decoder):
            stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.normal_()
    return model


def same(other: Any, cls: Any = T5ForConditionalGeneration) -> Any:
    """Ours, of the same config and weights."""
    content = other.config.to_dict()
    content["tie_word_embeddings"] = other.lm_head.weight is other.shared.weight
    model = cls(T5Config.from_dict(content)).to(other.dtype).eval()
    model.load_state_dict(other.state_dict())
    return model


def data(length: int = 11, target: int = 7) -> dict[str, torch.Tensor]:
    ids, labels = torch.randint(2, 61, (3, length)), torch.randint(2, 61, (3, target))
    mask, decoder_mask = torch.ones_like(ids), torch.ones_like(labels)
    mask[0, length - 3 :], mask[2, :2] = 0, 0
    decoder_mask[1, target - 2 :], labels[1, target - 2 :] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, "decoder_attention_mask": decoder_mask}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_logits_loss_and_every_gradient_are_those_of_transformers(options: dict[str, Any]) -> None:
    other = theirs(**options)
    model, inputs = same(other), data()
    expected, got = other(**inputs, output_hidden_states=True), model(**inputs, output_hidden_states=True)
    assert distance(got.logits, expected.logits) < 1e-5
    assert got.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        assert len(got[name]) == len(expected[name])
        assert all(distance(a, b) < 1e-5 for a, b in zip(got[name], expected[name], strict=True))
    expected.loss.backward()
    got.loss.backward()
    gradients = {name: parameter.grad for name, parameter in other.named_parameters()}
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert distance(parameter.grad, gradients[name]) < 1e-4, name


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_float32_is_no_further_from_float64_than_transformers_is(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def exact(self: Any, x: torch.Tensor) -> Any:  # theirs takes its variance in float32 whatever x is
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    other = theirs(**options)
    model, inputs = same(other), data(40, 33)
    with torch.no_grad():
        single, got = other(**inputs).logits, model(**inputs).logits
        monkeypatch.setattr(T5LayerNorm, "forward", exact)
        truth, ours = other.double()(**inputs).logits, model.double()(**inputs).logits
    assert distance(ours, truth) < 1e-12
    assert distance(got, truth) < 1.5 * distance(single, truth) + 1e-7


def test_lengths_past_the_farthest_bucket_agree() -> None:
    other = theirs()
    model, inputs = same(other), data(190, 150)
    assert distance(model(**inputs).logits, other(**inputs).logits) < 1e-5


def test_masks_with_a_row_for_each_query_agree() -> None:
    other = theirs()
    model, inputs = same(other), data()
    among = torch.rand(3, 11, 11) < 0.6
    among |= torch.eye(11, dtype=torch.bool)
    back = (torch.rand(3, 7, 7) < 0.6).tril() | torch.eye(7, dtype=torch.bool)
    across = torch.rand(3, 7, 11) < 0.6
    across[:, :, 0] = True
    target = inputs["labels"].clamp_min(0)
    states = other.encoder(inputs["input_ids"], attention_mask=float_mask(among))
    expected = other(
        encoder_outputs=states,
        attention_mask=float_mask(across),
        decoder_input_ids=target,
        decoder_attention_mask=float_mask(back),
    )
    got = model(
        inputs["input_ids"],
        attention_mask=among,
        cross_attention_mask=across,
        decoder_input_ids=target,
        decoder_attention_mask=back,
    )
    assert distance(got.logits, expected.logits) < 1e-5
    with pytest.raises(UsageError, match="cross_attention_mask"):
        model(inputs["input_ids"], attention_mask=among, decoder_input_ids=target)


def float_mask(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape)[:, None].masked_fill(~mask[:, None], torch.finfo(torch.float32).min)


def test_packed_sequences_give_what_they_give_alone() -> None:
    model = same(theirs())
    ids, target = torch.randint(2, 61, (2, 5)), torch.randint(2, 61, (2, 4))
    alone = model(ids, decoder_input_ids=target).logits
    both = model(
        ids.view(1, 10),
        attention_mask=block_mask(5, 5),
        cross_attention_mask=block_mask(4, 5),
        decoder_input_ids=target.view(1, 8),
        decoder_attention_mask=block_mask(4, 4),
    ).logits
    assert distance(both.view(2, 4, -1), alone) < 1e-5


def block_mask(queries: int, keys: int) -> Any:
    return torch.block_diag(torch.ones(queries, keys), torch.ones(queries, keys))[None]


def test_bfloat16_agrees_loosely() -> None:
    other = theirs().bfloat16()
    model, inputs = same(other), data()
    assert distance(model(**inputs).logits, other(**inputs).logits) < 0.05


def test_float16_that_overflows_is_clamped_as_in_transformers() -> None:
    other = theirs().half()
    with torch.no_grad():
        for block in other.encoder.block:
            block.layer[1].DenseReluDense.wo.weight.fill_(60000.0)
    model, inputs = same(other), data()
    got, expected = model(**inputs).logits, other(**inputs).logits
    assert got.isfinite().all()
    assert distance(got, expected) < 0.05


def test_dropout_falls_in_as_many_places_as_in_transformers() -> None:
    places = [
        sum(isinstance(module, torch.nn.Dropout) for module in model.modules())
        for model in (transformers.T5ForConditionalGeneration(transformers.T5Config(**SIZES)), T5_of())
    ]
    assert places[0] == places[1]
    model = T5_of(dropout_rate=0.5).train()
    inputs = data()
    assert not torch.equal(model(**inputs).logits, model(**inputs).logits)


def T5_of(**options: Any) -> Any:  # noqa: N802
    return T5ForConditionalGeneration(T5Config(**SIZES | options))


def test_the_base_model_and_the_encoder_alone_agree() -> None:
    inputs = data()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    config = transformers.T5Config(**SIZES)
    pairs: list[tuple[Any, Any]] = [(transformers.T5Model, T5Model), (transformers.T5EncoderModel, T5EncoderModel)]
    for theirs_, cls in pairs:
        other = theirs_(transformers.T5Config(**SIZES)).eval()
        model = cls(T5Config.from_dict(config.to_dict())).eval()
        assert set(model.state_dict()) == set(other.state_dict())
        model.load_state_dict(other.state_dict())
        target = {} if cls is T5EncoderModel else {"decoder_input_ids": ids[:, :5]}
        got, expected = (one(ids, attention_mask=mask, **target).last_hidden_state for one in (model, other))
        assert distance(got, expected) < 1e-5


@pytest.mark.parametrize("options", [{}, V1_1 | {"num_decoder_layers": 3}], ids=["v1.0", "v1.1"])
def test_names_and_counts_are_those_of_transformers(options: dict[str, Any]) -> None:
    other = theirs(**options)
    model = same(other)
    assert set(model.state_dict()) == set(other.state_dict())
    assert model.num_parameters() == other.num_parameters()
    assert len(list(model.parameters())) == len(list(other.parameters()))


def test_the_spread_of_every_drawn_tensor_is_that_of_transformers() -> None:
    sizes = SIZES | V1_1 | {"d_model": 64, "d_ff": 96, "d_kv": 16, "vocab_size": 300, "initializer_factor": 0.5}
    other = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    state = T5ForConditionalGeneration(T5Config(**sizes)).state_dict()
    for name, tensor in other.state_dict().items():
        if name != "lm_head.weight":  # transformers 5 ties it whatever the flag says
            assert float(state[name].square().mean()) == pytest.approx(float(tensor.square().mean()), rel=0.5), name
    assert float(state["lm_head.weight"].std()) == pytest.approx(0.5, rel=0.1)


def test_the_norm_has_right_first_and_second_derivatives() -> None:
    norm = OurLayerNorm(5, 1e-3).double()
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: functional_call(norm, {"weight": weight}, x), (x, norm.weight))
    assert torch.autograd.gradgradcheck(
        lambda x, weight: functional_call(norm, {"weight": weight}, x), (x, norm.weight)
    )
    assert torch.allclose(norm(x), torch.nn.functional.rms_norm(x, (5,), norm.weight, 1e-3))
    half = OurLayerNorm(5, 1e-3).bfloat16()(x.bfloat16())
    assert half.dtype is torch.bfloat16
    assert distance(half, norm(x)) < 0.02


# --- the tie and its scale --------------------------------------------------------------------------------------------


def test_encoder_decoder_and_a_tied_head_hold_one_table() -> None:
    model = T5_of()
    assert model.encoder.embed_tokens is model.shared is model.decoder.embed_tokens
    assert model.lm_head.weight is model.shared.weight
    assert T5_of(**V1_1).lm_head.weight is not model.shared.weight
    new = torch.nn.Embedding(61, 24)
    model.set_input_embeddings(new)
    assert model.encoder.embed_tokens is new is model.decoder.embed_tokens
    assert model.lm_head.weight is new.weight


def test_the_first_loss_is_near_ln_v_when_tied_and_scaled_and_far_above_it_unscaled() -> None:
    sizes = {"d_model": 128, "vocab_size": 1000}
    labels = torch.randint(2, 1000, (4, 16))
    scaled = T5_of(**sizes)(torch.randint(2, 1000, (4, 16)), labels=labels).loss.item()
    unscaled = T5_of(**sizes, scale_decoder_outputs=False)(labels, labels=labels).loss.item()
    assert scaled == pytest.approx(math.log(1000), abs=1.0)
    assert unscaled > 4 * math.log(1000)


def test_untying_and_tying_again_change_no_logit() -> None:
    model, inputs = T5_of().eval(), data()
    before = model(**inputs).logits
    untie_weights(model)
    assert (model.config.tie_word_embeddings, model.config.scale_decoder_outputs) == (False, False)
    assert distance(model(**inputs).logits, before) < 1e-6
    tie_weights(model)
    assert (model.config.tie_word_embeddings, model.config.scale_decoder_outputs) == (True, True)
    assert distance(model(**inputs).logits, before) < 1e-6


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


FILES: dict[str, tuple[dict[str, Any], dict[str, Any], bool, bool]] = {
    "v1.0, no flag": ({}, {"tie_word_embeddings": None, "scale_decoder_outputs": None}, True, True),
    "v1.0, flag": ({}, {"tie_word_embeddings": True, "scale_decoder_outputs": None}, True, True),
    "v1.1": (V1_1, {"tie_word_embeddings": False, "scale_decoder_outputs": None}, False, False),
    "v1.0 by transformers 5": ({}, {}, True, True),
    "v1.1 by transformers 5": (V1_1, {}, False, False),
}


@pytest.mark.parametrize(("options", "changes", "tied", "scaled"), FILES.values(), ids=FILES.keys())
def test_files_of_every_age_load_as_what_they_were_and_come_back(
    options: dict[str, Any], changes: dict[str, Any], tied: bool, scaled: bool, tmp_path: Path
) -> None:
    other, inputs = theirs(**options), data()
    other.save_pretrained(tmp_path / "theirs")
    edit(tmp_path / "theirs", **changes)
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "theirs")
    assert (model.lm_head.weight is model.shared.weight) is tied
    assert (model.config.tie_word_embeddings, model.config.scale_decoder_outputs) == (tied, scaled)
    expected = other(**inputs).logits
    assert distance(model(**inputs).logits, expected) < 1e-5

    model.save_pretrained(tmp_path / "ours")
    again = T5ForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)
    back = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours")
    assert distance(back(**inputs).logits, expected) < 1e-5
    state = back.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in other.state_dict().items())
    said = audit(tmp_path / "ours", ignore=["BW405"]).findings  # its weights are drawn, and the head with std 1
    assert not [finding for finding in said if finding.severity is not Severity.INFO]
    stored = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert stored["tie_word_embeddings"] is tied  # by which alone transformers 4 unties, and scales
    assert stored["scale_decoder_outputs"] is scaled is tied


def test_an_untied_head_that_is_scaled_comes_back_from_both(tmp_path: Path) -> None:
    model, inputs = T5_of(tie_word_embeddings=False, scale_decoder_outputs=True).eval(), data()
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    for cls in (T5ForConditionalGeneration, transformers.T5ForConditionalGeneration):
        assert distance(cls.from_pretrained(tmp_path)(**inputs).logits, expected) < 1e-5


def test_a_tied_head_that_is_unscaled_comes_back_from_both(tmp_path: Path) -> None:
    model, inputs = T5_of(scale_decoder_outputs=False).eval(), data()
    expected = model(**inputs).logits
    model.save_pretrained(tmp_path)
    for cls in (T5ForConditionalGeneration, transformers.T5ForConditionalGeneration):
        again: Any = cls.from_pretrained(tmp_path)
        assert again.lm_head.weight is again.shared.weight
        assert distance(again(**inputs).logits, expected) < 1e-5


def test_a_head_of_its_own_under_a_true_flag_is_refused_where_the_scale_does_not_explain_it(tmp_path: Path) -> None:
    theirs(**V1_1).save_pretrained(tmp_path)
    edit(tmp_path, scale_decoder_outputs=True)
    with pytest.raises(BowlineError, match=r"lm_head\.weight"):
        T5ForConditionalGeneration.from_pretrained(tmp_path)
    model = T5ForConditionalGeneration.from_pretrained(tmp_path, on_conflict="source")
    assert model.lm_head.weight is model.shared.weight


def test_files_load_into_the_classes_with_fewer_and_more_parts(tmp_path: Path) -> None:
    model, inputs = T5_of(**V1_1).eval(), data()
    model.save_pretrained(tmp_path / "whole")
    ids = inputs["input_ids"]
    encoder, info = T5EncoderModel.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert info
    assert torch.equal(encoder(ids).last_hidden_state, model.encode(ids).last_hidden_state)
    base, info = T5Model.from_pretrained(tmp_path / "whole", output_loading_info=True)
    assert info
    base.save_pretrained(tmp_path / "base")
    headed, info = T5ForConditionalGeneration.from_pretrained(tmp_path / "base", output_loading_info=True)
    assert info.missing_keys == ("lm_head.weight",)
    assert torch.equal(headed.shared.weight, model.shared.weight)
    assert float(headed.lm_head.weight.std()) == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("options", [{}, V1_1], ids=["tied", "untied"])
def test_resizing_reaches_both_ends(options: dict[str, Any]) -> None:
    model, inputs = T5_of(**options).eval(), data()
    before = model(**inputs).logits
    assert model.resize_token_embeddings(70).num_embeddings == 70
    assert model.config.vocab_size == 70
    assert model.shared is model.encoder.embed_tokens is model.decoder.embed_tokens
    assert (model.lm_head.weight is model.shared.weight) is not bool(options)
    after = model(**inputs).logits
    assert after.shape[-1] == 70
    assert distance(after[..., :61], before) < 1e-6


# --- training and generation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS.keys())
def test_cached_decoding_gives_the_full_forward_position_by_position(options: dict[str, Any]) -> None:
    model, inputs = T5_of(**options).eval(), data()
    ids, mask, target = inputs["input_ids"], inputs["attention_mask"], torch.randint(2, 61, (3, 9))
    with torch.no_grad():
        full = model(ids, attention_mask=mask, decoder_input_ids=target).logits
        states = model.encode(ids, mask)
        cache: Any = None
        for begin, end in ((0, 3), (3, 4), (4, 5), (5, 7), (7, 8), (8, 9)):
            output = model(
                encoder_outputs=states,
                attention_mask=mask,
                decoder_input_ids=target[:, begin:end],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            assert output.logits.shape[1] == 1
            assert distance(output.logits[:, 0], full[:, end - 1]) < 1e-5
        assert len(cache) == 9


def test_the_encoders_keys_are_computed_once_and_follow_the_beams() -> None:
    model, inputs = T5_of().eval(), data()
    states = model.encode(inputs["input_ids"])
    with torch.no_grad():
        first = model(encoder_outputs=states, decoder_input_ids=torch.zeros(3, 1, dtype=torch.long), use_cache=True)
        cache, order = first.past_key_values, torch.tensor([2, 2, 0])
        held = cache.fixed[0][0]
        cache.reorder(order)
        token = torch.full((3, 1), 5)
        second = model(encoder_outputs=(states[0][order],), decoder_input_ids=token, past_key_values=cache)
        assert torch.equal(cache.fixed[0][0], held[order])
        both = torch.cat([torch.zeros_like(token), token], 1)
        full = model(encoder_outputs=(states[0][order],), decoder_input_ids=both)
    assert distance(second.logits[:, 0], full.logits[:, 1]) < 1e-5


def test_labels_are_shifted_from_the_start_token_with_padding_for_none() -> None:
    model = T5_of(decoder_start_token_id=4, pad_token_id=3)
    labels = torch.tensor([[7, 8, -100, 9]])
    assert model.prepare_decoder_input_ids_from_labels(labels).tolist() == [[4, 7, 8, 3]]
    assert T5Config(pad_token_id=3).decoder_start_token_id == 3


def test_checkpointed_blocks_give_the_same_gradients() -> None:
    model, inputs = T5_of().train(), data()
    model(**inputs).loss.backward()
    plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    calls = []
    model.encoder.block[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model(**inputs).loss.backward()
    assert len(calls) == 2
    assert all(distance(parameter.grad, plain[name]) < 1e-6 for name, parameter in model.named_parameters())


@pytest.mark.parametrize("options", [{}, V1_1], ids=["v1.0", "v1.1"])
def test_the_training_step_compiles_to_one_graph(options: dict[str, Any]) -> None:
    model, inputs = T5_of(**options).train(), data()
    expected = model(**inputs).loss
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    loss = compiled(**inputs).loss
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert model.shared.weight.grad is not None


def test_autocast_runs_and_agrees_loosely() -> None:
    model, inputs = T5_of().eval(), data()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**inputs).logits
    assert logits.isfinite().all()
    assert distance(logits, model(**inputs).logits) < 0.05


# --- configs and bad input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "act", "gated"),
    [("relu", "relu", False), ("gated-gelu", "gelu_new", True), ("gated-silu", "silu", True), ("gelu", "gelu", False)],
)
def test_the_feed_forward_part_is_read_from_one_key(kind: str, act: str, gated: bool) -> None:
    config = T5Config(feed_forward_proj=kind)
    assert (config.dense_act_fn, config.is_gated_act) == (act, gated)
    other = transformers.T5Config(feed_forward_proj=kind)
    assert (other.dense_act_fn, other.is_gated_act) == (act, gated)
    assert T5Config.from_dict(other.to_dict()).to_dict()["dense_act_fn"] == act


def test_the_config_comes_back_with_what_it_has_no_use_for() -> None:
    content = transformers.T5Config(**SIZES).to_dict() | {"task_specific_params": {"a": 1}, "n_positions": 512}
    config = T5Config.from_dict(content)
    written = config.to_dict()
    assert T5Config.from_dict(written) == config
    assert {
        key for key in content if content[key] is not None and written.get(key, content[key]) != content[key]
    } == set()
    assert written["task_specific_params"] == {"a": 1}
    assert dataclasses.replace(config, num_layers=3).num_hidden_layers == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feed_forward_proj": "gated-nothing"}, "nothing"),
        ({"feed_forward_proj": "wide-gelu"}, "feed_forward_proj"),
        ({"feed_forward_proj": "gated-gelu-new"}, "feed_forward_proj"),
        ({"scale_decoder_outputs": 1}, "scale_decoder_outputs"),
        ({"relative_attention_num_buckets": 2}, "relative_attention_num_buckets"),
        ({"relative_attention_max_distance": 16}, "relative_attention_max_distance"),
        ({"num_decoder_layers": 0}, "num_decoder_layers"),
        ({"decoder_start_token_id": 61}, "decoder_start_token_id"),
        ({"dense_act_fn": "silu"}, "dense_act_fn"),
        ({"is_decoder": True}, "is_decoder"),
    ],
)
def test_a_config_that_means_nothing_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        T5Config.from_dict(SIZES | change)


def test_what_does_not_fit_is_refused_by_name_and_number() -> None:
    model, inputs = T5_of(), data()
    ids, labels = inputs["input_ids"], inputs["labels"]
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("input_ids has 61", {"input_ids": torch.full((1, 2), 61), "labels": labels[:1]}),
        ("decoder_input_ids has -1", {"input_ids": ids, "decoder_input_ids": labels.clamp(max=-1)}),
        ("label 61: expected 0 to 60", {"input_ids": ids, "labels": torch.full((3, 2), 61)}),
        ("input_ids and encoder_outputs", {"labels": labels}),
        ("decoder_input_ids are missing", {"input_ids": ids}),
        ("batch of 3 and the decoder one of 2", {"input_ids": ids, "labels": labels[:2]}),
        (r"attention_mask \(3, 5\)", {"input_ids": ids, "labels": labels, "attention_mask": torch.ones(3, 5)}),
        (r"empty batch", {"input_ids": ids[:0], "labels": labels[:0]}),
    ]
    for message, bad in wrong:
        with pytest.raises(UsageError, match=message):
            model(**bad)
    with pytest.raises(ConfigError, match="cannot be shifted"):
        T5_of(pad_token_id=None, decoder_start_token_id=None)(ids, labels=labels)
    with pytest.raises(UsageError, match="pruned"):
        model.prune_heads({0: [1]})
