"""What a family of next tokens does behind its body: logits, the loss of each next token, and text."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from bowline.models.common.blocks import check_kept, check_labels, shifted
from bowline.models.common.outputs import LMOutput
from bowline.models.common.pretrained_model import PreTrainedModel
from bowline.models.generation import GenerationMixin
from bowline.nn.modules.heads import LMHead

__all__ = ["CausalLM"]


class CausalLM(PreTrainedModel, GenerationMixin):
    """A model without a head, held under `base_model_prefix`, and `lm_head`."""

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
        """`labels` (B, T) are the tokens themselves, -100 where none counts: they are shifted here.

        Of the logits only those of the last `logits_to_keep` positions are made, where that is not 0.
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
        """The loss that is trained on."""
        return loss
