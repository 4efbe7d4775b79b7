"""What an export wrote: what became of the tie, the size beside one copy, and whether it was run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bowline.tie import Tie
from bowline.wording import byte_count, joined

__all__ = ["ExportReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """The result of an export; `str()` gives the lines that the command prints."""

    destination: Path
    to: str
    """The format: torchscript, pt2 or onnx."""
    files: tuple[Path, ...]
    """The files that were written, the destination first."""
    ties: tuple[Tie, ...]
    """The ties of the model that was exported."""
    outcome: str
    """What became of them, in one line."""
    copies: int
    """How many matrices of the shape of the tied one the export holds beyond the model's own: 0 if none was doubled."""
    nbytes: int
    """The size of the files."""
    one_copy_nbytes: int
    """The size of the model's parameters and buffers, each storage counted once."""
    inputs: tuple[str, ...]
    """The names of the inputs, in order."""
    sizes: tuple[tuple[int, ...], ...]
    """The shapes of the first input that the export was run on."""
    largest_difference: float | None
    """Of any output, from the model's own; `None` if the export was not run."""
    notes: tuple[str, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether the export was run beside the model."""
        return self.largest_difference is not None

    def lines(self) -> tuple[str, ...]:
        """The report, line by line."""
        ratio = self.nbytes / self.one_copy_nbytes if self.one_copy_nbytes else 1.0
        said = "not verified: the export was not run"
        if self.largest_difference is not None:
            shapes = joined([str(shape) for shape in self.sizes])
            said = f"verified: outputs differ by at most {self.largest_difference:.2g}, for inputs of {shapes}"
        return (
            f"wrote {joined([str(path) for path in self.files])} ({self.to})",
            f"tie: {self.outcome}",
            f"size: {byte_count(self.nbytes)}, {ratio:.3f} times one copy of the weights "
            f"({byte_count(self.one_copy_nbytes)})",
            f"inputs: {joined(self.inputs)}",
            said,
            *self.notes,
        )

    def __str__(self) -> str:
        return "\n".join(self.lines())
