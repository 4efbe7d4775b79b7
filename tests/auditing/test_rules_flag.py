"""BW101 to BW117, the flag compared with the tensors: each code with the smallest checkpoint, and a near miss."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bowline.auditing import Severity, audit
from bowline.auditing.config_fix import fix_config
from bowline.auditing.loaders import Fate
from bowline.families.transformers_table import Table
from tests.checkpoints import (
    BART,
    BERT,
    GPT2,
    HEAD,
    LLAMA,
    LLAVA,
    OWN,
    ROWS,
    T5,
    UNKNOWN,
    WTE,
    Tensors,
    bf16,
    codes,
    one,
    table,
    tied_gpt2,
    write,
)

EMBED = "model.embed_tokens.weight"
LLAVA_EMBED, LLAVA_HEAD = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
BERT_EMBED, BERT_HEAD = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
BIAS, DECODER_BIAS = "cls.predictions.bias", "cls.predictions.decoder.bias"
UNTIED = {**GPT2, "tie_word_embeddings": False}


def test_a_tied_model_with_one_matrix_has_nothing_to_find(tmp_path: Path) -> None:
    assert codes(tied_gpt2(tmp_path)) == []


# --- BW101 tied-but-diverged ----------------------------------------------------------------------------------------


def test_bw101_two_different_matrices_under_a_true_flag(tmp_path: Path) -> None:
    found = one(write(tmp_path, {WTE: table(), HEAD: OWN}, GPT2), "BW101")
    assert (found.severity, found.tensors, found.file) == (Severity.ERROR, (HEAD, WTE), "config.json")
    assert found.flag_from_bytes is False
    assert f"differ in {ROWS} of {ROWS} rows" in found.message


def test_bw101_one_element_is_enough(tmp_path: Path) -> None:
    head = table()
    head[3, 5] = np.nextafter(head[3, 5], np.float32(9))
    assert "differ in 1 of 64 rows" in one(write(tmp_path, {WTE: table(), HEAD: head}, GPT2), "BW101").message


def test_bw101_a_default_of_true_counts_as_true(tmp_path: Path) -> None:
    silent = {key: value for key, value in GPT2.items() if key != "tie_word_embeddings"}
    found = one(write(tmp_path, {WTE: table(), HEAD: OWN}, silent), "BW101")
    assert "absent (default true)" in found.message
    assert found.fixable


def test_bw101_is_not_said_of_a_negative_zero(tmp_path: Path) -> None:
    embedding, head = table(), table()
    embedding[0, 0], head[0, 0] = 0.0, -0.0
    assert codes(write(tmp_path, {WTE: embedding, HEAD: head}, GPT2)) == ["BW105"]


def test_bw101_is_not_said_when_the_flag_is_false(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: table(), HEAD: OWN}, UNTIED)) == []


def test_bw101_is_not_said_without_reading_values(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: table(), HEAD: OWN}, GPT2), values=False) == []


def test_bw101_a_tie_that_no_config_decides_is_not_fixed_in_the_config(tmp_path: Path) -> None:
    tensors = {"shared.weight": table(), "encoder.embed_tokens.weight": OWN}
    found = one(write(tmp_path, tensors, T5), "BW101")
    assert found.tensors == ("encoder.embed_tokens.weight", "shared.weight")
    assert not found.fixable


# --- BW102 untied-but-missing ---------------------------------------------------------------------------------------


def test_bw102_a_false_flag_and_no_head(tmp_path: Path) -> None:
    found = one(write(tmp_path, {WTE: table()}, UNTIED), "BW102")
    assert (found.severity, found.tensors, found.file) == (Severity.ERROR, (HEAD, WTE), "config.json")
    assert found.flag_from_bytes is True
    assert "transformers-4, transformers-5, vllm" in found.message


def test_bw102_is_found_from_headers_alone(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: table()}, UNTIED), values=False) == ["BW102"]


def test_bw102_is_not_said_of_a_quantised_head(tmp_path: Path) -> None:
    tensors = {EMBED: table(), "lm_head.qweight": np.zeros((4, ROWS), np.int32)}
    assert codes(write(tmp_path, tensors, LLAMA)) == []


def test_bw102_is_not_said_of_a_class_without_a_head(tmp_path: Path) -> None:
    config = {**BERT, "architectures": ["BertModel"], "tie_word_embeddings": False}
    assert codes(write(tmp_path, {"embeddings.word_embeddings.weight": table()}, config)) == []


# --- BW103 flag-absent ----------------------------------------------------------------------------------------------


def test_bw103_an_unknown_class_without_a_flag_is_two_models(tmp_path: Path) -> None:
    found = one(write(tmp_path, {EMBED: table()}, UNKNOWN), "BW103")
    assert (found.severity, found.tensors, found.file) == (Severity.WARNING, (HEAD, EMBED), "config.json")
    assert found.flag_from_bytes is True


def test_bw103_two_matrices_make_the_flag_false(tmp_path: Path) -> None:
    assert one(write(tmp_path, {EMBED: table(), HEAD: OWN}, UNKNOWN), "BW103").flag_from_bytes is False


def test_bw103_a_quantised_head_leaves_the_flag_open(tmp_path: Path) -> None:
    tensors = {EMBED: table(), "lm_head.qweight": np.zeros((4, ROWS), np.int32)}
    assert not one(write(tmp_path, tensors, UNKNOWN), "BW103").fixable


def test_bw103_is_not_said_where_the_defaults_agree(tmp_path: Path) -> None:
    silent = {key: value for key, value in GPT2.items() if key != "tie_word_embeddings"}
    assert codes(write(tmp_path, {WTE: table()}, silent)) == []


def test_bw103_is_not_said_without_a_config(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {EMBED: table(), HEAD: OWN})) == ["BW402"]


# --- BW104 levels-disagree ------------------------------------------------------------------------------------------


def llava(top: bool | None, text: bool | None) -> dict[str, object]:
    config: dict[str, Any] = {**LLAVA, "text_config": dict(LLAVA["text_config"])}
    if top is not None:
        config["tie_word_embeddings"] = top
    if text is not None:
        config["text_config"]["tie_word_embeddings"] = text
    return config


def test_bw104_levels_that_make_two_versions_differ(tmp_path: Path) -> None:
    found = one(write(tmp_path, {LLAVA_EMBED: table(), LLAVA_HEAD: OWN}, llava(True, False)), "BW104")
    assert (found.severity, found.tensors, found.file) == (Severity.WARNING, (LLAVA_HEAD,), "config.json")
    assert found.flag_from_bytes is False
    assert "tie_word_embeddings: true, text_config.tie_word_embeddings: false" in found.message


def test_bw104_one_matrix_makes_every_level_true(tmp_path: Path) -> None:
    assert one(write(tmp_path, {LLAVA_EMBED: table()}, llava(True, False)), "BW104").flag_from_bytes is True


def test_bw104_is_information_where_the_versions_agree(tmp_path: Path) -> None:
    found = one(write(tmp_path, {LLAVA_EMBED: table()}, llava(False, True)), "BW104")
    assert (found.severity, found.fixable) == (Severity.INFO, False)


def test_bw104_a_quantised_head_leaves_the_flag_open(tmp_path: Path) -> None:
    tensors = {LLAVA_EMBED: table(), "language_model.lm_head.qweight": np.zeros((4, ROWS), np.int32)}
    assert not one(write(tmp_path, tensors, llava(True, False)), "BW104").fixable


def test_bw104_missing_matrices_leave_the_flag_open(tmp_path: Path) -> None:
    other = {"language_model.model.norm.weight": np.ones(8, np.float32)}
    assert not one(write(tmp_path, other, llava(True, False)), "BW104").fixable


def test_bw104_two_equal_matrices_keep_the_flag_that_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(path: str) -> dict[str, Any]:
        tie = {"target": HEAD, "source": EMBED, "gate": {"paths": [path], "default": False}}
        return {"ties": [tie], "embedding": EMBED, "head": HEAD, "vocabulary": {EMBED: 0, HEAD: 0}}

    toy = {
        "family": "toy",
        "prefix": "",
        "4": asks("text_config.tie_word_embeddings"),
        "5": asks("tie_word_embeddings"),
    }
    by_hand = Table({"transformers": {"4": "4", "5": "5"}, "families": {}, "classes": {"ToyForCausalLM": toy}})
    monkeypatch.setattr(import_module("bowline.families.resolver"), "load_table", lambda: by_hand)
    for top in (True, False):
        config = {**llava(top, not top), "architectures": ["ToyForCausalLM"], "model_type": "toy"}
        found = one(write(tmp_path, {EMBED: table(), HEAD: table()}, config), "BW104")
        assert found.flag_from_bytes is top


def test_bw104_is_not_said_of_a_level_without_a_vocabulary(tmp_path: Path) -> None:
    config = {**llava(False, None), "vision_config": {"tie_word_embeddings": True}}
    assert codes(write(tmp_path, {LLAVA_EMBED: table(), LLAVA_HEAD: OWN}, config)) == []


def test_bw104_is_not_said_where_the_levels_agree(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {LLAVA_EMBED: table(), LLAVA_HEAD: OWN}, llava(False, False))) == []


# --- BW105 redundant-copy -------------------------------------------------------------------------------------------


def test_bw105_a_tied_head_stored_again(tmp_path: Path) -> None:
    found = one(write(tmp_path, {WTE: table(), HEAD: table()}, GPT2), "BW105")
    assert (found.severity, found.tensors) == (Severity.WARNING, (HEAD, WTE))
    assert (found.file, found.fixable) == ("model.safetensors", False)
    assert "2.05 kB" in found.message


def test_bw105_a_bias_stored_again_is_information(tmp_path: Path) -> None:
    tensors = {BERT_EMBED: table(), BIAS: np.ones(ROWS, np.float32), DECODER_BIAS: np.ones(ROWS, np.float32)}
    assert one(write(tmp_path, tensors, BERT), "BW105").severity is Severity.INFO


MARIAN = {**BART, "architectures": ["MarianMTModel"], "model_type": "marian", "share_encoder_decoder_embeddings": True}
SHARED = "model.shared.weight"


def test_bw105_a_head_that_is_tied_through_the_decoders_table(tmp_path: Path) -> None:
    path = write(tmp_path, {SHARED: table(), HEAD: table()}, MARIAN)
    assert one(path, "BW105").tensors == (HEAD, SHARED)
    assert codes(path) == ["BW105"]


def test_bw101_a_head_that_is_tied_through_the_decoders_table(tmp_path: Path) -> None:
    assert one(write(tmp_path, {SHARED: table(), HEAD: OWN}, MARIAN), "BW101").tensors == (HEAD, SHARED)


def test_bw105_is_not_said_of_an_untied_copy(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: table(), HEAD: table()}, UNTIED)) == ["BW112"]


def test_bw105_several_copies_of_one_table_are_one_finding(tmp_path: Path) -> None:
    names = ("shared.weight", HEAD, "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    found = one(write(tmp_path, {name: table() for name in names}, T5), "BW105")
    assert found.tensors[-1] == "shared.weight"
    assert set(found.tensors) == set(names)
    assert found.message.endswith(" each repeat shared.weight value by value: 6.14 kB wasted")


# --- BW106 both-missing ---------------------------------------------------------------------------------------------


def test_bw106_neither_end_is_stored(tmp_path: Path) -> None:
    found = one(write(tmp_path, {"transformer.ln_f.weight": np.ones(8, np.float32)}, GPT2), "BW106")
    assert (found.severity, found.tensors, found.fixable) == (Severity.ERROR, (HEAD, WTE), False)


@pytest.mark.parametrize("prefix", ["module.", "net.gpt.", "\x1b[2J."])
def test_bw106_names_the_prefix_that_every_tensor_has(tmp_path: Path, prefix: str) -> None:
    tensors = {f"{prefix}{WTE}": table(), f"{prefix}transformer.ln_f.weight": np.ones(8, np.float32)}
    found = one(write(tmp_path, tensors, GPT2), "BW106")
    assert found.message.endswith(f"; every tensor name begins with {prefix!r}")
    assert found.help == f"remove the prefix {prefix!r} from every tensor name"


def test_bw106_names_a_prefix_that_hides_another_tensor_and_does_not_say_to_remove_it(tmp_path: Path) -> None:
    found = one(write(tmp_path, {"net.ln.weight": table(), "net.ln.bias": table()}, GPT2), "BW106")
    assert found.message.endswith("; every tensor name begins with 'net.ln.'")
    assert found.help.startswith("fetch the missing shard")


def test_bw106_names_no_prefix_where_the_class_has_it_or_one_tensor_lacks_it(tmp_path: Path) -> None:
    lone = one(write(tmp_path / "own", {"transformer.ln_f.weight": table()}, GPT2), "BW106")
    mixed = one(write(tmp_path / "mixed", {f"net.{WTE}": table(), "other.weight": table()}, GPT2), "BW106")
    assert "prefix" not in lone.message + lone.help + mixed.message + mixed.help
    assert lone.message.endswith(mixed.message[-9:]) and lone.message.endswith("at random")


def test_bw106_all_ties_of_one_missing_table_are_one_finding(tmp_path: Path) -> None:
    found = one(write(tmp_path, {"decoder.block.weight": table(), "encoder.block.weight": table()}, T5), "BW106")
    assert found.message == (
        f"none of {HEAD}, decoder.embed_tokens.weight, encoder.embed_tokens.weight and shared.weight is stored: all "
        "will be drawn at random"
    )


def test_bw106_a_missing_bias_is_a_warning(tmp_path: Path) -> None:
    found = one(write(tmp_path, {BERT_EMBED: table()}, BERT), "BW106")
    assert (found.severity, found.tensors) == (Severity.WARNING, (DECODER_BIAS, BIAS))


def test_bw106_a_source_missing_whose_other_target_is_stored_is_a_warning(tmp_path: Path) -> None:
    found = one(write(tmp_path, {"model.encoder.embed_tokens.weight": table(), HEAD: table()}, BART), "BW106")
    assert (found.severity, found.tensors[0]) == (Severity.WARNING, "model.decoder.embed_tokens.weight")


def test_bw106_is_not_said_when_a_prefix_away(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {"wte.weight": table()}, GPT2)) == []


def test_bw106_is_not_said_of_a_quantised_head_alone(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {"lm_head.qweight": np.zeros((4, ROWS), np.int32)}, LLAMA)) == []


# --- BW107 only-target-stored ---------------------------------------------------------------------------------------


def test_bw107_a_head_without_its_embedding(tmp_path: Path) -> None:
    found = one(write(tmp_path, {HEAD: table()}, GPT2), "BW107")
    assert (found.severity, found.tensors, found.fixable) == (Severity.WARNING, (HEAD, WTE), False)


def test_bw107_is_an_error_under_a_false_flag(tmp_path: Path) -> None:
    assert one(write(tmp_path, {HEAD: table()}, UNTIED), "BW107").severity is Severity.ERROR


def test_bw107_is_not_said_of_a_quantised_embedding(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.qweight": np.zeros((ROWS, 4), np.int32), HEAD: table()}
    assert codes(write(tmp_path, tensors, LLAMA)) == []


def test_bw107_is_not_said_of_a_bias(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {BERT_EMBED: table(), DECODER_BIAS: np.ones(ROWS, np.float32)}, BERT)) == []


def test_bw107_several_targets_without_their_source_are_one_finding(tmp_path: Path) -> None:
    tensors = {"encoder.embed_tokens.weight": table(), "decoder.embed_tokens.weight": table()}
    found = one(write(tmp_path, tensors, T5), "BW107")
    assert found.message.endswith(" are stored, but shared.weight, from which loaders take the matrix, is not")
    assert set(found.tensors) == {*tensors, "shared.weight"}


# --- BW108 incompatible ---------------------------------------------------------------------------------------------


def test_bw108_two_shapes(tmp_path: Path) -> None:
    path = write(tmp_path, {WTE: table(), HEAD: table(columns=16)}, GPT2)
    found = one(path, "BW108")
    assert (found.severity, found.tensors, found.fixable) == (Severity.ERROR, (HEAD, WTE), False)
    assert "F32 [64, 16]" in found.message and "F32 [64, 8]" in found.message


def test_bw108_two_shapes_are_an_error_under_a_false_flag_too(tmp_path: Path) -> None:
    assert one(write(tmp_path, {WTE: table(), HEAD: table(72)}, UNTIED), "BW108").severity is Severity.ERROR


def test_bw108_two_dtypes_whose_values_agree_once_cast(tmp_path: Path) -> None:
    exact = (table().view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    found = one(write(tmp_path, {WTE: exact, HEAD: bf16(exact)}, GPT2), "BW108")
    assert found.message.endswith("the values agree once cast")
    assert found.severity is Severity.ERROR


def test_bw108_two_dtypes_whose_values_do_not(tmp_path: Path) -> None:
    assert not one(write(tmp_path, {WTE: table(), HEAD: bf16(OWN)}, GPT2), "BW108").message.endswith("once cast")


def test_bw108_two_dtypes_of_an_untied_model_are_information(tmp_path: Path) -> None:
    assert one(write(tmp_path, {WTE: table(), HEAD: bf16(OWN)}, UNTIED), "BW108").severity is Severity.INFO


def test_bw108_is_not_said_of_one_shape_and_dtype(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {WTE: bf16(table()), HEAD: bf16(OWN)}, UNTIED)) == []


# --- BW109 t5-scale-trap, BW113 t5-untied ---------------------------------------------------------------------------

V11 = {"shared.weight": table(), HEAD: OWN}


def test_bw109_an_untied_t5_saved_again_by_transformers_5(tmp_path: Path) -> None:
    found = one(write(tmp_path, V11, {**T5, "scale_decoder_outputs": False}), "BW109")
    assert (found.severity, found.tensors, found.file) == (Severity.ERROR, (HEAD,), "config.json")
    assert found.flag_from_bytes is False
    assert "drops the head and scales the logits" in found.message


def test_bw109_one_matrix_that_no_config_can_describe_is_not_fixable(tmp_path: Path) -> None:
    found = one(write(tmp_path, {"shared.weight": table()}, {**T5, "scale_decoder_outputs": False}), "BW109")
    assert not found.fixable
    assert "drops the head" not in found.message


def test_bw109_an_absent_flag_is_true(tmp_path: Path) -> None:
    silent = {key: value for key, value in T5.items() if key != "tie_word_embeddings"}
    assert "BW109" in codes(write(tmp_path, V11, {**silent, "scale_decoder_outputs": False}))


@pytest.mark.parametrize("scaled", [{}, {"scale_decoder_outputs": True}])
def test_bw109_is_not_said_of_a_t5_that_scales(tmp_path: Path, scaled: dict[str, bool]) -> None:
    assert codes(write(tmp_path, {"shared.weight": table()}, {**T5, **scaled})) == []


def test_bw113_an_untied_t5_is_information(tmp_path: Path) -> None:
    found = one(write(tmp_path, V11, {**T5, "tie_word_embeddings": False}), "BW113")
    assert (found.severity, found.tensors, found.fixable) == (Severity.INFO, (HEAD,), False)


def test_bw113_is_not_said_of_a_tied_t5(tmp_path: Path) -> None:
    assert "BW113" not in codes(write(tmp_path, V11, T5))


def test_bw113_is_not_said_of_another_family(tmp_path: Path) -> None:
    tensors = {"model.shared.weight": table(), HEAD: OWN}
    assert "BW113" not in codes(write(tmp_path, tensors, {**BART, "tie_word_embeddings": False}))


# --- BW110 bias-diverged --------------------------------------------------------------------------------------------


def biases(decoder: float) -> Tensors:
    return {BERT_EMBED: table(), BIAS: np.zeros(ROWS, np.float32), DECODER_BIAS: np.full(ROWS, decoder, np.float32)}


def test_bw110_one_bias_under_two_names_with_two_values(tmp_path: Path) -> None:
    found = one(write(tmp_path, biases(1.5), BERT), "BW110")
    assert (found.severity, found.tensors, found.fixable) == (Severity.ERROR, (DECODER_BIAS, BIAS), False)
    assert "differ in 64 entries (by at most 1.5)" in found.message


def two_biases(architecture: str, head: str, *, flag: bool) -> tuple[Tensors, dict[str, Any]]:
    bias, decoder = np.zeros(ROWS, np.float32), np.ones(ROWS, np.float32)
    config = {**BERT, "architectures": [architecture], "tie_word_embeddings": flag}
    return {f"{head}.bias": bias, f"{head}.decoder.bias": decoder}, config


@pytest.mark.parametrize(
    ("architecture", "head"), [("BertForMaskedLM", "cls.predictions"), ("FlavaForPreTraining", "mlm_head")]
)
def test_bw110_two_versions_compute_with_different_biases(tmp_path: Path, architecture: str, head: str) -> None:
    found = one(write(tmp_path, *two_biases(architecture, head, flag=False)), "BW110")
    assert set(found.tensors) == {f"{head}.bias", f"{head}.decoder.bias"}


ONE_BIAS_ACTS = [
    ("RobertaForMaskedLM", "lm_head"),
    ("AlbertForMaskedLM", "predictions"),
    ("BertGenerationDecoder", "lm_head"),
    ("LukeForMaskedLM", "lm_head"),
]
"""Classes whose decoder's bias is computed with in transformers 4 and 5 alike."""


@pytest.mark.parametrize(("architecture", "head"), ONE_BIAS_ACTS)
def test_bw110_is_not_said_where_every_version_computes_with_the_same_bias(
    tmp_path: Path, architecture: str, head: str
) -> None:
    assert "BW110" not in codes(write(tmp_path, *two_biases(architecture, head, flag=False)))


def test_bw110_under_a_true_flag_the_next_tie_overwrites_the_bias_that_acts(tmp_path: Path) -> None:
    assert "BW110" in codes(write(tmp_path, *two_biases("RobertaForMaskedLM", "lm_head", flag=True)))


def test_bw110_is_not_said_of_equal_biases(tmp_path: Path) -> None:
    assert codes(write(tmp_path, biases(0.0), BERT)) == ["BW105"]


# --- BW111 stored-under-alias ---------------------------------------------------------------------------------------


def test_bw111_what_save_model_of_safetensors_leaves(tmp_path: Path) -> None:
    found = one(write(tmp_path, {HEAD: table()}, GPT2, metadata={WTE: HEAD}), "BW111")
    assert (found.severity, found.tensors, found.fixable) == (Severity.WARNING, (HEAD, WTE), False)


def test_bw111_takes_the_place_of_bw107(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {HEAD: table()}, GPT2, metadata={WTE: HEAD})) == ["BW111"]


def test_bw111_is_not_said_when_the_record_names_another(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {HEAD: table()}, GPT2, metadata={WTE: "other.weight"})) == ["BW107"]


# --- BW112 untied-but-equal -----------------------------------------------------------------------------------------


def test_bw112_a_copy_under_a_false_flag(tmp_path: Path) -> None:
    found = one(write(tmp_path, {WTE: table(), HEAD: table()}, UNTIED), "BW112")
    assert (found.severity, found.tensors, found.fixable) == (Severity.INFO, (HEAD, WTE), False)


def test_bw112_is_not_said_of_a_head_of_its_own(tmp_path: Path) -> None:
    assert codes(write(tmp_path, {EMBED: table(), HEAD: OWN}, LLAMA)) == []


# --- BW117 default-drops-head ---------------------------------------------------------------------------------------

SILENT_LLAMA = {
    **{key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"},
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 0,
    "rms_norm_eps": 1e-6,
}


def test_bw117_mlx_lm_ties_where_transformers_keeps(tmp_path: Path) -> None:
    place = write(tmp_path, {EMBED: table(), HEAD: OWN}, SILENT_LLAMA)
    found = one(place, "BW117")
    assert (found.severity, found.tensors, found.file) == (Severity.WARNING, (HEAD, EMBED), "config.json")
    assert found.flag_from_bytes is False
    fix_config(audit(place))
    assert codes(place) == []
    assert json.loads((place / "config.json").read_text())["tie_word_embeddings"] is False


def test_bw117_is_not_said_of_a_stated_flag_or_an_equal_head(tmp_path: Path) -> None:
    stated = {**SILENT_LLAMA, "tie_word_embeddings": False}
    assert codes(write(tmp_path, {EMBED: table(), HEAD: OWN}, stated)) == []
    assert "BW117" not in codes(write(tmp_path, {EMBED: table(), HEAD: table()}, SILENT_LLAMA))


def test_bw117_is_not_said_where_mlx_lm_has_the_default_of_transformers(tmp_path: Path) -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "rms_norm_eps": 1e-6}
    place = write(tmp_path, {EMBED: table(), HEAD: OWN}, {**SILENT_LLAMA, **mixtral})
    assert codes(place) == []
    outcome = audit(place).evidence.outcomes["mlx-lm"][HEAD]
    assert outcome is not None
    assert outcome.fate is Fate.KEPT
