"""Audits one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from bowline.auditing.audit_report import AuditReport, findings_of, select_rules
from bowline.auditing.evidence_gathering import gather
from bowline.auditing.progress import Progress
from bowline.checkpoint import open_checkpoint
from bowline.errors import UsageError

__all__ = ["audit"]


def audit(
    place: str | os.PathLike[str],
    *,
    values: bool = True,
    base: str | os.PathLike[str] | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
) -> AuditReport:
    """Audit one checkpoint: a directory, a file, or a Hub repository `org/name[@revision]`.

    With `values=False` only headers, config and tokenizer are read: the cost does not follow the model's size, and
    two stored ends of a tie are not compared. `select` and `ignore` take codes or beginnings of codes; `progress`
    is called with the number of bytes that will be read and with each number that has been.

    `base` is the original checkpoint, in the same forms as `place`: the rows of embedding and head are compared with
    it (`report.evidence.base`). A PEFT adapter is audited by `audit_adapter`.

    Raises:
        CheckpointError: the checkpoint or the base cannot be read at all. A fault in a readable checkpoint is a finding
            instead.
        UsageError: `place` is not a path, no rule has such a code, or `base` is given without `values`.

    Example:
        >>> report = audit(minilm)  # doctest: +SKIP
        >>> report.evidence.declaration.family, report.clean  # doctest: +SKIP
        ('bert', True)
    """
    rules = select_rules(select, ignore, adapters=False)
    if base is not None and not values:
        raise UsageError(
            "base is compared by values, but values=False reads none", help="leave out one of the two", argument="base"
        )
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(place))
        original = stack.enter_context(open_checkpoint(base)) if base is not None else None
        evidence = gather(checkpoint, values=values, base=original, progress=progress)
    return AuditReport(evidence=evidence, findings=findings_of(evidence, rules))
