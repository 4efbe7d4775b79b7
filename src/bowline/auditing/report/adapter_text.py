"""The part of the full report about one adapter: a sentence, what it trains, and what a merge makes of it."""

from __future__ import annotations

from collections.abc import Iterator

from bowline.auditing.adapter_evidence import AdapterEvidence, Merge
from bowline.auditing.adapter_merge import PEFT, PEFT_RUN
from bowline.auditing.adapter_report import AdapterReport

__all__ = ["adapter_lines"]


def adapter_lines(report: AdapterReport) -> Iterator[str]:
    """The lines in front of the findings."""
    evidence = report.evidence
    yield f"{evidence.location}: {report.sentence}"
    yield f"  {'adapter':<10} {_config(evidence)}"
    base = evidence.base
    if base.evidence is not None:
        named = "" if base.given else ", which the adapter names"
        yield f"  {'base':<10} {base.location}{named}: {base.architecture or 'unknown class'}"
    for place in base.places:
        delta = next((one for one in evidence.deltas if one.place is place), None)
        lost = ", left out at load" if delta is not None and delta.loaded is False else ""
        none = "trained with the embedding" if evidence.rows_of_all_ends else "not trained"
        yield f"  {place.end.value:<10} {place.module}: {delta if delta is not None else none}{lost}"
    if len(evidence.loaded) > 1:
        same = {True: "the same values", False: "different values", None: "not compared"}[evidence.alike]
        yield (
            f"  {'':<10} the ends carry {same}"
            if evidence.alike is not None
            else f"  {'':<10} the ends' values: {same}"
        )
    if evidence.elsewhere:
        yield f"  {'elsewhere':<10} {', '.join(f'{count} {name}' for name, count in evidence.elsewhere.items())}"
    for tied in dict.fromkeys(merge.tied_base for merge in evidence.merges):
        known = evidence.base.tied is not None
        state = "tied" if tied else "not tied"
        yield "  merged" if known else f"  merged, if the base is {state}"
        for merge in evidence.merges:
            if merge.tied_base is tied:
                yield f"    {_tool(merge):<15} {_verdict(merge):<8} {merge.text}"


def _config(evidence: AdapterEvidence) -> str:
    adapter = evidence.adapter
    config = adapter.config
    parts = [config.peft_type]
    if config.rank is not None:
        parts.append(f"rank {config.rank}")
    if config.alpha is not None:
        parts.append(f"alpha {config.alpha:g}")
    if config.peft_version is not None:
        parts.append(f"PEFT {config.peft_version}")
    count = len(adapter.tensors)
    return f"{', '.join(parts)}; {count} tensor{'s' * (count != 1)} in {adapter.file} ({adapter.nbytes:,} bytes)"


def _tool(merge: Merge) -> str:
    return f"peft {PEFT_RUN}" if merge.tool == PEFT else merge.tool


def _verdict(merge: Merge) -> str:
    return {True: "exact", False: "wrong", None: "unknown"}[merge.exact]
