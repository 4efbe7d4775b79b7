"""One pass over a checkpoint that collects everything the rules look at: config, headers, values, tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bowline.auditing.evidence import Evidence, TieEvidence, compare_headers
from bowline.auditing.gguf_outcomes import gguf_outcomes
from bowline.auditing.loaders import Fate, Outcome, StoredFacts, predict
from bowline.auditing.other_weights import compare_other_weights
from bowline.auditing.progress import Progress
from bowline.auditing.quantised_names import has_one_torchao_table, names_its_table, table_of
from bowline.auditing.quantised_state import with_quantised_ends
from bowline.auditing.shape_fit import misfits
from bowline.auditing.stated_declaration import declaration_of
from bowline.auditing.tokenizer_files import read_tokenizer
from bowline.checkpoint.checkpoint import Checkpoint
from bowline.checkpoint.formats.stored_tensor import StoredTensor
from bowline.checkpoint.lint import LintKind
from bowline.errors import CheckpointError
from bowline.families.declaration import Declaration, DeclaredTie
from bowline.tie import Tie, TieState

__all__ = ["gather"]


def gather(
    checkpoint: Checkpoint, *, values: bool = True, base: Checkpoint | None = None, progress: Progress | None = None
) -> Evidence:
    """Collect the evidence of a checkpoint. With `values=False` only headers, config and tokenizer are read.

    `base` is the checkpoint whose tables are compared with this one's.
    """
    tensors = checkpoint.tensors
    declaration = declaration_of(checkpoint)
    if values:
        from bowline.auditing.vocabulary_tables import (
            read_tables,  # imports numpy, which an audit of headers never needs
        )

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
        ties = tuple(
            compare_headers(tensors, declared, complete=checkpoint.complete, graph=checkpoint.graph)
            for declared in declaration.ties
        )
        ties = tuple(with_quantised_ends(checkpoint, tie, values=False) for tie in ties)
        further, tables, padding, geometry, odd_bools = (), (), None, None, ()
    compared = None
    if base is not None:
        from bowline.auditing.base_comparison import compare_with_base

        compared = compare_with_base(checkpoint, declaration, base, progress or Progress())
    seen = StoredFacts(
        stored=frozenset(tensors),
        equal={tie.tie: _equal(tie) for tie in (*ties, *further)},
        equal_when_cast={tie.tie: tie.equal_when_cast for tie in ties},
        misfits={loader: misfits(declaration, tensors, loader) for loader in declaration.made},
        safetensors=any(file.endswith(".safetensors") for file in checkpoint.weight_files),
        nested=any(lint.kind is LintKind.NESTED_TENSORS for lint in checkpoint.lints),
        dtype_stated=any((checkpoint.config or {}).get(key) is not None for key in ("dtype", "torch_dtype")),
        config=checkpoint.config or {},
        weight_files=checkpoint.weight_files,
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        complete=checkpoint.complete,
    )
    generation_config, generation_problem = _generation_config(checkpoint)
    return Evidence(
        location=checkpoint.location,
        config=checkpoint.config,
        generation_config=generation_config,
        generation_problem=generation_problem,
        declaration=declaration,
        tensors=tensors,
        metadata=checkpoint.metadata,
        lints=checkpoint.lints,
        ties=ties,
        outcomes=(
            gguf_outcomes(declaration, tensors, ties)
            if checkpoint.gguf is not None
            else {}  # a runtime computes with the tensors as the graph uses them: there is no loader to predict
            if checkpoint.graph is not None
            else _of_torchao(
                _of_tables(_as_far_as_known(predict(declaration, seen), ties), ties, checkpoint), ties, checkpoint
            )
        ),
        tokenizer=read_tokenizer(checkpoint),
        tables=tables,
        padding=padding,
        geometry=geometry,
        odd_bools=odd_bools,
        seen=seen,
        complete=checkpoint.complete,
        values_read=values,
        base=compared,
        other_weights=compare_other_weights(checkpoint, declaration, progress or Progress(), values=values),
        hub_parameters=checkpoint.files.parameters,
        gguf_file=checkpoint.gguf.file if checkpoint.gguf is not None else None,
        graph_file=checkpoint.graph.files[0] if checkpoint.graph is not None else None,
        graph_format=checkpoint.graph.format if checkpoint.graph is not None else None,
    )


def _generation_config(checkpoint: Checkpoint) -> tuple[Mapping[str, Any] | None, str | None]:
    """The content of `generation_config.json`, and the reason if it cannot be read; `None` twice if it is missing."""
    name = "generation_config.json"
    try:
        if checkpoint.gguf is not None or not checkpoint.files.has(name):
            return None, None
        content = checkpoint.json(name)
    except CheckpointError as error:
        return None, error.message
    if isinstance(content, dict):
        return content, None
    return None, f"{name}: holds {'null' if content is None else f'a {type(content).__name__}'}, expected an object"


def _beside(declaration: Declaration, tensors: Mapping[str, StoredTensor]) -> tuple[DeclaredTie, ...]:
    """The pairs that a loader compares beyond the declared ties.

    A pair is a target with its owner in that loader or, if the owner is not stored, with the owner's first stored
    target.
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


def _as_far_as_known(
    outcomes: dict[str, dict[str, Outcome | None]], ties: tuple[TieEvidence, ...]
) -> dict[str, dict[str, Outcome | None]]:
    """The outcomes, with `None` for each tie whose ends could not be compared; a refusal stays."""
    unknown = {tie.tie.target for tie in ties if tie.unseen}
    return {
        loader: {
            target: None if target in unknown and outcome and outcome.fate is not Fate.REFUSED else outcome
            for target, outcome in targets.items()
        }
        for loader, targets in outcomes.items()
    }


def _of_tables(
    outcomes: dict[str, dict[str, Outcome | None]], ties: tuple[TieEvidence, ...], checkpoint: Checkpoint
) -> dict[str, dict[str, Outcome | None]]:
    """The outcomes, with those of ties whose matrix is a table of `quantize_tied`, which no loader reads."""
    if names_its_table(checkpoint.config):
        fate = Outcome(Fate.REFUSED, "quantization_config has no quant_method: the quantised table is not read")
    else:
        fate = Outcome(Fate.RANDOM, "only a quantised table is stored, which is not read")
    tabled = {tie.tie.target for tie in ties if table_of(tie.tie.source, checkpoint.tensors)}
    return {
        loader: {
            target: fate if target in tabled and outcome is None else outcome for target, outcome in targets.items()
        }
        for loader, targets in outcomes.items()
    }


def _of_torchao(
    outcomes: dict[str, dict[str, Outcome | None]], ties: tuple[TieEvidence, ...], checkpoint: Checkpoint
) -> dict[str, dict[str, Outcome | None]]:
    """The outcomes, with that of transformers 5 for the one int8 table that `bowline quantize` wrote."""
    if not has_one_torchao_table(checkpoint.config):
        return outcomes
    held = {tie.tie.target for tie in ties if tie.quantised is not None and tie.declared.flag.value is True}
    shared = Outcome(Fate.TIED, "torchao's table of the embedding is loaded, and serves both ends")
    targets = outcomes.get("transformers-5", {})
    known = {target: shared if target in held and found is None else found for target, found in targets.items()}
    return {**outcomes, "transformers-5": known} if targets else outcomes


def _equal(tie: TieEvidence) -> bool | None:
    """The result that `torch.equal` would give: False with a NaN. `None` if the ends were not compared."""
    if tie.state in (TieState.EQUAL, TieState.ALIAS):
        return not tie.has_nan
    return None if tie.state is None else False
