"""`bowline dedupe SRC [DST]`"""

from __future__ import annotations

from bowline.cli.edit_options import Copy, Destination, DryRun, InPlace, Source, run_edit

__all__ = ["dedupe"]


def dedupe(
    source: Source,
    destination: Destination = None,
    in_place: InPlace = False,
    dry_run: DryRun = False,
    copy: Copy = False,
) -> None:
    """Store each tied matrix once: aliases and equal copies go. A .bin becomes safetensors.

    The flag stays as it is; ends that differ stay both.
    """
    run_edit(source, destination, in_place=in_place, dry_run=dry_run, copy=copy, steps=lambda edit: edit.dedupe())
