"""AdamW (Loshchilov and Hutter, 2017) with the usual two groups: matrices decay, biases and norms do not.

The group of an embedding is a convention, and a tied matrix is both an embedding and a head. nanoGPT, Megatron and
transformers' `Trainer` decay every matrix, embeddings included; so does this file, and a tied matrix decays once.
(minGPT excluded embeddings.) Decay pulls every row towards zero at each step, including rows that no batch looked up.
In a tied matrix all rows have a gradient through the head, which counteracts the decay.

AdamW's steps have the size of the rate, whatever the size of the weights. T5's table is drawn with std 1, and its
logits are multiplied by d^-1/2. That is the same function as a table of std d^-1/2 whose looked-up rows are multiplied
by d^1/2 (Vaswani et al., 2017), but with AdamW T5's table learns d^1/2 times more slowly. T5's authors used Adafactor,
whose steps are proportional to the weights (Shazeer and Stern, 2018). `embedding_rate` makes up for that factor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import AdamW, Optimizer

from bowline.errors import UsageError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.config.head_scaling import head_scale
from bowline.nn.ties.optimizer_groups import group_of
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.ties.untying import untie_weights
from bowline.nn.tree.unique_parameters import unique_parameters
from bowline.train.loop.trainer_settings import TrainerSettings

__all__ = ["Groups", "adamw", "decay_groups", "untie"]


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The parameters with weight decay and those without, each under one name.

    `tied` lists all names of each parameter that has several; the first of them is the name used in a group. `rates`
    are the factors of the learning rate other than 1.
    """

    decayed: dict[str, nn.Parameter]
    plain: dict[str, nn.Parameter]
    tied: tuple[tuple[str, ...], ...] = ()
    rates: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        parts = []
        for title, group in (("with weight decay", self.decayed), ("without", self.plain)):
            count = sum(parameter.numel() for parameter in group.values())
            parts.append(f"{len(group)} tensor{'s' * (len(group) != 1)} of {count:,} numbers {title}")
        for names in self.tied:
            where = "with weight decay" if names[0] in self.decayed else "without"
            parts.append(f"{names[0]} (also {', '.join(names[1:])}) is one parameter, {where}")
        parts += [f"{name} learns at {rate:.3g} times the rate" for name, rate in self.rates.items()]
        return "; ".join(parts)


def decay_groups(
    model: nn.Module, embedding_rate: float = 1.0, tables: Collection[nn.Parameter] | None = None
) -> Groups:
    """Split the trainable parameters of `model`: two or more dimensions with weight decay, the others without.

    Args:
        model: the model to train.
        embedding_rate: multiplies the learning rate of `model.get_input_embeddings()`, and divides its weight decay.
        tables: the parameters to which that applies instead, as on a stage of a pipeline.

    Raises:
        UsageError: `embedding_rate` is not 1, and the model has no `get_input_embeddings()`.

    Example:
        >>> model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9)})
        >>> model["lm_head"].weight = model["wte"].weight
        >>> print(decay_groups(model))  # doctest: +NORMALIZE_WHITESPACE
        1 tensor of 36 numbers with weight decay; 1 tensor of 9 numbers without;
        wte.weight (also lm_head.weight) is one parameter, with weight decay
    """
    once = {id(parameter) for parameter in unique_parameters(model)}
    named = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) in once}
    shared: dict[str, list[str]] = {}
    for tie in find_ties(model):
        shared.setdefault(tie.source, [tie.source]).append(tie.target)
    tied = []
    for names in shared.values():
        first = [name for name in names if name in named]
        tied += [(*first, *(name for name in names if name not in first))] if first else []
    rates = {}
    if embedding_rate != 1.0:
        chosen = {id(table) for table in ([_embedding(model)] if tables is None else tables)}
        rates = {name: embedding_rate for name, parameter in named.items() if id(parameter) in chosen}
    return Groups(
        decayed={name: parameter for name, parameter in named.items() if parameter.ndim >= 2},
        plain={name: parameter for name, parameter in named.items() if parameter.ndim < 2},
        tied=tuple(tied),
        rates=rates,
    )


def _embedding(model: nn.Module) -> nn.Parameter:
    found = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(found, "weight", None)
    if not isinstance(weight, nn.Parameter):
        raise UsageError(
            f"embedding_rate: {type(model).__name__} has no get_input_embeddings() that returns its embedding",
            help="embedding_rate=1, or add that method to the model",
            argument="embedding_rate",
        )
    return weight


def adamw(groups: Groups, settings: TrainerSettings) -> AdamW:
    """Make the optimizer of these groups, fused if possible; `group["rate"]` multiplies the learning rate."""
    parts = []
    for parameters, decay in ((groups.decayed, settings.weight_decay), (groups.plain, 0.0)):
        for rate in sorted({groups.rates.get(name, 1.0) for name in parameters}):
            params = [each for each in parameters.items() if groups.rates.get(each[0], 1.0) == rate]
            for some in _by_mesh(params):
                parts.append({"params": some, "weight_decay": decay / rate, "rate": rate})
    floating = all(parameter.is_floating_point() for group in parts for _, parameter in group["params"])  # type: ignore[attr-defined]
    return AdamW(parts, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=floating)


def _by_mesh(params: list[tuple[str, nn.Parameter]]) -> Iterable[list[tuple[str, nn.Parameter]]]:
    """The parameters of each mesh of processes, and those that are whole: a fused step mixes no others."""
    meshes: dict[Any, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in params:
        held: Any = parameter
        meshes.setdefault(held.device_mesh if is_dtensor(parameter) else None, []).append((name, parameter))
    return meshes.values()


def untie(model: nn.Module, optimizer: Optimizer) -> None:
    """Untie the model during a run (`untie_weights`), so that the head's steps keep their effect on the logits.

    Untied, T5's head absorbs the factor of the logits and is smaller than the table by that factor. Its learning rate
    is scaled by the same factor.
    """
    scale = head_scale(model)
    if not untie_weights(model, optimizer=optimizer) or scale == 1.0:
        return
    head = model.get_output_embeddings().weight  # type: ignore[operator]
    group = group_of(optimizer, head)
    if group is None:  # the head is not trained
        return
    at = next(at for at, parameter in enumerate(group["params"]) if parameter is head)
    own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    own["params"] = [(group["param_names"].pop(at), group["params"].pop(at))]
    optimizer.add_param_group(own | {"rate": group["rate"] * scale, "weight_decay": group["weight_decay"] / scale})
