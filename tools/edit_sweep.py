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
import textwrap
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
from benchmarks.measure import machine

from bowline.auditing import audit
from bowline.edit import CheckpointEdit, history, open_checkpoint, undo
from bowline.edit.draft import Draft, begin
from bowline.edit.row_selection import RowSelection, named_ids, vocabulary_of, with_rows
from bowline.errors import BowlineError
from tools.sweep import LARGEST, arguments_of, one_line, tied_classes
from tools.tied_loss_sweep import has_head, inputs_of
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

DESCRIPTIONS = {
    "untie": "the head gets a matrix of its own",
    "untie and tie": "the head shares the embedding again",
    "resize up": f"{MORE} rows more",
    "resize up and down": f"{MORE} rows more, then {MORE} fewer",
    "prune": f"ids from {USED} on are dropped, but for those that a config names",
}
METHOD = f"""
Each transformers class that declares a tie and has a head is built tiny, with random weights and {VOCABULARY:,}
tokens where its config allows it, tied and saved. Each edit below is then made in place; where its name has an "and",
it is two edits. transformers loads the result, and the logits of the tokens that stay are compared with those of the
checkpoint before the edit. The audit of the result may find only what the edit itself explains, such as a vocabulary
whose size is slow on a GPU. `undo` must bring back every byte, and a refused edit must leave every byte as it is.
"""
NEARLY_EQUAL = """
Nearly equal: within 1e-5 of the largest logit. T5 and its relatives scale the logits of a tied head, so the untied
head's matrix carries the scale, rounded once.
"""
NOTES = {
    "CsmForConditionalGeneration": "Its declared tie is between two embeddings of audio codes, not of the head.",
    "FSMTForConditionalGeneration": "Its decoder uses the embedding's own module as the head.",
    "MuseGlimmerForConditionalGeneration": "Only its text config has a flag, and transformers ignores it "
    "there: the ends differ before any edit.",
    "OpenAIGPTDoubleHeadsModel": "Its tie is declared from the head to the embedding.",
}
"""What explains a refusal beside its message."""
CANNOT_RUN = "cannot be built, saved and run on ids alone"

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


Step = Callable[[CheckpointEdit], CheckpointEdit]
EDITS: dict[str, tuple[Step, ...]] = {
    "untie": (lambda edit: edit.untie(),),
    "untie and tie": (lambda edit: edit.untie(), lambda edit: edit.tie()),
    "resize up": (lambda edit: edit.resize(size_of(edit) + MORE),),
    "resize up and down": (
        lambda edit: edit.resize(size_of(edit) + MORE),
        lambda edit: edit.resize(size_of(edit) - MORE),
    ),
    "prune": (lambda edit: edit._and(KeepIds()),),
}
"""Each step is an edit in place of its own."""


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
        if not has_head(model):
            result.reason = "has no output head"
            return result
        if not hasattr(model.get_output_embeddings(), "weight"):
            result.reason = "has several output heads"
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
        result.reason = f"{CANNOT_RUN}: {one_line(error)}"
        return result
    bytes_before, findings = digests(place), codes(place)
    for edit, steps in EDITS.items():
        refusal = refused(place, steps)
        try:
            result.outcomes[edit] = refusal or compared(before, logits_of(cls, place, inputs), edit)
            new = set() if refusal else codes(place) - findings - EXPECTED_FINDINGS.get(edit, frozenset())
            if new:
                result.outcomes[edit] = f"WRONG: the audit finds {', '.join(sorted(new))}"
        except Exception as error:  # the result must load
            result.outcomes[edit] = f"WRONG: {one_line(error)}"
        for _ in history(place):
            undo(place)
        if digests(place) != bytes_before:
            result.outcomes[edit] = "WRONG: undo does not bring back the bytes"
            break
    return result


def refused(place: Path, steps: tuple[Step, ...]) -> str:
    """Make the edits one after the other; why one was refused, empty if none was."""
    for step in steps:
        before = digests(place)
        try:
            with open_checkpoint(place) as checkpoint:
                step(checkpoint.edit()).commit(in_place=True)
        except BowlineError as error:
            if digests(place) != before:
                return "WRONG: refused, but files changed"
            return f"refused: {error.message}"
    return ""


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
    """The counts of each edit, and every outcome that is not the common one, as Markdown."""
    ran = [result for result in results if not result.reason]
    yield "# Edits on disk of every class with a tied head"
    yield from _paragraph(f"{machine(['bowline-ties', 'torch', 'transformers'])}; {seconds:.0f} s")
    yield from _paragraph("Rerun: `HF_HUB_OFFLINE=1 python -m tools.edit_sweep --report FILE`.")
    yield from _paragraph(METHOD)
    wrong = sum(len(result.wrong) for result in ran)
    yield from _paragraph(f"{len(ran)} classes edited, {len(results) - len(ran)} not run; {wrong} edits went wrong.")
    yield ""
    yield "| edit | | logits equal, bit for bit | nearly equal | refused | wrong |"
    yield "|---|---|---|---|---|---|"
    for edit, description in DESCRIPTIONS.items():
        kinds = Counter(result.outcomes.get(edit, "not reached").partition(" ")[0].rstrip(":") for result in ran)
        counts = (kinds[kind] for kind in ("equal", "within", "refused", "WRONG"))
        yield f"| {edit} | {description} | {' | '.join(map(str, counts))} |"
    yield from _paragraph(NEARLY_EQUAL)
    yield from _outcomes("Wrong", "WRONG: ", ran)
    yield from _outcomes("Nearly equal", "within ", ran)
    yield from _outcomes("Refused", "refused: ", ran)
    yield from _not_run([result for result in results if result.reason])


def _outcomes(title: str, kind: str, results: list[EditResult]) -> Iterator[str]:
    """One kind of outcome: the classes, their edits and the details, as a table."""
    rows: dict[tuple[str, str], list[str]] = {}
    for result in results:
        for edit, outcome in result.outcomes.items():
            if outcome.startswith(kind):
                rows.setdefault((result.name, outcome), []).append(edit)
    yield from ("", f"## {title}", "")
    yield from ("| class | edits | |", "|---|---|---|") if rows else ("None.",)
    for (name, outcome), edits in rows.items():
        detail = outcome.removeprefix(kind) if kind.endswith(": ") else outcome
        note = f". {NOTES[name]}" if name in NOTES and "untie and tie" in edits else ""
        yield f"| {name} | {', '.join(edits)} | {detail.rstrip('.')}{note} |"


def _not_run(results: list[EditResult]) -> Iterator[str]:
    """The classes that were not run, by reason."""
    yield from ("", "## Not run")
    groups: dict[str, list[str]] = {}
    for result in results:
        if not result.reason.startswith(CANNOT_RUN):
            groups.setdefault(result.reason, []).append(result.name)
    for reason, names in sorted(groups.items(), key=lambda group: -len(group[1])):
        yield from _paragraph(f"{reason.capitalize()} ({len(names)}): {', '.join(names)}.")
    others = [result for result in results if result.reason.startswith(CANNOT_RUN)]
    if others:
        yield from _paragraph(f"{CANNOT_RUN.capitalize()} ({len(others)}), with the first error:")
        yield ""
    yield from (f"- {result.name}: {result.reason.removeprefix(f'{CANNOT_RUN}: ')}" for result in others)


def _paragraph(text: str) -> Iterator[str]:
    yield ""
    yield from textwrap.wrap(text.strip(), 120, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main())
