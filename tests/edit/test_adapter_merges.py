"""Adapters merged on disk: every kind that PEFT saves, at every end of a tie, against the adapter model itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from bowline.edit import EditReport, open_checkpoint
from bowline.errors import BowlineError, TieError
from bowline.nn import load_checkpoint
from tests.parity.adapter_cases import CASES, H_, ROWS, Base, Case, loaded, logits, make_base, saved_adapter

pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings("ignore"),  # PEFT warns of ties, of saved tables and of configs that it mends
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Base]:
    """The base models, each written and loaded once."""
    root = tmp_path_factory.mktemp("bases")
    return cache(lambda family, tied: make_base(family, tied, root / f"{family}-{tied}"))


def merge(base: Path, adapter: Path, out: Path, **options: Any) -> EditReport:
    with open_checkpoint(base) as checkpoint:
        return checkpoint.edit().merge(adapter, **options).commit(out)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_merged_checkpoint_computes_what_the_adapter_model_computed(
    case: Case, bases: Callable[[str, bool], Base], tmp_path: Path
) -> None:
    base = bases(case.family, case.tied)
    saved_adapter(case, base, place := tmp_path / "adapter")
    before = logits(loaded(base, place))
    report = merge(base.place, place, tmp_path / "merged")
    again = type(base.model).from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    off = float((logits(again) - before).abs().max())
    if case.codes == "BW506":  # PEFT leaves the head's bias out while trained rows are on
        assert off > 1e-3 and "the head's bias, which PEFT leaves out" in str(report)
    else:
        assert off < 1e-9, report
    assert " tensors of the adapter are accounted for" in str(report)
    assert report.clean, report.findings


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "square layers stored transposed": ("gpt2", {"target_modules": ["c_proj", "c_attn", "c_fc"]}),
    "DoRA on layers stored transposed": ("gpt2", {"target_modules": ["c_proj", "c_fc"], "use_dora": True}),
    "rsLoRA everywhere": ("llama", {"target_modules": "all-linear", "use_rslora": True}),
    "a LoRA with a bias": ("bert", {"target_modules": ["query", "dense"], "lora_bias": True}),
    "trained biases": ("bert", {"target_modules": ["query"], "bias": "all"}),
    "saved modules": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm", "v_proj"]}),
    "DoRA on a scaled embedding": ("gemma", {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True}),
    "ranks and alphas of their own": (
        "llama",
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 1}, "alpha_pattern": {"q_proj": 3}},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_other_settings_are_merged_as_the_adapter_model_computes(
    name: str, bases: Callable[[str, bool], Base], tmp_path: Path
) -> None:
    family, options = VARIANTS[name]
    base = bases(family, True)
    saved_adapter(Case(family, options, "", ""), base, place := tmp_path / "adapter")
    before = logits(loaded(base, place))
    report = merge(base.place, place, tmp_path / "merged")
    again = type(base.model).from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    assert float((logits(again) - before).abs().max()) < 1e-9, report


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5", "gemma"])
def test_bowline_loads_the_parted_ends_as_transformers_does(
    family: str, bases: Callable[[str, bool], Base], tmp_path: Path
) -> None:
    base = bases(family, True)
    head = "decoder" if family == "bert" else H_
    saved_adapter(Case(family, {"target_modules": [head]}, "", ""), base, place := tmp_path / "adapter")
    merge(base.place, place, tmp_path / "merged")
    kind = type(base.model)
    expected = kind.from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    config = type(base.model.config).from_pretrained(tmp_path / "merged")
    model = kind(config).double().eval()
    load_checkpoint(model, tmp_path / "merged", on_conflict="untie")  # a new T5 is tied, whatever its config says
    assert torch.allclose(logits(model), logits(expected), rtol=0, atol=1e-6)  # Gemma's scale is float32 in one
    assert not config.tie_word_embeddings


def half_precision(base: Base, place: Path) -> Path:
    type(base.model).from_pretrained(base.place, dtype=torch.bfloat16).save_pretrained(place)
    return place


def test_sums_are_rounded_once_to_the_stored_dtype(bases: Callable[[str, bool], Base], tmp_path: Path) -> None:
    base = bases("llama", True)
    saved_adapter(Case("llama", {"target_modules": ["q_proj"]}, "", ""), base, place := tmp_path / "adapter")
    source = half_precision(base, tmp_path / "base")
    merge(source, place, tmp_path / "merged")
    name = "model.layers.0.self_attn.q_proj"
    before, after = (load_file(one / "model.safetensors")[f"{name}.weight"] for one in (source, tmp_path / "merged"))
    factors = load_file(place / "adapter_model.safetensors")
    a, b = (factors[f"base_model.model.{name}.lora_{side}.weight"].double() for side in "AB")
    exact = before.double() + 2.0 * (b @ a)  # alpha 8 over rank 4
    assert after.dtype == torch.bfloat16
    assert torch.equal(after, exact.to(torch.bfloat16))


def test_both_makes_the_change_on_the_shared_matrix(bases: Callable[[str, bool], Base], tmp_path: Path) -> None:
    base = bases("llama", True)
    saved_adapter(Case("llama", {"target_modules": [H_]}, "", ""), base, place := tmp_path / "adapter")
    report = merge(base.place, place, tmp_path / "merged", tied="both")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    original = load_file(base.place / "model.safetensors")
    assert set(merged) == set(original)
    assert not torch.equal(merged["model.embed_tokens.weight"], original["model.embed_tokens.weight"])
    assert "so that they reach model.embed_tokens too" in str(report)


@pytest.mark.parametrize("options", [{"target_modules": [H_]}, {"target_modules": [H_], "ensure_weight_tying": True}])
def test_a_base_that_stores_its_one_matrix_twice_is_merged_as_one(
    bases: Callable[[str, bool], Base], tmp_path: Path, options: dict[str, Any]
) -> None:
    base = bases("llama", True)
    twice = tmp_path / "twice"
    shutil.copytree(base.place, twice)
    tensors = load_file(twice / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone()}, twice / "model.safetensors", {"format": "pt"})
    saved_adapter(Case("llama", options, "", ""), base, place := tmp_path / "adapter")
    before = logits(loaded(base, place))
    report = merge(twice, place, tmp_path / "merged")
    again = type(base.model).from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    assert float((logits(again) - before).abs().max()) < 1e-9, report
    assert again.config.tie_word_embeddings is ("ensure_weight_tying" in options)


def test_refuse_names_the_end_that_was_trained_alone(bases: Callable[[str, bool], Base], tmp_path: Path) -> None:
    base = bases("llama", True)
    saved_adapter(Case("llama", {"target_modules": [H_]}, "", ""), base, place := tmp_path / "adapter")
    with pytest.raises(TieError, match=r"the adapter changes lm_head \(LoRA of rank 4\): one matrix cannot hold that"):
        merge(base.place, place, tmp_path / "merged", tied="refuse")
    assert not (tmp_path / "merged").exists()


def test_a_vocabulary_that_was_resized_before_training_comes_with_its_tokenizer(
    bases: Callable[[str, bool], Base], tmp_path: Path
) -> None:
    base = bases("llama", True)
    larger = type(base.model).from_pretrained(base.place, dtype=torch.float64)
    larger.resize_token_embeddings(ROWS + 3)
    model: Any = get_peft_model(larger, LoraConfig(r=4, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=True)
    (tmp_path / "adapter" / "tokenizer_config.json").write_text('{"of": "the adapter"}')
    report = merge(base.place, tmp_path / "adapter", tmp_path / "merged")
    again = type(base.model).from_pretrained(tmp_path / "merged", dtype=torch.float64).eval()
    assert again.config.vocab_size == ROWS + 3
    assert torch.allclose(logits(again), logits(model.eval()), rtol=0, atol=1e-9)
    assert (tmp_path / "merged" / "tokenizer_config.json").read_text() == '{"of": "the adapter"}'
    assert f"the vocabulary has {ROWS + 3} rows now" in str(report)


# --- adapters that cannot be merged ----------------------------------------------------------------------------------

Q = {"target_modules": ["q_proj"]}


@pytest.fixture
def place(bases: Callable[[str, bool], Base], tmp_path: Path) -> Path:
    """A LoRA of a Llama's q_proj."""
    saved_adapter(Case("llama", Q, "", ""), bases("llama", True), place := tmp_path / "adapter")
    return place


def with_tensors(place: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    tensors = load_file(place / "adapter_model.safetensors")
    edit(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, place / "adapter_model.safetensors")
    return place


def with_config(place: Path, **values: Any) -> Path:
    config = json.loads((place / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(config | values))
    return place


def refused(bases: Callable[[str, bool], Base], place: Path, seen: str, family: str = "llama") -> None:
    """The merge is refused with these words, and nothing is written."""
    out = place.parent / "merged"
    with pytest.raises(BowlineError, match=seen):
        merge(bases(family, True).place, place, out)
    assert not out.exists()


A, B = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight" for side in "AB")


def test_a_delta_that_is_not_finite_is_refused(bases: Callable[[str, bool], Base], place: Path) -> None:
    with_tensors(place, lambda tensors: tensors[A].view(-1)[0].fill_(float("nan")))
    refused(bases, place, "lora_A.weight has values that are not finite")


def test_an_adapter_of_another_base_is_refused(bases: Callable[[str, bool], Base], place: Path) -> None:
    refused(bases, place, "has no place in the base, which stores no 'model.layers.0.self_attn.q_proj.weight", "bert")


def test_factors_of_another_width_are_refused(bases: Callable[[str, bool], Base], place: Path) -> None:
    with_tensors(place, lambda tensors: tensors.update({A: torch.zeros(4, 9)}))
    refused(bases, place, r"makes a delta of \[8, 9\], and the base's weight is \[8, 8\]")


def test_a_rank_that_does_not_fit_is_refused(bases: Callable[[str, bool], Base], place: Path) -> None:
    with_tensors(place, lambda tensors: tensors.update({A: torch.zeros(3, 8)}))
    refused(bases, place, "they have no product")
    with_tensors(place, lambda tensors: tensors.update({B: torch.zeros(8, 3)}))
    refused(bases, place, "has rank 3, and the config says 4")


def test_half_a_delta_is_refused(bases: Callable[[str, bool], Base], place: Path) -> None:
    with_tensors(place, lambda tensors: tensors.pop(B))
    refused(bases, place, "is there, and the other factor of the LoRA is not")


def test_two_claims_on_one_parameter_are_refused(bases: Callable[[str, bool], Base], place: Path) -> None:
    whole = A.replace("lora_A.weight", "modules_to_save.weight")
    with_tensors(place, lambda tensors: tensors.update({whole: torch.zeros(8, 8)}))
    refused(bases, place, "both claim one parameter")


def test_a_tensor_of_an_unknown_kind_is_refused_by_name(bases: Callable[[str, bool], Base], place: Path) -> None:
    with_tensors(place, lambda tensors: tensors.update({A.replace("lora_A", "lora_Z"): torch.zeros(2)}))
    refused(bases, place, "lora_Z.weight' does not belong to a LoRA adapter")


def test_a_new_head_that_the_base_does_not_have_is_refused(bases: Callable[[str, bool], Base], place: Path) -> None:
    with_config(place, modules_to_save=["score"])
    with_tensors(place, lambda tensors: tensors.update({"base_model.model.score.weight": torch.zeros(2, 8)}))
    refused(bases, place, "a classifier, needs its own class")


@pytest.mark.parametrize(
    ("values", "seen"),
    [
        ({"peft_type": "IA3"}, "a PEFT adapter of type IA3, expected LORA or TRAINABLE_TOKENS"),
        ({"alora_invocation_tokens": [1]}, "an activated LoRA counts only from its invocation tokens on"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "layer_replication adds layers"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters adapts parameters of fused experts"),
        ({"init_lora_weights": "pissa_niter_4"}, "with which PEFT changes the base itself"),
        ({"alpha_pattern": {r"^model\..*": 3}}, "decides about .* by a regular expression, which is not run"),
    ],
)
def test_what_is_no_sum_of_deltas_is_refused_by_name(
    bases: Callable[[str, bool], Base], place: Path, values: dict[str, Any], seen: str
) -> None:
    refused(bases, with_config(place, **values), seen)


def test_a_directory_without_an_adapter_is_refused(bases: Callable[[str, bool], Base], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(bases, tmp_path / "empty", "no PEFT adapter here, expected a directory with adapter_config.json")


def test_a_base_of_another_name_is_a_note(bases: Callable[[str, bool], Base], place: Path, tmp_path: Path) -> None:
    with_config(place, base_model_name_or_path="org/other")
    report = merge(bases("llama", True).place, place, tmp_path / "merged")
    assert "the adapter names 'org/other' as its base" in str(report)


def test_every_tensor_is_accounted_for(bases: Callable[[str, bool], Base], tmp_path: Path) -> None:
    base = bases("llama", True)
    options = {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": [H_]}
    saved_adapter(Case("llama", options, "", ""), base, place := tmp_path / "adapter")
    count = len(load_file(place / "adapter_model.safetensors"))
    report = merge(base.place, place, tmp_path / "merged")
    assert f"all {count} tensors of the adapter are accounted for: " in str(report)
    assert "LoRA of rank 4" in str(report) and "1 for a saved module" in str(report)
