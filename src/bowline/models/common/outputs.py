"""The outputs of models: records with parts by name, and by position among the parts that are not None."""

from __future__ import annotations

import warnings
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
    """The base of all outputs. `output.loss` and `output["loss"]` are equal; `output[0]` is the first part not None."""

    def keys(self) -> tuple[str, ...]:
        """Return the names of the parts that are not None."""
        return tuple(one.name for one in fields(self) if getattr(self, one.name) is not None)

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the parts that are not None."""
        return tuple(getattr(self, name) for name in self.keys())

    def __getitem__(self, key: str | int | slice) -> Any:
        return getattr(self, key) if isinstance(key, str) else self.to_tuple()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.to_tuple())

    def __len__(self) -> int:
        return len(self.keys())


@dataclass
class BaseOutput(ModelOutput):
    """A model without a head: `last_hidden_state` and each of `hidden_states` (B, T, D), `pooler_output` (B, D)."""

    last_hidden_state: torch.Tensor | None = None
    pooler_output: torch.Tensor | None = None
    past_key_values: Any = None
    hidden_states: Hidden = None


@dataclass
class LMOutput(ModelOutput):
    """A language model: `loss` (), `logits` (B, T, V), and each of `hidden_states` (B, T, D)."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    past_key_values: Any = None
    hidden_states: Hidden = None


@dataclass
class PreTrainingOutput(ModelOutput):
    """BERT in pretraining: the summed `loss`, `prediction_logits` (B, T, V), `seq_relationship_logits` (B, 2)."""

    loss: torch.Tensor | None = None
    prediction_logits: torch.Tensor | None = None
    seq_relationship_logits: torch.Tensor | None = None
    hidden_states: Hidden = None


@dataclass
class ClassifierOutput(ModelOutput):
    """A classifier: `loss` () and `logits` (B, num_labels)."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    hidden_states: Hidden = None


@dataclass
class Seq2SeqOutput(ModelOutput):
    """An encoder-decoder: `logits` (B, U, V) with a head, else `last_hidden_state` (B, U, D)."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    past_key_values: Any = None
    decoder_hidden_states: Hidden = None
    encoder_last_hidden_state: torch.Tensor | None = None
    encoder_hidden_states: Hidden = None


with warnings.catch_warnings():  # torch 2.6 warns of a function of its own that it calls here
    warnings.filterwarnings("ignore", ".*_register_pytree_node. is deprecated", FutureWarning)
    for _record in (BaseOutput, LMOutput, PreTrainingOutput, ClassifierOutput, Seq2SeqOutput):
        torch.export.register_dataclass(_record)
