"""The rule about a tied matrix that differs from the original checkpoint's by the delta of an adapter."""

from __future__ import annotations

from collections.abc import Iterator

from bowline.auditing.evidence import Evidence
from bowline.auditing.rules.rule import Observation, Severity, rule
from bowline.tie import TieState

TIED = (TieState.SHARED, TieState.ALIAS, TieState.EQUAL)
LOW_RANK = "a merged low-rank delta"


@rule("BW115", "adapter-in-both-ends", Severity.WARNING)
def adapter_in_both_ends(evidence: Evidence) -> Iterator[Observation]:
    """A tied matrix differs from the base's by a low-rank delta: an adapter of one end was merged into both.

    What: the flag is true, embedding and head are one matrix (or equal copies), and that matrix differs from the one
    of the base checkpoint by a delta of low rank, as a LoRA leaves it. This needs `--base`: the bytes of the merged
    checkpoint alone are those of an intact tied model.

    Why it hurts: a LoRA on `lm_head` or on the embedding changes one end of the tie while it is trained. PEFT's merge
    adds its delta to the shared matrix, so the other end changes as well, and the merged model computes other logits
    than the adapter model did. No loader can notice it.

    Example: `LoraConfig(target_modules=["lm_head"])` on a tied model, then `merge_and_unload()` and
    `save_pretrained`.

    Fix: merge again with `bowline.nn.merge_lora(model, on_tie="untie")`, which gives each end its own delta. If the
    adapter was trained on both ends as one (`ensure_weight_tying=True`) and merged by `merge_lora`, nothing is wrong.

    Reported in: huggingface/peft#2018, huggingface/peft#2864
    """
    tie = evidence.main_tie
    if evidence.base is None or tie is None or tie.state not in TIED or not tie.declared.flag.value:
        return
    for table in evidence.base.tables:
        difference = table.difference
        if difference is not None and difference.cause.value == LOW_RANK:
            yield Observation(
                message=(
                    f"{table.tensor} serves as embedding and head, and differs from {evidence.base.location} by what "
                    f"looks like {difference} ({difference.rows_differing} of {table.common_rows} rows, "
                    f"{difference.extent}): an adapter that was merged into the shared matrix has changed both ends"
                ),
                help=(
                    'merge again with bowline.nn.merge_lora(model, on_tie="untie"); nothing is wrong if one adapter '
                    "was trained for both ends and merged once"
                ),
                tensors=(tie.tie.target, tie.tie.source),
            )
            return
