"""What the models return: named records, whose parts are reached by name or, those that are there, by position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch

__all__ = [
    "BaseOutput",
    "ClassifierOutput",
    "LMOutput",
    "ModelOutput",
    "PreTrainingOutput",
    "Seq2SeqOutput",
]

Hidden = tuple[torch.Tensor, ...] | None


@dataclass
class ModelOutput:
    """`output.loss`, `output["loss"]`, and `output[0]`: the first part that is there."""

    def keys(self) -> tuple[str, ...]:
        """The names of the parts that are there."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name) is not None)

    def to_tuple(self) -> tuple[Any, ...]:
        """The parts that are there."""
        return tuple(getattr(self, name) for name in self.keys())

    def __getitem__(self, key: str | int | slice) -> Any:
        return getattr(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_tuple())

    def __len__(self) -> int:
        return len(self.keys())


@dataclass
class BaseOutput(ModelOutput):
    """`last_hidden_state` (B, T, D); `pooler_output` (B, D); `past_key_values`; `hidden_states`, each (B, T, D)."""

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None
    past_key_values: Any = None
    hidden_states: Hidden = None


@dataclass
class LMOutput(ModelOutput):
    """`loss` (); `logits` (B, T, V); `past_key_values`; `hidden_states`, each (B, T, D)."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: Any = None
    hidden_states: Hidden = None


@dataclass
class PreTrainingOutput(ModelOutput):
    """BERT's two losses in one: `prediction_logits` (B, T, V) and `seq_relationship_logits` (B, 2)."""

    loss: torch.Tensor | None = None
    prediction_logits: torch.Tensor | None = None
    seq_relationship_logits: torch.Tensor | None = None
    hidden_states: Hidden = None


@dataclass
class ClassifierOutput(ModelOutput):
    """`loss` (); `logits` (B, num_labels)."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: Hidden = None


@dataclass
class Seq2SeqOutput(ModelOutput):
    """An encoder and a decoder: `logits` (B, U, V) with a head, else `last_hidden_state` (B, U, D); B sources of T."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    past_key_values: Any = None
    decoder_hidden_states: Hidden = None
    encoder_last_hidden_state: torch.Tensor | None = None
    encoder_hidden_states: Hidden = None


for _record in (BaseOutput, LMOutput, PreTrainingOutput, ClassifierOutput, Seq2SeqOutput):
    torch.export.register_dataclass(_record)
