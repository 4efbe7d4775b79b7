"""The tied LSTM: the language model in which the output head first became the input embedding.

The tie: `lm_head.weight` is `lstm.wte.weight`, one `Parameter`, (V, E). Press and Wolf ("Using the Output Embedding to
Improve Language Models", 2016, arXiv 1608.05859) and Inan, Khosravi and Socher (2016, arXiv 1611.01462) found it at
the same time, on LSTMs: a third to a half fewer parameters, and a lower perplexity. logits = P h wteᵀ + bias. The head
reads E numbers, the width of the table. If the last layer has another width, the learned projection P maps it to E
(Press and Wolf's projection regularisation). Head and table add to one gradient: the head to all rows, through the
softmax, the table to the rows that were looked up. The bias belongs to the head alone.

The rest is the recipe of Merity, Keskar and Socher (2017, arXiv 1708.02182, AWD-LSTM) without weight dropping: locked
dropout, one mask for all steps of a sequence (Gal and Ghahramani, 2016, arXiv 1512.05287), after the table, between the
layers and before the head. transformers has no such model; names and keys follow its conventions.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from bowline.errors import UsageError
from bowline.models.causal_lm import CausalLM
from bowline.models.common.input_checks import check_tensor
from bowline.models.common.input_embeddings import token_embeddings
from bowline.models.common.model_config import PreTrainedConfig, frozen
from bowline.models.common.outputs import BaseOutput
from bowline.models.common.pretrained_model import PreTrainedModel
from bowline.nn import LMHead
from bowline.nn.modules.tied_embedding import TiedEmbedding

__all__ = ["LSTMConfig", "LSTMLMHeadModel", "LSTMModel", "LSTMState", "LockedDropout"]

Pair = tuple[torch.Tensor, torch.Tensor]


@frozen
class LSTMConfig(PreTrainedConfig):
    """The configuration of the LSTM. The defaults are Zaremba's medium model of Penn Treebank (2014), tied.

    Press and Wolf tied that model. `projection` says whether the model has P: `True` always, `False` never, `None` only
    if `hidden_size` differs from the table's width. Without P the last layer is as wide as the table (AWD-LSTM).

    Example:
        >>> LSTMConfig(hidden_size=1150, embedding_size=400, num_layers=3, projection=False).layer_sizes
        ((400, 1150), (1150, 1150), (1150, 400))
    """

    model_type = "lstm"
    attribute_map: ClassVar = {"num_hidden_layers": "num_layers"}

    vocab_size: int = 10000
    hidden_size: int = 650
    embedding_size: int | None = None
    """Columns of the table and of the head; `hidden_size` if `None`."""
    num_layers: int = 2
    projection: bool | None = None
    projection_penalty: float = 0.0
    """The factor l of the penalty l‖P‖ that is added to the loss in training; 0.15 in Press and Wolf."""
    head_bias: bool = True
    embd_pdrop: float = 0.5
    hidden_pdrop: float = 0.5
    output_pdrop: float = 0.5
    initializer_range: float = 0.1
    """Weights are drawn uniformly between minus this number and this number; biases are zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_depth("num_layers")
        self.check_numbers("initializer_range", "projection_penalty")
        self.check_flags("head_bias")
        self.check_sizes("hidden_size", *(["embedding_size"] if self.embedding_size is not None else []))
        for name in ("embd_pdrop", "hidden_pdrop", "output_pdrop"):
            if not isinstance(getattr(self, name), (int, float)) or not 0 <= getattr(self, name) < 1:
                self.refuse(name, "a share from 0 to less than 1")
        if self.projection not in (None, True, False):
            self.refuse("projection", "true, false or null")

    @property
    def width(self) -> int:
        """Columns of the table and of the head."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def is_projected(self) -> bool:
        """True if the projection P lies between the last layer and the head."""
        return self.hidden_size != self.width if self.projection is None else self.projection

    @property
    def layer_sizes(self) -> tuple[tuple[int, int], ...]:
        """The input and output width of each layer."""
        last = self.hidden_size if self.is_projected else self.width
        sizes = [self.width, *[self.hidden_size] * (self.num_layers - 1), last]
        return tuple(pairwise(sizes))


class LockedDropout(nn.Module):
    """Dropout with one mask for all steps of a sequence: x m / (1 - p), with x (B, T, D) and m (B, 1, D).

    Every step loses the same features, so that dropout adds no noise from step to step to the recurrence.

    Example:
        >>> x = LockedDropout(0.5)(torch.ones(2, 7, 4))
        >>> bool((x == x[:, :1]).all()), set(x.flatten().tolist()) <= {0.0, 2.0}
        (True, True)
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.p:
            return x
        return x * F.dropout(x.new_ones(x.shape[0], 1, x.shape[2]), self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class LSTMState:
    """The state h and c of each layer, both (1, B, H), after the tokens seen. Its size does not grow with them.

    Example:
        >>> model = LSTMModel(LSTMConfig(vocab_size=9, hidden_size=4)).eval()
        >>> state = model(torch.tensor([[1, 2, 3]]), use_cache=True).past_key_values
        >>> len(state), len(model(torch.tensor([[4]]), past_key_values=state).past_key_values)
        (3, 4)
    """

    def __init__(self) -> None:
        self.layers: list[Pair] = []
        self._seen = 0

    def __len__(self) -> int:
        """The number of tokens seen."""
        return self._seen

    def get_seq_length(self) -> int:
        """Return `len(state)`, under transformers' name for it."""
        return len(self)

    def update(self, layers: list[Pair], steps: int) -> None:
        """Store the state of the layers after `steps` more tokens."""
        self.layers = layers
        self._seen += steps

    def reorder(self, rows: torch.Tensor) -> None:
        """Row i takes the state of the former row `rows[i]`: beam search keeps some beams and drops others."""
        self.layers = [(h[:, rows], c[:, rows]) for h, c in self.layers]

    def detach(self) -> LSTMState:
        """Detach the state from its graph, in place, for truncated backpropagation through time."""
        self.layers = [(h.detach(), c.detach()) for h, c in self.layers]
        return self


class Steps:
    """The steps of each row that count, (B, T): layers run over those, other steps keep the state before them."""

    def __init__(self, counts: torch.Tensor) -> None:
        self.order = torch.argsort((~counts).int(), dim=1, stable=True)[..., None]  # the steps that count come first
        self.latest = counts.cumsum(1)[..., None] - 1  # index of the last counted step; -1: none
        self.number = counts.sum(1)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Move the steps that count to the front of each row, (B, T, D)."""
        return x.gather(1, self.order.expand_as(x))

    def spread(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Move each step back to its place; steps before the first one that counts take `before` (1, B, D)."""
        held = x.gather(1, self.latest.clamp(min=0).expand_as(x))
        return torch.where(self.latest < 0, before.transpose(0, 1), held)

    def hold(self, new: Pair, old: Pair) -> Pair:
        """Return the new state, but the old one for rows in which no step counts."""
        empty = (self.number == 0)[None, :, None]
        return torch.where(empty, old[0], new[0]), torch.where(empty, old[1], new[1])


class LSTMLayer(nn.RNNBase):
    """One LSTM layer that reads its parameters at each call, because torch.compile refuses `nn.LSTM` itself.

    `nn.LSTM` also keeps a second list of its parameters, which goes stale when a parameter is replaced.
    """

    weight_ih_l0: torch.Tensor
    weight_hh_l0: torch.Tensor
    bias_ih_l0: torch.Tensor
    bias_hh_l0: torch.Tensor

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__("LSTM", input_size, hidden_size, batch_first=True)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Map x (B, T, D), h and c (1, B, H) to y (B, T, H), h and c. `lengths` (B,), on the CPU, end the rows."""
        weights = [self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0]
        if lengths is None:
            return torch.lstm(x, (h, c), weights, True, 1, 0.0, self.training, False, True)
        rows = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        there, back = rows.sorted_indices, rows.unsorted_indices
        before = h[:, there], c[:, there]
        data, h, c = torch.lstm(rows.data, rows.batch_sizes, before, weights, True, 1, 0.0, self.training, False)
        packed = PackedSequence(data, rows.batch_sizes, there, back)
        y, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
        return y, h[:, back], c[:, back]


class LSTMPreTrainedModel(PreTrainedModel):
    """The base of both LSTM classes: config class, names in checkpoints, initialization."""

    config_class = LSTMConfig
    base_model_prefix = "lstm"

    def _init_weights(self, module: nn.Module) -> None:
        bound = self.config.initializer_range
        if isinstance(module, (nn.Embedding, nn.Linear, LSTMLayer)):
            for name, parameter in module.named_parameters(recurse=False):
                if name.startswith("bias"):
                    parameter.zero_()
                else:
                    parameter.uniform_(-bound, bound)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()


class LSTMModel(LSTMPreTrainedModel):
    """The LSTM without a head: tokens (B, T) to the head's input (B, T, E), projected by P if the config has it."""

    input_embeddings = "wte"

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        self.wte = TiedEmbedding(config.vocab_size, config.width, padding_idx=config.pad_token_id)
        self.embd_drop = LockedDropout(config.embd_pdrop)
        self.layers = nn.ModuleList(LSTMLayer(*sizes) for sizes in config.layer_sizes)
        self.hidden_drop = LockedDropout(config.hidden_pdrop)
        self.output_drop = LockedDropout(config.output_pdrop)
        self.projection = nn.Linear(config.hidden_size, config.width, bias=False) if config.is_projected else None
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: LSTMState | None = None,
        use_cache: bool = False,
        output_hidden_states: bool = False,
    ) -> BaseOutput:
        """`attention_mask` is (B, K), where K includes the tokens that `past_key_values` has seen.

        A step whose mask is 0 leaves the state as it is, wherever it stands, and repeats the output of the step before
        it. `past_key_values` is updated in place and returned.

        Raises:
            UsageError: ids, a mask or a state that do not fit.
        """
        x = self._embedded(input_ids, inputs_embeds)  # (B, T, E)
        length = x.shape[1]
        state = past_key_values if past_key_values is not None else LSTMState()
        before = self._before(state, x)
        steps = _steps(attention_mask, x.shape[0], len(state), length)
        keep = use_cache or past_key_values is not None
        # A row must end at its last counted step for its final state to be right; only a cache needs that state.
        lengths = steps.number.clamp(min=1).cpu() if steps is not None and keep and length > 1 else None
        states = [x]
        after: list[Pair] = []
        x = x if steps is None else steps.gather(x)
        for layer, old in zip(self.layers, before, strict=True):
            x, h, c = self._run(layer, self.hidden_drop(x) if after else x, *old, lengths)
            after.append(steps.hold((h, c), old) if steps is not None and keep else (h, c))
            if output_hidden_states or len(after) == len(before):
                states.append(x if steps is None else steps.spread(x, old[0]))
        x = self.output_drop(states[-1])
        states[-1] = x = x if self.projection is None else self.projection(x)
        if keep:
            state.update(after, length)
        return BaseOutput(
            last_hidden_state=x,
            past_key_values=state if keep else None,
            hidden_states=tuple(states) if output_hidden_states else None,
        )

    def _embedded(self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None) -> torch.Tensor:
        embeds = token_embeddings(
            self.wte,
            input_ids,
            inputs_embeds,
            vocab_size=self.config.vocab_size,
            width=self.config.width,
            scale=self.config.embed_scale,
        )
        return self.embd_drop(embeds)

    def _before(self, state: LSTMState, x: torch.Tensor) -> list[Pair]:
        if not isinstance(state, LSTMState):
            raise UsageError(
                f"past_key_values is a {type(state).__name__}, expected an LSTMState",
                help="pass the past_key_values of an output that was computed with use_cache=True",
            )
        batch = x.shape[0]
        if not state.layers:
            zeros = [x.new_zeros(1, batch, width) for _, width in self.config.layer_sizes]
            return [(zero, zero) for zero in zeros]
        if state.layers[0][0].shape[1] != batch:
            raise UsageError(
                f"past_key_values has {state.layers[0][0].shape[1]} rows and the input {batch}: expected equal numbers",
                help="select or repeat rows with state.reorder(rows)",
            )
        return state.layers


def _steps(mask: torch.Tensor | None, batch: int, past: int, length: int) -> Steps | None:
    if mask is None:
        return None
    check_tensor(mask, "attention_mask")
    if mask.shape != (batch, past + length):
        raise UsageError(
            f"attention_mask {tuple(mask.shape)}: expected {(batch, past + length)}",
            help="with past_key_values the mask counts the tokens in the state too",
        )
    return Steps(mask[:, past:] != 0)


class LSTMLMHeadModel(LSTMPreTrainedModel, CausalLM):
    """The LSTM with its head: logits (B, T, V), and the next-token loss if `labels` are given.

    Example:
        >>> model = LSTMLMHeadModel(LSTMConfig(vocab_size=9, hidden_size=6, embedding_size=4))
        >>> model.lm_head.weight is model.lstm.wte.weight, tuple(model.lstm.projection.weight.shape)
        (True, (4, 6))
        >>> model(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 9])
    """

    ties: ClassVar = {"lm_head.weight": "lstm.wte.weight"}
    input_embeddings = "lstm.wte"

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__(config)
        self.lstm = LSTMModel(config)
        self.lm_head = LMHead(config.width, config.vocab_size, bias=config.head_bias)
        self.post_init()

    def _penalised(self, loss: torch.Tensor) -> torch.Tensor:
        if self.config.projection_penalty and self.lstm.projection is not None:
            return loss + self.config.projection_penalty * self.lstm.projection.weight.norm()
        return loss
