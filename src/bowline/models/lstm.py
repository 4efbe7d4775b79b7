"""The tied LSTM: the language model in which the output head first became the input embedding.

The tie: `lm_head.weight` is `lstm.wte.weight`, one `Parameter`, (V, E). Press and Wolf ("Using the Output Embedding to
Improve Language Models", 2016, arXiv 1608.05859) and Inan, Khosravi and Socher (2016, arXiv 1611.01462) found it at
once, on LSTMs: a third to a half of the parameters fewer, and a lower perplexity. logits = P h wteᵀ + bias. The head
reads E numbers, as wide as the table is; where the last layer has another width, the learned projection P comes
between (Press and Wolf's projection regularisation). Both ends add to one gradient: the head all rows, through the
softmax, the table those that were looked up. The bias belongs to the head alone.

The rest is the recipe of Merity, Keskar and Socher (2017, arXiv 1708.02182, AWD-LSTM) without weight dropping: locked
dropout, one mask for all steps of a sequence (Gal and Ghahramani, 2016, arXiv 1512.05287), after the table, between the
layers and before the head. transformers has no such model: names and keys follow its customs.
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
from bowline.models.common.blocks import (
    check_embeds,
    check_ids,
    check_tensor,
    looked_up,
)
from bowline.models.common.model_config import PreTrainedConfig, frozen
from bowline.models.common.outputs import BaseOutput
from bowline.models.common.pretrained_model import PreTrainedModel
from bowline.nn import LMHead
from bowline.nn.modules.tied_embedding import TiedEmbedding

__all__ = ["LSTMConfig", "LSTMLMHeadModel", "LSTMModel", "LSTMState", "LockedDropout"]

Pair = tuple[torch.Tensor, torch.Tensor]


@frozen
class LSTMConfig(PreTrainedConfig):
    """Zaremba's medium model of Penn Treebank (2014), as Press and Wolf tied it, unless other values are given.

    `projection`: `None` has P where `hidden_size` differs from the table's width, `True` always, `False` never: then
    the last layer is as wide as the table (AWD-LSTM).

    Example:
        >>> LSTMConfig(hidden_size=1150, embedding_size=400, num_layers=3, projection=False).layer_sizes
        ((400, 1150), (1150, 1150), (1150, 400))
    """

    model_type = "lstm"
    attribute_map: ClassVar = {"num_hidden_layers": "num_layers"}

    vocab_size: int = 10000
    hidden_size: int = 650
    embedding_size: int | None = None
    """Columns of the table and of the head; `hidden_size` where it is not given."""
    num_layers: int = 2
    projection: bool | None = None
    projection_penalty: float = 0.0
    """l of l‖P‖, added to the loss in training; 0.15 in Press and Wolf."""
    head_bias: bool = True
    embd_pdrop: float = 0.5
    hidden_pdrop: float = 0.5
    output_pdrop: float = 0.5
    initializer_range: float = 0.1
    """Weights are drawn evenly from -0.1 to 0.1, biases are zero."""

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
        """Whether P comes between the last layer and the head."""
        return self.hidden_size != self.width if self.projection is None else self.projection

    @property
    def layer_sizes(self) -> tuple[tuple[int, int], ...]:
        """What each layer reads and writes."""
        last = self.hidden_size if self.is_projected else self.width
        sizes = [self.width, *[self.hidden_size] * (self.num_layers - 1), last]
        return tuple(pairwise(sizes))


class LockedDropout(nn.Module):
    """x m / (1 - p), with one m of zeros and ones for all steps: x (B, T, D), m (B, 1, D).

    A step then loses the same features as the step before it, so that a recurrence is not fed noise of its own.

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
    """For each layer h and c, (1, B, H) both, after the tokens seen: as large after a thousand as after one.

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
        """`len(state)`, by the name that transformers gives it."""
        return len(self)

    def update(self, layers: list[Pair], steps: int) -> None:
        """What the layers hold after `steps` more tokens."""
        self.layers = layers
        self._seen += steps

    def reorder(self, rows: torch.Tensor) -> None:
        """Row i becomes what row `rows[i]` was: beams that are followed and beams that are dropped."""
        self.layers = [(h[:, rows], c[:, rows]) for h, c in self.layers]

    def detach(self) -> LSTMState:
        """Without the past's gradient, in place: truncated backpropagation carries the state over, not the graph."""
        self.layers = [(h.detach(), c.detach()) for h, c in self.layers]
        return self


class Steps:
    """Which steps of each row count, (B, T): the layers run over those alone, and the others hold what was before."""

    def __init__(self, counts: torch.Tensor) -> None:
        self.order = torch.argsort((~counts).int(), dim=1, stable=True)[..., None]  # those that count first
        self.latest = counts.cumsum(1)[..., None] - 1  # for each step, where the last that counts has gone; -1: nowhere
        self.number = counts.sum(1)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) with the steps that count first."""
        return x.gather(1, self.order.expand_as(x))

    def spread(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Each step its own again; `before` (1, B, D) is held where none has counted yet."""
        held = x.gather(1, self.latest.clamp(min=0).expand_as(x))
        return torch.where(self.latest < 0, before.transpose(0, 1), held)

    def hold(self, new: Pair, old: Pair) -> Pair:
        """The new state, and the old one for rows of which no step counts."""
        empty = (self.number == 0)[None, :, None]
        return torch.where(empty, old[0], new[0]), torch.where(empty, old[1], new[1])


class LSTMLayer(nn.RNNBase):
    """One layer of `nn.LSTM`, its parameters read at each call: torch.compile refuses `nn.LSTM` itself.

    `nn.LSTM` also keeps a second list of its parameters, which goes stale where one is put in another's place.
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
        """x (B, T, D), h and c (1, B, H) to y (B, T, H), h and c; `lengths` (B,) on the CPU end each row there."""
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
    """What both classes have: the config, the names, the draws."""

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
    """Tokens (B, T) to what the head is given, (B, T, E): the last layer's h, projected where the config says so."""

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
        """`attention_mask` (B, K), K tokens with those that `past_key_values` has seen: a step at 0 changes nothing,
        wherever it is, and gives what the step before it gave. `past_key_values` is brought up to date and returned.

        Raises:
            UsageError: ids, a mask or a state that do not fit.
        """
        x = self._embedded(input_ids, inputs_embeds)  # (B, T, E)
        length = x.shape[1]
        state = past_key_values if past_key_values is not None else LSTMState()
        before = self._before(state, x)
        steps = _steps(attention_mask, x.shape[0], len(state), length)
        keep = use_cache or past_key_values is not None
        # The last state of a row is that of its last step only if the row ends there; without a cache nobody asks.
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

    def _embedded(self, ids: torch.Tensor | None, embeds: torch.Tensor | None) -> torch.Tensor:
        if ids is not None and embeds is None:
            check_ids(ids, self.config.vocab_size)
            embeds = looked_up(self.wte, ids, self.config.embed_scale)
        elif embeds is None or ids is not None:
            raise UsageError("input_ids and inputs_embeds: expected one of them")
        check_embeds(embeds, self.config.width)
        return self.embd_drop(embeds)

    def _before(self, state: LSTMState, x: torch.Tensor) -> list[Pair]:
        if not isinstance(state, LSTMState):
            raise UsageError(
                f"past_key_values is a {type(state).__name__}, expected an LSTMState",
                help="use_cache=True returns one: past_key_values of the output",
            )
        batch = x.shape[0]
        if not state.layers:
            zeros = [x.new_zeros(1, batch, width) for _, width in self.config.layer_sizes]
            return [(zero, zero) for zero in zeros]
        if state.layers[0][0].shape[1] != batch:
            raise UsageError(
                f"past_key_values has {state.layers[0][0].shape[1]} rows and the input {batch}: expected as many",
                help="state.reorder(rows) picks and repeats rows",
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
    """The LSTM with its head: logits (B, T, V), and the loss of each next token where there are `labels`.

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
