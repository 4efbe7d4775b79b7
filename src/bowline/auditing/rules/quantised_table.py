"""A rule about the int8 table that `bowline.nn.quantize_tied` makes of a tied matrix."""

from __future__ import annotations

from collections.abc import Iterator

from bowline.auditing.evidence import Evidence
from bowline.auditing.quantised_names import names_its_table, table_of
from bowline.auditing.rules.rule import Observation, Severity, rule


@rule("BW116", "quantised-table", Severity.INFO, also=Severity.WARNING)
def quantised_table(evidence: Evidence) -> Iterator[Observation]:
    """Embedding and head are one int8 table, which `bowline.nn.quantize_tied` made.

    What: the file holds `<embedding>.table.values` (int8) and `<embedding>.table.scale` in place of the matrix, and one
    table serves both ends of the tie. The finding is a warning if `quantization_config` in `config.json` does not name
    the table.

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
            yield Observation(
                message=(
                    f"{table} is an int8 table that quantize_tied made of {source}, and serves {', '.join(targets)} too"
                    + ("" if named else "; config.json does not name it, so transformers initialises all at random")
                ),
                help=(
                    "bowline.nn.load_checkpoint(model, path) reads it; transformers and vLLM refuse it"
                    if named
                    else "save the model with bowline.nn.save_checkpoint, so that other loaders refuse the files"
                ),
                tensors=(f"{table}.values", f"{table}.scale"),
                severity=None if named else Severity.WARNING,
            )
