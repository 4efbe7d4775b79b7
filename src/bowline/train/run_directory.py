"""The directory of a run: it is used by one process at a time, and holds only the files of one run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bowline.checkpoint.durable.file_creation import cannot_write, create, fill
from bowline.errors import UsageError
from bowline.train.loop.directory_lock import locked
from bowline.train.loop.run_checkpoints import steps_in
from bowline.train.text.corpus import CorpusSurvey
from bowline.train.train_config import TrainConfig
from bowline.wording import listed

__all__ = ["stated", "taken"]

RUN = "run.json"
"""The file that marks the directory of a run: its configuration, and the fingerprint of its text."""


@contextmanager
def taken(place: Path, config: TrainConfig, survey: CorpusSurvey, *, resume: bool) -> Iterator[bool]:
    """Lock `place` for this run; yields True if the run resumes one that is there.

    A directory that belongs to something else is not changed. After an error before anything was made, new files and
    new directories are removed again.

    Raises:
        UsageError: `place` holds something else, another run, or a trained model without `resume`, or another process
            trains there.
        CheckpointError: `place` cannot be written.
    """
    if os.path.lexists(place) and not place.is_dir():
        raise UsageError(f"{place}: is not a directory", help="give another directory")
    new = [path for path in (place, *place.parents) if not path.exists()]
    with locked(place):
        before = stated(place / RUN)
        goes_on = False
        if before is None or not isinstance(before.get("config"), dict) or "text" not in before:
            _refuse_what_is_there(place)
            _begin(place, config, survey)
        elif steps_in(place / "checkpoints"):
            if not resume:
                raise UsageError(
                    f"{place}: already holds a run", help="--resume continues it, or give another directory"
                )
            _refuse_another(place, before, config, survey)
            goes_on = True
        elif (place / "config.json").exists():
            raise UsageError(
                f"{place}: already holds a trained model, and no checkpoint to resume from",
                help=f"give another directory; --init-from {place} starts from its weights",
            )
        else:  # a run without a checkpoint can begin again
            _begin(place, config, survey)
        try:
            yield goes_on
        except BaseException:
            if before is None:
                _leave_nothing(place, new)
            raise


def stated(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file, or None if it cannot be read."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _begin(place: Path, config: TrainConfig, survey: CorpusSurvey) -> None:
    content = {"version": 1, "config": config.effective(), "text": survey.fingerprint}
    staged = place / f".{RUN}.{os.getpid()}.tmp"
    try:
        staged.unlink(missing_ok=True)
        fill(create(staged), (json.dumps(content, indent=2) + "\n").encode(), 0o644)
        staged.replace(place / RUN)
    except OSError as error:
        raise cannot_write(place, error) from error


def _leave_nothing(place: Path, new: list[Path]) -> None:
    """Remove `run.json` if the directory holds nothing else, and then the new directories."""
    with suppress(OSError):
        if [path.name for path in place.iterdir()] == [RUN]:
            (place / RUN).unlink()
            for directory in new:
                directory.rmdir()


def _refuse_what_is_there(place: Path) -> None:
    there = sorted(path.name for path in place.iterdir() if not path.name.startswith(f".{RUN}."))
    if there:
        raise UsageError(
            f"{place}: expected a new or empty directory, got one that holds {listed(there, 3)}",
            help="give another directory",
        )


def _refuse_another(place: Path, before: dict[str, Any], config: TrainConfig, survey: CorpusSurvey) -> None:
    odd = config.differences(before["config"])
    if not odd and before["text"] != survey.fingerprint:
        odd = ["the text in it has changed"]
    if odd:
        raise UsageError(
            f"{place}: holds a run with other settings: {'; '.join(odd)}",
            help="resume with the settings of that run, or start a new run in another directory",
        )
