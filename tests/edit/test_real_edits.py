"""Edits on disk of two trained models: text splits as before, and the tokens that stay have their logits.

all-MiniLM-L6-v2 is a BERT body with WordPiece, SmolLM2-135M-Instruct a tied Llama with byte-level BPE. The same
comparisons, of more prompts, make the page `benchmarks/results/prune-*.md`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.edit_sweep import digests
from tools.prune_table import (
    CORPORA,
    PROMPTS,
    STEPS,
    Pruned,
    compare_hidden,
    compare_logits,
    compare_splits,
    compare_steps,
    load_causal,
    prune,
    write_corpora,
)

from bowline.edit import CheckpointEdit, history, open_checkpoint, undo

pytestmark = [pytest.mark.real, pytest.mark.usefixtures("quiet_transformers")]

Corpora = dict[str, tuple[Path, ...]]
LIBRARY, HELP = CORPORA
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TEXT = "The bowline is a knot that does not slip.\n    for name, value in sorted(items):\n"
OUTSIDE = [
    "日本語と中文,混在。",
    "床前明月光,疑是地上霜。",
    "🎉 👩‍👩‍👧‍👦 🏴‍☠️",
    "Größe, Füße, Ärger; naïve façade",
    "\u0430\u0431\u0432 עברית \x00\t\r\n  end",
]
WRITTEN_ALIKE = {LIBRARY: "# This module implements ", HELP: "The try statement specifies exception handlers"}
"""Prompts after which the original chooses only tokens that stay."""
UNITS = 16
"""Bound on the difference of a logit in a step of one token, in units in the last place of the position's largest.

The kernel for one position adds up the last `V mod 4` rows in another order: up to 9 units were seen there (AVX-512).
Against float64, the original's own logits are off by up to 20."""


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    return write_corpora(tmp_path_factory.mktemp("corpora") / "help")


@pytest.fixture(scope="module")
def small(minilm: Path, corpora: Corpora, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pruned]:
    """MiniLM pruned to each corpus."""
    place = tmp_path_factory.mktemp("minilm")
    return {name: prune(minilm, name, documents, place / name) for name, documents in corpora.items()}


@pytest.fixture(scope="module")
def large(smollm2: Path, corpora: Corpora, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pruned]]:
    """SmolLM2 pruned to each corpus; each has half a gigabyte, and none is kept."""
    place = tmp_path_factory.mktemp("smollm2")
    yield {name: prune(smollm2, name, documents, place / name) for name, documents in corpora.items()}
    shutil.rmtree(place)


@pytest.fixture(scope="module")
def original(smollm2: Path) -> Any:
    return load_causal(smollm2)


@pytest.fixture
def copied(smollm2: Path, tmp_path: Path) -> Iterator[Path]:
    """SmolLM2 to be edited in place."""
    yield shutil.copytree(smollm2, tmp_path / "smollm2")
    shutil.rmtree(tmp_path)


def edit(place: Path, **step: Any) -> None:
    """Make one step in place: its verb, and its arguments."""
    ((verb, options),) = step.items()
    with open_checkpoint(place) as checkpoint:
        steps: CheckpointEdit = getattr(checkpoint.edit(), verb)(**options)
        steps.commit(in_place=True)


@torch.no_grad()
def logits(model: Any, ids: list[int]) -> torch.Tensor:
    """The logits (positions, rows) of one pass."""
    result: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return result


@torch.no_grad()
def written(model: Any, ids: list[int]) -> list[int]:
    """The greedy text after a prompt, as `generate` writes it."""
    prompt = torch.tensor([ids])
    result = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=STEPS)
    found: list[int] = result[0, len(ids) :].tolist()
    return found


def ids_of(place: Path, text: str) -> list[int]:
    return list(tokenizer_of(place)(text).input_ids)


def tokenizer_of(place: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(place)


# --- prune ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("model", ["small", "large"])
def test_a_pruned_tokenizer_splits_its_corpus_to_the_mapped_ids(
    model: str, corpus: str, request: pytest.FixtureRequest
) -> None:
    pruned: Pruned = request.getfixturevalue(model)[corpus]
    for library in (True, False):
        splits = compare_splits(pruned, pruned.documents, library=library)
        assert splits.documents == len(pruned.documents) >= 60
        assert splits.tokens > 100_000
        assert splits.differing == 0


@pytest.mark.parametrize("corpus", CORPORA)
def test_a_pruned_bert_has_the_same_hidden_states(small: dict[str, Pruned], corpus: str) -> None:
    from transformers import AutoModel

    pruned = small[corpus]
    before, after = (AutoModel.from_pretrained(place).eval() for place in (pruned.source, pruned.place))
    positions, differing = compare_hidden(pruned, before, after)
    assert positions > 1000
    assert differing == 0


@pytest.mark.parametrize("corpus", CORPORA)
def test_a_pruned_model_has_the_same_logits_and_greedy_text(
    large: dict[str, Pruned], original: Any, corpus: str
) -> None:
    """In a pass over many tokens bit for bit; in steps of one, the same choices and logits within rounding."""
    pruned = large[corpus]
    model = load_causal(pruned.place)
    assert torch.equal(model.lm_head.weight, original.lm_head.weight[torch.tensor(pruned.kept)])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    positions, differing, difference = compare_logits(pruned, original, model)
    assert positions > 1000
    assert differing == 0
    assert difference.differing == 0
    for prompt in PROMPTS[corpus][:3]:
        steps = compare_steps(pruned, original, model, prompt)
        assert steps.alike == steps.steps
        assert steps.hidden_equal
        assert steps.pruned_winners <= 16
        assert steps.difference.units <= UNITS
        assert all(row >= len(pruned.kept) // 16 * 16 for row in steps.difference.rows)


@pytest.mark.parametrize("corpus", CORPORA)
def test_each_model_on_its_own_writes_the_same_text_up_to_a_pruned_token(
    large: dict[str, Pruned], original: Any, corpus: str
) -> None:
    pruned = large[corpus]
    model = load_causal(pruned.place)
    for prompt in (PROMPTS[corpus][0], WRITTEN_ALIKE[corpus]):
        before = written(original, ids_of(pruned.source, prompt))
        after = written(model, ids_of(pruned.place, prompt))
        mapped = [pruned.remap.get(number) for number in before]
        until = mapped.index(None) if None in mapped else len(mapped)
        assert after[:until] == mapped[:until]
        assert until > 0
        if prompt == WRITTEN_ALIKE[corpus]:
            assert len(after) == until == STEPS


def test_padded_in_the_same_edit_single_steps_are_equal_to_the_bit_too(
    smollm2: Path, corpora: Corpora, original: Any, tmp_path: Path
) -> None:
    pruned = prune(smollm2, LIBRARY, corpora[LIBRARY], tmp_path / "padded", multiple=64)
    model = load_causal(pruned.place)
    assert len(model.lm_head.weight) == -(-len(pruned.kept) // 64) * 64
    steps = compare_steps(pruned, original, model, PROMPTS[LIBRARY][0])
    assert (steps.alike, steps.difference.differing) == (steps.steps, 0)
    shutil.rmtree(tmp_path)


def test_a_pruned_model_is_smaller_by_its_rows(small: dict[str, Pruned], large: dict[str, Pruned]) -> None:
    for models, rows, width in ((small, 30_522, 384), (large, 49_152, 576)):
        for pruned in models.values():
            before, after = pruned.sizes["model.safetensors"]
            assert abs(before - after - (rows - len(pruned.kept)) * width * 4) < 1024  # the header's numbers
            before, after = pruned.sizes["tokenizer.json"]
            assert after < before / 4
            assert json.loads((pruned.place / "config.json").read_text())["vocab_size"] == len(pruned.kept)


@pytest.mark.parametrize("corpus", CORPORA)
def test_text_outside_the_corpus_is_still_spelled(large: dict[str, Pruned], corpus: str) -> None:
    before, after = tokenizer_of(large[corpus].source), tokenizer_of(large[corpus].place)
    for text in OUTSIDE:
        ids = after(text).input_ids
        assert after.decode(ids) == before.decode(before(text).input_ids) == text
        assert len(ids) >= len(before(text).input_ids)


# --- resize, untie, tie, cast -----------------------------------------------------------------------------------------


def test_an_added_token_starts_as_the_mean_of_its_pieces(smollm2: Path, original: Any, tmp_path: Path) -> None:
    place, added = tmp_path / "more", ["<|knot|>", "sheetbend"]
    with open_checkpoint(smollm2) as checkpoint:
        checkpoint.edit().resize(add_tokens=added, new_rows="like:").commit(place)
    tokenizer, model = tokenizer_of(place), load_causal(place)
    rows = model.lm_head.weight
    assert len(rows) == len(tokenizer) == 49_154
    for number, text in enumerate(added, 49_152):
        assert ids_of(place, f"a {text} b") == [*ids_of(smollm2, "a "), number, *ids_of(smollm2, " b")]
        pieces = ids_of(smollm2, text)
        assert len(pieces) > 1
        mean = original.lm_head.weight[pieces].double().mean(0).float()
        assert torch.equal(rows[number], mean)
    ids = ids_of(place, TEXT)
    assert ids == ids_of(smollm2, TEXT)
    assert torch.equal(rows[:49_152], original.lm_head.weight)
    assert torch.equal(logits(model, ids)[:, :49_152], logits(original, ids))
    shutil.rmtree(tmp_path)


def test_untied_tied_padded_and_cast_the_logits_stay_and_undo_brings_each_file_back(
    copied: Path, smollm2: Path, original: Any
) -> None:
    from transformers import AutoModelForCausalLM

    ids = ids_of(smollm2, TEXT)
    expected = logits(original, ids)
    states = [digests(copied)]

    edit(copied, untie={})
    model = load_causal(copied)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert torch.equal(logits(model, ids), expected)
    states.append(digests(copied))

    edit(copied, tie={})
    tied = digests(copied)
    assert {name: tied[name] for name in states[0]} == states[0]
    model = load_causal(copied)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    states.append(tied)

    edit(copied, resize={"to": 49_153, "pad_to_multiple_of": 64})
    model = load_causal(copied)
    assert len(model.lm_head.weight) == 49_216
    found = logits(model, ids)
    assert torch.equal(found[:, :49_152], expected)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    states.append(digests(copied))

    cast: Any = AutoModelForCausalLM.from_pretrained(copied, dtype=torch.bfloat16).eval()
    edit(copied, cast={"dtype": "bf16"})
    model = load_causal(copied)
    assert model.dtype == torch.bfloat16
    weights = dict(model.named_parameters())
    assert all(torch.equal(weights[name], one) for name, one in cast.named_parameters())
    assert torch.equal(logits(model, ids), logits(cast, ids))

    assert len(history(copied)) == 4
    for before in reversed(states):
        undo(copied)
        now = digests(copied)
        assert {name: now[name] for name in before if not name.startswith(".bowline")} == {
            name: digest for name, digest in before.items() if not name.startswith(".bowline")
        }
    assert now == states[0]
