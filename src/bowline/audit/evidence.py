"""Everything that the rules look at, gathered once: what the class declares, the config says, the bytes hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bowline.audit.fit import misfits
from bowline.audit.outcomes import Fate, Outcome, Seen, predict
from bowline.audit.progress import Progress
from bowline.audit.stored import in_other_form
from bowline.audit.tokens import Tokenizer, read_tokenizer
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.lint import Lint, LintKind
from bowline.checkpoint.tensor import StoredTensor
from bowline.families.declaration import Declaration, DeclaredTie
from bowline.families.resolve import resolve
from bowline.tie import Tie, TieState

if TYPE_CHECKING:  # numpy is for those who read values
    from bowline.audit.difference import Difference
    from bowline.audit.vocabulary import PaddingRow, TableRows
    from bowline.geometry import GeometryReport

__all__ = ["Evidence", "TieEvidence", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TieEvidence:
    """One tie as it was found. `state` is `None` when it hangs on values that were not read.

    `unseen` says that an end is stored quantised, or may be in a file that was not read: no reading would tell.
    """

    declared: DeclaredTie
    state: TieState | None
    difference: Difference | None = None
    has_nan: bool = False
    equal_when_cast: bool = False
    target: StoredTensor | None = None
    source: StoredTensor | None = None
    unseen: bool = False

    @property
    def tie(self) -> Tie:
        """The tie."""
        return self.declared.tie


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What one checkpoint was found to be. The rules read this and nothing else."""

    location: str
    config: Mapping[str, Any] | None
    declaration: Declaration
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    lints: tuple[Lint, ...]
    ties: tuple[TieEvidence, ...]
    outcomes: Mapping[str, Mapping[str, Outcome | None]]
    tokenizer: Tokenizer | None
    tables: tuple[TableRows, ...]
    padding: PaddingRow | None
    geometry: GeometryReport | None
    odd_bools: tuple[str, ...]
    """BOOL tensors with a byte that is neither 0 nor 1."""
    seen: Seen
    complete: bool
    """Whether every file of the checkpoint was read: what is missing from a part may be in another."""
    values_read: bool

    def fates_under(self, config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Outcome | None]]:
        """The outcomes that these same bytes would have under another config."""
        declaration = resolve(config, {name: tensor.shape for name, tensor in self.tensors.items()})
        fitting = {loader: misfits(declaration, self.tensors, loader) for loader in declaration.made}
        return predict(declaration, replace(self.seen, misfits=fitting))

    @property
    def main_tie(self) -> TieEvidence | None:
        """The tie that the flag is about: the head's, else the first."""
        head = self.declaration.head
        return next((tie for tie in self.ties if tie.tie.target == head), next(iter(self.ties), None))

    def tie(self, target: str) -> TieEvidence:
        """The tie with this target."""
        return next(tie for tie in self.ties if tie.tie.target == target)


def gather(checkpoint: Checkpoint, *, values: bool = True, progress: Progress | None = None) -> Evidence:
    """Hear every witness. With `values=False` only headers, config and tokenizer are read."""
    tensors = checkpoint.tensors
    declaration = resolve(checkpoint.config, {name: tensor.shape for name, tensor in tensors.items()})
    if values:
        from bowline.audit.tables import read_tables

        read = read_tables(checkpoint, declaration, progress or Progress())
        beside = replace(declaration, ties=_beside(declaration, tensors), embedding=None, head=None)
        further = read_tables(checkpoint, beside, Progress()).ties if beside.ties else ()
        ties, tables, padding, geometry, odd_bools = (
            read.ties,
            read.tables,
            read.padding,
            read.geometry,
            read.odd_bools,
        )
    else:
        ties = tuple(compare_headers(tensors, declared, complete=checkpoint.complete) for declared in declaration.ties)
        further, tables, padding, geometry, odd_bools = (), (), None, None, ()
    seen = Seen(
        stored=frozenset(tensors),
        equal={tie.tie: _equal(tie) for tie in (*ties, *further)},
        equal_when_cast={tie.tie: tie.equal_when_cast for tie in ties},
        misfits={loader: misfits(declaration, tensors, loader) for loader in declaration.made},
        safetensors=any(file.endswith(".safetensors") for file in checkpoint.weight_files),
        nested=any(lint.kind is LintKind.NESTED_TENSORS for lint in checkpoint.lints),
        dtype_stated=any((checkpoint.config or {}).get(key) is not None for key in ("dtype", "torch_dtype")),
    )
    return Evidence(
        location=checkpoint.location,
        config=checkpoint.config,
        declaration=declaration,
        tensors=tensors,
        metadata=checkpoint.metadata,
        lints=checkpoint.lints,
        ties=ties,
        outcomes=_as_far_as_known(predict(declaration, seen), ties),
        tokenizer=read_tokenizer(checkpoint),
        tables=tables,
        padding=padding,
        geometry=geometry,
        odd_bools=odd_bools,
        seen=seen,
        complete=checkpoint.complete,
        values_read=values,
    )


def _beside(declaration: Declaration, tensors: Mapping[str, StoredTensor]) -> tuple[DeclaredTie, ...]:
    """What a version compares besides the ties that are listed: a target with the owner that it has there, or where
    that is not stored, with the first of its targets that is.
    """
    pairs: dict[frozenset[str], Tie] = {}
    for made in declaration.made.values():
        for tie in made:
            heirs = (other.target for other in made if other.source == tie.source and other.target in tensors)
            owner = tie.source if tie.source in tensors else next(heirs, tie.target)
            if tie.target in tensors and tie.target != owner:
                pairs.setdefault(frozenset((tie.target, owner)), Tie(tie.target, owner))
    listed = {frozenset((one.tie.target, one.tie.source)) for one in declaration.ties}
    return tuple(
        DeclaredTie(tie=tie, flag=declaration.flag, asked={}) for ends, tie in pairs.items() if ends not in listed
    )


def compare_headers(
    tensors: Mapping[str, StoredTensor], declared: DeclaredTie, *, complete: bool = True
) -> TieEvidence:
    """The state of a tie as far as headers tell: which ends are stored, and whether they could be one matrix.

    An end that is stored quantised, or may be in a file that was not read, leaves the state open.
    """
    target, source = tensors.get(declared.tie.target), tensors.get(declared.tie.source)
    missing = [name for name in (declared.tie.target, declared.tie.source) if name not in tensors]
    ends = (declared.tie.target, declared.tie.source)
    unseen = bool(missing and not complete) or any(in_other_form(name, tensors) for name in ends)
    state: TieState | None
    if unseen:
        state = None
    elif target is None and source is None:
        state = TieState.BOTH_MISSING
    elif source is None:
        state = TieState.SOURCE_MISSING
    elif target is None:
        state = TieState.SHARED if declared.flag.value else TieState.TARGET_MISSING
    elif target.same_storage(source):
        state = TieState.ALIAS
    elif target.shape != source.shape or target.dtype != source.dtype:
        state = TieState.INCOMPATIBLE
    else:
        state = None
    return TieEvidence(declared=declared, state=state, target=target, source=source, unseen=unseen)


def _as_far_as_known(
    outcomes: dict[str, dict[str, Outcome | None]], ties: tuple[TieEvidence, ...]
) -> dict[str, dict[str, Outcome | None]]:
    """Without the outcomes of ties whose ends were not seen as they are."""
    unknown = {tie.tie.target for tie in ties if tie.unseen}
    return {
        loader: {
            target: None if target in unknown and outcome and outcome.fate is not Fate.REFUSED else outcome
            for target, outcome in targets.items()
        }
        for loader, targets in outcomes.items()
    }


def _equal(tie: TieEvidence) -> bool | None:
    """Whether `torch.equal` would say so. NaN equals nothing, itself included."""
    if tie.state in (TieState.EQUAL, TieState.ALIAS):
        return not tie.has_nan
    return None if tie.state is None else False
