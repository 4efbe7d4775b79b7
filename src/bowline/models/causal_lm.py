"""The base of models with a head for next tokens: logits, the next-token loss, and generation."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.models.common.input_checks import check_kept, check_labels
from bowline.models.common.outputs import LMOutput
from bowline.models.common.pretrained_model import PreTrainedModel
from bowline.models.generation import GenerationMixin
from bowline.nn.modules.heads import LMHead

__all__ = ["CausalLM", "shifted"]


class CausalLM(PreTrainedModel, GenerationMixin):
    """A model without a head, kept under the name `base_model_prefix`, followed by `lm_head`."""

    output_embeddings: ClassVar[str | None] = "lm_head"
    lm_head: LMHead

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        logits_to_keep: int = 0,
        **inputs: Any,
    ) -> LMOutput:
        """Compute logits, and the loss if `labels` are given.

        `labels` (B, T) are the tokens themselves, -100 at positions to ignore; they are shifted here. If
        `logits_to_keep` is not 0, only the logits of that many last positions are computed.
        """
        check_kept(logits_to_keep)
        base = getattr(self, self.base_model_prefix)(input_ids, **inputs)
        hidden, targets = base.last_hidden_state, None
        if labels is None:
            hidden = hidden[:, -logits_to_keep:]
        else:
            check_labels(labels, hidden.shape[:-1], self.config.vocab_size)
            targets = shifted(labels)
        logits, loss = self._logits_and_loss(hidden, self.lm_head, targets, bias=self.lm_head.bias)
        if loss is not None and self.training:
            loss = self._penalised(loss)
        return LMOutput(
            loss=loss, logits=logits, past_key_values=base.past_key_values, hidden_states=base.hidden_states
        )

    def _penalised(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to train on: a family may add a penalty."""
        return loss


def shifted(labels: torch.Tensor, ignore_index: int = -100) -> torch.Tensor:
    """Move each label one position back, so that each position has its next token: (B, T) to (B, T).

    The last position has no next token and gets `ignore_index`.
    """
    return F.pad(labels[:, 1:], (0, 1), value=ignore_index)
