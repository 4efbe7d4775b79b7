"""The verdict on a checkpoint in one sentence: what became of the tie on disk, and what the loaders make of it."""

from __future__ import annotations

from bowline.auditing.evidence import Evidence
from bowline.tie import TieState
from bowline.wording import joined

__all__ = ["in_loaders", "on_disk", "verdict"]

NAMES = {
    "transformers-4": "transformers 4",
    "transformers-5": "transformers 5",
    "vllm-0.28": "vLLM before 0.29",
    "vllm": "vLLM",
}
"""What a sentence calls a loader, if not by its key."""
DISAGREES = {True: ", but the flag says tied", False: ", but the flag says untied", None: ", and no flag says which"}


def verdict(evidence: Evidence) -> str:
    """What the bytes hold at the two ends, and the loaders by what they make of the head.

    Loaders whose outcome is not known are left out, and the others are then named: "every loader" means all of them.

    Example:
        >>> from bowline import audit
        >>> verdict(audit("fine-tuned").evidence)  # doctest: +SKIP
        'head and embedding differ, but the flag says tied: dropped in transformers 4; kept in transformers 5'
    """
    said = in_loaders(evidence)
    return on_disk(evidence) + (f": {said}" if said else "")


def in_loaders(evidence: Evidence) -> str:
    """The loaders by what they make of the head; empty if there is no tie, or no outcome is known.

    Example:
        >>> in_loaders(audit("fine-tuned").evidence)  # doctest: +SKIP
        'dropped in transformers 4; kept in transformers 5'
    """
    tie = evidence.main_tie
    if tie is None:
        return ""
    loaders: dict[str, list[str]] = {}
    tried = sum(tie.tie.target in targets for targets in evidence.outcomes.values())
    for loader, targets in evidence.outcomes.items():
        outcome = targets.get(tie.tie.target)
        if outcome is not None:
            loaders.setdefault(outcome.fate.value, []).append(NAMES.get(loader, loader))
    known = sum(map(len, loaders.values()))
    if len(loaders) == 1 and known > 1 and known == tried:
        fate = next(iter(loaders))
        return f"{fate} {_in(fate)} every loader"
    return "; ".join(f"{fate} {_in(fate)} {joined(names)}" for fate, names in loaders.items())


def _in(fate: str) -> str:
    return "by" if fate == "refused" else "in"


def _without_tie(evidence: Evidence) -> str:
    known = evidence.declaration.loaders or evidence.gguf_file or evidence.graph_file
    return "no head to tie" if known else "the class is not known, and names and shapes show no tie"


def on_disk(evidence: Evidence) -> str:
    """The state of the two ends, and whether the flag agrees; without a tie, why there is none."""
    tie, no_flag = evidence.main_tie, bool(evidence.gguf_file or evidence.graph_file)
    if tie is None:
        return _without_tie(evidence)
    flag = tie.declared.flag.value
    both = "head and embedding"
    match tie.state:
        case TieState.SHARED | TieState.ALIAS:
            return "one matrix, stored once"
        case TieState.EQUAL:
            return "one matrix, stored twice" + ("" if flag or no_flag else DISAGREES[flag])
        case TieState.DIVERGED:
            if tie.quantised is not None and tie.quantised.within is not None:
                if flag is False:
                    return "two matrices, equal within the quantisation"
                return "one matrix but for its quantisation, stored twice"
            if flag is False or no_flag:
                return "two matrices"
            return f"{both} differ{DISAGREES[flag]}"
        case TieState.INCOMPATIBLE:
            same_shape = tie.target is not None and tie.source is not None and tie.target.shape == tie.source.shape
            return f"{both} have different {'dtypes' if same_shape else 'shapes'}" + (DISAGREES[True] if flag else "")
        case TieState.TARGET_MISSING:
            return f"only the embedding is stored{DISAGREES[flag]}"
        case TieState.SOURCE_MISSING:
            return "only the head is stored" + ("" if flag else DISAGREES[flag])
        case TieState.BOTH_MISSING:
            return f"neither {both.replace(' and ', ' nor ')} is stored"
        case None:
            return f"{both} were not compared"
