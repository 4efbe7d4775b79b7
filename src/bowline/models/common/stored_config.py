"""Reading the config of an open checkpoint, and checking a path before it is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from bowline.checkpoint import Checkpoint
from bowline.checkpoint.lint import LintKind
from bowline.errors import ConfigError, UsageError

__all__ = ["checked_path", "stored_config"]


def checked_path(path: Any) -> Any:
    """Return `path` if it is a path or the name of a Hub repository.

    Raises:
        UsageError: it has another type.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"path={path!r:.60}: expected a directory, a file or org/name")
    return path


def stored_config(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the content of the checkpoint's `config.json`.

    Raises:
        ConfigError: the file is missing or cannot be read; the message says why.
    """
    if checkpoint.config is None:
        seen = [lint.message for lint in checkpoint.lints if lint.kind is LintKind.CONFIG_MALFORMED]
        raise ConfigError(
            f"{checkpoint.location}: {seen[0] if seen else 'no config.json'}", help="add a good one, or give config="
        )
    return checkpoint.config
