"""`--fix`: set the flag in `config.json` to what the stored tensors show, at every level, and change nothing else."""

from __future__ import annotations

from pathlib import Path

from bowline.auditing.audit_report import AuditReport
from bowline.auditing.evidence import Evidence
from bowline.auditing.loaders import Fate
from bowline.checkpoint.durable.file_replacement import replace_file
from bowline.checkpoint.formats.json_edit import set_values
from bowline.checkpoint.formats.strict_json import loads, shown
from bowline.errors import ConfigError, FormatError
from bowline.families.flag_paths import flag_paths

__all__ = ["fix_config", "flag_edits"]

CONFIG = "config.json"
HARM = frozenset({Fate.RANDOM, Fate.DROPPED})


def flag_edits(report: AuditReport) -> dict[str, bool]:
    """The keys to write, with their value: the flag at each level that states it, and each key that a loader reads.

    Raises `ConfigError` when two findings need different values: no config is right then.
    """
    wanted = {finding.flag_from_bytes for finding in report.findings if finding.flag_from_bytes is not None}
    if not wanted:
        return {}
    if len(wanted) > 1:
        codes = ", ".join(finding.code for finding in report.findings if finding.fixable)
        raise ConfigError(
            f"{report.evidence.location}: {codes} need different values of the flag, expected one value that agrees "
            "with all stored tensors",
            help="correct the tensors first",
        )
    value = wanted.pop()
    targets = {finding.tensors[0] for finding in report.findings if finding.fixable and finding.tensors}
    evidence = report.evidence
    return {
        path: value
        for path in flag_paths(evidence.declaration, evidence.config or {}, targets)
        if _stated(evidence).get(path) is not value
    }


def fix_config(report: AuditReport) -> list[str]:
    """Write the flag that agrees with the stored tensors; returns one line for each change.

    The file is replaced atomically and its old bytes are kept under `.bowline/undo`.

    Raises:
        ConfigError: only a part of the checkpoint was read, or the flag would correct one tie and break another, or the
            config is on the Hub, is reached through a link, or has several names on disk.
    """
    edits = flag_edits(report)
    if not edits:
        return []
    if not report.evidence.complete:
        raise ConfigError(
            f"{report.evidence.location}: only a part of the checkpoint was read, and --fix needs all of it",
            help="give the directory, with every shard in it",
        )
    directory = Path(report.evidence.location)
    if directory.is_file():
        directory = directory.parent
    if not directory.is_dir():
        raise ConfigError(
            f"{report.evidence.location}: --fix changes only local files", help="download it, and fix the local copy"
        )
    config = directory / CONFIG
    before = _unchanged(config, report.evidence)
    after = set_values(before.decode("utf-8"), edits).encode("utf-8")
    _refuse_harm(report.evidence, loads(after, CONFIG, allow_nonfinite=True))
    backup = replace_file(config, after, why="audit --fix")
    old = {path: shown(value) for path, value in _stated(report.evidence).items()}
    changes = [f"{path}: {old.get(path, 'absent')} -> {shown(value)}" for path, value in edits.items()]
    return [*changes, f"the old config.json is kept in {backup}"]


def _unchanged(config: Path, evidence: Evidence) -> bytes:
    """The bytes of `config.json`; raises `ConfigError` if its content has changed since the audit."""
    try:
        content = config.read_bytes()
        if repr(loads(content, CONFIG, allow_nonfinite=True)) == repr(evidence.config):  # NaN equals nothing
            return content
    except FormatError:
        pass
    except OSError as error:
        raise ConfigError(f"{config}: cannot be read: {error.strerror or error}", help="audit it again") from error
    raise ConfigError(f"{config}: has changed since the audit", help="audit it again")


def _refuse_harm(evidence: Evidence, config: object) -> None:
    """Raise `ConfigError` if the new flag corrects one tie but makes another random, or drops a stored tensor."""
    assert isinstance(config, dict)
    for loader, fates in evidence.fates_under(config).items():
        for target, outcome in fates.items():
            before = evidence.outcomes[loader].get(target)
            if outcome and before and outcome.fate in HARM and before.fate not in HARM:
                raise ConfigError(
                    f"{evidence.location}: the flag that corrects one tie would change {target} in {loader} from "
                    f"{before.fate.value} to {outcome.fate.value} ({outcome.reason})",
                    help="no flag suits these tensors: store the missing ones, or remove those that disagree",
                )


def _stated(evidence: Evidence) -> dict[str, object]:
    """The flag of each level as the config has it."""
    return {**evidence.declaration.levels, **evidence.declaration.not_boolean}
