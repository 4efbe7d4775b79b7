"""`bowline audit`: checks whether head and embedding are one matrix, what the config says, and what loaders will do.

An audit opens the checkpoint (`bowline.checkpoint`), looks up the ties that its class declares (`bowline.families`),
gathers the evidence once (`evidence_gathering`), predicts what each loader will do (`loaders`), runs the rules, one
function per finding (`rules`), and writes a report (`report`). Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from bowline.auditing.adapter_gathering import gather_adapter
from bowline.auditing.adapter_place import adapter_files
from bowline.auditing.adapter_report import AdapterReport
from bowline.auditing.audit_report import AuditReport, findings_of, select_rules
from bowline.auditing.evidence import Evidence
from bowline.auditing.evidence_gathering import gather
from bowline.auditing.progress import Progress
from bowline.auditing.rules import Finding, Severity
from bowline.checkpoint import open_checkpoint
from bowline.errors import CheckpointError, NoCheckpointError, UsageError
from bowline.wording import located

__all__ = ["AdapterReport", "AuditReport", "Evidence", "Finding", "Severity", "audit", "audit_adapter"]


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
    rules = select_rules(select, ignore)
    if base is not None and not values:
        raise UsageError(
            "base is compared by values, but values=False reads none", help="leave out one of the two", argument="base"
        )
    with ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(place))
        original = stack.enter_context(open_checkpoint(base)) if base is not None else None
        evidence = gather(checkpoint, values=values, base=original, progress=progress)
    return AuditReport(evidence=evidence, findings=findings_of(evidence, rules))


def audit_adapter(
    place: str | os.PathLike[str],
    *,
    values: bool = True,
    base: str | os.PathLike[str] | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> AdapterReport:
    """Audit a PEFT adapter: which ends of the vocabulary it trains, and what a merge makes of its base's tie.

    `place` is a directory, one of its files, or a Hub repository, as for `audit`. `base` is the base model in the same
    forms; without it, the base that the adapter names is opened if it is a directory of this machine. With
    `values=False` only headers and configs are read: what the two ends carry is not compared.

    Raises:
        NoCheckpointError: `place` holds no adapter.
        CheckpointError: the adapter, or a base that was given, cannot be read.
        UsageError: `place` is not a path, or no rule has such a code.

    Example:
        >>> report = audit_adapter("outputs/lora", base="outputs/base")  # doctest: +SKIP
        >>> report.sentence  # doctest: +SKIP
        "a LoRA adapter for 'outputs/base' trains the head (lm_head) and not the embedding; the base is tied"
    """
    rules = select_rules(select, ignore)
    files = adapter_files(place)
    if files is None:
        raise NoCheckpointError(
            f"{place}: no PEFT adapter here, expected adapter_config.json and the adapter's weights",
            help="bowline.audit audits a whole model",
        )
    with ExitStack() as stack:
        stack.callback(files.close)
        original = stack.enter_context(open_checkpoint(base)) if base is not None else None
        try:
            evidence = gather_adapter(files, values=values, base=original)
        except CheckpointError as error:
            raise type(error)(located(error.message, files.location), help=error.help) from error
    return AdapterReport(evidence=evidence, findings=findings_of(evidence, rules))
