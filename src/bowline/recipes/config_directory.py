"""Reading the `config.json` of a checkpoint on disk. Only its sizes are used, so plain `json` is enough."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bowline.errors import ConfigError

__all__ = ["stored_config"]

NAME = "config.json"


def stored_config(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The content of the `config.json` in the directory `path`.

    Raises:
        ConfigError: no such file, or one that does not hold a JSON object.
    """
    place = Path(path)
    try:
        content = json.loads((place / NAME).read_bytes())
    except OSError as error:
        why = "no config.json" if isinstance(error, (FileNotFoundError, NotADirectoryError)) else str(error.strerror)
        raise ConfigError(f"{place}: {why}", help="give the directory of a checkpoint that has one") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: {NAME} is not JSON: {error}", help="restore the file") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{place}: {NAME} holds a {type(content).__name__}, expected an object")
    return content
