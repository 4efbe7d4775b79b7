"""BERT (Devlin et al., 2018): a post-norm encoder that predicts the tokens hidden from it with its own embedding.

The tie, stated as `ties` at `BertWithMLMHead` and made where `tie_word_embeddings` is true (the default):
  cls.predictions.decoder.weight <- bert.embeddings.word_embeddings.weight
  cls.predictions.decoder.bias   <- cls.predictions.bias, the output-only bias, one parameter under two names
logits = transform(h) Eᵀ + bias, with transform(h) = LayerNorm(gelu(dense h)), so E is also the matrix of a space that
the last layer need not share. Positions and token types have tables that are not tied to anything. Untied, decoder and
table are two matrices, and there are two biases: only the decoder's acts, `cls.predictions.bias` is dead, and files
hold both. Up to version 4 transformers made the decoder a clone of the table where `config.torchscript` was set (traces
knew no shared parameters): equal on the first day, and nothing kept them so in training.

Why the padding row moves: `padding_idx` zeroes the row [PAD] at the start and stops the input's gradient to it, and the
output's passes. Every position has [PAD] in its softmax's denominator, so dL/dE_pad = (1/N) sum_t p_t(pad) h_t over the
N labelled positions, though padding is never a label: the row is pushed away from all h_t, and what an embedding looks
up for padding is not zero any more. The attention mask hides that, where there is one. `pad_logit="mask"` makes
p_t(pad) = 0, and the row stays; untied, the table's row stays and the decoder's moves.

Not built: decoders, cross-attention, relative positions; a config that asks for one is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.models.common.blocks import (
    activation,
    attend,
    check_beside,
    check_embeds,
    check_ids,
    check_labels,
    check_tensor,
    classified,
    looked_up,
    prune_linear,
    split_heads,
    visible_keys,
)
from bowline.models.common.model_config import PreTrainedConfig, frozen
from bowline.models.common.outputs import BaseOutput, ClassifierOutput, LMOutput, PreTrainingOutput
from bowline.models.common.pretrained_model import PreTrainedModel
from bowline.nn.modules.heads import MLMHead
from bowline.nn.modules.tied_embedding import TiedEmbedding

__all__ = [
    "BertConfig",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BertForSequenceClassification",
    "BertModel",
]

REGRESSION, SINGLE, MULTI = "regression", "single_label_classification", "multi_label_classification"


@frozen
class BertConfig(PreTrainedConfig):
    """BERT base, uncased, unless other values are given."""

    model_type = "bert"
    unsupported: ClassVar = {
        **PreTrainedConfig.unsupported,
        "is_decoder": False,
        "position_embedding_type": "absolute",
    }

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int | None = 0
    classifier_dropout: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_depth("num_hidden_layers")
        self.check_sizes("intermediate_size", "max_position_embeddings", "type_vocab_size")
        self.check_heads("hidden_size", "num_attention_heads")
        self.check_numbers("hidden_dropout_prob", "attention_probs_dropout_prob", high=1.0)
        self.check_numbers("layer_norm_eps", "initializer_range")
        if self.classifier_dropout is not None:
            self.check_numbers("classifier_dropout", high=1.0)
        if self.problem_type not in (None, REGRESSION, SINGLE, MULTI):
            self.refuse("problem_type", f"{REGRESSION!r}, {SINGLE!r}, {MULTI!r} or null")


class BertEmbeddings(nn.Module):
    """LayerNorm(word + position + token type): ids (B, T) to (B, T, D)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = TiedEmbedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, words: torch.Tensor, positions: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        """`words` are vectors (B, T, D) already; what all rows have in common, (1, T), is added once."""
        rest = self.position_embeddings(positions) + self.token_type_embeddings(types)
        return self.dropout(self.LayerNorm(words + rest))


class BertSelfAttention(nn.Module):
    """Each position looks at all that the mask lets it see: (B, T, D) to (B, T, H d)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        query, key, value = (split_heads(part(x), self.heads) for part in (self.query, self.key, self.value))
        return attend(query, key, value, mask, dropout=self.dropout.p if self.training else 0.0)


class BertResidual(nn.Module):
    """LayerNorm(residual + dropout(dense x)): post-norm, what the attention and the feed-forward part both end with."""

    def __init__(self, config: BertConfig, in_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class BertAttention(nn.Module):
    """Self-attention and its projection back to (B, T, D)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertResidual(config, config.hidden_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.output(self.self(x, mask), x)

    def prune(self, heads: Collection[int]) -> None:
        """Without these heads, counted as they are now."""
        inner, out = self.self, self.output.dense
        rows = torch.arange(out.in_features, device=out.weight.device).view(inner.heads, -1)  # (H, d)
        keep = rows[[head for head in range(inner.heads) if head not in heads]].flatten()
        for part in (inner.query, inner.key, inner.value):
            part.weight = prune_linear(part.weight, keep, 0)  # type: ignore[arg-type]
            part.bias = prune_linear(part.bias, keep, 0)
            part.out_features = len(keep)
        out.weight = prune_linear(out.weight, keep, 1)  # type: ignore[arg-type]
        out.in_features = len(keep)
        inner.heads -= len(heads)


class BertIntermediate(nn.Module):
    """activation(dense x): (B, T, D) to (B, T, intermediate_size)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.dense(x))


class BertLayer(nn.Module):
    """x = norm(x + attention(x)), then norm(x + feed-forward(x))."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertResidual(config, config.intermediate_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class BertEncoder(nn.Module):
    """The layers, under the name that files have."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))


class BertPooler(nn.Module):
    """tanh(dense h) of the first token's h: (B, T, D) to (B, D)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(hidden[:, 0]))


class BertPreTrainedModel(PreTrainedModel):
    """What all classes have: the config, the names, the draws."""

    config_class = BertConfig
    base_model_prefix = "bert"
    input_embeddings = "bert.embeddings.word_embeddings"
    _keys_to_ignore_on_load_unexpected = (r"embeddings\.position_ids$",)  # 0, 1, 2, ..., which old files hold

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MLMHead):
            module.bias.zero_()


class BertModel(BertPreTrainedModel):
    """Tokens (B, T) to their hidden states (B, T, D), and to one state of the whole (B, D), the pooler's."""

    input_embeddings = "embeddings.word_embeddings"

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_hidden_states: bool = False,
    ) -> BaseOutput:
        """`attention_mask` as `blocks.visible_keys` has it; `token_type_ids` are 0 unless given, and positions count.

        Raises:
            UsageError: ids, positions or a mask that do not fit.
        """
        if (input_ids is None) is (inputs_embeds is None):
            raise UsageError("input_ids and inputs_embeds: expected one of them")
        if inputs_embeds is None:
            check_ids(input_ids, self.config.vocab_size)  # type: ignore[arg-type]
            inputs_embeds = looked_up(self.embeddings.word_embeddings, input_ids, self.config.embed_scale)  # type: ignore[arg-type]
        check_embeds(inputs_embeds, self.config.hidden_size)
        batch, length = inputs_embeds.shape[:2]
        device, places = inputs_embeds.device, self.config.max_position_embeddings
        if position_ids is None:
            if length > places:
                raise UsageError(
                    f"{length} positions, and the table has {places} (max_position_embeddings)",
                    help="cut the text, or build a model with more positions",
                )
            position_ids = torch.arange(length, device=device)[None]
        else:
            check_beside(position_ids, batch, length, places, "position_ids")
        if token_type_ids is None:
            token_type_ids = torch.zeros_like(position_ids)
        else:
            check_beside(token_type_ids, batch, length, self.config.type_vocab_size, "token_type_ids")
        mask = visible_keys(attention_mask, batch, length, length, causal=False, device=device)
        x = self.embeddings(inputs_embeds, position_ids, token_type_ids)  # (B, T, D)
        states = [x]
        for layer in self.encoder.layer:
            x = self._run(layer, x, mask)
            if output_hidden_states:
                states.append(x)
        return BaseOutput(
            last_hidden_state=x,
            pooler_output=self.pooler(x) if self.pooler is not None else None,
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def _prune(self, heads: Mapping[int, list[int]]) -> None:
        for layer, some in heads.items():
            attention = self.encoder.layer[layer].attention
            attention.prune(some)  # type: ignore[operator, union-attr]


class BertHeads(nn.Module):
    """`predictions` of tokens, and where it is asked for, whether the second sentence follows the first."""

    def __init__(self, config: BertConfig, *, next_sentence: bool) -> None:
        super().__init__()
        act = activation(config.hidden_act)
        self.predictions = MLMHead(config.hidden_size, config.vocab_size, act, config.layer_norm_eps)
        if next_sentence:
            self.seq_relationship = nn.Linear(config.hidden_size, 2)


class BertWithMLMHead(BertPreTrainedModel):
    """The two classes that predict tokens: their ties, and what follows from them."""

    ties: ClassVar = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    output_embeddings = "cls.predictions.decoder"
    stand_ins: ClassVar = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
    """transformers 4 has one bias, untied too, and its files hold it under the second name alone."""
    bert: BertModel
    cls: BertHeads

    def set_output_embeddings(self, new: nn.Module) -> None:
        """Another decoder in its place, whose bias is the output-only bias from now on.

        Raises:
            UsageError: it has no bias.
        """
        bias = getattr(new, "bias", None)
        if not isinstance(bias, nn.Parameter):
            raise UsageError(
                f"{type(new).__name__} without a bias: expected a head with weight and bias",
                help="nn.Linear(hidden_size, vocab_size), with a bias of zeros",
            )
        super().set_output_embeddings(new)
        self.cls.predictions.bias = bias

    def _predict(
        self, hidden: torch.Tensor, labels: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if labels is not None:
            check_labels(labels, hidden.shape[:-1], self.config.vocab_size)
        head = self.cls.predictions
        return self._logits_and_loss(head.transform(hidden), head.decoder, labels, bias=head.decoder.bias)


class BertForMaskedLM(BertWithMLMHead):
    """BERT with its head for tokens: logits (B, T, V), and the loss at hidden tokens where there are `labels`.

    Example:
        >>> sizes = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
        >>> model = BertForMaskedLM(BertConfig(vocab_size=9, **sizes))
        >>> model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
        True
        >>> model(torch.tensor([[2, 5, 3]])).logits.shape
        torch.Size([1, 3, 9])
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.cls = BertHeads(config, next_sentence=False)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor | None = None, *, labels: torch.Tensor | None = None, **inputs: Any
    ) -> LMOutput:
        """`labels` (B, T): the token that was hidden, -100 where none was."""
        base = self.bert(input_ids, **inputs)
        logits, loss = self._predict(base.last_hidden_state, labels)
        return LMOutput(loss=loss, logits=logits, hidden_states=base.hidden_states)


class BertForPreTraining(BertWithMLMHead):
    """BERT as it is pretrained: hidden tokens, and whether the second sentence follows the first."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = BertHeads(config, next_sentence=True)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
        **inputs: Any,
    ) -> PreTrainingOutput:
        """`labels` (B, T) as `BertForMaskedLM` has them; `next_sentence_label` (B,): 0 follows, 1 is from elsewhere.

        The loss is the sum of the two. Given one kind of labels it is that kind's loss (transformers gives none then).
        """
        base = self.bert(input_ids, **inputs)
        logits, of_tokens = self._predict(base.last_hidden_state, labels)
        relation, of_sentences = classified(
            self.cls.seq_relationship, base.pooler_output, next_sentence_label, "next_sentence_label"
        )
        losses = [loss for loss in (of_tokens, of_sentences) if loss is not None]
        return PreTrainingOutput(
            loss=sum(losses[1:], losses[0]) if losses else None,
            prediction_logits=logits,
            seq_relationship_logits=relation,
            hidden_states=base.hidden_states,
        )


class BertForSequenceClassification(BertPreTrainedModel):
    """BERT with a label for the whole: logits (B, num_labels), from the pooler's state."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        rate = config.classifier_dropout if config.classifier_dropout is not None else config.hidden_dropout_prob
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self, input_ids: torch.Tensor | None = None, *, labels: torch.Tensor | None = None, **inputs: Any
    ) -> ClassifierOutput:
        """`labels` by `config.problem_type`: numbers (B,) or (B, num_labels) for "regression", classes (B,) for
        "single_label_classification", 0 or 1 for each label (B, num_labels) for "multi_label_classification".

        Where the config has none: regression for one label, then whole numbers are classes and others are many labels.

        Raises:
            UsageError: labels of another shape.
        """
        if labels is not None:
            check_tensor(labels, "labels")
        base = self.bert(input_ids, **inputs)
        pooled = self.dropout(base.pooler_output)
        if labels is None or self._problem(labels) == SINGLE:
            logits, loss = classified(self.classifier, pooled, labels)
            return ClassifierOutput(loss=loss, logits=logits, hidden_states=base.hidden_states)
        logits = self.classifier(pooled)
        if labels.numel() != logits.numel() or (labels.shape != logits.shape and self.config.num_labels > 1):
            raise UsageError(f"labels {tuple(labels.shape)}: expected {tuple(logits.shape)}, one for each logit")
        distance = F.mse_loss if self._problem(labels) == REGRESSION else F.binary_cross_entropy_with_logits
        loss = distance(logits, labels.view_as(logits).to(logits.dtype))
        return ClassifierOutput(loss=loss, logits=logits, hidden_states=base.hidden_states)

    def _problem(self, labels: torch.Tensor) -> str:
        if self.config.problem_type is not None:
            return str(self.config.problem_type)
        if self.config.num_labels == 1:
            return REGRESSION
        return SINGLE if labels.dtype in (torch.int64, torch.int32) else MULTI
