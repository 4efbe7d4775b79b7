"""Audits one PEFT adapter, with its base model where that can be read."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from bowline.auditing.adapter_gathering import gather_adapter
from bowline.auditing.adapter_place import adapter_files
from bowline.auditing.adapter_report import AdapterReport
from bowline.auditing.audit_report import findings_of, select_rules
from bowline.checkpoint import open_checkpoint
from bowline.errors import CheckpointError, NoCheckpointError
from bowline.wording import located

__all__ = ["audit_adapter"]


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
