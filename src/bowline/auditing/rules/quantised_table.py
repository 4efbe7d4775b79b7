"""Rules about ends that are stored quantised: by `bowline.nn.quantize_tied`, or by another tool."""

from __future__ import annotations

from collections.abc import Iterator

from bowline.auditing.evidence import Evidence, TieEvidence
from bowline.auditing.quantised_ends import UNKNOWN, QuantisedEnds
from bowline.auditing.quantised_names import names_its_table, table_of
from bowline.auditing.rules.rule import Observation, Severity, rule
from bowline.tie import TieState
from bowline.wording import byte_count, joined


@rule("BW116", "quantised-table", Severity.INFO, also=Severity.WARNING)
def quantised_table(evidence: Evidence) -> Iterator[Observation]:
    """Embedding and head are one quantised table, which `bowline.nn.quantize_tied` made.

    What: the file holds `<embedding>.table.values` and `<embedding>.table.scale` (and, for int4, `.zero`) in place of
    the matrix, and one table serves both ends of the tie. The finding is a warning if `quantization_config` in
    `config.json` does not name the table.

    Why it hurts: only `bowline.nn.load_checkpoint` reads it. If the config names it, transformers' `from_pretrained`
    refuses the checkpoint, because the entry has no `quant_method`, and so does vLLM. Without the entry transformers
    initialises both ends at random, and says so in its load report only. llama.cpp cannot convert either.

    Example: `quantize_tied(model)` and then `save_checkpoint(model, directory)`.

    Fix: nothing, if the files are for `load_checkpoint`. For other loaders save the model before it is quantised. Or
    load the files with `load_checkpoint`, call `untie_weights(model)`, which converts the table to float, and then
    `tie_weights(model)`, which makes the two equal matrices one; and save again.
    """
    named = names_its_table(evidence.config)
    for source in dict.fromkeys(tie.tie.source for tie in evidence.ties):
        table = table_of(source, evidence.tensors)
        if table is not None:
            targets = [tie.tie.target for tie in evidence.ties if tie.tie.source == source]
            dtype = "int4" if f"{table}.zero" in evidence.tensors else "int8"
            parts = ("values", "scale", "zero") if dtype == "int4" else ("values", "scale")
            yield Observation(
                message=(
                    f"{table} is an {dtype} table that quantize_tied made of {source}, and serves "
                    + f"{', '.join(targets)} too"
                    + ("" if named else "; config.json does not name it, so transformers initialises all at random")
                ),
                help=(
                    "bowline.nn.load_checkpoint(model, path) reads it; transformers and vLLM refuse it"
                    if named
                    else "save the model with bowline.nn.save_checkpoint, so that other loaders refuse the files"
                ),
                tensors=tuple(f"{table}.{part}" for part in parts),
                severity=None if named else Severity.WARNING,
            )


@rule("BW118", "quantised-end", Severity.INFO, also=Severity.WARNING)
def quantised_end(evidence: Evidence) -> Iterator[Observation]:
    """The embedding or the head is stored quantised.

    What: an end of a tie is stored as codes with scales: GPTQ, AWQ, compressed-tensors, bitsandbytes, torchao, MLX, or
    FP8. The message names the layout and the size of each end, and says how the two compare after dequantising. If one
    end is stored otherwise, and no value differs by more than a step of the codes, it says that the two are equal
    within the quantisation: the head can be the embedding, quantised. It cannot be told from a head that training moved
    by less than a step.

    Why it hurts: a tied model that is quantised at the head stores the matrix twice. A quantised head that differs by
    more than quantisation explains is a head of its own. The finding is a warning if the flag says tied and the same
    codes are stored twice, or if the two ends have different shapes.

    Example: GPTQ with `lm_head: true` on a tied Llama. The embedding stays in bfloat16, and a head of 4 bits is added.

    Fix: none is needed if the tool's loader shares or keeps the ends as intended. Otherwise quantise the model again
    without its head, or with both ends as one table.
    """
    told: set[tuple[str, ...]] = set()
    for tie in evidence.ties:
        ends = tie.quantised
        if ends is None or any(table.serves_both or table.layout == UNKNOWN for table in ends.tables):
            continue
        names = tuple(table.name for table in ends.tables)
        both_stored = tie.state not in (TieState.SHARED, TieState.TARGET_MISSING, TieState.SOURCE_MISSING)
        if not both_stored and names in told:
            continue
        told.add(names)
        repeated = tie.state is TieState.EQUAL and ends.alike and bool(tie.declared.flag.value)
        misfit = tie.state is TieState.INCOMPATIBLE
        yield Observation(
            message=_message(tie, ends),
            help=(
                "quantise the model again with both ends as one table, or without its head"
                if repeated or misfit
                else "no change is needed if the loader of this layout keeps or shares the ends as intended"
            ),
            tensors=tuple(part.name for table in ends.tables for part in table.parts.values())[:8],
            severity=Severity.WARNING if repeated or misfit else None,
        )


def _message(tie: TieEvidence, ends: QuantisedEnds) -> str:
    """How each end is stored, and how the two compare."""
    stored = [f"{table.name} ({table.layout}, {byte_count(table.nbytes)})" for table in ends.tables]
    plain = tie.source if ends.source is None else tie.target if ends.target is None else None
    if plain is not None:
        stored.append(f"{plain.name} ({plain.dtype}, {byte_count(plain.nbytes)})")
    are = f"{joined(stored)} {'is' if len(stored) == 1 else 'are'} stored"
    match tie.state:
        case TieState.EQUAL:
            return f"{are}, and equal in every value"
        case TieState.ALIAS:
            return f"{are} as one"
        case TieState.INCOMPATIBLE:
            return f"{are}, and have different shapes"
        case TieState.DIVERGED if ends.within is not None:
            return f"{are}, and equal within the quantisation: no value differs by more than {ends.within:.2f} steps"
        case TieState.DIVERGED if tie.difference is not None:
            rows = f"{tie.difference.rows_differing} rows differ, {tie.difference.extent}"
            return f"{are}: {rows}{'' if ends.alike else ', more than quantisation explains'}"
        case TieState.SHARED:
            return f"{are}, and serves {tie.tie.target} too"
        case None if ends.reason is not None:
            return f"{are}, and not compared: {ends.reason}"
        case _:
            return are
