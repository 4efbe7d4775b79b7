"""What PEFT's merge, `merge_lora` and `bowline merge` make of a tie, held against what the audit of the adapter says.

The models are tiny and float64. Each adapter is saved by PEFT, audited from its directory, loaded by PEFT, merged,
saved and loaded again. "Own" is what a module computes with while the loaded adapter is on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from bowline.auditing import audit_adapter
from bowline.auditing.adapter_evidence import AdapterEvidence, Holds, Merge
from bowline.auditing.adapter_merge import PEFT_RUN, TRANSFORMERS_RUN
from bowline.checkpoint.formats.peft_adapter import KNOWN_TYPES
from bowline.edit import open_checkpoint
from bowline.errors import TieError, UsageError
from bowline.nn import merge_lora
from tests.parity.adapter_cases import CASES, H_, ROWS, WIDTH, Base, Case, loaded, logits, make_base, saved_adapter

pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings("ignore"),  # PEFT warns of ties, of saved tables and of configs that it mends
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Base]:
    """The base models, each written and loaded once."""
    root = tmp_path_factory.mktemp("bases")
    return cache(lambda family, tied: make_base(family, tied, root / f"{family}-{tied}"))


def computed(model: Any, name: str) -> torch.Tensor:
    """The matrix that a module computes with, its adapters included: (rows, width)."""
    module = model.get_submodule(name)
    with torch.no_grad():
        if name.endswith(("embed_tokens", "wte", "word_embeddings", "shared")):
            table: torch.Tensor = module(torch.arange(ROWS))
            return table
        zero = module(torch.zeros(1, WIDTH, dtype=torch.float64))
        head: torch.Tensor = (module(torch.eye(WIDTH, dtype=torch.float64)) - zero).T
        return head


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-9)


def merged(base: Base, place: Path, tool: str, tmp: Path) -> tuple[Any, bool]:
    """The merged model, and whether `merge_lora` refused to merge before it was told to untie."""
    if tool == "bowline merge":
        with open_checkpoint(base.place) as checkpoint:
            checkpoint.edit().merge(place).commit(tmp / "on disk")
        return type(base.model).from_pretrained(tmp / "on disk", dtype=torch.float64).eval(), False
    model = loaded(base, place)
    if tool == "peft":
        return model.merge_and_unload(), False
    try:
        return merge_lora(model), False
    except TieError:
        return merge_lora(model, on_tie="untie"), True


def words(merge: Merge, evidence: AdapterEvidence) -> str:
    head = next(each.holds for each in merge.ends if each.place.end.value == "head")
    tie = {True: "stays", False: "parted", None: "none"}[merge.tie_stays]
    exact = {True: "exact", False: "wrong", None: "unknown"}[merge.exact]
    assert merge.ends[0].place is evidence.base.source
    return f"{merge.ends[0].holds.name.lower()} {head.name.lower()} {tie} {exact}"


def disagreements(base: Base, place: Path, evidence: AdapterEvidence, tmp: Path) -> Iterator[str]:
    """Whatever differs between what the audit says of the merges and what they did."""
    names = [each.module for each in evidence.base.places]
    model = loaded(base, place)
    own = {name: computed(model.base_model.model, name) for name in names}
    before = logits(model)
    for merge in evidence.merges:
        after, refused = merged(base, place, merge.tool, tmp)
        for each in merge.ends:
            table = computed(after, each.place.module)
            scaled = table * WIDTH**0.5  # untying a T5 moves the scale of its logits into the head
            right = close(table, own[each.place.module]) or close(scaled, own[each.place.module])
            if merge.tool == "bowline merge" and each.place.module in evidence.base.unused:
                continue  # what no layer calls stays as it was
            if right is not (each.holds in (Holds.OWN, Holds.BASE)) and each.holds is not Holds.ROWS_OF_SEVERAL:
                yield f"{merge.tool}: {each.place.module} is {'' if right else 'not '}its own, said {each.holds.name}"
        one = len({id(after.get_submodule(name).weight) for name in names}) == 1
        if merge.tied_base and merge.tie_stays is not one:
            yield f"{merge.tool}: tie {'stays' if one else 'parted'}, said {merge.tie_stays}"
        if merge.tool == "merge_lora" and merge.tied_base and refused is one:
            yield f"merge_lora: {'refused' if refused else 'merged'}, said {merge.text}"
        if not after.config.is_encoder_decoder and after.config.tie_word_embeddings is not one:
            yield f"{merge.tool}: the flag is {after.config.tie_word_embeddings}, the tie {one}"
        after.save_pretrained(tmp / merge.tool)
        again = type(after).from_pretrained(tmp / merge.tool, dtype=torch.float64).eval()
        off = float((logits(again) - before).abs().max())
        if merge.exact is not (off < 1e-9):
            yield f"{merge.tool}: logits off by {off:.3g}, said {merge.exact}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_merges_do_what_the_audit_says(case: Case, bases: Callable[[str, bool], Base], tmp_path: Path) -> None:
    base = bases(case.family, case.tied)
    saved_adapter(case, base, place := tmp_path / "adapter")
    report = audit_adapter(place)
    evidence = report.evidence
    assert evidence.base.tied is case.tied
    assert [words(merge, evidence) for merge in evidence.merges[:2]] == [case.peft, case.ours]
    assert list(disagreements(base, place, evidence, tmp_path)) == []
    found = {finding.code for finding in report.findings if finding.severity.value != "info"}
    assert " ".join(sorted(found)) == case.codes


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_an_adapter_inside_another_is_merged_by_neither(
    family: str, bases: Callable[[str, bool], Base], tmp_path: Path
) -> None:
    head = {"llama": H_, "bert": "decoder"}[family]
    case = Case(family, {"target_modules": [head], "trainable_token_indices": [1, 2]}, "", "")
    base = bases(family, True)
    saved_adapter(case, base, place := tmp_path / "adapter")
    report = audit_adapter(place)
    assert "BW510" in {finding.code for finding in report.findings}
    model = loaded(base, place)
    before = logits(model)
    after = model.merge_and_unload()
    assert (logits(after) - before).abs().max() > 0.01
    with pytest.raises(RuntimeError, match="shared tensors"):
        after.save_pretrained(tmp_path / "merged")
    with pytest.raises(UsageError, match="one inside the other"):
        merge_lora(loaded(base, place), on_tie="untie")


def test_the_versions_that_ran_are_those_that_the_audit_names() -> None:
    assert (peft.__version__, transformers.__version__) == (PEFT_RUN, TRANSFORMERS_RUN)


def test_the_methods_are_those_of_peft() -> None:
    assert {kind.value for kind in peft.PeftType} == KNOWN_TYPES
