"""`bowline audit`: is the head the embedding, does the config say so, and what will each loader make of it?

The way through: a checkpoint is opened (`bowline.checkpoint`), its ties are declared (`bowline.families`), the
evidence is gathered once (`evidence`), what each loader will do is predicted (`outcomes`), one function per finding
looks at it (`rules`), and a report is rendered (`render`). Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from bowline.auditing.audit_report import AuditReport, findings_of, select_rules
from bowline.auditing.evidence import Evidence
from bowline.auditing.evidence_gathering import gather
from bowline.auditing.progress import Progress
from bowline.auditing.rules import Finding, Severity
from bowline.checkpoint import open_checkpoint

__all__ = ["AuditReport", "Evidence", "Finding", "Severity", "audit"]


def audit(
    place: str | os.PathLike[str],
    *,
    values: bool = True,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    progress: Progress | None = None,
) -> AuditReport:
    """Audit one checkpoint: a directory, a file, or a Hub repository `org/name[@revision]`.

    With `values=False` only headers, config and tokenizer are read: the cost does not follow the model's size, and
    whether two stored ends of a tie are equal stays open. `select` and `ignore` take codes or beginnings of codes;
    `progress` is told what is read.

    Raises:
        CheckpointError: it cannot be read at all. What is wrong with a checkpoint that can be read is a finding.
        UsageError: `place` is no path, or a code that no rule has.

    Example:
        >>> report = audit(minilm)  # doctest: +SKIP
        >>> report.evidence.declaration.family, report.clean  # doctest: +SKIP
        ('bert', True)
    """
    rules = select_rules(select, ignore)
    with open_checkpoint(place) as checkpoint:
        evidence = gather(checkpoint, values=values, progress=progress)
    return AuditReport(evidence=evidence, findings=findings_of(evidence, rules))
