"""Prunes two real models to texts that every Python installation has, and compares each result with its original.

    python -m tools.prune_table MINILM_DIRECTORY SMOLLM2_DIRECTORY [--report FILE]

The texts are the sources of the standard library's modules and the pages of `help()`. Both tokenizers split each text;
the hidden states and logits of one pass over a text are compared, and greedy text step by step. The output is the page
`benchmarks/results/prune-*.md`; `tests/edit/test_real_edits.py` asserts the same comparisons.
"""

from __future__ import annotations

import argparse
import json
import os
import pydoc_data.topics
import shutil
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from benchmarks.measure import machine

from bowline.edit import open_checkpoint

__all__ = [
    "CORPORA",
    "PASS",
    "PROMPTS",
    "STEPS",
    "GreedySteps",
    "LogitDifference",
    "Pruned",
    "Splits",
    "compare_hidden",
    "compare_logits",
    "compare_splits",
    "compare_steps",
    "last_place",
    "load_causal",
    "prune",
    "write_corpora",
]

Tensor = torch.Tensor
WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
CORPORA = ("standard library", "help pages")
"""Sixty of the standard library's top-level modules; the pages of `help()`, English text with some code."""
FILES = 60
PASS = 256
"""Tokens of a text in one pass; BERT's positions end at 512."""
STEPS = 64
"""Greedy steps of each prompt."""
PROMPTS = {
    "standard library": (
        "import os\nimport sys\n\n",
        "def __init__(self, name, value=None):\n",
        "class Error(Exception):\n    ",
        '    """Return a list of all the ',
        "    for key, value in self.items():\n",
        "    try:\n        return self._data[key]\n",
        "# This module implements ",
        "def main():\n    import argparse\n",
    ),
    "help pages": (
        "The expression is evaluated, and ",
        "A class definition ",
        "If the object is mutable, then ",
        "The try statement specifies exception handlers",
        "Strings are sequences of characters. ",
        "An example of a function that ",
        "In the following, the name is bound ",
        "When a module is imported, the ",
    ),
}
"""Beginnings whose tokens all stay when a model is pruned to the text of this name."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """A pruned checkpoint beside its source: the old ids of its rows, and the text that it was pruned to."""

    source: Path
    place: Path
    corpus: str
    documents: tuple[Path, ...]
    kept: tuple[int, ...]
    """The old id of each row."""
    sizes: Mapping[str, tuple[int, int]]
    """The bytes of the weights and of the tokenizer before and after."""

    @property
    def remap(self) -> dict[int, int]:
        """The new id of each old one."""
        return {old: new for new, old in enumerate(self.kept)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """How two tokenizers split documents: those whose ids differ, once the old ones are mapped, and all tokens."""

    documents: int
    differing: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitDifference:
    """The logits of the tokens that stay, by both models: how many differ, and by how much at most.

    `units` is in units in the last place of the largest logit at the position.
    """

    logits: int = 0
    differing: int = 0
    units: float = 0.0
    rows: frozenset[int] = frozenset()
    """The rows of the pruned table whose logits differ."""

    def __add__(self, other: LogitDifference) -> LogitDifference:
        return LogitDifference(
            logits=self.logits + other.logits,
            differing=self.differing + other.differing,
            units=max(self.units, other.units),
            rows=self.rows | other.rows,
        )

    def __str__(self) -> str:
        if not self.differing:
            return "equal"
        return f"{self.differing:,} of {self.logits:,} differ, by at most {self.units:.1f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedySteps:
    """The greedy steps of both models from one prompt, both given the tokens that the pruned one chooses."""

    steps: int
    alike: int
    """Steps at which the pruned model chooses what the original would choose among the tokens that stay."""
    pruned_winners: int
    """Steps at which the original would choose a token that was pruned."""
    hidden_equal: bool
    difference: LogitDifference

    @property
    def same_text(self) -> bool:
        """Whether both models, each on its own, write the same text."""
        return self.alike == self.steps and not self.pruned_winners


def write_corpora(place: Path) -> dict[str, tuple[Path, ...]]:
    """The files of each corpus; the help pages are written to a directory."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:FILES]
    place.mkdir(parents=True)
    pages = []
    for name, text in sorted(pydoc_data.topics.topics.items()):
        pages.append(place / f"{name}.txt")
        pages[-1].write_text(text, encoding="utf-8")
    return dict(zip(CORPORA, (tuple(sources), tuple(pages)), strict=True))


def prune(source: Path, corpus: str, documents: Sequence[Path], place: Path, multiple: int | None = None) -> Pruned:
    """Prune a checkpoint to a corpus, in a new directory; with `multiple`, pad its rows to that in the same edit."""
    with open_checkpoint(source) as checkpoint:
        edit = checkpoint.edit().prune(corpus=documents)
        (edit if multiple is None else edit.resize(pad_to_multiple_of=multiple)).commit(place)
    moved: dict[str, int] = json.loads((place / "token_map.json").read_text())
    sizes = {name: ((source / name).stat().st_size, (place / name).stat().st_size) for name in (WEIGHTS, TOKENIZER)}
    kept = sorted((new, int(old)) for old, new in moved.items())
    assert [new for new, _ in kept] == list(range(len(kept)))
    return Pruned(source, place, corpus, tuple(documents), tuple(old for _, old in kept), sizes)


# --- tokenizers -------------------------------------------------------------------------------------------------------


def compare_splits(pruned: Pruned, documents: Sequence[Path], *, library: bool) -> Splits:
    """Split documents with both tokenizers, as `tokenizers` loads them or as transformers' `AutoTokenizer` does."""
    split = _by_library if library else _by_transformers
    remap = pruned.remap
    differing = tokens = 0
    for old, new in zip(split(pruned.source, documents), split(pruned.place, documents), strict=True):
        differing += [remap.get(number) for number in old] != new
        tokens += len(new)
    return Splits(documents=len(documents), differing=differing, tokens=tokens)


def _by_library(place: Path, documents: Sequence[Path]) -> Iterator[list[int]]:
    tokenizer = tokenizers.Tokenizer.from_file(str(place / TOKENIZER))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for document in documents:
        yield tokenizer.encode(document.read_text(encoding="utf-8")).ids


def _by_transformers(place: Path, documents: Sequence[Path]) -> Iterator[list[int]]:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place)
    for document in documents:
        yield tokenizer(document.read_text(encoding="utf-8")).input_ids


def text_tokens(pruned: Pruned, text: str) -> tuple[Tensor, Tensor]:
    """The ids (1, N) of a text's first tokens by both tokenizers."""
    both = []
    for place in (pruned.source, pruned.place):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(place)
        both.append(torch.tensor([tokenizer(text).input_ids[:PASS]]))
    return both[0], both[1]


# --- numbers ----------------------------------------------------------------------------------------------------------


def load_causal(place: Path) -> Any:
    """A causal model in the dtype that its config states."""
    return transformers.AutoModelForCausalLM.from_pretrained(place).eval()


def last_place(logits: Tensor) -> Tensor:
    """The unit in the last place (..., 1) of the largest float32 logit of each position."""
    largest = logits.abs().amax(-1, keepdim=True).double().numpy()
    return torch.from_numpy(np.exp2(np.floor(np.log2(largest)) - 23))


def logit_difference(old: Tensor, new: Tensor) -> LogitDifference:
    """Compare the logits (positions, rows) of the rows that stay."""
    differs = old != new
    units = ((old.double() - new.double()).abs() / last_place(old)).max()
    rows = frozenset(differs.nonzero()[:, -1].tolist())
    return LogitDifference(logits=differs.numel(), differing=int(differs.sum()), units=float(units), rows=rows)


@torch.no_grad()
def compare_hidden(pruned: Pruned, old: Any, new: Any) -> tuple[int, int]:
    """The positions of passes over eight documents of the corpus, and those whose hidden states differ in any bit."""
    positions = differing = 0
    for document in _spread(pruned.documents):
        before, after = text_tokens(pruned, document.read_text(encoding="utf-8"))
        states = old(before).last_hidden_state[0], new(after).last_hidden_state[0]
        positions += len(states[0])
        differing += int((states[0] != states[1]).any(-1).sum())
    return positions, differing


@torch.no_grad()
def compare_logits(pruned: Pruned, old: Any, new: Any) -> tuple[int, int, LogitDifference]:
    """As `compare_hidden` of two causal models, with the logits of the tokens that stay."""
    kept = torch.tensor(pruned.kept)
    positions = differing = 0
    difference = LogitDifference()
    for document in _spread(pruned.documents):
        before, after = text_tokens(pruned, document.read_text(encoding="utf-8"))
        states = old.model(before).last_hidden_state[0], new.model(after).last_hidden_state[0]
        positions += len(states[0])
        differing += int((states[0] != states[1]).any(-1).sum())
        difference += logit_difference(old.lm_head(states[0])[:, kept], new.lm_head(states[1])[:, : len(kept)])
    return positions, differing, difference


def _spread(documents: Sequence[Path]) -> Sequence[Path]:
    return documents[:: len(documents) // 8][:8]


@torch.no_grad()
def compare_steps(pruned: Pruned, old: Any, new: Any, prompt: str) -> GreedySteps:
    """Let the pruned model continue a prompt greedily, and the original model read the same tokens."""
    ids, mapped = text_tokens(pruned, prompt)
    kept, remap = torch.tensor(pruned.kept), pruned.remap
    caches: list[Any] = [None, None]
    alike = gone = 0
    hidden_equal = True
    difference = LogitDifference()
    for _ in range(STEPS):
        states = []
        for at, (model, tokens) in enumerate(((old, ids), (new, mapped))):
            output = model.model(tokens, past_key_values=caches[at], use_cache=True)
            caches[at] = output.past_key_values
            states.append(output.last_hidden_state[:, -1])
        before, after = old.lm_head(states[0]), new.lm_head(states[1])
        hidden_equal &= torch.equal(*states)
        difference += logit_difference(before[:, kept], after[:, : len(kept)])
        chosen = int(after.argmax())
        alike += chosen == int(before[0, kept].argmax())
        gone += int(before.argmax()) not in remap
        token = int(after[0, : len(kept)].argmax())  # a padding row must not win, and is not in the original
        ids, mapped = torch.tensor([[pruned.kept[token]]]), torch.tensor([[token]])
    return GreedySteps(steps=STEPS, alike=alike, pruned_winners=gone, hidden_equal=hidden_equal, difference=difference)


# --- the page ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What was measured of one model and corpus; no logits and steps of a model without a head."""

    name: str
    pruned: Pruned
    splits: Splits
    covered: float
    """The share of the corpus' tokens that stay."""
    other: tuple[int, int]
    """The tokens of the other corpus before and after."""
    hidden: tuple[int, int]
    logits: LogitDifference | None = None
    steps: tuple[GreedySteps, ...] = ()


def measure(name: str, pruned: Pruned, other: Sequence[Path], old: Any = None) -> Row:
    """Compare a pruned checkpoint with its source; with `old`, its causal model."""
    splits = [compare_splits(pruned, pruned.documents, library=library) for library in (True, False)]
    if splits[0].differing or splits[1].differing:
        raise SystemExit(f"{name}, {pruned.corpus}: texts split differently: {splits}")
    before = sum(map(len, _by_library(pruned.source, other)))
    after = sum(map(len, _by_library(pruned.place, other)))
    remap = pruned.remap
    ids = [number for document in _by_library(pruned.source, pruned.documents) for number in document]
    covered = sum(number in remap for number in ids) / len(ids)
    row = Row(name=name, pruned=pruned, splits=splits[0], covered=covered, other=(before, after), hidden=(0, 0))
    if old is None:
        base, new = (transformers.AutoModel.from_pretrained(place).eval() for place in (pruned.source, pruned.place))
        return replace(row, hidden=compare_hidden(pruned, base, new))
    new = load_causal(pruned.place)
    positions, differing, logits = compare_logits(pruned, old, new)
    steps = tuple(compare_steps(pruned, old, new, prompt) for prompt in PROMPTS[pruned.corpus])
    return replace(row, hidden=(positions, differing), logits=logits, steps=steps)


def page(rows: Sequence[Row], padded: Row) -> Iterator[str]:
    """The page's lines."""
    pages = next(len(row.pruned.documents) for row in rows if row.pruned.corpus == CORPORA[1])
    yield "# Pruned models beside their originals"
    yield from _paragraph(
        "`bowline prune` keeps the tokens that a text uses. The texts are two that every Python installation has: the "
        f"standard library's first {FILES} top-level modules, in the order of their names, and the {pages} pages of "
        "`help()` (`pydoc_data.topics`). Each result is compared with its original in transformers, in float32, on one "
        "thread."
    )
    yield from _paragraph(machine(("bowline-ties", "torch", "transformers", "tokenizers")))
    yield from _paragraph("Rerun: `python -m tools.prune_table MINILM_DIRECTORY SMOLLM2_DIRECTORY`.")
    yield from ("", "## Sizes", "")
    yield "| model | text | rows | `model.safetensors`, MB | `tokenizer.json`, KB |"
    yield "|---|---|---|---|---|"
    for row in rows:
        (weights, fewer), (tokenizer, shorter) = row.pruned.sizes[WEIGHTS], row.pruned.sizes[TOKENIZER]
        yield (
            f"| {row.name} | {row.pruned.corpus} | {_rows(row.pruned.source):,} to {len(row.pruned.kept):,} | "
            f"{weights / 1e6:.1f} to {fewer / 1e6:.1f} | {tokenizer / 1e3:,.0f} to {shorter / 1e3:,.0f} |"
        )
    yield from ("", "## Tokens")
    yield from _paragraph(
        "Both tokenizers split every document, once as `tokenizers` loads them and once as `AutoTokenizer` does. A "
        "document is split alike if the ids are equal after `token_map.json` maps the old ones. The last column is the "
        "text that the model was not pruned to: its tokens before and after."
    )
    yield ""
    yield "| model | text | tokens | of them stay | documents split alike | other text, tokens |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        before, after = row.other
        yield (
            f"| {row.name} | {row.pruned.corpus} | {row.splits.tokens:,} | {row.covered:.2%} | "
            f"{row.splits.documents - row.splits.differing} of {row.splits.documents} | "
            f"{before:,} to {after:,} ({after / before:.2f}) |"
        )
    yield from ("", "## Numbers")
    yield from _paragraph(
        f"Passes: eight documents of the text, up to {PASS} tokens of each. Steps: {STEPS} greedy tokens after each of "
        f"{len(PROMPTS[CORPORA[0]])} prompts, one token a step; the pruned model chooses, and the original reads the "
        "same tokens. Logits are those of the tokens that stay. Their difference is in units in the last place of the "
        "largest logit at the position. Padded: the same edit also resizes to a multiple of 64 rows."
    )
    yield ""
    yield "| model | text | hidden states, passes | logits, passes | hidden states, steps | logits, steps |"
    yield "|---|---|---|---|---|---|"
    compared = [(row.name, row) for row in rows] + [(f"{padded.name}, padded", padded)]
    for name, row in compared:
        cells = [name, row.pruned.corpus, _hidden(*row.hidden)]
        if row.logits is None:
            cells += ["no head", "no head", "no head"]
        else:
            total = sum((one.difference for one in row.steps), LogitDifference())
            hidden = "equal" if all(one.hidden_equal for one in row.steps) else "differ"
            cells += [str(row.logits), hidden, str(total)]
        yield f"| {' | '.join(cells)} |"
    for name, row in compared:
        if found := frozenset[int]().union(*(one.difference.rows for one in row.steps)):
            yield from _paragraph(
                f"{name}, {row.pruned.corpus}: the logits that differ are those of rows {min(found):,} to "
                f"{max(found):,} of {len(row.pruned.kept):,}."
            )
    yield from ("", "## Greedy text")
    yield from _paragraph(
        "A step chooses alike if the pruned model chooses what the original would choose among the tokens that stay. "
        "Where the original's own choice was pruned, the texts part: a prompt has the same text if that happens at no "
        f"step of {STEPS}."
    )
    yield ""
    yield "| model | text | steps that choose alike | steps whose winner was pruned | prompts with the same text |"
    yield "|---|---|---|---|---|"
    for name, row in compared:
        if row.steps:
            yield (
                f"| {name} | {row.pruned.corpus} | {sum(one.alike for one in row.steps)} of "
                f"{sum(one.steps for one in row.steps)} | {sum(one.pruned_winners for one in row.steps)} | "
                f"{sum(one.same_text for one in row.steps)} of {len(row.steps)} |"
            )


def _paragraph(text: str) -> Iterator[str]:
    yield ""
    yield from textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _hidden(positions: int, differing: int) -> str:
    return f"equal ({positions:,} positions)" if not differing else f"{differing:,} of {positions:,} positions differ"


def _rows(place: Path) -> int:
    size: int = json.loads((place / "config.json").read_text())["vocab_size"]
    return size


def main() -> int:
    """Prune and compare, and print the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minilm", type=Path)
    parser.add_argument("smollm2", type=Path)
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    workspace = Path(tempfile.mkdtemp())
    try:
        corpora = write_corpora(workspace / "help")
        rows = []
        causal = load_causal(arguments.smollm2)
        large = ("SmolLM2-135M-Instruct", arguments.smollm2, causal)
        for name, source, old in (("all-MiniLM-L6-v2", arguments.minilm, None), large):
            for corpus, other in (CORPORA, CORPORA[::-1]):
                one = prune(source, corpus, corpora[corpus], workspace / "pruned")
                rows.append(measure(name, one, corpora[other], old))
                shutil.rmtree(one.place)
        one = prune(large[1], CORPORA[0], corpora[CORPORA[0]], workspace / "pruned", 64)
        padded = measure(large[0], one, corpora[CORPORA[1]], causal)
        text = "\n".join(page(rows, padded)) + "\n"
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    if arguments.report:
        arguments.report.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
