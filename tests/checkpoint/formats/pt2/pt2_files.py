"""Small programs of torch.export, and archives of them that are damaged on purpose."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from bowline.export.program import quietly

__all__ = ["TinyLM", "changed", "entries", "packed", "program"]

IDS = torch.zeros(3, 7, dtype=torch.int64)


class TinyLM(nn.Module):
    """An embedding, something between, and a head: its own, the embedding's, or a clone of that."""

    scale: torch.Tensor

    def __init__(self, kind: str = "tied", rows: int = 96) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(rows, 16)
        self.norm = nn.LayerNorm(16)
        self.lm_head = nn.Linear(16, rows, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        if kind == "tied":
            self.lm_head.weight = self.embed.weight
        elif kind == "cloned":
            self.lm_head.weight = nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.norm(self.embed(ids)))
        return torch.tanh(logits * self.scale)


def program(module: nn.Module, *, strict: bool = False, decomposed: bool = False, ids: torch.Tensor = IDS) -> bytes:
    """The bytes that `torch.export.save` writes."""
    file = io.BytesIO()
    with quietly():
        exported = torch.export.export(module.eval(), (ids,), strict=strict)
        torch.export.save(exported.run_decompositions() if decomposed else exported, file)
    return file.getvalue()


def entries(raw: bytes) -> dict[str, bytes]:
    """The entries of an archive by their names within its directory."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def packed(content: Mapping[str, bytes], *, method: int = zipfile.ZIP_STORED, twice: str | None = None) -> bytes:
    """An archive of these entries."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, raw in content.items():
            archive.writestr(f"model/{name}", raw)
        if twice is not None:
            archive.writestr(f"model/{twice}", content[twice])
    return file.getvalue()


def changed(raw: bytes, name: str, change: Callable[[Any], object]) -> bytes:
    """The archive after `change` of one of its JSON entries."""
    content = entries(raw)
    document = json.loads(content[name])
    change(document)
    return packed({**content, name: json.dumps(document).encode()})
