"""What the note on variants says is what happens: a sample of them, audited and loaded by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from tools.variants import VARIANTS, base_model, logits, run_variant

from bowline.errors import CheckpointError
from bowline.nn import load_checkpoint

pytestmark = pytest.mark.usefixtures("quiet_transformers")

PAGE = Path(__file__).parents[2] / "docs" / "notes" / "variants.md"
SAMPLE = [
    "llama",
    "bin-nested",
    "lora-head-alone",
    "lora-head",
    "lora-untied",
    "adapter",
    "adapter-state",
    "resized",
    "untied-flag-true",
    "tied-flag-false",
    "shard-missing",
    "layers-missing",
    "pruned",
    "prefix-module",
    "prefix-model",
    "prefix-net",
    "compiled-layers",
    "fsdp-layers",
    "checkpointed-layers",
    "sentence-transformers",
]
WITH_PEFT = {name for name in SAMPLE if name.startswith(("lora", "adapter"))}


def rows() -> dict[str, list[str]]:
    """The table of the page: the cells behind each variant's phrase."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "|" in line]
    return {cells[0]: cells[1:] for cells in lines[2:]}


@pytest.mark.parametrize("name", SAMPLE)
def test_the_verdict_and_the_load_are_those_of_the_page(name: str, tmp_path: Path) -> None:
    if name in WITH_PEFT:
        pytest.importorskip("peft")
    row = run_variant(VARIANTS[name], tmp_path)
    assert not row.silent
    verdict, line, loaded = rows()[row.what]
    assert row.verdict == verdict
    assert line.startswith(f"`{row.line[:40].replace('`', chr(39))}")
    assert loaded.partition(", logits")[0] == row.loaded.partition(", logits")[0]
    assert ("logits kept" in loaded) is ("logits kept" in row.loaded)


def test_the_page_has_every_variant_and_none_is_silent() -> None:
    table = rows()
    assert list(table) == [one.what for one in VARIANTS.values()]
    run = [cells for cells in table.values() if not cells[0].startswith("not run: ")]
    assert len(run) > 30
    for verdict, _, loaded in run:
        assert not verdict.startswith("0,") or loaded.startswith(("0 missing", "refused"))


@pytest.mark.parametrize(
    ("name", "strip"),
    [
        ("prefix-module", "module."),
        ("compiled-layers", "_orig_mod."),
        ("fsdp-layers", "_fsdp_wrapped_module."),
        ("checkpointed-layers", "_checkpoint_wrapped_module."),
    ],
)
def test_strip_loads_a_wrapped_model_as_it_was(name: str, strip: str, tmp_path: Path) -> None:
    made = VARIANTS[name].make(tmp_path)
    model = base_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(CheckpointError, match=r"stored names have the part") as caught:
        load_checkpoint(model, made.place)
    assert f"strip={strip!r}" in (caught.value.help or "")
    assert load_checkpoint(model, made.place, strip=strip)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert made.reference is not None
    assert torch.equal(logits(model), made.reference)
