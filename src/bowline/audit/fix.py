"""`--fix`: make `config.json` say what the bytes hold, at every level, and change nothing else."""

from __future__ import annotations

from pathlib import Path

from bowline.audit.config_edit import set_flags
from bowline.audit.evidence import Evidence
from bowline.audit.report import AuditReport
from bowline.checkpoint.replace import replace_file
from bowline.checkpoint.strict_json import loads
from bowline.errors import ConfigError, FormatError
from bowline.families.resolve import FLAG

__all__ = ["fix_config", "flag_edits"]

CONFIG = "config.json"


def flag_edits(report: AuditReport) -> dict[str, bool]:
    """The keys to write and their value: every level that states the flag, and every key that a loader asks.

    Raises `ConfigError` when two findings want different values: then no config is right.
    """
    wanted = {finding.flag_from_bytes for finding in report.findings if finding.flag_from_bytes is not None}
    if not wanted:
        return {}
    if len(wanted) > 1:
        codes = ", ".join(finding.code for finding in report.findings if finding.fixable)
        raise ConfigError(
            f"{report.evidence.location}: {codes} want different flags, expected one that the bytes make true",
            help="mend the tensors first",
        )
    value = wanted.pop()
    return {
        path: value for path in _levels(report.evidence) if report.evidence.declaration.levels.get(path) is not value
    }


def fix_config(report: AuditReport) -> list[str]:
    """Write the flag that the bytes make true; returns what was changed, a line each.

    The file is replaced atomically and its old bytes are kept under `.bowline/undo`.

    Raises:
        ConfigError: the config is on the Hub, is reached through a link, or has several names on disk.
    """
    edits = flag_edits(report)
    if not edits:
        return []
    directory = Path(report.evidence.location)
    if directory.is_file():
        directory = directory.parent
    if not directory.is_dir():
        raise ConfigError(
            f"{report.evidence.location}: cannot be changed where it is", help="download it, and fix the local copy"
        )
    config = directory / CONFIG
    before = _unchanged(config, report.evidence)
    backup = replace_file(config, set_flags(before.decode("utf-8"), edits).encode("utf-8"), why="audit --fix")
    old = report.evidence.declaration.levels
    changes = [f"{path}: {_word(old.get(path))} -> {_word(value)}" for path, value in edits.items()]
    return [*changes, f"the old config.json is kept in {backup}"]


def _unchanged(config: Path, evidence: Evidence) -> bytes:
    """The file's bytes, if they still say what was audited."""
    try:
        content = config.read_bytes()
        if repr(loads(content, CONFIG, allow_nonfinite=True)) == repr(evidence.config):  # NaN equals nothing
            return content
    except FormatError:
        pass
    except OSError as error:
        raise ConfigError(f"{config}: cannot be read: {error.strerror or error}", help="audit it again") from error
    raise ConfigError(f"{config}: is not what it was when it was audited", help="audit it again")


def _levels(evidence: Evidence) -> list[str]:
    """The levels that say something of this model's ties, outermost first."""
    asked = [path for tie in evidence.ties for path in tie.declared.paths]
    stated = [
        path for path in evidence.declaration.levels if path == FLAG or path in asked or _has_vocabulary(evidence, path)
    ]
    present = [path for path in asked if _level_exists(evidence, path)]
    return sorted(dict.fromkeys([*stated, *present]), key=lambda path: path.count("."))


def _has_vocabulary(evidence: Evidence, path: str) -> bool:
    level = _level(evidence, path)
    return level is not None and "vocab_size" in level


def _level_exists(evidence: Evidence, path: str) -> bool:
    return _level(evidence, path) is not None


def _level(evidence: Evidence, path: str) -> dict[str, object] | None:
    config: object = evidence.config
    for key in path.split(".")[:-1]:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else None


def _word(value: bool | None) -> str:
    return "absent" if value is None else str(value).lower()
