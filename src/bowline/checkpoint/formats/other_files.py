"""Says what a file is that holds no whole model: a PEFT adapter."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from bowline.checkpoint.formats.strict_json import loads, shown
from bowline.checkpoint.places.file_set import FileSet
from bowline.errors import CheckpointError

__all__ = [
    "ADAPTER_CONFIG",
    "FileKind",
    "adapter_kind",
    "file_kind",
    "holds_adapter",
]

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")


class FileKind(NamedTuple):
    """What a file is, as a noun phrase, and what to give instead."""

    name: str
    help: str


def file_kind(files: FileSet, name: str) -> FileKind | None:
    """What the file `name` of a checkpoint is, if it is of a kind that holds no whole model; otherwise `None`."""
    if name.rpartition("/")[2] in ADAPTER_FILES:
        return adapter_kind(files)
    return None


def adapter_kind(files: FileSet) -> FileKind:
    """A PEFT adapter, with its type and its base as `adapter_config.json` names them."""
    config: Any = None
    if files.has(ADAPTER_CONFIG):
        try:
            config = loads(files.read(ADAPTER_CONFIG), ADAPTER_CONFIG, allow_nonfinite=True)
        except CheckpointError:
            config = None
    stated: Mapping[str, Any] = config if isinstance(config, dict) else {}
    kind, base = stated.get("peft_type"), stated.get("base_model_name_or_path")
    what = "a PEFT adapter" + (f" ({shown(kind)[1:-1]})" if isinstance(kind, str) else "")
    whole = f"for {shown(base)}" if isinstance(base, str) and base else "whose base is not stated"
    return FileKind(
        f"{what} {whole}",
        "give the base model; `bowline audit` and bowline.auditing.audit_adapter audit the adapter itself, and --base "
        "BASE compares a merged model with its base",
    )


def holds_adapter(names: Collection[str]) -> bool:
    """Whether these are the tensors of a LoRA adapter alone, without the model that it adapts.

    Example:
        >>> holds_adapter(["base_model.model.lm_head.lora_A.weight", "base_model.model.lm_head.lora_B.weight"])
        True
    """
    if not any("lora_" in name for name in names):
        return False
    parts = [name.split(".") for name in names]
    lora = [any(part.startswith("lora_") for part in segments) for segments in parts]
    kept = ["modules_to_save" in segments or segments[:2] == ["base_model", "model"] for segments in parts]
    whole = any("base_layer" in segments for segments in parts)
    return any(lora) and not whole and all(one or other for one, other in zip(lora, kept, strict=True))
