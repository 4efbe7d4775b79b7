"""Everything that the rules look at, gathered once: what the class declares, the config says, the bytes hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bowline.audit.fit import misfits
from bowline.audit.outcomes import Outcome, Seen, predict
from bowline.audit.progress import Progress
from bowline.audit.tokens import Tokenizer, read_tokenizer
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.lint import Lint
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
    """One tie as it was found. `state` is `None` when it hangs on values that were not read."""

    declared: DeclaredTie
    state: TieState | None
    difference: Difference | None = None
    has_nan: bool = False
    equal_when_cast: bool = False
    target: StoredTensor | None = None
    source: StoredTensor | None = None

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
    values_read: bool

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
        ties, tables, padding, geometry = read.ties, read.tables, read.padding, read.geometry
    else:
        ties = tuple(compare_headers(tensors, declared) for declared in declaration.ties)
        tables, padding, geometry = (), None, None
    seen = Seen(
        stored=frozenset(tensors),
        equal={tie.tie: _equal(tie) for tie in ties},
        equal_when_cast={tie.tie: tie.equal_when_cast for tie in ties},
        misfits={loader: misfits(declaration, tensors, loader) for loader in declaration.made},
        safetensors=any(file.endswith(".safetensors") for file in checkpoint.weight_files),
    )
    return Evidence(
        location=checkpoint.location,
        config=checkpoint.config,
        declaration=declaration,
        tensors=tensors,
        metadata=checkpoint.metadata,
        lints=checkpoint.lints,
        ties=ties,
        outcomes=predict(declaration, seen),
        tokenizer=read_tokenizer(checkpoint),
        tables=tables,
        padding=padding,
        geometry=geometry,
        values_read=values,
    )


def compare_headers(tensors: Mapping[str, StoredTensor], declared: DeclaredTie) -> TieEvidence:
    """The state of a tie as far as headers tell: which ends are stored, and whether they could be one matrix."""
    target, source = tensors.get(declared.tie.target), tensors.get(declared.tie.source)
    state: TieState | None
    if target is None and source is None:
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
    return TieEvidence(declared=declared, state=state, target=target, source=source)


def _equal(tie: TieEvidence) -> bool | None:
    """Whether `torch.equal` would say so. NaN equals nothing, itself included."""
    if tie.state in (TieState.EQUAL, TieState.ALIAS):
        return not tie.has_nan
    return None if tie.state is None else False
