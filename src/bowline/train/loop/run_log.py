"""The log of a run: `log.jsonl`, TensorBoard if installed, a progress bar on a terminal, lines in a pipe."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeAlias

from bowline.checkpoint.durable.file_creation import cannot_write, create, fill
from bowline.checkpoint.places.closeable import Closing

__all__ = ["Log", "Record", "Shown", "line", "read_log", "shown"]

Record: TypeAlias = dict[str, Any]
"""One record of the log. Every record has `step`, `loss` (the mean since the last record), `lr`, `tokens_per_second`,
`gradient_norm` (before clipping), `memory_mb` (the peak until now) and `tie`. It has `held_out_loss`, `perplexity` and
`gradient_split` if they were measured. The first one has `groups`, which says which parameters decay."""


# --- files ------------------------------------------------------------------------------------------------------------


class Log(Closing):
    """The file `out/log.jsonl`: one object per line, in the order of steps, even in a run that was resumed."""

    def __init__(self, out: Path, *, up_to: int) -> None:
        """Open the log for records after the step `up_to`; later records and unfinished lines are removed atomically.

        Raises:
            CheckpointError: the log cannot be written.
        """
        self.path = out / "log.jsonl"
        try:
            self.history: list[Record] = [record for record in read_log(self.path) if record["step"] <= up_to]
            staged = self.path.with_name(f".{self.path.name}.tmp")
            staged.unlink(missing_ok=True)
            fill(create(staged), b"".join(map(_encoded, self.history)), 0o644)
            staged.replace(self.path)
            self._file: BinaryIO = self.path.open("ab", buffering=0)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._board = _tensorboard(out / "tensorboard", up_to)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record in one write.

        Raises:
            CheckpointError: the log cannot be written.
        """
        self.history.append(dict(record))
        encoded = _encoded(record)
        try:
            if self._file.write(encoded) < len(encoded):  # a partial write: the next one raises the reason
                self._file.write(b"\n")
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if self._board is not None:
            for name, value in _scalars(record):
                self._board.add_scalar(name, value, record["step"])

    def synchronise(self) -> None:
        """Flush the records to the disk, so that they survive a power failure.

        Raises:
            CheckpointError: the disk reports an error.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def _encoded(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def read_log(path: Path) -> Iterator[Record]:
    """Yield the records of a log. A line that a killed process left unfinished is skipped."""
    with suppress(FileNotFoundError):
        for text in path.read_bytes().splitlines():
            with suppress(ValueError):
                record = json.loads(text)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    yield record


def _tensorboard(directory: Path, up_to: int) -> Any:
    """Return TensorBoard's writer, or None if it is not installed. Its records after `up_to` are hidden."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=up_to + 1)


def _scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{part}", number) for part, number in _scalars(value))
        elif isinstance(value, (int, float)) and name != "step":
            yield name, float(value)


# --- a person ---------------------------------------------------------------------------------------------------------


def line(record: Mapping[str, Any], steps: int) -> str:
    """Format a record as a line for a person.

    Example:
        >>> line({"step": 20, "loss": 4.5, "held_out_loss": 4.0, "perplexity": 54.6, "tie": "tied"}, 200)
        'step  20/200  loss 4.500  held-out 4.000 (perplexity 54.6)  tied'
    """
    parts = [f"step {record['step']:>{len(str(steps))}}/{steps}", f"loss {record['loss']:.3f}"]
    if "held_out_loss" in record:
        parts.append(f"held-out {record['held_out_loss']:.3f} (perplexity {record['perplexity']:.4g})")
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if "memory_mb" in record:
        parts.append(f"{record['memory_mb']:,.0f} MB")
    parts.append(record["tie"])
    split = record.get("gradient_split")
    if split and split.get("input"):
        parts.append(f"gradient output/input {split['output'] / split['input']:.2g}")
    return "  ".join(parts)


class Shown:
    """Shows a run, as lines or as a progress bar: `Trainer(log=shown.record, on_step=shown.step)`."""

    def __init__(self, steps: int, lines: TextIO | None, bars: Any) -> None:
        self._steps, self._lines, self._bars = steps, lines, bars
        self._task = bars.add_task("", total=steps) if bars is not None else None
        self._held_out = ""

    def record(self, record: Mapping[str, Any]) -> None:
        """Write the record as a line, and on the bar beside the latest evaluation."""
        if self._lines is not None:
            if "groups" in record:
                self._lines.write(f"{record['groups']}\n")
            self._lines.write(line(record, self._steps) + "\n")
            self._lines.flush()
        if self._bars is not None:
            if "held_out_loss" in record:
                self._held_out = f"  held-out perplexity {record['perplexity']:.4g}"
            rest = {name: value for name, value in record.items() if name not in ("held_out_loss", "perplexity")}
            text = line(rest, self._steps).partition("  ")[2] + self._held_out
            self._bars.update(self._task, completed=record["step"], description=text)

    def step(self, step: int) -> None:
        """Advance the progress bar."""
        if self._bars is not None:
            self._bars.update(self._task, completed=step)


@contextmanager
def shown(steps: int) -> Iterator[Shown]:
    """Show a bar on stderr if it is a terminal, and a line per record on stdout if it is not a terminal."""
    lines = None if sys.stdout is None or sys.stdout.isatty() else sys.stdout
    with ExitStack() as stack:
        bars = None
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                MofNCompleteColumn(),
                BarColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.description}", markup=False),
            )
            bars = stack.enter_context(Progress(*columns, console=Console(stderr=True), redirect_stdout=False))
        yield Shown(steps, lines, bars)
