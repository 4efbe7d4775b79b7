"""The predicted outcome of a tie in each loader. transformers 5's table is that of the facts, row by row."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bowline.auditing import audit
from bowline.auditing.audit_report import findings_of
from bowline.auditing.evidence_gathering import gather
from bowline.auditing.loaders import LOADERS, Fate, Outcome
from bowline.auditing.rules import all_rules
from bowline.checkpoint import Checkpoint
from bowline.checkpoint.places.byte_source import ByteSource, MemoryBytes
from bowline.checkpoint.places.file_set import FileSet
from bowline.families.loader_tables import loader_table
from bowline.families.transformers_table import load_table
from tests.checkpoint.pickled import dictionary, saved, storage, tensor
from tests.checkpoints import BART, BERT, GPT2, HEAD, LLAMA, LLAVA, OWN, T5, UNKNOWN, WTE, bf16, table, write

TIED, KEPT, RANDOM, DROPPED, REFUSED = Fate
NOW = [loader for loader in LOADERS if loader != "vllm-0.28"]
"""Of vLLM only the newer rule; the older has tests of its own."""
EMBED = "model.embed_tokens.weight"
UNTIED = {**GPT2, "tie_word_embeddings": False}


def close_to(at: tuple[int, int], change: float) -> Any:
    head = table().astype(np.float64)
    head[at] += change
    return head


NAN_IN_BOTH = table()
NAN_IN_BOTH[3, 3] = np.nan
EXACT_IN_BF16 = (table().view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
WIDE = table().astype(np.float64)


def outcomes(path: Path, tensors: Any, config: Any, target: str = HEAD, **options: Any) -> dict[str, Outcome | None]:
    found = audit(write(path, tensors, config), **options).evidence.outcomes
    return {loader: found[loader][target] for loader in NOW}


def fates(path: Path, tensors: Any, config: Any, target: str = HEAD, **options: Any) -> list[Fate | None]:
    """By transformers 4, transformers 5, vLLM, llama.cpp, mlx-lm (which misses keys in GPT2's config here)."""
    return [
        outcome.fate if outcome else None for outcome in outcomes(path, tensors, config, target, **options).values()
    ]


# --- one matrix or two, under either flag ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "config", "expected"),
    [
        pytest.param({WTE: table(), HEAD: table()}, GPT2, [TIED, TIED, TIED, KEPT, REFUSED], id="both-equal"),
        pytest.param({WTE: table(), HEAD: OWN}, GPT2, [DROPPED, KEPT, KEPT, KEPT, REFUSED], id="both-different"),
        pytest.param(
            {WTE: WIDE, HEAD: close_to((9, 3), 1e-10)}, GPT2, [DROPPED, KEPT, KEPT, KEPT, REFUSED], id="by-1e-10"
        ),
        pytest.param(
            {WTE: NAN_IN_BOTH, HEAD: NAN_IN_BOTH}, GPT2, [DROPPED, KEPT, KEPT, KEPT, REFUSED], id="nan-in-both"
        ),
        pytest.param(
            {WTE: table(), HEAD: bf16(table())}, GPT2, [DROPPED, KEPT, KEPT, KEPT, REFUSED], id="bf16-cut-off"
        ),
        pytest.param(
            {WTE: EXACT_IN_BF16, HEAD: bf16(EXACT_IN_BF16)}, GPT2, [DROPPED, KEPT, TIED, KEPT, REFUSED], id="bf16-exact"
        ),
        pytest.param({WTE: table()}, GPT2, [TIED, TIED, TIED, TIED, REFUSED], id="embedding-alone"),
        pytest.param({HEAD: table()}, GPT2, [RANDOM, TIED, KEPT, REFUSED, REFUSED], id="head-alone"),
        pytest.param({"other": table()}, GPT2, [RANDOM, RANDOM, RANDOM, REFUSED, REFUSED], id="neither"),
        pytest.param({WTE: table()}, UNTIED, [RANDOM, RANDOM, RANDOM, TIED, REFUSED], id="false-and-no-head"),
        pytest.param({WTE: table(), HEAD: OWN}, UNTIED, [KEPT, KEPT, KEPT, KEPT, REFUSED], id="false-and-both"),
        pytest.param({WTE: table(), HEAD: table()}, UNTIED, [KEPT, KEPT, KEPT, KEPT, REFUSED], id="false-and-equal"),
        pytest.param({HEAD: table()}, UNTIED, [KEPT, KEPT, KEPT, REFUSED, REFUSED], id="false-and-head-alone"),
        pytest.param(
            {WTE: table(72), HEAD: table(72)},
            GPT2,
            [REFUSED, REFUSED, REFUSED, REFUSED, REFUSED],
            id="not-the-configs-size",
        ),
        pytest.param(
            {WTE: np.zeros(()), HEAD: np.zeros(())}, GPT2, [REFUSED, REFUSED, REFUSED, REFUSED, REFUSED], id="scalars"
        ),
        pytest.param(
            {WTE: table(), HEAD: table(72)}, GPT2, [REFUSED, REFUSED, REFUSED, REFUSED, REFUSED], id="two-shapes"
        ),
    ],
)
def test_the_fate_of_gpt2s_head(tmp_path: Path, tensors: Any, config: Any, expected: list[Fate]) -> None:
    assert fates(tmp_path, tensors, config) == expected


def test_a_head_that_version_4_overwrites_with_nothing_is_not_said_to_be_missing(tmp_path: Path) -> None:
    found = outcomes(tmp_path, {HEAD: table()}, GPT2)["transformers-4"]
    assert found is not None
    assert found.reason == f"tie_word_embeddings is true: overwritten by {WTE}, which is not stored"


def test_every_outcome_has_a_reason_that_is_one_phrase(tmp_path: Path) -> None:
    for outcome in outcomes(tmp_path, {WTE: table(), HEAD: OWN}, GPT2).values():
        assert outcome is not None
        assert outcome.reason
        assert "\n" not in outcome.reason


def test_without_values_an_outcome_that_hangs_on_them_is_open(tmp_path: Path) -> None:
    tensors = {WTE: table(), HEAD: table()}
    assert fates(tmp_path, tensors, GPT2, values=False) == [None, None, None, KEPT, REFUSED]
    assert fates(tmp_path, tensors, UNTIED, values=False) == [KEPT, KEPT, KEPT, KEPT, REFUSED]
    assert fates(tmp_path, {WTE: table()}, GPT2, values=False) == [TIED, TIED, TIED, TIED, REFUSED]


# --- groups ---------------------------------------------------------------------------------------------------------

GROUP = ["shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD]


@pytest.mark.parametrize("stored", GROUP)
def test_transformers_5_ties_a_whole_group_to_the_one_that_is_stored(tmp_path: Path, stored: str) -> None:
    found = audit(write(tmp_path, {stored: table()}, T5)).evidence.outcomes
    assert {target: outcome and outcome.fate for target, outcome in found["transformers-5"].items()} == dict.fromkeys(
        GROUP[1:], TIED
    )
    fate_in_4 = TIED if stored == "shared.weight" else RANDOM
    assert {outcome and outcome.fate for outcome in found["transformers-4"].values()} == {fate_in_4}


def test_transformers_5_leaves_out_of_a_group_only_what_differs(tmp_path: Path) -> None:
    tensors = {"shared.weight": table(), "encoder.embed_tokens.weight": table(), HEAD: OWN}
    found = audit(write(tmp_path, tensors, T5)).evidence.outcomes
    assert [found["transformers-5"][target].fate for target in GROUP[1:]] == [TIED, TIED, KEPT]  # type: ignore[union-attr]
    assert [found["transformers-4"][target].fate for target in GROUP[1:]] == [TIED, TIED, DROPPED]  # type: ignore[union-attr]


@pytest.mark.parametrize(("head", "expected"), [(table(), [TIED, TIED]), (OWN, [DROPPED, KEPT])])
def test_marians_head_is_held_against_the_table_at_the_end_of_its_chain(
    tmp_path: Path, head: Any, expected: list[Fate]
) -> None:
    config = {**BART, "architectures": ["MarianMTModel"], "model_type": "marian"}
    assert fates(tmp_path, {"model.shared.weight": table(), HEAD: head}, config)[:2] == expected


@pytest.mark.parametrize(("decoder", "expected"), [(table(), [TIED, TIED, TIED]), (OWN, [TIED, KEPT, TIED])])
def test_without_their_source_targets_are_held_against_the_first_that_is_stored(
    tmp_path: Path, decoder: Any, expected: list[Fate]
) -> None:
    config = {**BART, "architectures": ["MarianMTModel"], "model_type": "marian"}
    tensors = {HEAD: table(), "model.decoder.embed_tokens.weight": decoder}
    found = audit(write(tmp_path, tensors, config)).evidence.outcomes["transformers-5"]
    assert [outcome and outcome.fate for outcome in found.values()] == expected


def test_two_targets_that_nobody_compared_leave_their_fate_open(tmp_path: Path) -> None:
    tensors = {"encoder.embed_tokens.weight": table(), HEAD: table()}
    found = audit(write(tmp_path, tensors, T5), values=False).evidence
    assert found.seen.are_equal("encoder.embed_tokens.weight", HEAD) is None
    assert set(found.outcomes["transformers-5"].values()) == {None}


def test_what_equals_one_of_two_that_differ_differs_from_the_other(tmp_path: Path) -> None:
    tensors = {"shared.weight": table(), "encoder.embed_tokens.weight": table(), HEAD: OWN}
    found = audit(write(tmp_path, tensors, T5)).evidence.seen
    assert found.are_equal("encoder.embed_tokens.weight", HEAD) is False


def test_an_untied_t5_keeps_its_head_in_both_versions(tmp_path: Path) -> None:
    config = {**T5, "tie_word_embeddings": False}
    assert fates(tmp_path, {"shared.weight": table(), HEAD: OWN}, config)[:2] == [KEPT, KEPT]


def test_barts_flag_governs_its_encoder_and_t5s_does_not(tmp_path: Path) -> None:
    untied_bart, untied_t5 = {**BART, "tie_word_embeddings": False}, {**T5, "tie_word_embeddings": False}
    encoder = "encoder.embed_tokens.weight"
    assert fates(tmp_path, {"model.shared.weight": table()}, untied_bart, f"model.{encoder}")[:2] == [RANDOM, RANDOM]
    assert fates(tmp_path, {"shared.weight": table(), HEAD: OWN}, untied_t5, encoder)[:2] == [TIED, TIED]


def test_berts_bias_is_a_tie_of_its_own(tmp_path: Path) -> None:
    tensors = {
        "bert.embeddings.word_embeddings.weight": table(),
        "cls.predictions.bias": np.zeros(64, np.float32),
        "cls.predictions.decoder.bias": np.ones(64, np.float32),
    }
    assert fates(tmp_path, tensors, BERT, "cls.predictions.decoder.bias")[:2] == [DROPPED, KEPT]


def test_a_target_whose_values_serve_both_ends_is_not_called_equal(tmp_path: Path) -> None:
    tensors = {"lm_head.bias": np.zeros(64, np.float32), "lm_head.decoder.bias": np.ones(64, np.float32)}
    config = {**BERT, "architectures": ["RobertaForMaskedLM"], "tie_word_embeddings": False}
    found = outcomes(tmp_path, tensors, config, "lm_head.decoder.bias")
    assert found["transformers-4"] == Outcome(TIED, "always tied: lm_head.decoder.bias is used for both")
    assert found["transformers-5"] == Outcome(KEPT, "tie_word_embeddings is false: loaded as stored")


# --- configs that versions read differently -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("top", "text", "expected"),
    [
        (True, False, [KEPT, KEPT]),
        (False, True, [DROPPED, KEPT]),
        (True, True, [DROPPED, KEPT]),
        (False, False, [KEPT, KEPT]),
    ],
)
def test_llava_asks_its_text_config_in_4_and_both_levels_in_5(
    tmp_path: Path, top: bool, text: bool, expected: list[Fate]
) -> None:
    names = "language_model.model.embed_tokens.weight", "language_model.lm_head.weight"
    config = {**LLAVA, "tie_word_embeddings": top, "text_config": {**LLAVA["text_config"], "tie_word_embeddings": text}}
    assert fates(tmp_path, {names[0]: table(), names[1]: OWN}, config, names[1])[:2] == expected


@pytest.mark.parametrize("flag", [{}, {"tie_word_embeddings": True}, {"tie_word_embeddings": None}])
def test_an_unknown_class_has_no_verdict_in_any_loader(tmp_path: Path, flag: Any) -> None:
    for at, tensors in enumerate(({EMBED: table()}, {EMBED: table(), HEAD: OWN})):
        found = outcomes(tmp_path / str(at), tensors, {**UNKNOWN, **flag})
        assert dict.fromkeys(found) == found


@pytest.mark.parametrize("method", ["awq", "bitsandbytes", "torchao", "gptq", "compressed-tensors"])
def test_llama_cpp_refuses_weights_that_its_converter_does_not_read(tmp_path: Path, method: str) -> None:
    config = {**LLAMA, "tie_word_embeddings": True, "quantization_config": {"quant_method": method}}
    outcome = outcomes(tmp_path, {EMBED: table()}, config)["llama.cpp"]
    assert outcome is not None
    if method in ("gptq", "compressed-tensors"):
        assert outcome.fate is TIED
    else:
        assert outcome == Outcome(REFUSED, f"the converter does not read weights quantised by {method}")


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("bitsandbytes", "mlx-lm does not read weights quantised by bitsandbytes"),
        ("torchao", "mlx-lm does not read weights quantised by torchao"),
        ("gptq", "mlx-lm does not read weights with g_idx, the groups of GPTQ"),
        ("awq", None),
        ("compressed-tensors", None),
    ],
)
def test_mlx_lm_refuses_weights_in_parts_that_it_does_not_know(tmp_path: Path, method: str, said: str | None) -> None:
    """As mlx-lm 0.32.2 did with outputs of bitsandbytes, torchao and GPTQModel; it loaded that of AWQ."""
    parts = {"model.layers.0.mlp.up_proj.g_idx": np.zeros(8, np.int32)} if method == "gptq" else {}
    config = {**LLAMA, "tie_word_embeddings": True, "quantization_config": {"quant_method": method}}
    config |= {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    found = outcomes(tmp_path, {EMBED: table(), **parts}, {**config, "rms_norm_eps": 1e-5})["mlx-lm"]
    assert found == (None if said is None else Outcome(REFUSED, said))


# --- a flag that is no boolean --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "of_one", "of_two"),
    [
        (1, TIED, DROPPED),
        ("false", TIED, DROPPED),
        ([1], TIED, DROPPED),
        (None, RANDOM, KEPT),
        (0, RANDOM, KEPT),
        ("", RANDOM, KEPT),
        ([], RANDOM, KEPT),
    ],
)
def test_transformers_4_asks_what_python_takes_for_true_and_5_refuses(
    tmp_path: Path, value: object, of_one: Fate, of_two: Fate
) -> None:
    config = {**GPT2, "tie_word_embeddings": value}
    assert fates(tmp_path, {WTE: table()}, config)[:3] == [of_one, REFUSED, REFUSED]
    assert fates(tmp_path, {WTE: table(), HEAD: OWN}, config)[:3] == [of_two, REFUSED, REFUSED]


@pytest.mark.parametrize(
    ("family", "architecture", "value"),
    [
        ("gemma3", "Gemma3ForConditionalGeneration", None),
        ("perception_lm", "PerceptionLMForConditionalGeneration", None),
        ("nomic_bert", "NomicBertForMaskedLM", "false"),
        ("t5", "T5ForConditionalGeneration", None),
        ("blip-2", "Blip2ForConditionalGeneration", 0),
    ],
)
def test_a_config_that_takes_such_a_flag_is_not_refused(
    tmp_path: Path, family: str, architecture: str, value: object
) -> None:
    config = {"architectures": [architecture], "model_type": family, "tie_word_embeddings": value}
    found = audit(write(tmp_path, {"other.weight": table()}, config)).evidence.outcomes["transformers-5"]
    assert all(outcome and outcome.fate is not REFUSED for outcome in found.values())


# --- a pickle whose tensors lie in a dictionary of it ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param(GPT2, [RANDOM, REFUSED, REFUSED, REFUSED, REFUSED], id="5-asks-the-first-entry-for-its-dtype"),
        pytest.param(
            {**GPT2, "dtype": "float32"}, [RANDOM, RANDOM, REFUSED, REFUSED, REFUSED], id="the-config-states-it"
        ),
        pytest.param(
            {**GPT2, "torch_dtype": "float32"}, [RANDOM, RANDOM, REFUSED, REFUSED, REFUSED], id="by-its-old-name"
        ),
    ],
)
def test_no_loader_finds_tensors_in_a_dictionary_of_the_pickle(
    tmp_path: Path, config: Any, expected: list[Fate]
) -> None:
    nested = dictionary({WTE: tensor((64, 8), (8, 1), of=storage(numel=512))})
    pickle = saved(dictionary({"state_dict": nested}), {"0": table().tobytes()})
    (tmp_path / "pytorch_model.bin").write_bytes(pickle)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = audit(tmp_path).evidence.outcomes
    assert [outcome and outcome.fate for loader in NOW for outcome in found[loader].values()] == expected


# --- vLLM -----------------------------------------------------------------------------------------------------------


def of_class(name: str, *, tied: bool) -> dict[str, Any]:
    return {**LLAMA, "architectures": [name], "tie_word_embeddings": tied}


def fate_in(loader: str, path: Path, name: str, *, tied: bool, head: Any = None) -> Fate | None:
    tensors = {EMBED: table()} if head is None else {EMBED: table(), HEAD: head}
    outcome = outcomes(path, tensors, {**of_class(name, tied=tied), "rotary_pct": 1.0})[loader]
    return outcome.fate if outcome else None


def test_vllm_looks_into_safetensors_only(tmp_path: Path) -> None:
    raw = {"0": table().tobytes(), "1": OWN.tobytes()}
    both = {name: tensor((64, 8), (8, 1), of=storage(key, numel=512)) for name, key in ((WTE, "0"), (HEAD, "1"))}
    (tmp_path / "pytorch_model.bin").write_bytes(saved(dictionary(both), raw))
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    found = audit(tmp_path).evidence.outcomes["vllm"][HEAD]
    assert found is not None
    assert (found.fate, found.reason.endswith("only in safetensors files")) == (DROPPED, True)


def test_vllm_refuses_a_class_that_it_does_not_have(tmp_path: Path) -> None:
    found = outcomes(tmp_path, {"model.shared.weight": table()}, BART)["vllm"]
    assert found == Outcome(REFUSED, "vLLM has no class BartForConditionalGeneration")


def test_vllm_always_ties_some_classes(tmp_path: Path) -> None:
    assert "Cohere2ForCausalLM" in loader_table("vllm")["always_tied"]
    assert fate_in("vllm", tmp_path, "Cohere2ForCausalLM", tied=False) is TIED
    assert fate_in("vllm", tmp_path, "Cohere2ForCausalLM", tied=True, head=OWN) is DROPPED


def test_vllm_has_classes_without_a_head_to_load_into(tmp_path: Path) -> None:
    assert "Gemma2ForCausalLM" in loader_table("vllm")["refuses_stored_head"]
    assert fate_in("vllm", tmp_path, "Gemma2ForCausalLM", tied=True, head=table()) is REFUSED
    assert fate_in("vllm", tmp_path, "Gemma2ForCausalLM", tied=True) is TIED


def test_vllm_never_ties_some_classes(tmp_path: Path) -> None:
    assert "DeepseekV3ForCausalLM" in loader_table("vllm")["never_tied"]
    assert fate_in("vllm", tmp_path, "DeepseekV3ForCausalLM", tied=True) is RANDOM
    assert fate_in("vllm", tmp_path, "DeepseekV3ForCausalLM", tied=True, head=OWN) is KEPT


def test_vllm_loads_berts_own_decoder_and_one_bias(tmp_path: Path) -> None:
    names = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    assert fates(tmp_path, {names[0]: table(), names[1]: OWN}, BERT, names[1])[2] is KEPT
    (tmp_path / "model.safetensors").unlink()
    assert fates(tmp_path, {names[0]: table()}, BERT, names[1])[2] is TIED


@pytest.mark.parametrize(
    ("tensors", "flag", "expected"),
    [
        pytest.param({EMBED: table(), HEAD: OWN}, True, DROPPED, id="both-different"),
        pytest.param({EMBED: table(), HEAD: table()}, True, TIED, id="both-equal"),
        pytest.param({EMBED: table(), HEAD: OWN}, False, KEPT, id="false-and-both"),
        pytest.param({EMBED: table()}, False, RANDOM, id="false-and-no-head"),
        pytest.param({EMBED: table()}, True, TIED, id="embedding-alone"),
        pytest.param({HEAD: table()}, True, RANDOM, id="head-alone"),
    ],
)
def test_vllm_before_0_29_goes_by_the_flag_alone(tmp_path: Path, tensors: Any, flag: bool, expected: Fate) -> None:
    found = audit(write(tmp_path, tensors, {**LLAMA, "tie_word_embeddings": flag})).evidence.outcomes
    outcome = found["vllm-0.28"][HEAD]
    assert outcome is not None
    assert outcome.fate is expected


# --- llama.cpp ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tied", "head", "expected"),
    [
        ("LlamaForCausalLM", True, OWN, KEPT),
        ("LlamaForCausalLM", False, None, TIED),
        ("Gemma2ForCausalLM", True, OWN, DROPPED),
        ("Gemma2ForCausalLM", True, table(), TIED),
        ("Cohere2ForCausalLM", True, table(), REFUSED),
        ("Cohere2ForCausalLM", True, None, TIED),
        ("DeepseekV3ForCausalLM", False, OWN, KEPT),
        ("DeepseekV3ForCausalLM", True, OWN, DROPPED),
        ("Olmo2ForCausalLM", True, None, REFUSED),
        ("Olmo2ForCausalLM", True, OWN, KEPT),
    ],
)
def test_llama_cpps_converter_and_runtime(tmp_path: Path, name: str, tied: bool, head: Any, expected: Fate) -> None:
    assert fate_in("llama.cpp", tmp_path, name, tied=tied, head=head) is expected


@pytest.mark.parametrize(("head", "expected"), [(OWN, KEPT), (table(), TIED)])
def test_llama_cpp_drops_mambas_head_where_it_is_equal(tmp_path: Path, head: Any, expected: Fate) -> None:
    config = {**GPT2, "architectures": ["MambaForCausalLM"], "model_type": "mamba"}
    assert fates(tmp_path, {"backbone.embeddings.weight": table(), HEAD: head}, config)[3] is expected


def test_llama_cpp_makes_an_embedding_model_of_bert(tmp_path: Path) -> None:
    names = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    assert fates(tmp_path, {names[0]: table(), names[1]: table()}, BERT, names[1])[3] is DROPPED


def test_llama_cpp_refuses_a_class_that_it_cannot_convert(tmp_path: Path) -> None:
    found = outcomes(tmp_path, {"model.shared.weight": table()}, BART)["llama.cpp"]
    assert found == Outcome(REFUSED, "llama.cpp cannot convert BartForConditionalGeneration")


@pytest.mark.parametrize("loader", ["vllm", "llama_cpp"])
def test_what_is_known_of_a_loader_is_dated_and_sourced(loader: str) -> None:
    known = loader_table(loader)
    assert known["as_of"]
    assert known["source"]
    assert len(known["architectures"]) > 200


def test_llama_cpps_rules_use_known_words_only() -> None:
    for name, rule in loader_table("llama_cpp")["architectures"].items():
        assert rule["head_when_stored"] in ("kept", "dropped", "dropped-if-flag", "dropped-if-equal", "refused"), name
        assert rule["head_when_missing"] in ("tied", "refused", "none"), name


def test_vllms_exceptions_are_classes_that_it_has() -> None:
    known = loader_table("vllm")
    lists = {name for name, listed in known.items() if isinstance(listed, list)} - {"source", "architectures"}
    classes = {*known["architectures"], *known["transformers_backend"]}
    for exceptions in lists:
        assert set(known[exceptions]) <= classes, exceptions
    assert not set(known["architectures"]) & set(known["transformers_backend"])


# --- mlx-lm ---------------------------------------------------------------------------------------------------------

MLX_LLAMA = {
    **LLAMA,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 0,
    "rms_norm_eps": 1e-6,
}
SILENT = {key: value for key, value in MLX_LLAMA.items() if key != "tie_word_embeddings"}


def in_mlx_lm(path: Path, config: Any, head: Any = None, **options: Any) -> Outcome | None:
    tensors = {EMBED: table()} if head is None else {EMBED: table(), HEAD: head}
    return outcomes(path, tensors, config, **options)["mlx-lm"]


@pytest.mark.parametrize(
    ("config", "head", "expected"),
    [
        pytest.param({**MLX_LLAMA, "tie_word_embeddings": True}, OWN, DROPPED, id="true"),
        pytest.param({**MLX_LLAMA, "tie_word_embeddings": True}, table(72), DROPPED, id="true-and-any-length"),
        pytest.param({**MLX_LLAMA, "tie_word_embeddings": None}, OWN, KEPT, id="null-is-false"),
        pytest.param(SILENT, OWN, DROPPED, id="its-own-default-is-true"),
        pytest.param(SILENT, table(), TIED, id="equal"),
        pytest.param(SILENT, None, TIED, id="no-head"),
        pytest.param(MLX_LLAMA, OWN, KEPT, id="false"),
        pytest.param(MLX_LLAMA, None, REFUSED, id="false-and-no-head"),
        pytest.param(MLX_LLAMA, table(72), REFUSED, id="false-and-too-long"),
        pytest.param({**MLX_LLAMA, "vocab_size": 65}, OWN, REFUSED, id="not-the-configs-size"),
        pytest.param({**MLX_LLAMA, "model_type": "mistral"}, OWN, KEPT, id="by-a-remapped-type"),
        pytest.param({**MLX_LLAMA, "model_type": "opt"}, OWN, REFUSED, id="a-type-that-it-lacks"),
        pytest.param({**MLX_LLAMA, "quantization": {"bits": 4}}, OWN, None, id="quantised"),
        pytest.param({**MLX_LLAMA, "model_file": "own.py"}, OWN, None, id="code-of-its-own"),
        pytest.param(UNKNOWN, OWN, None, id="a-class-that-nobody-knows"),
    ],
)
def test_the_fate_of_llamas_head_in_mlx_lm(tmp_path: Path, config: Any, head: Any, expected: Fate | None) -> None:
    found = in_mlx_lm(tmp_path, config, head)
    assert (found.fate if found else None) is expected


def test_mlx_lm_names_the_keys_that_it_requires(tmp_path: Path) -> None:
    found = in_mlx_lm(tmp_path, {key: value for key, value in SILENT.items() if key != "rms_norm_eps"})
    assert found == Outcome(REFUSED, "mlx-lm requires keys that config.json lacks: rms_norm_eps")


def test_mlx_lm_reads_only_files_whose_name_begins_with_model(tmp_path: Path) -> None:
    write(tmp_path, {EMBED: table()}, SILENT)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    found = audit(tmp_path / "weights.safetensors").evidence.outcomes["mlx-lm"][HEAD]
    assert found == Outcome(REFUSED, "mlx-lm reads only model*.safetensors")


def test_mlx_lms_rules_use_known_words_only() -> None:
    known = loader_table("mlx_lm")
    assert known["as_of"].startswith("mlx-lm ")
    assert known["source"]
    assert set(known["remapping"].values()) | set(known["architecture_remapping"].values()) <= set(known["models"])
    rules = [rule for rule in known["models"].values() if rule is not None]
    assert len(rules) > 110
    for rule in rules:
        assert set(rule) - {"text_model_types"} == {"requires", "rows", "flag", "ties"} | (
            set() if rule["flag"] is None else {"default"}
        )
        for fates in rule["ties"].values():
            assert fates == "refused" or set(fates) == ({"any"} if rule["flag"] is None else {"true", "false"})


# --- every class ----------------------------------------------------------------------------------------------------


class Headers(FileSet):
    """A file of tensors whose values are holes: only headers are asked for."""

    location = "memory"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: dict[str, Any]) -> None:
        header, at = {}, 0
        for name, shape in shapes.items():
            size = math.prod(shape)
            header[name] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        self.files = {
            "model.safetensors": len(text).to_bytes(8, "little") + text + bytes(at),
            "config.json": json.dumps(config).encode(),
        }

    def sizes(self) -> dict[str, int]:
        return {name: len(content) for name, content in self.files.items()}

    def open(self, name: str) -> ByteSource:
        return MemoryBytes(name, self.files[name])


@pytest.mark.parametrize("stored", ["all", "vocabulary", "one", "vectors", "none"])
def test_every_class_of_the_table_has_an_outcome_for_each_tie_in_each_loader(stored: str) -> None:
    families = load_table()
    for name in families:
        architecture = families.architecture(name)
        assert architecture is not None
        names = dict.fromkeys(end for gated in architecture.newest.ties for end in (gated.tie.target, gated.tie.source))
        if not names:
            continue
        vocabulary = dict(architecture.newest.vocabulary)
        chosen = {"all": [*names, *vocabulary], "vocabulary": vocabulary, "one": list(names)[:1], "vectors": names}
        shapes = dict.fromkeys(chosen.get(stored, ()), (3,) if stored == "vectors" else (3, 2, 3))
        for config in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False, "text_config": {}}):
            checkpoint = Checkpoint(Headers(shapes, {"architectures": [name], "vocab_size": 3, **config}))
            evidence = gather(checkpoint, values=False)
            targets = {tie.tie.target for tie in evidence.ties}
            assert all(set(evidence.outcomes[loader]) == targets for loader in LOADERS), name
            findings_of(evidence, all_rules())
