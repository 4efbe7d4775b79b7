"""The audit of PEFT adapters: which end they train, what is known of the base, and each finding about them.

The adapters are written for the occasion, with the names and shapes that PEFT writes. What PEFT's merge does was run in
tests/parity/test_adapter_merges.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from typer.testing import CliRunner, Result

from bowline.auditing import AdapterReport, Finding, audit_adapter
from bowline.auditing.report import FORMATS, Run
from bowline.auditing.rules import Severity
from bowline.cli import app
from bowline.errors import CheckpointError, NoCheckpointError, UsageError
from tests.checkpoints import BERT, GPT2, LLAMA, ROWS, T5, WTE, table, write

VALIDATOR = Draft202012Validator(json.loads((Path(__file__).parents[2] / "docs" / "audit.schema.json").read_text()))
ERROR = re.compile(r"^error: [^\n]+ \(help: [^\n]+\)$", re.MULTILINE)
WIDTH, RANK = 8, 4
BASE = "base_model.model."
EMBED, HEAD = "model.embed_tokens", "lm_head"
LAYER = "model.layers.0.self_attn.q_proj"
TIED_LLAMA = {**LLAMA, "tie_word_embeddings": True}
Tensors = Mapping[str, npt.NDArray[np.float32]]


def lora(module: str, out: int = WIDTH, into: int = WIDTH, rank: int = RANK, seed: int = 0) -> Tensors:
    return {
        f"{BASE}{module}.lora_A.weight": table(rank, into, seed),
        f"{BASE}{module}.lora_B.weight": table(out, rank, seed + 1),
    }


def of_head(seed: int = 0, module: str = HEAD) -> Tensors:
    return lora(module, ROWS, WIDTH, seed=seed)


def of_embedding(seed: int = 0, module: str = EMBED) -> Tensors:
    """The same delta as `of_head` for the same seed: an embedding's factors are a head's, transposed."""
    return {
        f"{BASE}{module}.lora_embedding_A": np.ascontiguousarray(table(ROWS, RANK, seed + 1).T),
        f"{BASE}{module}.lora_embedding_B": np.ascontiguousarray(table(RANK, WIDTH, seed).T),
    }


def rows_of(module: str, count: int = 2, seed: int = 0) -> Tensors:
    return {f"{BASE}{module}.token_adapter.trainable_tokens_delta": table(count, WIDTH, seed)}


def adapter(path: Path, tensors: Tensors, *, name: str = "adapter_model.safetensors", **config: Any) -> Path:
    stated = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj", "lm_head", "embed_tokens"]}
    return write(path / "adapter", tensors, name=name, files={"adapter_config": {**stated, **config}})


def llama(path: Path, *, tied: bool = True, rows: int = ROWS) -> Path:
    tensors = {f"{EMBED}.weight": table(rows), f"{LAYER}.weight": table(WIDTH)}
    if not tied:
        tensors[f"{HEAD}.weight"] = table(rows, seed=3)
    return write(path / "base", tensors, {**TIED_LLAMA, "tie_word_embeddings": tied, "vocab_size": rows})


def audited(path: Path, tensors: Tensors, *, tied: bool = True, values: bool = True, **config: Any) -> AdapterReport:
    return audit_adapter(adapter(path, tensors, **config), base=llama(path, tied=tied), values=values)


def codes(report: AdapterReport, *, worst: bool = True) -> list[str]:
    """The codes found, the informational ones left out."""
    return [found.code for found in report.findings if not worst or found.severity is not Severity.INFO]


def only(report: AdapterReport, code: str) -> Finding:
    (found,) = [finding for finding in report.findings if finding.code == code]
    return found


def texts(report: AdapterReport) -> list[str]:
    return [f"{merge.tool}: {merge.text}" for merge in report.evidence.merges]


# --- the sentence ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "config", "said"),
    [
        (lora(LAYER), {}, "a LoRA adapter for 'org/base' trains neither the embedding nor the head; the base is tied"),
        (of_head(), {}, "trains the head (lm_head) and not the embedding; the base is tied"),
        (of_embedding(), {}, "trains the embedding (model.embed_tokens) and not the head; the base is tied"),
        ({**of_embedding(), **of_head()}, {}, "trains the embedding (model.embed_tokens) and the head (lm_head); "),
        (of_head(), {"use_rslora": True}, "a rank-stabilised LoRA adapter for"),
        (of_head(), {"use_dora": True}, "a DoRA adapter for"),
        (
            rows_of(EMBED),
            {"trainable_token_indices": [3, 5]},
            "trains 2 rows of the matrix that embedding and head share (model.embed_tokens); the base is tied",
        ),
        ({}, {"peft_type": "VERA"}, "an adapter of PEFT's VERA for"),
        ({}, {"base_model_name_or_path": ""}, "a LoRA adapter for a base that it does not name"),
    ],
)
def test_the_first_line_says_what_it_is_and_which_end_it_trains(
    tmp_path: Path, tensors: Tensors, config: dict[str, Any], said: str
) -> None:
    report = audited(tmp_path, tensors, **{"base_model_name_or_path": "org/base", **config})
    assert said in report.sentence


def test_an_untied_base_is_said_to_be_so(tmp_path: Path) -> None:
    report = audited(tmp_path, of_head(), tied=False)
    assert report.sentence.endswith("; the base is not tied")
    assert codes(report) == []
    assert texts(report)[0] == "peft: each end gets its own change"


# --- the base -------------------------------------------------------------------------------------------------------


def test_the_base_that_the_adapter_names_is_read_if_it_is_a_directory(tmp_path: Path) -> None:
    base = llama(tmp_path)
    report = audit_adapter(adapter(tmp_path, of_head(), base_model_name_or_path=str(base)))
    assert report.evidence.base.tied
    assert not report.evidence.base.given


def test_bw508_an_end_of_a_base_that_is_not_known(tmp_path: Path) -> None:
    found = only(audit_adapter(adapter(tmp_path, of_head(), base_model_name_or_path="org/base")), "BW508")
    assert "'org/base' is not a directory of this machine" in found.message


@pytest.mark.parametrize("stated", [None, "org/base", "/no/such/place", "\0", "a" * 5000])
def test_without_its_base_both_outcomes_are_given_and_the_tie_is_not_known(tmp_path: Path, stated: str | None) -> None:
    report = audit_adapter(adapter(tmp_path, of_head(), base_model_name_or_path=stated))
    assert "whether the base is tied is not known" in report.sentence
    assert codes(report) == ["BW508"]
    assert [merge.tied_base for merge in report.evidence.merges] == [True] * 3 + [False] * 3
    assert "so it reaches the other end" in texts(report)[0]


def test_bw508_is_not_said_of_an_adapter_that_trains_no_end(tmp_path: Path) -> None:
    assert codes(audit_adapter(adapter(tmp_path, lora(LAYER)))) == []


def test_the_class_that_the_adapter_records_gives_the_names_of_both_ends(tmp_path: Path) -> None:
    report = audit_adapter(adapter(tmp_path, of_head(), auto_mapping={"base_model_class": "LlamaForCausalLM"}))
    assert [each.module for each in report.evidence.base.places] == [EMBED, HEAD]
    assert "so it reaches model.embed_tokens" in texts(report)[0]


def test_an_adapter_that_names_itself_as_its_base_has_no_known_base(tmp_path: Path) -> None:
    place = adapter(tmp_path, of_head(), base_model_name_or_path=str(tmp_path / "adapter"))
    report = audit_adapter(place)
    assert "cannot be read" in str(report.evidence.base.reason)
    with pytest.raises(NoCheckpointError, match="a PEFT adapter"):
        audit_adapter(place, base=place)


def test_a_base_whose_head_will_be_random_is_neither_tied_nor_untied(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {f"{EMBED}.weight": table()}, LLAMA)
    report = audit_adapter(adapter(tmp_path, of_head()), base=base)
    assert report.evidence.base.tied is None
    assert "lm_head.weight random" in report.sentence


def test_a_base_that_stores_both_ends_is_tied_if_they_are_equal(tmp_path: Path) -> None:
    same = write(tmp_path / "base", {f"{EMBED}.weight": table(), f"{HEAD}.weight": table()}, TIED_LLAMA)
    place = adapter(tmp_path, of_head())
    assert audit_adapter(place, base=same).evidence.base.tied is True
    assert audit_adapter(place, base=same, values=False).evidence.base.tied is None
    write(tmp_path / "base", {f"{EMBED}.weight": table(), f"{HEAD}.weight": table(seed=3)}, TIED_LLAMA)
    assert audit_adapter(place, base=same).evidence.base.tied is False


def test_names_with_and_without_the_models_prefix_mean_one_module(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"wte.weight": table()}, GPT2)
    report = audit_adapter(adapter(tmp_path, of_embedding(module="transformer.wte"), target_modules=["wte"]), base=base)
    assert [delta.place.end.value for delta in report.evidence.deltas] == ["embedding"]
    assert codes(report) == ["BW501"]


# --- ties -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensors", [of_head(), of_embedding()], ids=["head", "embedding"])
def test_bw501_a_lora_on_one_end_of_a_tie(tmp_path: Path, tensors: Tensors) -> None:
    report = audited(tmp_path, tensors)
    assert codes(report) == ["BW501"]
    found = only(report, "BW501")
    assert set(found.tensors) == set(tensors)
    assert "LoRA of rank 4, scaling 2" in found.message
    assert "ensure_weight_tying" in found.help


def test_bw501_names_no_way_that_peft_does_not_go(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {WTE: table()}, GPT2)
    report = audit_adapter(adapter(tmp_path, of_head()), base=base)
    assert "ensure_weight_tying" not in only(report, "BW501").help


def test_bw501_is_not_said_of_an_untied_base_or_of_layers(tmp_path: Path) -> None:
    assert codes(audited(tmp_path, of_head(), tied=False)) == []
    assert codes(audited(tmp_path, lora(LAYER))) == []


def test_bw502_two_deltas_of_one_matrix(tmp_path: Path) -> None:
    report = audited(tmp_path, {**of_embedding(0), **of_head(5)})
    assert codes(report) == ["BW502"]
    assert report.evidence.alike is False
    assert "were not compared" not in only(report, "BW502").message


def test_bw502_without_values_it_is_not_known_whether_they_are_one(tmp_path: Path) -> None:
    report = audited(tmp_path, {**of_embedding(), **of_head()}, values=False)
    assert codes(report) == ["BW502"]
    assert "were not compared" in only(report, "BW502").message
    assert "keeps the tie if the ends carry the same values" in texts(report)[1]


def test_bw502_is_not_said_of_an_untied_base(tmp_path: Path) -> None:
    assert codes(audited(tmp_path, {**of_embedding(0), **of_head(5)}, tied=False)) == []


def test_bw503_one_delta_at_both_ends(tmp_path: Path) -> None:
    report = audited(tmp_path, {**of_embedding(), **of_head()})
    assert codes(report) == ["BW503"]
    assert report.evidence.alike is True
    assert "adds it twice" in only(report, "BW503").message


def test_bw503_is_not_said_of_another_scaling_at_one_end(tmp_path: Path) -> None:
    report = audited(tmp_path, {**of_embedding(), **of_head()}, alpha_pattern={"lm_head": 9})
    assert codes(report) == ["BW502"]


@pytest.mark.parametrize("module", [EMBED, HEAD])
def test_bw504_a_trained_copy_of_one_end(tmp_path: Path, module: str) -> None:
    report = audited(tmp_path, {f"{BASE}{module}.weight": table()}, modules_to_save=[module])
    assert codes(report) == ["BW504"]
    assert only(report, "BW504").severity is Severity.WARNING


def test_bw504_is_not_said_of_copies_that_peft_makes_one(tmp_path: Path) -> None:
    both = {f"{BASE}{module}.weight": table() for module in (EMBED, HEAD)}
    assert codes(audited(tmp_path, both, modules_to_save=[EMBED], ensure_weight_tying=True)) == []
    assert codes(audited(tmp_path, both, modules_to_save=[EMBED, HEAD])) == ["BW504"]


def bert(path: Path) -> Path:
    tensors = {"bert.embeddings.word_embeddings.weight": table(), "cls.predictions.bias": np.ones(ROWS, np.float32)}
    return write(path / "base", tensors, BERT)


def test_bw504_a_bias_that_is_lost_is_an_error(tmp_path: Path) -> None:
    name = "bert.embeddings.word_embeddings"
    place = adapter(tmp_path, {f"{BASE}{name}.weight": table()}, modules_to_save=["word_embeddings"])
    found = only(audit_adapter(place, base=bert(tmp_path)), "BW504")
    assert found.severity is Severity.ERROR
    assert "head's bias too" in found.message


def test_bw505_rows_of_the_head_alone(tmp_path: Path) -> None:
    report = audited(tmp_path, rows_of(HEAD), trainable_token_indices={"lm_head": [1, 2]})
    assert codes(report) == ["BW505"]


@pytest.mark.parametrize("indices", [[1, 2], {"embed_tokens": [1, 2]}])
@pytest.mark.parametrize("ensured", [True, False])
def test_bw505_is_not_said_of_rows_of_the_embedding_which_are_those_of_every_end(
    tmp_path: Path, indices: object, ensured: bool
) -> None:
    report = audited(tmp_path, rows_of(EMBED), trainable_token_indices=indices, ensure_weight_tying=ensured)
    assert codes(report) == []
    assert texts(report)[0] == "peft: every end gets the trained rows, and the tie stays"


def test_bw502_rows_of_both_ends_are_one_only_if_ids_and_values_are(tmp_path: Path) -> None:
    both = {**rows_of(EMBED), **rows_of(HEAD)}
    same: dict[str, Any] = {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [1, 2]}}
    assert codes(audited(tmp_path, both, **same)) == []
    assert codes(audited(tmp_path, {**both, **rows_of(HEAD, seed=7)}, **same)) == ["BW502"]
    other: dict[str, Any] = {"trainable_token_indices": {"embed_tokens": [1, 2], "lm_head": [2, 3]}}
    assert codes(audited(tmp_path, both, **other)) == ["BW502"]


def test_bw506_rows_beside_a_heads_bias(tmp_path: Path) -> None:
    place = adapter(tmp_path, rows_of("bert.embeddings.word_embeddings"), trainable_token_indices=[1, 2])
    assert codes(audit_adapter(place, base=bert(tmp_path))) == ["BW506"]


def test_bw506_is_not_said_of_rows_of_an_untied_embedding(tmp_path: Path) -> None:
    words, head = "bert.embeddings.word_embeddings", "cls.predictions.decoder"
    tensors = {f"{words}.weight": table(), f"{head}.weight": table(seed=3), f"{head}.bias": np.ones(ROWS, np.float32)}
    base = write(tmp_path / "base", tensors, {**BERT, "tie_word_embeddings": False})
    assert codes(audit_adapter(adapter(tmp_path, rows_of(words), trainable_token_indices=[1, 2]), base=base)) == []


def test_bw507_is_not_said_of_rows_which_peft_trains_for_every_module(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"shared.weight": table()}, T5)
    place = adapter(tmp_path, rows_of("shared"), trainable_token_indices=[1, 2])
    assert codes(audit_adapter(place, base=base)) == []


def test_bw507_shared_of_a_t5_is_not_called(tmp_path: Path) -> None:
    base = write(tmp_path / "base", {"shared.weight": table()}, T5)
    report = audit_adapter(adapter(tmp_path, of_embedding(module="shared"), target_modules=["shared"]), base=base)
    assert codes(report) == ["BW501", "BW507"]


def test_bw509_methods_whose_merge_was_not_run(tmp_path: Path) -> None:
    loha = {f"{BASE}lm_head.hada_w1_a": table(ROWS, RANK)}
    assert codes(audited(tmp_path, loha, peft_type="LOHA")) == ["BW509"]
    mixed = {**rows_of(HEAD), **of_embedding()}
    assert codes(audited(tmp_path, mixed, trainable_token_indices={"lm_head": [1, 2]})) == ["BW509"]


def test_bw504_a_copy_beside_a_delta_of_the_other_end(tmp_path: Path) -> None:
    mixed = {**of_head(), f"{BASE}{EMBED}.weight": table()}
    report = audited(tmp_path, mixed, modules_to_save=["embed_tokens"])
    assert codes(report) == ["BW504"]
    assert only(report, "BW504").severity is Severity.WARNING
    base = write(tmp_path / "t5", {"shared.weight": table()}, T5)
    beside = {f"{BASE}lm_head.weight": table(), **of_embedding(module="shared")}
    place = adapter(tmp_path / "t5", beside, target_modules=["shared"], modules_to_save=["lm_head"])
    assert "the other change reaches" in only(audit_adapter(place, base=base), "BW504").message


def test_bw510_rows_of_a_tied_embedding_inside_a_lora_of_the_head(tmp_path: Path) -> None:
    report = audited(tmp_path, {**rows_of(EMBED), **of_head()}, trainable_token_indices=[1, 2])
    assert codes(report) == ["BW510"]
    assert texts(report)[1].startswith("merge_lora: refuses: a module has one adapter inside another")


def test_bw510_is_not_said_of_an_untied_base(tmp_path: Path) -> None:
    report = audited(tmp_path, {**rows_of(EMBED), **of_head()}, tied=False, trainable_token_indices=[1, 2])
    assert codes(report) == []


def test_bw509_is_not_said_of_other_methods_in_the_layers(tmp_path: Path) -> None:
    assert codes(audited(tmp_path, {f"{BASE}{LAYER}.hada_w1_a": table(WIDTH, RANK)}, peft_type="LOHA")) == []


# --- files ----------------------------------------------------------------------------------------------------------


def test_bw521_a_module_that_the_base_lacks(tmp_path: Path) -> None:
    absent = LAYER.replace("layers.0", "layers.9")
    report = audited(tmp_path, {**lora(LAYER), **lora(absent)})
    assert codes(report) == ["BW521"]
    assert only(report, "BW521").severity is Severity.ERROR
    assert absent in only(report, "BW521").message
    alone = audited(tmp_path, lora(absent))
    assert only(alone, "BW521").severity is Severity.WARNING


def test_bw521_is_not_said_of_a_new_head_or_of_an_unknown_base(tmp_path: Path) -> None:
    assert codes(audited(tmp_path, {f"{BASE}score.weight": table(2)}, modules_to_save=["score"])) == []
    assert codes(audit_adapter(adapter(tmp_path / "b", lora("no.such.q_proj")))) == []


def test_bw522_a_delta_of_another_size(tmp_path: Path) -> None:
    report = audited(tmp_path, lora(LAYER, out=12))
    assert codes(report) == ["BW522"]
    assert "[12, 8], and the base's weight is [8, 8]" in only(report, "BW522").message


def test_bw522_a_resized_vocabulary_is_saved_with_the_adapter(tmp_path: Path) -> None:
    tables = {f"{BASE}{module}.weight": table(ROWS + 2) for module in (EMBED, HEAD)}
    found = only(audited(tmp_path, {**lora(LAYER), **tables}), "BW522")
    assert found.help == f"resize the base to {ROWS + 2} rows before the adapter is put on"


@pytest.mark.parametrize(
    ("tensors", "indices", "said"),
    [
        (rows_of(EMBED, 3), [1, 2], r"is \[3, 8\], expected \[2, 8\]"),
        (rows_of(EMBED), [1, ROWS], f"has a trained row {ROWS}, and the base has {ROWS} rows"),
    ],
)
def test_bw522_rows_that_the_base_lacks(tmp_path: Path, tensors: Tensors, indices: list[int], said: str) -> None:
    assert re.search(said, only(audited(tmp_path, tensors, trainable_token_indices=indices), "BW522").message)


def test_bw522_is_not_said_of_a_layer_that_is_stored_transposed(tmp_path: Path) -> None:
    name = "transformer.h.0.attn.c_attn"
    base = write(tmp_path / "base", {WTE: table(), f"{name}.weight": table(WIDTH, 3 * WIDTH)}, GPT2)
    place = adapter(tmp_path, lora(name, out=3 * WIDTH), target_modules=["c_attn"])
    assert codes(audit_adapter(place, base=base)) == []


def test_bw523_is_not_said_of_a_rank_that_a_pattern_states_or_might_state(tmp_path: Path) -> None:
    assert codes(audited(tmp_path, lora(LAYER), r=8, rank_pattern={"q_proj": RANK})) == []
    assert codes(audited(tmp_path, lora(LAYER), r=8, rank_pattern={".*q_proj": RANK})) == []


def test_bw523_a_rank_that_the_config_does_not_state(tmp_path: Path) -> None:
    assert codes(audited(tmp_path, lora(LAYER), r=8)) == ["BW523"]
    unequal = {**lora(LAYER), f"{BASE}{LAYER}.lora_B.weight": table(WIDTH, 2)}
    assert "BW523" in codes(audited(tmp_path, unequal))


def test_bw524_tensors_that_peft_leaves_out(tmp_path: Path) -> None:
    report = audited(tmp_path, {**lora(LAYER), **of_head()}, target_modules=["q_proj"])
    assert codes(report) == ["BW524"]
    assert "'lm_head'" in only(report, "BW524").message
    assert texts(report)[0] == "peft: neither end changes, and the tie stays"


def test_bw524_is_not_said_of_a_head_that_peft_ties_again(tmp_path: Path) -> None:
    both = {**of_embedding(), **of_head()}
    tied: dict[str, Any] = {"target_modules": ["model.embed_tokens"], "ensure_weight_tying": True}
    assert codes(audited(tmp_path, both, **tied)) == ["BW503"]
    assert codes(audited(tmp_path, both, target_modules=["model.embed_tokens"])) == ["BW501", "BW524"]
    assert codes(audited(tmp_path, both, target_modules=".*(embed_tokens|lm_head)")) == ["BW503"]


def test_bw525_one_factor_alone(tmp_path: Path) -> None:
    half = {name: tensor for name, tensor in lora(LAYER).items() if "lora_A" in name}
    assert codes(audited(tmp_path, half)) == ["BW525"]


def test_bw525_is_not_said_of_trained_rows_or_copies(tmp_path: Path) -> None:
    assert codes(audited(tmp_path, {f"{BASE}{HEAD}.weight": table()}, modules_to_save=[HEAD])) == ["BW504"]
    assert codes(audited(tmp_path, rows_of(EMBED), trainable_token_indices=[1, 2])) == []


def test_bw526_is_not_said_of_tensors_of_another_method(tmp_path: Path) -> None:
    assert codes(audited(tmp_path, {f"{BASE}{LAYER}.lora_E": table(RANK, 1)}, peft_type="ADALORA")) == []


def test_bw526_a_tensor_of_no_known_kind(tmp_path: Path) -> None:
    odd = {**lora(LAYER), f"{BASE}{LAYER}.lora_C.weight": table(2)}
    assert codes(audited(tmp_path, odd)) == ["BW526"]


def test_bw527_another_base(tmp_path: Path) -> None:
    place = adapter(tmp_path, lora(LAYER), auto_mapping={"base_model_class": "MistralForCausalLM"})
    assert codes(audit_adapter(place, base=llama(tmp_path))) == ["BW527"]
    named = audited(tmp_path, lora(LAYER), base_model_name_or_path="org/other")
    assert only(named, "BW527").severity is Severity.INFO
    same = audited(tmp_path, lora(LAYER), base_model_name_or_path="org/Base@main")
    assert codes(same, worst=False) == []


def test_bw528_a_pickle_is_named(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    place = adapter(tmp_path, lora(LAYER))
    tensors = {name: torch.from_numpy(tensor.copy()) for name, tensor in {**of_embedding(), **of_head()}.items()}
    torch.save(tensors, place / "adapter_model.bin")
    beside = audit_adapter(place, base=llama(tmp_path))
    assert codes(beside, worst=False) == ["BW528"]
    (place / "adapter_model.safetensors").unlink()
    report = audit_adapter(place, base=llama(tmp_path))
    assert codes(report, worst=False) == ["BW503", "BW528"]


def test_bw528_is_not_said_of_safetensors_alone(tmp_path: Path) -> None:
    assert codes(audited(tmp_path, lora(LAYER)), worst=False) == []


def test_bw528_factors_with_strides_are_compared_by_their_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    place = adapter(tmp_path, {})
    (place / "adapter_model.safetensors").unlink()
    tensors = {name: torch.from_numpy(np.ascontiguousarray(tensor.T)).T for name, tensor in of_embedding().items()}
    tensors |= {name: torch.from_numpy(tensor.copy()) for name, tensor in of_head().items()}
    torch.save(tensors, place / "adapter_model.bin")
    assert audit_adapter(place, base=llama(tmp_path)).evidence.alike is True


def test_bw529_is_not_said_of_a_trained_copy(tmp_path: Path) -> None:
    report = audited(tmp_path, {f"{BASE}{HEAD}.weight": table()}, modules_to_save=[HEAD])
    assert codes(report, worst=False) == ["BW504"]


def test_bw529_copies_of_the_bases_table(tmp_path: Path) -> None:
    stored = {**of_head(), f"{BASE}lm_head.base_layer.weight": table()}
    found = only(audited(tmp_path, stored), "BW529")
    assert found.severity is Severity.INFO
    assert f"{table().nbytes:,} bytes" in found.message


def test_bw527_is_not_said_of_another_class_of_the_family(tmp_path: Path) -> None:
    place = adapter(tmp_path, lora(LAYER), auto_mapping={"base_model_class": "LlamaForSequenceClassification"})
    assert codes(audit_adapter(place, base=llama(tmp_path))) == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bw530_a_value_that_is_not_finite(tmp_path: Path, value: float) -> None:
    broken = {name: tensor.copy() for name, tensor in lora(LAYER).items()}
    broken[f"{BASE}{LAYER}.lora_B.weight"][3, 2] = value
    report = audited(tmp_path, broken)
    assert codes(report) == ["BW530"]
    assert only(report, "BW530").tensors == (f"{BASE}{LAYER}.lora_B.weight",)


def test_bw530_is_not_said_of_values_that_are_not_read(tmp_path: Path) -> None:
    broken = {name: np.full_like(tensor, np.nan) for name, tensor in lora(LAYER).items()}
    assert codes(audited(tmp_path, broken, values=False)) == []


def test_bw531_is_not_said_of_dora_whose_magnitude_is_trained(tmp_path: Path) -> None:
    untrained = {**lora(LAYER), f"{BASE}{LAYER}.lora_B.weight": np.zeros((WIDTH, RANK), np.float32)}
    dora = {**untrained, f"{BASE}{LAYER}.lora_magnitude_vector": table(1)[0]}
    assert codes(audited(tmp_path, dora)) == []


def test_bw531_a_delta_that_was_never_trained(tmp_path: Path) -> None:
    untrained = {**lora(LAYER), f"{BASE}{LAYER}.lora_B.weight": np.zeros((WIDTH, RANK), np.float32)}
    assert codes(audited(tmp_path, untrained)) == ["BW531"]
    some = audited(
        tmp_path, {**untrained, **lora(LAYER.replace("q_proj", "v_proj"))}, target_modules=["q_proj", "v_proj"]
    )
    assert only(some, "BW531").severity is Severity.INFO
    fresh = {**of_embedding(), f"{BASE}{EMBED}.lora_embedding_A": np.zeros((RANK, ROWS), np.float32)}
    assert only(audited(tmp_path, fresh), "BW531").severity is Severity.WARNING


@pytest.mark.parametrize(
    "config",
    [{"task_type": "SEQ_CLS"}, {"auto_mapping": {"base_model_class": "LlamaForSequenceClassification"}}],
    ids=["task", "class"],
)
def test_a_task_without_an_output_head_has_no_tie(tmp_path: Path, config: dict[str, Any]) -> None:
    report = audited(tmp_path, of_embedding(), **config)
    assert codes(report) == []
    assert re.search(r"trains the embedding \(model\.embed_tokens\); the model .* has no output head$", report.sentence)
    alone = audit_adapter(adapter(tmp_path, of_embedding(), **config))
    assert codes(alone) == []


def test_bw522_is_not_said_of_a_quantised_base(tmp_path: Path) -> None:
    packed: Any = {f"{EMBED}.weight": table(), f"{LAYER}.weight": np.zeros((32, 1), np.uint8)}
    base = write(tmp_path / "base", packed, TIED_LLAMA)
    assert codes(audit_adapter(adapter(tmp_path, lora(LAYER)), base=base)) == []


# --- the command ----------------------------------------------------------------------------------------------------


def bowline_audit(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(app, ["audit", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


SAMPLES: dict[str, tuple[Tensors, dict[str, Any]]] = {
    "nothing": ({}, {}),
    "attention": (lora(LAYER), {}),
    "head": (of_head(), {}),
    "both": ({**of_embedding(), **of_head(5)}, {"use_dora": True}),
    "rows": (rows_of(EMBED), {"trainable_token_indices": [1, 2]}),
    "copy": ({f"{BASE}{EMBED}.weight": table()}, {"modules_to_save": ["embed_tokens"]}),
    "another method": ({f"{BASE}lm_head.hada_w1_a": table()}, {"peft_type": "LOHA"}),
    "no rank": (of_head(), {"r": None, "lora_alpha": None}),
    "hostile names": (
        {f"{BASE}\x1b[2J\n.lora_A.weight": table(), "": table()},
        {"base_model_name_or_path": "\x1b[31m\n", "peft_version": "\x1b\n"},
    ),
}


@pytest.mark.parametrize("known", [True, False], ids=["base", "no base"])
@pytest.mark.parametrize("name", SAMPLES)
def test_each_format_reports_an_adapter(tmp_path: Path, name: str, known: bool) -> None:
    tensors, config = SAMPLES[name]
    place = adapter(tmp_path, tensors, **config)
    with_base: list[str | Path] = ["--base", llama(tmp_path)]
    arguments: list[str | Path] = [place, *with_base] if known else [place]
    found = [
        result.exit_code
        for form in ("full", "concise", "json", "sarif")
        for result in [bowline_audit(*arguments, "--output-format", form)]
    ]
    assert len(set(found)) == 1
    assert found[0] in (0, 1)
    record = json.loads(bowline_audit(*arguments, "--output-format", "json").output)
    VALIDATOR.validate(record)
    assert record["checkpoints"] == []
    assert record["adapters"][0]["base"]["tied"] is (True if known else None)
    text = bowline_audit(*arguments, "--verbose").output
    assert "\x1b" not in text
    assert f"{place}: {record['adapters'][0]['sentence']}".partition("\n")[0][:60] in text
    sarif = json.loads(bowline_audit(*arguments, "--output-format", "sarif").output)
    assert [one["ruleId"] for one in sarif["runs"][0]["results"]] == [
        one["code"] for one in record["adapters"][0]["findings"]
    ]


def test_the_full_report_of_an_adapter(tmp_path: Path) -> None:
    base = llama(tmp_path)
    place = adapter(tmp_path, {**lora(LAYER), **of_head()}, base_model_name_or_path=str(base), peft_version="0.21.2")
    result = bowline_audit(place)
    assert result.exit_code == 1
    assert (
        result.output
        == f"""\
{place}: a LoRA adapter for '{base}' trains the head (lm_head) and not the embedding; the base is tied
  adapter    LORA, rank 4, alpha 8, PEFT 0.21.2; 4 tensors in adapter_model.safetensors (1,408 bytes)
  base       {base}, which the adapter names: LlamaForCausalLM
  embedding  model.embed_tokens: not trained
  head       lm_head: LoRA of rank 4, scaling 2
  elsewhere  1 q_proj
  merged
    peft 0.21.2     wrong    the shared matrix gets the change of lm_head, so it reaches model.embed_tokens; the flag \
stays true
    merge_lora      exact    refuses, since one matrix cannot hold both ends; on_tie="untie" gives each end its own \
and sets the flag to false
    bowline merge   exact    gives each end its own and sets the flag to false; --tied both makes each change on the \
shared matrix

BW501 error: lm_head has LoRA of rank 4, scaling 2, and the rest of the tie (model.embed_tokens) has none: PEFT's \
merge (0.21.2) changes every end
  --> {place}/adapter_model.safetensors
  help: merge with `bowline merge BASE ADAPTER DST`, or bowline.nn.merge_lora(model, on_tie="untie"): each end gets \
its own; or train again with ensure_weight_tying=True, which makes one adapter for both ends, and merge with merge_lora

Found 1 error in 1 adapter.
"""
    )


def test_codes_are_selected_and_ignored_and_a_clean_adapter_is_0(tmp_path: Path) -> None:
    base = llama(tmp_path)
    assert bowline_audit(adapter(tmp_path, of_head()), "--base", base, "--ignore", "BW5").exit_code == 0
    assert bowline_audit(adapter(tmp_path, of_head()), "--base", base, "--select", "BW502").exit_code == 0
    clean = bowline_audit(adapter(tmp_path, lora(LAYER)), "--base", base)
    assert (clean.exit_code, clean.output.splitlines()[-1]) == (0, "Nothing found in 1 adapter.")


def test_headers_only_goes_with_a_base(tmp_path: Path) -> None:
    result = bowline_audit(adapter(tmp_path, of_head()), "--base", llama(tmp_path), "--headers-only")
    assert result.exit_code == 1
    assert "BW501" in result.output


def test_one_run_audits_checkpoints_and_adapters(tmp_path: Path) -> None:
    base = llama(tmp_path)
    place = adapter(tmp_path, of_head(), base_model_name_or_path=str(base))
    result = bowline_audit(tmp_path, "--recursive", "--output-format", "json")
    record = json.loads(result.output)
    assert [one["path"] for one in record["checkpoints"]] == [str(base)]
    assert [one["path"] for one in record["adapters"]] == [str(place)]
    assert "in 1 checkpoint and 1 adapter" in bowline_audit(base, place).output.splitlines()[-1]


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_of_an_adapter_means_the_adapter(tmp_path: Path, file: str) -> None:
    place = adapter(tmp_path, of_head())
    assert bowline_audit(place / file, "--base", llama(tmp_path)).exit_code == 1


def test_a_whole_model_beside_an_adapters_config_is_a_checkpoint(tmp_path: Path) -> None:
    place = adapter(tmp_path, of_head())
    write(place, {WTE: table()}, GPT2)
    assert bowline_audit(place).output.splitlines()[-1] == "Nothing found in 1 checkpoint."
    with pytest.raises(NoCheckpointError, match="no PEFT adapter here"):
        audit_adapter(place)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"adapter_config.json": b"{"}, "not JSON"),
        ({"adapter_config.json": b"{}"}, "no peft_type"),
        ({"adapter_config.json": b'{"peft_type": "LORA", "r": "8"}'}, "r is '8'"),
        ({"adapter_model.safetensors": b"\xff" * 16}, "a header of"),
        ({"adapter_model.safetensors": None}, "neither adapter_model.safetensors nor adapter_model.bin"),
        ({"adapter_model.safetensors": None, "adapter_model.bin": b"\x80\x04."}, "adapter_model.bin"),
    ],
)
def test_bad_files_are_one_line_and_exit_code_2(tmp_path: Path, files: dict[str, bytes | None], said: str) -> None:
    place = adapter(tmp_path, of_head())
    for name, content in files.items():
        if content is None:
            (place / name).unlink()
        else:
            (place / name).write_bytes(content)
    result = bowline_audit(place)
    assert result.exit_code == 2
    (line,) = ERROR.findall(result.output)
    assert said in line
    assert str(place) in line


PARTS = [
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "token_adapter.trainable_tokens_delta",
    "weight",
    "bias",
    "base_layer.weight",
    "modules_to_save.weight",
    "lora_C",
    "",
]
NAMES = st.builds(
    lambda module, part: f"{BASE}{module}.{part}", st.sampled_from([EMBED, HEAD, LAYER, "x"]), st.sampled_from(PARTS)
)
SHAPES = st.lists(st.sampled_from([0, 1, 2, 4, WIDTH, ROWS]), max_size=3).map(tuple)
CONFIGS = st.fixed_dictionaries(
    {
        "peft_type": st.sampled_from(["LORA", "TRAINABLE_TOKENS", "LOHA", "PROMPT_TUNING"]),
        "target_modules": st.sampled_from(
            [None, [], ["lm_head"], ["embed_tokens", "x"], "all-linear", "(", "embed_tokens"]
        ),
    },
    optional={
        "r": st.integers(1, 9),
        "lora_alpha": st.floats(-9, 9),
        "use_rslora": st.booleans(),
        "ensure_weight_tying": st.booleans(),
        "modules_to_save": st.sampled_from([[], ["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]]),
        "trainable_token_indices": st.sampled_from(
            [[], [1], {"lm_head": [1, 99]}, {"embed_tokens": [1], "lm_head": [1]}]
        ),
        "token_indices": st.sampled_from([[], [1, 2]]),
        "task_type": st.sampled_from(["CAUSAL_LM", "SEQ_CLS"]),
    },
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(NAMES, SHAPES, max_size=6), CONFIGS, st.sampled_from([True, False, None]))
def test_any_adapter_gets_a_report_that_follows_the_schema(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any], tied: bool | None
) -> None:
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    place = write(tmp_path / "adapter", tensors, name="adapter_model.safetensors", files={"adapter_config": config})
    report = audit_adapter(place, base=None if tied is None else llama(tmp_path, tied=tied))
    run = Run(reports=(), adapters=(report,), verbose=True)
    VALIDATOR.validate(json.loads(FORMATS["json"](run)))
    assert str(place) in FORMATS["full"](run)
    assert len(report.evidence.adapter.tensors) == len(tensors)


def test_a_base_that_cannot_be_read_is_an_error_and_exit_code_2(tmp_path: Path) -> None:
    place = adapter(tmp_path, of_head())
    assert bowline_audit(place, "--base", tmp_path / "none").exit_code == 2
    with pytest.raises(CheckpointError):
        audit_adapter(place, base=tmp_path / "none")
    with pytest.raises(UsageError, match="matches no rule"):
        audit_adapter(place, select=["XX"])
