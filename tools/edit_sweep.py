"""Edits a tiny checkpoint of every transformers class with a tied head on disk, and loads each result.

    python -m tools.edit_sweep [--report FILE] [CLASS ...]

Each class is built tiny and saved. Then it is tied, untied, resized up and down and pruned, each in place; transformers
loads the result, the logits of the tokens that stay are compared with those before, the audit of the result with that
before, and after `undo` every file with its bytes before. The output ends with the counts and what differs.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import transformers

from bowline.auditing import audit
from bowline.edit import CheckpointEdit, open_checkpoint, undo
from bowline.edit.draft import Draft, begin
from bowline.edit.row_selection import RowSelection, named_ids, vocabulary_of, with_rows
from bowline.errors import BowlineError
from tools.sweep import LARGEST, arguments_of, one_line, tied_classes
from tools.tied_loss_sweep import inputs_of
from tools.tiny import VOCABULARY, build, load_class, tiny_config

__all__ = ["EDITS", "EditResult", "digests", "run_class"]

MORE = 65
"""Rows that a resize adds."""
USED = 500
"""Ids of the texts lie below this one, which pruning keeps."""
DRAWS = frozenset({"DiffusionGemmaForBlockDiffusion"})
"""Classes that draw ids from the whole vocabulary as an input: their logits follow its size."""
EXPECTED_FINDINGS = {
    "untie": frozenset({"BW112", "BW113", "BW209"}),
    "resize up": frozenset({"BW205", "BW208"}),
    "prune": frozenset({"BW209"}),
}
"""Codes that an edit may add: equal ends without a tie, new rows that are equal and untrained, a slow size."""

Tensors = Mapping[str, torch.Tensor]


def size_of(edit: CheckpointEdit) -> int:
    """The number of tokens of the checkpoint."""
    return vocabulary_of(begin(edit.source)).size


@dataclass(frozen=True, slots=True)
class KeepIds:
    """A step that keeps the ids below `USED` and those that configs name, in a checkpoint without a tokenizer."""

    verb: ClassVar[str] = "prune"

    def __str__(self) -> str:
        return "prune"

    def apply(self, draft: Draft) -> Draft:
        """The draft with these rows."""
        vocabulary = vocabulary_of(draft)
        named = (token for token in named_ids(draft, vocabulary.levels) if token < vocabulary.size)
        kept = np.array(sorted({*range(USED), *named}), np.int64)
        return with_rows(draft, vocabulary, RowSelection(vocabulary.size, len(kept), kept), "mean", "keep it")


EDITS: dict[str, Callable[[CheckpointEdit], CheckpointEdit]] = {
    "untie": lambda edit: edit.untie(),
    "untie and tie": lambda edit: edit.untie().tie(),
    "resize up": lambda edit: edit.resize(size_of(edit) + MORE),
    "resize up and down": lambda edit: edit.resize(size_of(edit) + MORE).resize(size_of(edit)),
    "prune": lambda edit: edit._and(KeepIds()),
}


@dataclass
class EditResult:
    """What became of one class: the outcome of each edit in a few words, or the reason why it was not run."""

    name: str
    reason: str = ""
    outcomes: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """The edits that went wrong."""
        return [edit for edit, outcome in self.outcomes.items() if outcome.startswith("WRONG")]


def digests(directory: Path) -> dict[str, str]:
    """The digest of every file in a directory."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_class(name: str, workspace: Path) -> EditResult:
    """Build, save, edit and load one class."""
    result = EditResult(name)
    place = workspace / "model"
    try:
        if name in DRAWS:
            result.reason = "draws an input from the whole vocabulary"
            return result
        cls = load_class(name)
        model = build(cls, _tied(tiny_config(cls)))
        if sum(parameter.numel() for parameter in model.parameters()) > LARGEST:
            result.reason = "not tiny however its config is shrunk"
            return result
        model.save_pretrained(place)
        inputs = {key: value % USED for key, value in inputs_of(model, ignoring=False).items() if key == "input_ids"}
        if not inputs:
            result.reason = "takes no text"
            return result
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = inputs["input_ids"].flip(1)
        before = logits_of(cls, place, inputs)
        if not before:
            result.reason = "has no logits as wide as its vocabulary"
            return result
    except Exception as error:  # any error of a model class is recorded as the reason
        result.reason = f"cannot be built, saved and run: {one_line(error)}"
        return result
    bytes_before, findings = digests(place), codes(place)
    for edit, steps in EDITS.items():
        try:
            with open_checkpoint(place) as checkpoint:
                steps(checkpoint.edit()).commit(in_place=True)
        except BowlineError as error:
            result.outcomes[edit] = f"refused: {one_line(error)}"
            if digests(place) != bytes_before:
                result.outcomes[edit] = "WRONG: refused, but files changed"
                break
            continue
        try:
            result.outcomes[edit] = compared(before, logits_of(cls, place, inputs), edit)
            new = codes(place) - findings - EXPECTED_FINDINGS.get(edit, frozenset())
            if new:
                result.outcomes[edit] = f"WRONG: the audit finds {', '.join(sorted(new))}"
        except Exception as error:  # the result must load
            result.outcomes[edit] = f"WRONG: {one_line(error)}"
        undo(place)
        if digests(place) != bytes_before:
            result.outcomes[edit] = "WRONG: undo does not bring back the bytes"
            break
    return result


def _tied(config: Any) -> Any:
    """The config with the flag set at every level that states it."""
    for level in (config, config.get_text_config(decoder=True)):
        if getattr(level, "tie_word_embeddings", None) is False:
            level.tie_word_embeddings = True
    return config


def codes(place: Path) -> set[str]:
    """The codes that the audit reports."""
    return {finding.code for finding in audit(place).findings}


def logits_of(cls: type[Any], place: Path, inputs: Tensors) -> dict[str, torch.Tensor]:
    """Every output of the loaded model that has the vocabulary as its last axis."""
    model = cls.from_pretrained(place).eval()
    head = model.get_output_embeddings()
    rows = len(head.weight) if head is not None and getattr(head, "weight", None) is not None else 0
    torch.manual_seed(0)
    with torch.no_grad():
        output = model(**inputs, return_dict=True)
    found = {name: one for name, one in output.items() if isinstance(one, torch.Tensor) and "logits" in name}
    return {name: one for name, one in found.items() if one.shape[-1] == rows}


def compared(before: Tensors, after: Tensors, edit: str) -> str:
    """How the logits of the tokens that keep their ids compare."""
    if set(before) != set(after):
        return f"WRONG: logits {sorted(after)}, before {sorted(before)}"
    worst = 0.0
    for name, old in before.items():
        shared = min(old.shape[-1], after[name].shape[-1], USED if edit == "prune" else VOCABULARY)
        one, two = old[..., :shared], after[name][..., :shared]
        if torch.equal(one, two):
            continue
        worst = max(worst, float((one - two).abs().max() / one.abs().max()))
    if worst == 0:
        return "equal"
    return f"{'WRONG: ' if worst > 1e-5 or not np.isfinite(worst) else ''}within {worst:.1e} of the largest logit"


def main() -> int:
    """Run the sweep; 1 if anything went wrong."""
    arguments = arguments_of(__doc__)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    began, results = time.perf_counter(), []
    for name in arguments.classes or tied_classes():
        workspace = Path(tempfile.mkdtemp())
        try:
            results.append(run_class(name, workspace))
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
        print(f"{name}: {results[-1].reason or results[-1].outcomes}", file=sys.stderr, flush=True)
    text = "\n".join(summary(results, time.perf_counter() - began)) + "\n"
    if arguments.report:
        arguments.report.write_text(text)
    print(text)
    return 1 if any(result.wrong for result in results) else 0


def summary(results: list[EditResult], seconds: float) -> Iterator[str]:
    """The counts of each edit, and every outcome that is not the common one."""
    ran = [result for result in results if not result.reason]
    yield (
        f"{len(ran)} classes edited, {len(results) - len(ran)} not run; {seconds:.0f} s, "
        f"transformers {transformers.__version__}"
    )
    yield ""
    yield "| edit | logits equal, bit for bit | nearly equal | refused | wrong |"
    yield "|---|---|---|---|---|"
    for edit in EDITS:
        kinds = Counter(result.outcomes.get(edit, "not reached").partition(" ")[0].rstrip(":") for result in ran)
        yield f"| {edit} | {kinds['equal']} | {kinds['within']} | {kinds['refused']} | {kinds['WRONG']} |"
    yield ""
    for result in ran:
        for edit, outcome in result.outcomes.items():
            if outcome != "equal":
                yield f"- {result.name}, {edit}: {outcome}"
    yield ""
    yield from (f"- {result.name}: not run: {result.reason}" for result in results if result.reason)


if __name__ == "__main__":
    sys.exit(main())
