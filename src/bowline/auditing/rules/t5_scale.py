"""Rules about T5, whose flag decides both the tie and whether the decoder's output is scaled before the head."""

from __future__ import annotations

from collections.abc import Iterator

from bowline.auditing.evidence import Evidence
from bowline.auditing.rules.rule import Observation, Severity, rule
from bowline.families.quirks import ScaledBy, quirks_of
from bowline.tie import TieState

CONFIG = "config.json"
SCALED = ScaledBy.OWN_KEY.value


@rule("BW109", "t5-scale-trap", Severity.ERROR)
def t5_scale_trap(evidence: Evidence) -> Iterator[Observation]:
    """transformers 4 and 5 compute this T5 config differently.

    What: `tie_word_embeddings` is true (or absent) and `scale_decoder_outputs` is false.

    Why it hurts: T5 v1.0 ties its head and multiplies the decoder's output by d_model^-1/2 before the head; v1.1 does
    neither. transformers 4 decides both by `tie_word_embeddings`. transformers 5 always writes that flag as true and
    keeps the scaling in `scale_decoder_outputs`. If version 5 saves a v1.1 checkpoint again, version 4 therefore ties
    *and* scales it: it drops the head, and the logits are off by a factor of sqrt(d_model).

    Example: `T5ForConditionalGeneration.from_pretrained("google/t5-v1_1-small").save_pretrained(...)` in transformers
    5.23.

    Fix: if the file holds a separate head, `bowline audit --fix` sets the flag to false, which both versions read
    correctly. If it holds one matrix, no config makes version 4 tie without scaling: load it with 5 only.

    Reported in: huggingface/transformers#26441, huggingface/transformers#43681, huggingface/transformers#48154
    """
    config = evidence.config or {}
    if not _has_the_key(evidence) or config.get(SCALED) is not False or not evidence.ties:
        return
    if config.get("tie_word_embeddings", True):
        head = next((tie for tie in evidence.ties if tie.tie.target == evidence.declaration.head), None)
        own_head = head is not None and head.state is TieState.DIVERGED
        yield Observation(
            message=(
                f"tie_word_embeddings is true and {SCALED} false: transformers 4 "
                f"{'drops the head and ' if own_head else ''}scales the logits, transformers 5 does not"
            ),
            help="`bowline audit --fix` sets the flag to false" if own_head else "load it with transformers 5 only",
            tensors=(head.tie.target,) if head else (),
            file=CONFIG,
            flag_from_bytes=False if own_head else None,
        )


@rule("BW113", "t5-untied", Severity.INFO)
def t5_untied(evidence: Evidence) -> Iterator[Observation]:
    """This T5 checkpoint is untied, like v1.1; a save by transformers 5 will set its flag to true.

    What: the flag is false and the file holds a separate head.

    Why it hurts: it does no harm yet. transformers 5 loads it correctly, but writes `tie_word_embeddings: true` when it
    saves, and transformers 4 then misreads that file (BW109).

    Example: google/t5-v1_1-base, google/flan-t5-base.

    Fix: after a save by transformers 5, run `bowline audit --fix` on what it wrote.

    Reported in: huggingface/transformers#43681
    """
    config = evidence.config or {}
    if _has_the_key(evidence) and config.get("tie_word_embeddings") is False:
        for tie in evidence.ties:
            if tie.tie.target == evidence.declaration.head and tie.state is TieState.DIVERGED:
                yield Observation(
                    message="untied, like T5 v1.1; transformers 5 will write tie_word_embeddings: true when it saves",
                    help="run `bowline audit --fix` on what transformers 5 saves",
                    tensors=(tie.tie.target,),
                    file=CONFIG,
                )


def _has_the_key(evidence: Evidence) -> bool:
    """Whether transformers 5 keeps the scale of this family in a key of its own."""
    return quirks_of(evidence.declaration.family).scaled_by.get(5) is ScaledBy.OWN_KEY
