"""What a report for people says of ends that are stored quantised."""

from __future__ import annotations

from bowline.auditing.evidence import Evidence, TieEvidence
from bowline.tie import TieState
from bowline.wording import byte_count

__all__ = ["quantised_ends_of", "quantised_state"]


def quantised_ends_of(evidence: Evidence) -> dict[str, str]:
    """Each end that is stored quantised, by name: its layout, shape and size in one line."""
    tables = {table.name: table for tie in evidence.ties if tie.quantised for table in tie.quantised.tables}
    return {
        name: f"{name} {table.layout}{f' {list(table.shape)}' if table.shape else ''}, {byte_count(table.nbytes)}"
        for name, table in tables.items()
    }


def quantised_state(tie: TieEvidence) -> str:
    """The state of a tie with a quantised end, and how far the ends are apart."""
    ends, difference = tie.quantised, tie.difference
    assert ends is not None
    if tie.state is None:
        return f"not compared: {ends.reason}" if ends.reason else "not compared"
    if tie.state is TieState.EQUAL:
        return "EQUAL" if ends.alike else "EQUAL, dequantised"
    if difference is None or ends.shape is None:
        return tie.state.value
    if ends.within is not None:
        return f"equal within its quantisation: no value differs by more than {ends.within:.2f} steps of {ends.layouts}"
    untied = " (untied, as the flag says)" if tie.declared.flag.value is False else ""
    rows = f"{difference.rows_differing} of {ends.shape[0]} rows differ, {difference.extent}"
    return f"{tie.state.value}{untied}: {rows}{'' if ends.alike else ', more than quantisation explains'}"
