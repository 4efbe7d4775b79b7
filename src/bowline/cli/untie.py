"""`bowline untie SRC [DST]`"""

from __future__ import annotations

from bowline.cli.edit_options import Copy, Destination, DryRun, InPlace, Source, run_edit

__all__ = ["untie"]


def untie(
    source: Source,
    destination: Destination = None,
    in_place: InPlace = False,
    dry_run: DryRun = False,
    copy: Copy = False,
) -> None:
    """Store a copy for the head (and BERT's decoder bias), and clear the flag at every level.

    The logits stay what they were: where the flag also scales them (T5), the head's copy carries the scale.
    """
    run_edit(source, destination, in_place=in_place, dry_run=dry_run, copy=copy, steps=lambda edit: edit.untie())
