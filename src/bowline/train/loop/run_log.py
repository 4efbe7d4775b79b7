"""What a run tells: `log.jsonl`, TensorBoard where it is installed, a bar on a terminal, lines in a pipe."""

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
"""`step`, `loss` (the mean since the last record), `lr`, `tokens_per_second`, `gradient_norm` (before it is cut),
`memory_mb` (the most until now), `tie`; where they were measured, `held_out_loss`, `perplexity`, `gradient_split`; in
the first one `groups`, what decays."""


# --- files ------------------------------------------------------------------------------------------------------------


class Log(Closing):
    """`out/log.jsonl`: one object a line, in the order of steps, also where a run was killed and went on."""

    def __init__(self, out: Path, *, up_to: int) -> None:
        """Open for records beyond the step `up_to`: later ones, and half a line, are cut off, all at once.

        Raises:
            CheckpointError: it cannot be written.
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
        """Append a record, in one write.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.history.append(dict(record))
        encoded = _encoded(record)
        try:
            if self._file.write(encoded) < len(encoded):  # the disk took a part, and says why at the next byte
                self._file.write(b"\n")
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if self._board is not None:
            for name, value in _scalars(record):
                self._board.add_scalar(name, value, record["step"])

    def synchronise(self) -> None:
        """Return when the records would survive a loss of power.

        Raises:
            CheckpointError: they would not.
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
    """The records of a log; a line that was cut by a kill is passed over."""
    with suppress(FileNotFoundError):
        for text in path.read_bytes().splitlines():
            with suppress(ValueError):
                record = json.loads(text)
                if isinstance(record, dict) and isinstance(record.get("step"), int):
                    yield record


def _tensorboard(directory: Path, up_to: int) -> Any:
    """TensorBoard's writer, where it is installed; what it had beyond the step `up_to` is hidden."""
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
    """A record for a person.

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
    """For `Trainer(log=shown.record, on_step=shown.step)`."""

    def __init__(self, steps: int, lines: TextIO | None, bars: Any) -> None:
        self._steps, self._lines, self._bars = steps, lines, bars
        self._task = bars.add_task("", total=steps) if bars is not None else None
        self._held_out = ""

    def record(self, record: Mapping[str, Any]) -> None:
        """Write it as a line; on the bar, the latest evaluation stays beside the latest loss."""
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
        """Move the bar."""
        if self._bars is not None:
            self._bars.update(self._task, completed=step)


@contextmanager
def shown(steps: int) -> Iterator[Shown]:
    """A bar on stderr where that is a terminal, and a line for each record on stdout where that is none."""
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
