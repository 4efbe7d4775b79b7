"""Merges a PEFT adapter on disk: each delta once, at the end where it was trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import ClassVar, Literal

from bowline.auditing.adapter_evidence import AdapterEvidence, DeltaKind, Merge, TiedModule
from bowline.auditing.adapter_gathering import gather_adapter
from bowline.auditing.adapter_merge import MERGE_LORA
from bowline.auditing.adapter_place import adapter_files
from bowline.checkpoint.checkpoint import CONFIG
from bowline.checkpoint.formats.peft_adapter import AdapterTensor
from bowline.checkpoint.formats.strict_json import shown
from bowline.checkpoint.places.file_set import FileSet
from bowline.edit.adapter.adapter_file import AdapterFile
from bowline.edit.adapter.module_changes import CONVOLVED, ParameterChange, module_changes, refuse_unmergeable
from bowline.edit.content import Content, Scaled, Stored
from bowline.edit.draft import Draft
from bowline.edit.steps.tie_step import equal
from bowline.edit.steps.untie_step import UntieStep
from bowline.errors import CheckpointError, FormatError, TieError, UsageError
from bowline.families.stored_vocabulary import stored_vocabulary
from bowline.wording import joined, listed

__all__ = ["MergeStep"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
)
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class MergeStep:
    """Add an adapter's deltas to the base, and put its trained copies in.

    Where the ends of a tie were trained alike, the change is made once and the tie stays. Where they were not, `tied`
    decides: `"untie"` gives each end a matrix of its own, `"both"` makes every change on the shared matrix, `"refuse"`
    raises.
    """

    adapter: Path
    tied: Literal["untie", "both", "refuse"] = "untie"
    verb: ClassVar[str] = "merge"

    def __str__(self) -> str:
        return f"merge {self.adapter}" + (f" --tied {self.tied}" if self.tied != "untie" else "")

    def apply(self, draft: Draft) -> Draft:
        """The draft with every tensor of the adapter accounted for.

        Raises:
            UsageError: there is no adapter, it is of a kind that cannot be merged, or another step comes before.
            FormatError: the adapter is malformed, not finite, or does not fit the base.
            TieError: the ends of a tie were trained apart and `tied` is `"refuse"`, or no class can hold the result.
        """
        if draft.texts or any(not isinstance(content, Stored) for content in draft.tensors.values()):
            raise UsageError("merge has to come first: it compares the adapter with the base as it is stored")
        files = adapter_files(self.adapter, hub=False)
        if files is None:
            raise UsageError(
                f"{self.adapter}: no PEFT adapter here, expected a directory with adapter_config.json",
                help="give the directory that PEFT's save_pretrained wrote",
            )
        with closing(files):
            evidence = gather_adapter(files, base=draft.source)
        return _Merging(draft, evidence, files, self.tied).result()


class _Merging:
    """One merge: the changes by module, and the draft that they make."""

    def __init__(self, draft: Draft, evidence: AdapterEvidence, files: FileSet, tied: str) -> None:
        self.draft, self.evidence, self.files, self.tied = draft, evidence, files, tied
        self.base, self.adapter = evidence.base, evidence.adapter
        self.file = AdapterFile(files, self.adapter.file)
        self.left_out = {tensor.name for delta in evidence.deltas if delta.loaded is False for tensor in delta.tensors}
        self.notes: list[str] = []
        self.done: Counter[str] = Counter()

    def result(self) -> Draft:
        refuse_unmergeable(self.adapter)
        if self.base.tied is None:
            raise TieError(
                f"it is not known whether the base's ends are one matrix: {self.base.reason}",
                help="`bowline audit` says what is wrong with the base; mend it first",
            )
        at_ends: dict[TiedModule, list[ParameterChange]] = {}
        edited = self.draft
        for change in self._changes():
            place = self.base.find(change.module)
            if place is not None and change.attribute == "weight":
                at_ends.setdefault(place, []).append(change)
            else:
                edited = self._elsewhere(edited, change)
        edited = self._ends(edited, at_ends)
        edited = self._resized(edited)
        return edited.with_notes(*self.notes, *self._report())

    # --- the changes ------------------------------------------------------------------------------------------------

    def _changes(self) -> Iterator[ParameterChange]:
        rows = {tensor.name: delta.rows for delta in self.evidence.deltas for tensor in delta.tensors if delta.rows}
        by_module: dict[str, list[AdapterTensor]] = {}
        for tensor in self.adapter.tensors:
            if tensor.name in self.left_out:
                self.done["left out by PEFT too, because the config does not name the module"] += 1
            else:
                by_module.setdefault(tensor.module, []).append(tensor)
        for module, tensors in by_module.items():
            yield from module_changes(
                self.adapter.config,
                self.file,
                module,
                tensors,
                lambda attribute, module=module: self.base.shape(module, attribute),  # type: ignore[misc]
                transposed_like=lambda module=module: self._convolved(module),  # type: ignore[misc]
                rows=next((rows[one.name] for one in tensors if one.name in rows), None),
            )

    def _convolved(self, module: str) -> bool:
        """Whether a square weight of this module is stored transposed: whether GPT-2's wider ones are."""
        if CONVOLVED.fullmatch(module) is None:
            return False
        for name, shape in self.base.shapes.items():
            if name.endswith((".c_attn.weight", ".c_fc.weight")) and len(shape) == 2 and shape[0] != shape[1]:
                return shape[0] < shape[1]
        return self.adapter.config.fan_in_fan_out

    def _elsewhere(self, draft: Draft, change: ParameterChange) -> Draft:
        """The draft with a change of a module that is no end of the vocabulary."""
        name = self._name(change.module, change.attribute)
        if name is None:
            raise FormatError(
                f"{self.adapter.file}: {shown(change.tensors[0].name)} has no place in the base, which stores no "
                f"{shown(f'{change.module}.{change.attribute}')}",
                help="give the base that the adapter was trained on; a new head, such as a classifier, needs its own "
                "class: merge it with PEFT",
            )
        content = draft.tensors[name]
        self._refuse_quantised(name, content)
        return self._put(draft, name, name, change)

    def _name(self, module: str, attribute: str) -> str | None:
        """The stored tensor of a parameter; for the target of a tie that is not stored, its source."""
        found = self.base.stored(module, attribute)
        if found is not None and found in self.draft.tensors:
            return found
        for declared in self.draft.declaration.ties:
            if declared.tie.target == f"{module}.{attribute}" and declared.tie.source in self.draft.tensors:
                return declared.tie.source
        return None

    def _put(self, draft: Draft, name: str, of: str, change: ParameterChange) -> Draft:
        """The draft in which tensor `name` is the changed content of tensor `of`."""
        before = draft.tensors[of]
        after = change.make(before)
        if change.base_copy and after.shape == before.shape and equal(after, before):
            self.done[f"{change.text}, equal to it"] += len(change.tensors)
            return draft
        if change.base_copy:
            self.notes.append(f"{name}: the table that is stored with the adapter takes the place of the base's")
        self.done[change.text] += len(change.tensors)
        return draft.with_tensor(name, after, draft.homes[of])

    def _refuse_quantised(self, name: str, content: Content) -> None:
        if content.dtype not in FLOATS:
            raise TieError(
                f"{name}: is stored as {content.dtype}, expected a plain float tensor",
                help="merge into the checkpoint that it was quantised from, and quantise the result",
            )

    # --- the ends ---------------------------------------------------------------------------------------------------

    def _ends(self, draft: Draft, at_ends: Mapping[TiedModule, Sequence[ParameterChange]]) -> Draft:
        if self.base.tied and not self.evidence.rows_of_all_ends:
            at_ends = {place: list(self._that_count(place, changes)) for place, changes in at_ends.items()}
        if not self.base.tied:
            for place, changes in at_ends.items():
                name = f"{place.stored}.weight"
                if name not in draft.tensors:
                    raise FormatError(f"{name} is not stored, and the adapter changes it", help="give the whole base")
                for change in changes:
                    self._refuse_quantised(name, draft.tensors[name])
                    draft = self._put(draft, name, name, change)
            return draft
        return self._tied_ends(draft, at_ends)

    def _that_count(self, place: TiedModule, changes: Sequence[ParameterChange]) -> Iterator[ParameterChange]:
        """The changes of this place but those of a module that no layer calls: other modules look tokens up."""
        for change in changes:
            if place.module in self.base.unused and not change.base_copy:
                self.notes.append(f"{place.module}: no layer calls it, so its {change.text} changes nothing")
                self.done["of a module that no layer calls"] += len(change.tensors)
            else:
                yield change

    def _tied_ends(self, draft: Draft, at_ends: Mapping[TiedModule, Sequence[ParameterChange]]) -> Draft:
        matrix = next((name for place in self.base.places if (name := f"{place.stored}.weight") in draft.tensors), None)
        if matrix is None:
            raise CheckpointError("the base stores no embedding", help="fetch the base again")
        self._refuse_quantised(matrix, draft.tensors[matrix])
        for name in {f"{place.stored}.weight" for place in self.base.places} - {matrix} if at_ends else ():
            draft = draft.without(name)  # an equal copy, which would not follow
        for change in [one for changes in at_ends.values() for one in changes if one.base_copy]:
            draft = self._put(draft, matrix, matrix, change)
        changed = {place: [one for one in changes if not one.base_copy] for place, changes in at_ends.items()}
        changed = {place: changes for place, changes in changed.items() if changes}
        if not changed:
            return draft
        stays = self._prediction(changed)
        if stays is True or self.tied == "both":
            return self._on_shared(draft, matrix, changed, alike=stays is True)
        if self.tied == "refuse":
            words = joined([f"{place.module} ({changes[0].text})" for place, changes in changed.items()])
            raise TieError(
                f"the base is tied, and the adapter changes {words}: one matrix cannot hold that at all ends",
                help="--tied untie gives each end its own matrix; --tied both makes each change on the shared one",
            )
        return self._parted(draft, matrix, changed)

    def _prediction(self, changed: Mapping[TiedModule, Sequence[ParameterChange]]) -> bool | None:
        merges: Sequence[Merge] = self.evidence.merges
        merge = next(one for one in merges if one.tool == MERGE_LORA and one.tied_base)
        kinds = {delta.kind for delta in self.evidence.loaded}
        nested = DeltaKind.ROWS in kinds and len(kinds) > 1
        if nested or DeltaKind.OTHER in kinds:
            raise TieError(
                f"{joined([place.module for place in changed])}: rows are trained at every end of the tie, and "
                "another adapter at one of them: their order is not known",
                help="train the vocabulary in one way",
            )
        return merge.tie_stays

    def _on_shared(
        self,
        draft: Draft,
        matrix: str,
        changed: Mapping[TiedModule, Sequence[ParameterChange]],
        *,
        alike: bool,
    ) -> Draft:
        groups = list(changed.values())
        if alike:
            for other in groups[1:]:
                self.done["equal to that of another end of the tie"] += sum(len(one.tensors) for one in other)
            groups = groups[:1]
        else:
            reached = [place.module for place in self.base.places if place not in changed]
            also = f", so that they reach {joined(reached)} too" if reached else ""
            self.notes.append(f"--tied both: the changes are made on the shared matrix{also}")
        for change in (one for group in groups for one in group):
            draft = self._put(draft, matrix, matrix, change)
        return draft

    def _parted(self, draft: Draft, matrix: str, changed: Mapping[TiedModule, Sequence[ParameterChange]]) -> Draft:
        """The draft with a matrix for each end that the class can hold apart, each with its own changes."""
        edited = UntieStep().apply(draft)
        called = [place for place in self.base.places if place.module not in self.base.unused or place in changed]
        own = [place for place in called if place in changed]
        if any(f"{place.stored}.weight" == matrix for place in own):  # the others would follow its change
            own = called
        for place in own:
            name = f"{place.stored}.weight"
            if name not in edited.tensors:
                edited = edited.with_tensor(name, edited.tensors[matrix], edited.homes[matrix])
        for place, changes in changed.items():
            for change in changes:
                edited = self._put_under_scale(edited, f"{place.stored}.weight", change)
        ends = " and ".join(f"{place.module} its {changes[0].text}" for place, changes in changed.items())
        return edited.with_notes(f"the ends are parted: {ends}; the flag is false now")

    def _put_under_scale(self, draft: Draft, name: str, change: ParameterChange) -> Draft:
        """The changed head; where it holds the embedding times T5's scale, the change is scaled with it."""
        content = draft.tensors[name]
        if not isinstance(content, Scaled):
            return self._put(draft, name, name, change)
        self.done[change.text] += len(change.tensors)
        return draft.with_tensor(name, Scaled(change.make(content.parent), content.factor), draft.homes[name])

    # --- what follows -----------------------------------------------------------------------------------------------

    def _resized(self, draft: Draft) -> Draft:
        """The draft with the config and the tokenizer of a vocabulary that was resized before training."""
        before = self.draft.tensors
        if all(content.rows == before[name].rows for name, content in draft.tensors.items() if name in before):
            if any(self.files.has(name) for name in TOKENIZER_FILES):
                self.notes.append("the tokenizer beside the adapter is not taken: the vocabulary is the base's")
            return draft
        vocabulary = stored_vocabulary(self.draft.config, self.draft.shapes)
        sizes = {name: draft.tensors[name].shape[axis.axis] for name, axis in vocabulary.axes.items()}
        sizes |= {name: content.rows for name, content in draft.tensors.items() if name not in self.draft.tensors}
        if len(set(sizes.values())) > 1:
            raise FormatError(
                f"{self.adapter.file}: a table of another size is stored with the adapter, and not for every end: "
                f"{', '.join(f'{name} has {size}' for name, size in sizes.items())}",
                help="resize the base first: `bowline resize`",
            )
        size = next(iter(sizes.values()))
        stated = vocabulary.stated or (("vocab_size",),)
        draft = draft.with_values(CONFIG, dict.fromkeys(stated, size))
        found = [name for name in TOKENIZER_FILES if self.files.has(name)]
        self.notes.append(
            f"the vocabulary has {size:,} rows now, as the adapter's table"
            + (f"; {listed(found, 3)} come from the adapter" if found else "; no tokenizer lies beside the adapter")
        )
        return draft.with_texts({name: self.files.read(name) for name in found})

    def _report(self) -> Iterator[str]:
        config, base = self.adapter.config, self.draft.source.location
        if config.base and PurePath(config.base).name.lower() != PurePath(base).name.lower():
            yield f"the adapter names {shown(config.base)} as its base, and the base given is {base}"
        counted = "; ".join(f"{count} for {text}" for text, count in self.done.items())
        total = sum(self.done.values())
        if total != len(self.adapter.tensors):
            raise FormatError(f"{self.adapter.file}: {len(self.adapter.tensors) - total} tensors are unaccounted for")
        yield f"all {total} tensors of the adapter are accounted for: {counted}"
        for merge in self.evidence.merges:
            if "bias" in merge.text and merge.tool == MERGE_LORA:
                yield "the head's bias, which PEFT leaves out while trained rows are on, counts again"
