"""The names under which `save_pretrained` writes the tensors of a model."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tools.inspection.models import separate_everything, tensors
from tools.tiny import Json, build, config_from_dict, fill


def disk_names(cls: type[Any], content: Json, wanted: set[str]) -> dict[str, str]:
    """{state_dict name: name in the file that `save_pretrained` writes}, for the names of `wanted`."""
    model = build(cls, config_from_dict(cls.config_class, content))
    separate_everything(model)
    fill(model)
    with torch.no_grad():
        for number, (name, buffer) in enumerate(model.named_buffers()):
            if name in wanted and buffer.is_floating_point():
                buffer.uniform_(number, number + 1)
    model.can_generate = lambda: False
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = sorted(Path(folder).glob("*.safetensors"))
        stored = {_digest(tensor): name for file in files for name, tensor in load_file(file).items()}
    present = {name: tensor for name, tensor in sorted(tensors(model).items()) if name in wanted}
    return {name: stored.get(_digest(tensor)) or _renamed(model, name, tensor) for name, tensor in present.items()}


def _renamed(model: Any, name: str, tensor: torch.Tensor) -> str:
    """The name that the version's own save would give to `name`, for a tensor that a save leaves out."""
    try:
        from transformers.core_model_loading import revert_weight_conversion

        return str(next(iter(revert_weight_conversion(model, {name: tensor}))))
    except ImportError:
        return name


def _digest(tensor: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple(tensor.shape), hashlib.blake2b(data, digest_size=16).digest()
