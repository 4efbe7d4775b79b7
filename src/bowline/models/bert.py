"""BERT (Devlin et al., 2018): a post-norm encoder that predicts the tokens hidden from it with its own embedding.

The tie, declared as `ties` in `BertWithMLMHead` and made if `tie_word_embeddings` is true (the default):
  cls.predictions.decoder.weight <- bert.embeddings.word_embeddings.weight
  cls.predictions.decoder.bias   <- cls.predictions.bias, the output-only bias, one parameter under two names
logits = transform(h) Eᵀ + bias, with transform(h) = LayerNorm(gelu(dense h)). Because of the transform, the last layer
need not use the space of the embeddings E. The tables of positions and token types are not tied to anything. Untied,
decoder and table are two matrices, and there are two biases: only the decoder's bias acts, `cls.predictions.bias` is
unused, and files hold both. Up to version 4 transformers made the decoder a clone of the table if `config.torchscript`
was set, because traces did not support shared parameters: the two were equal at first, and training could part them.

Why the padding row moves: `padding_idx` sets the row of [PAD] to zero at the start and stops the input's gradient to
that row, but not the output's. Every position has [PAD] in its softmax's denominator, so dL/dE_pad = (1/N) sum_t
p_t(pad) h_t over the N labelled positions, although padding is never a label. The row is pushed away from all h_t, and
the embedding of padding is no longer zero. An attention mask hides that if there is one. `pad_logit="mask"` makes
p_t(pad) = 0, and the row stays zero. Untied, the table's row stays zero and the decoder's row moves.

Not supported: decoders, cross-attention, relative positions. A config that asks for one of them is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.functional.loss import linear_cross_entropy
from bowline.models.common.activation_functions import activation
from bowline.models.common.attention import attend, prune_linear, split_heads, visible_keys
from bowline.models.common.input_checks import check_beside, check_labels, check_tensor
from bowline.models.common.input_embeddings import token_embeddings, token_positions
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
    """The configuration of BERT. The defaults are those of BERT base, uncased."""

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
    """The sum of word, position and token type embeddings, normalized: LayerNorm(word + position + type)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = TiedEmbedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, words: torch.Tensor, positions: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        """`words` are vectors (B, T, D); `positions` and `types` are ids, (B, T), or (1, T) for all rows."""
        rest = self.position_embeddings(positions) + self.token_type_embeddings(types)
        return self.dropout(self.LayerNorm(words + rest))


class BertSelfAttention(nn.Module):
    """Self-attention to every position that the mask allows: (B, T, D) to (B, T, H d).

    Its projections have the heads that are here: all of them, those that are left, or this process's.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        projected = (part(x) for part in (self.query, self.key, self.value))
        query, key, value = (split_heads(part, part.shape[-1] // self.head_size) for part in projected)
        return attend(query, key, value, mask, dropout=self.dropout.p if self.training else 0.0)


class BertResidual(nn.Module):
    """The post-norm end of the attention and of the feed-forward part: LayerNorm(residual + dropout(dense x))."""

    def __init__(self, config: BertConfig, in_features: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class BertAttention(nn.Module):
    """Self-attention, followed by its projection back to (B, T, D)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = BertSelfAttention(config)
        self.output = BertResidual(config, config.hidden_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return self.output(self.self(x, mask), x)

    def prune(self, heads: Collection[int]) -> None:
        """Remove these heads, numbered among the heads that are left now."""
        inner, out = self.self, self.output.dense
        rows = torch.arange(out.in_features, device=out.weight.device).view(-1, inner.head_size)  # (H, d)
        keep = rows[[head for head in range(len(rows)) if head not in heads]].flatten()
        for part in (inner.query, inner.key, inner.value):
            part.weight = prune_linear(part.weight, keep, 0)  # type: ignore[arg-type]
            part.bias = prune_linear(part.bias, keep, 0)
            part.out_features = len(keep)
        out.weight = prune_linear(out.weight, keep, 1)  # type: ignore[arg-type]
        out.in_features = len(keep)


class BertIntermediate(nn.Module):
    """The first half of the feed-forward part, activation(dense x): (B, T, D) to (B, T, intermediate_size)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.act = activation(config.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.dense(x))


class BertLayer(nn.Module):
    """One post-norm layer: x = norm(x + attention(x)), then norm(x + feed-forward(x))."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertResidual(config, config.intermediate_size)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = self.attention(x, mask)
        return self.output(self.intermediate(x), x)


class BertEncoder(nn.Module):
    """The layers, under the name that checkpoints use."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_hidden_layers))


class BertPooler(nn.Module):
    """A state for the whole sequence, tanh(dense h) of the first token: (B, T, D) to (B, D)."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(hidden[:, 0]))


class BertPreTrainedModel(PreTrainedModel):
    """The base of all BERT classes: config class, names in checkpoints, initialization."""

    config_class = BertConfig
    base_model_prefix = "bert"
    input_embeddings = "bert.embeddings.word_embeddings"
    _keys_to_ignore_on_load_unexpected = (r"embeddings\.position_ids$",)  # old files hold 0, 1, 2, ...

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, MLMHead):
            module.bias.zero_()


class BertModel(BertPreTrainedModel):
    """BERT without a head: tokens (B, T) to hidden states (B, T, D) and the pooler's state of the whole (B, D)."""

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
        """`attention_mask` is as `attention.visible_keys` takes it.

        Without `token_type_ids` all types are 0; without `position_ids` the positions are 0, 1, 2, ...

        Raises:
            UsageError: ids, positions or a mask that do not fit.
        """
        words = self._embed(input_ids, inputs_embeds)  # (B, T, D)
        batch, length = words.shape[:2]
        places = self.config.max_position_embeddings
        positions = token_positions(position_ids, words, size=places, key="max_position_embeddings")
        types = self._types(token_type_ids, positions, batch, length)
        mask = visible_keys(attention_mask, batch, length, length, causal=False, device=words.device)
        x = self.embeddings(words, positions, types)  # (B, T, D)
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

    def _embed(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        return token_embeddings(
            self.embeddings.word_embeddings,
            input_ids,
            inputs_embeds,
            vocab_size=self.config.vocab_size,
            width=self.config.hidden_size,
            scale=self.config.embed_scale,
        )

    def _types(
        self, token_type_ids: torch.Tensor | None, positions: torch.Tensor, batch: int, length: int
    ) -> torch.Tensor:
        if token_type_ids is None:
            return torch.zeros_like(positions)
        check_beside(token_type_ids, batch, length, self.config.type_vocab_size, "token_type_ids")
        return token_type_ids

    def _prune(self, heads: Mapping[int, list[int]]) -> None:
        for layer, some in heads.items():
            attention = self.encoder.layer[layer].attention
            attention.prune(some)  # type: ignore[operator, union-attr]


class BertHeads(nn.Module):
    """The pretraining heads: `predictions` of tokens, and optionally a next-sentence classifier."""

    def __init__(self, config: BertConfig, *, next_sentence: bool) -> None:
        super().__init__()
        act = activation(config.hidden_act)
        self.predictions = MLMHead(config.hidden_size, config.vocab_size, act, config.layer_norm_eps)
        if next_sentence:
            self.seq_relationship = nn.Linear(config.hidden_size, 2)


class BertWithMLMHead(BertPreTrainedModel):
    """The base of the two classes that predict tokens: the ties of the head."""

    ties: ClassVar = {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    }
    output_embeddings = "cls.predictions.decoder"
    stand_ins: ClassVar = {"cls.predictions.decoder.bias": "cls.predictions.bias"}
    """transformers 4 has one bias even when untied, and its files hold only the second name."""
    bert: BertModel
    cls: BertHeads

    def set_output_embeddings(self, new: nn.Module) -> None:
        """Replace the decoder. The new decoder's bias becomes the output-only bias.

        Raises:
            UsageError: the new decoder has no bias.
        """
        bias = getattr(new, "bias", None)
        if not isinstance(bias, nn.Parameter):
            raise UsageError(
                f"{type(new).__name__} without a bias: expected a head with a weight and a bias",
                help="use nn.Linear(hidden_size, vocab_size) and set its bias to zeros",
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
    """BERT with its head for tokens: logits (B, T, V), and the loss at masked tokens if `labels` are given.

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
        """`labels` (B, T) are the tokens that were masked, and -100 at all other positions."""
        base = self.bert(input_ids, **inputs)
        logits, loss = self._predict(base.last_hidden_state, labels)
        return LMOutput(loss=loss, logits=logits, hidden_states=base.hidden_states)


class BertForPreTraining(BertWithMLMHead):
    """BERT with both pretraining heads: masked tokens, and whether the second sentence follows the first."""

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
        """`labels` (B, T) are as in `BertForMaskedLM`; `next_sentence_label` (B,) is 0 if the second sentence follows.

        A `next_sentence_label` of 1 means a sentence from elsewhere. The loss is the sum of both losses; with only one
        kind of labels it is that kind's loss (transformers returns none then).
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
    """BERT with a classifier of whole sequences: logits (B, num_labels) from the pooler's state."""

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
        """`labels` depend on `config.problem_type`.

        They are numbers (B,) or (B, num_labels) for "regression", classes (B,) for "single_label_classification", and 0
        or 1 for each label, (B, num_labels), for "multi_label_classification". If the config names no problem type, one
        label means regression; with several labels, integers are classes and other numbers are multi-label.

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
            raise UsageError(f"labels {tuple(labels.shape)}: expected {tuple(logits.shape)}, a label for each logit")
        distance = F.mse_loss if self._problem(labels) == REGRESSION else F.binary_cross_entropy_with_logits
        loss = distance(logits, labels.view_as(logits).to(logits.dtype))
        return ClassifierOutput(loss=loss, logits=logits, hidden_states=base.hidden_states)

    def _problem(self, labels: torch.Tensor) -> str:
        if self.config.problem_type is not None:
            return str(self.config.problem_type)
        if self.config.num_labels == 1:
            return REGRESSION
        return SINGLE if labels.dtype in (torch.int64, torch.int32) else MULTI


def classified(
    head: nn.Linear, pooled: torch.Tensor, labels: torch.Tensor | None, what: str = "labels"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits (B, C), and the mean cross entropy of the classes `labels`, (B,) or (B, 1), if they are given.

    Raises:
        UsageError: labels that are not integers, not one for each row, or not a class of the head.
    """
    if labels is None:
        return head(pooled), None
    check_tensor(labels, what)
    rows = len(pooled)
    if labels.shape not in ((rows,), (rows, 1)) or labels.dtype not in (torch.int64, torch.int32):
        raise UsageError(
            f"{what} {tuple(labels.shape)} of {labels.dtype}: "
            f"expected int64 or int32 of shape {(rows,)}, a class for each row"
        )
    classes = labels.reshape(-1).long()
    loss, logits = linear_cross_entropy(pooled, head.weight, classes, bias=head.bias, return_logits=True)
    return logits, loss
