"""The report of a check of live ties, one entry per tie, and the error that it raises."""

from __future__ import annotations

from dataclasses import dataclass

from bowline.errors import TieError
from bowline.markup import Tone, html_report
from bowline.nn.ties.tensor_comparison import TensorDifference
from bowline.tie import Tie, TieState

__all__ = ["Remark", "TieCheck", "TieReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """One remark about a tie beyond its state: its kind, what was seen, and what to do.

    `kind` is stable: `size`, `bias`, `missing_tensor`, `parametrized`, `not_a_parameter`, `frozen`, `stale`,
    `missing`, `duplicate`, `weight_decay`, `flag`, `sharding`, `placement`. `breaks` marks a fault; other remarks are
    information.
    """

    kind: str
    message: str
    help: str
    breaks: bool

    def __str__(self) -> str:
        return f"{'error' if self.breaks else 'note'}: {self.message} (help: {self.help})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TieCheck:
    """The check of one tie: its state, where its values differ (if they do), and further remarks."""

    tie: Tie
    state: TieState
    difference: TensorDifference | None = None
    remarks: tuple[Remark, ...] = ()

    @property
    def broken(self) -> bool:
        """Whether the ends are not one parameter, or a remark says that model or optimizer are wrong."""
        return self.state is not TieState.SHARED or any(remark.breaks for remark in self.remarks)

    def __str__(self) -> str:
        apart = f": {self.difference}" if self.difference else ""
        return "\n  ".join([f"{self.tie} {self.state}{apart}", *map(str, self.remarks)])


@dataclass(frozen=True, slots=True, kw_only=True)
class TieReport:
    """The checks of all requested ties. Truthy if none is broken; `str()` is for people."""

    checks: tuple[TieCheck, ...]

    @property
    def broken(self) -> tuple[TieCheck, ...]:
        """The checks of broken ties."""
        return tuple(check for check in self.checks if check.broken)

    def __bool__(self) -> bool:
        return not self.broken

    def __len__(self) -> int:
        return len(self.checks)

    def __getitem__(self, target: str) -> TieCheck:
        """The check of the tie with this target."""
        found = {check.tie.target: check for check in self.checks}
        if target not in found:
            raise KeyError(f"{target}: no tie has this target; the targets are {', '.join(found) or 'none'}")
        return found[target]

    def raise_if_broken(self) -> None:
        """Raise a `TieError` that lists every broken tie, if any."""
        if not self.broken:
            return
        seen = "; ".join(str(check).replace("\n  ", "; ") for check in self.broken)
        count = len(self.broken)
        raise TieError(
            f"{count} of {len(self.checks)} ties {'does' if count == 1 else 'do'} not hold: {seen}",
            help="tie_weights(model, optimizer=...) makes the ties; untie_weights(model) undoes them",
        )

    def __str__(self) -> str:
        return "\n".join(map(str, self.checks)) or "no ties"

    def _repr_html_(self) -> str:
        """Whether the ties hold, and a table of them, as a notebook shows it."""
        count, broken = len(self.checks), len(self.broken)
        if not count:
            return html_report("check_ties", "no ties", Tone.NEUTRAL, (), ())
        verdict = f"{broken} of {count} ties broken" if broken else f"{count} tie{'s hold' if count > 1 else ' holds'}"
        rows = [
            (
                Tone.BAD if check.broken else Tone.DOUBTFUL if check.remarks else Tone.GOOD,
                check.state.value,
                (check.tie.target, check.tie.source, _remarks(check)),
            )
            for check in self.checks
        ]
        headings = ("state", "target", "source", "remarks")
        return html_report("check_ties", verdict, Tone.BAD if broken else Tone.GOOD, headings, rows)


def _remarks(check: TieCheck) -> tuple[str, ...]:
    """The difference and the remarks, each a line."""
    return (*([str(check.difference)] if check.difference else []), *map(str, check.remarks))
