"""Audits what is at a place: a checkpoint, or a PEFT adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bowline.auditing.adapter_place import is_adapter
from bowline.auditing.checkpoint_audit import audit
from bowline.errors import NoCheckpointError

if TYPE_CHECKING:  # the code for adapters is loaded when one is met
    from bowline.auditing.adapter_report import AdapterReport
    from bowline.auditing.audit_report import AuditReport
    from bowline.auditing.progress import Progress

__all__ = ["audit_place"]


def audit_place(
    path: str,
    *,
    values: bool = True,
    base: str | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
) -> AuditReport | AdapterReport:
    """The report on the checkpoint or adapter at `path`; arguments and errors are those of `audit`."""
    if not is_adapter(path, hub=False):
        try:
            return audit(path, values=values, base=base, select=select, ignore=ignore, progress=progress)
        except NoCheckpointError:
            if not is_adapter(path, hub=True):  # a repository of the Hub that holds no whole model
                raise
    from bowline.auditing.adapter_audit import audit_adapter

    return audit_adapter(path, values=values, base=base, select=select, ignore=ignore)
