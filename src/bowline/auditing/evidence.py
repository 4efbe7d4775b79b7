"""The evidence of one checkpoint: the class's declaration, the config and the stored tensors. Rules read only this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bowline.auditing.loaders import Outcome, StoredFacts, predict
from bowline.auditing.quantised_ends import QuantisedEnds
from bowline.auditing.quantised_names import in_other_form
from bowline.auditing.shape_fit import misfits
from bowline.auditing.tokenizer_files import TokenizerFacts
from bowline.checkpoint.formats.gguf import GGUF_SUFFIX
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.lint import Lint
from bowline.families.declaration import Declaration, DeclaredTie
from bowline.families.resolver import resolve
from bowline.tie import Tie, TieState

if TYPE_CHECKING:  # an audit of headers needs no numpy
    from bowline.auditing.base_comparison import BaseComparison
    from bowline.auditing.difference import TableDifference
    from bowline.auditing.other_weights import OtherWeights
    from bowline.auditing.row_statistics import PaddingRow, TableRows
    from bowline.checkpoint.formats.graphs import GraphFormat
    from bowline.checkpoint.formats.graphs.graph_model import GraphModel
    from bowline.geometry import GeometryReport

__all__ = ["Evidence", "TieEvidence", "compare_headers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TieEvidence:
    """The evidence of one tie. `state` is `None` when it depends on values that were not read.

    `unseen` means that an end is stored quantised, or may be in a file that was not read: what loaders do with the tie
    is then not known, and reading values as they are stored would not settle the state. `quantised` says how an end is
    stored quantised, and dequantised values settle the state.
    """

    declared: DeclaredTie
    state: TieState | None
    difference: TableDifference | None = None
    has_nan: bool = False
    equal_when_cast: bool = False
    target: StoredTensor | None = None
    source: StoredTensor | None = None
    unseen: bool = False
    quantised: QuantisedEnds | None = None

    @property
    def tie(self) -> Tie:
        """The tie that the class declares."""
        return self.declared.tie


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known about one checkpoint. The rules read this and nothing else."""

    location: str
    config: Mapping[str, Any] | None
    generation_config: Mapping[str, Any] | None
    generation_problem: str | None
    """The reason why `generation_config.json` cannot be read, if there is such a file."""
    declaration: Declaration
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    lints: tuple[Lint, ...]
    ties: tuple[TieEvidence, ...]
    outcomes: Mapping[str, Mapping[str, Outcome | None]]
    tokenizer: TokenizerFacts | None
    tables: tuple[TableRows, ...]
    padding: PaddingRow | None
    geometry: GeometryReport | None
    odd_bools: tuple[str, ...]
    """BOOL tensors with a byte that is neither 0 nor 1."""
    seen: StoredFacts
    complete: bool
    """Whether every file of the checkpoint was read; if not, a missing tensor may be in an unread file."""
    values_read: bool
    base: BaseComparison | None = None
    """The comparison with the original checkpoint, if one was given."""
    other_weights: tuple[OtherWeights, ...] = ()
    """The same model in other weight files of the directory."""
    hub_parameters: Mapping[str, int] = field(default_factory=dict)
    """The number of parameters by dtype that the Hub states; empty for other places."""
    gguf_file: str | None = None
    """The GGUF file whose metadata takes the place of config and tokenizer; `None` for every other format."""
    graph_file: str | None = None
    """The ONNX or pt2 file that holds the tensors; `None` for every other format."""
    graph_format: GraphFormat | None = None
    """The format of that file."""

    @property
    def config_file(self) -> str:
        """The file that states what the config states."""
        return self.gguf_file or "config.json"

    def fates_under(self, config: Mapping[str, Any]) -> Mapping[str, Mapping[str, Outcome | None]]:
        """The outcomes of the same stored tensors under another config."""
        declaration = resolve(config, {name: tensor.shape for name, tensor in self.tensors.items()})
        fitting = {loader: misfits(declaration, self.tensors, loader) for loader in declaration.made}
        return predict(declaration, replace(self.seen, misfits=fitting, config=config))

    @property
    def main_tie(self) -> TieEvidence | None:
        """The tie that the flag is about: that of the head, otherwise the first."""
        head = self.declaration.head
        return next((tie for tie in self.ties if tie.tie.target == head), next(iter(self.ties), None))

    def tie(self, target: str) -> TieEvidence:
        """The tie with this target."""
        return next(tie for tie in self.ties if tie.tie.target == target)


def compare_headers(
    tensors: Mapping[str, StoredTensor],
    declared: DeclaredTie,
    *,
    complete: bool = True,
    graph: GraphModel | None = None,
) -> TieEvidence:
    """The state of a tie as far as headers show it: which ends are stored, and whether they could be one matrix.

    The state stays `None` if an end is stored quantised, or may be in a file that was not read. Two ends of a GGUF file
    or of a graph may have different types: their values are compared.
    """
    target, source = tensors.get(declared.tie.target), tensors.get(declared.tie.source)
    missing = [name for name in (declared.tie.target, declared.tie.source) if name not in tensors]
    ends = (declared.tie.target, declared.tie.source)
    if graph is not None:
        unseen = target is not None and any(name in graph.opaque for name in ends)
    else:
        unseen = bool(missing and not complete) or any(in_other_form(name, tensors) for name in ends)
    by_value = graph is not None or (target is not None and target.file.endswith(GGUF_SUFFIX))
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
    elif target.shape != source.shape or (target.dtype != source.dtype and not by_value):
        state = TieState.INCOMPATIBLE
    else:
        state = None
    return TieEvidence(declared=declared, state=state, target=target, source=source, unseen=unseen)
