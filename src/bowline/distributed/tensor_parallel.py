"""Tensor parallelism for tied models: which modules to split along which axis, and the tied matrix by its rows."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from bowline.distributed.sharding_check import check_before_sharding
from bowline.errors import TieError, UsageError
from bowline.functional.row_shard import is_dtensor
from bowline.nn.init.fused_matrices import is_conv1d
from bowline.nn.modules.tied_loss import TiedLoss, use_tied_loss
from bowline.nn.ties.declared_ties import declared_ties
from bowline.nn.ties.shared_parameters import find_ties
from bowline.nn.ties.tie_check import check_ties
from bowline.nn.tree.sharding import placement_of
from bowline.nn.tree.slots import Slot, expect_module, slots
from bowline.nn.tree.table_slots import is_lookup
from bowline.tie import Tie

__all__ = ["apply_tensor_parallel", "tensor_parallel_plan"]

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""transformers' names: the outputs of a Linear are split; its inputs; a parameter that split heads share."""
LAYERS: Mapping[str, Mapping[str, str]] = {
    "bert": {
        "*.attention.self.query": COLUMNS,
        "*.attention.self.key": COLUMNS,
        "*.attention.self.value": COLUMNS,
        "*.attention.output.dense": ROWS,
        "*.intermediate.dense": COLUMNS,
        "*.output.dense": ROWS,
    },
    "gpt2": {"*.mlp.c_fc": COLUMNS, "*.mlp.c_proj": ROWS},
    "t5": {"*.DenseReluDense.wi": COLUMNS, "*.DenseReluDense.wi_?": COLUMNS, "*.DenseReluDense.wo": ROWS},
    "opt": {"*.fc1": COLUMNS, "*.fc2": ROWS},
}
"""By `model_type`, for classes that state no plan. The attention of T5 and OPT counts on all heads, and GPT-2's has one
matrix for query, key and value, so these stay whole."""
ATTENTION = ("attention", "self_attn")


def tensor_parallel_plan(model: nn.Module) -> dict[str, Any]:
    """A plan for torch's `parallelize_module`: a style for each module that is split, both ends of the tie by rows.

    The layers are those of the model's own `tp_plan` (transformers' Llama, Qwen, Gemma, Mistral), or BERT's, and the
    feed-forward layers of GPT-2, T5 and OPT. Of other models only the vocabulary is split: the embedding, and the
    head, whose logits stay split (transformers' plan gathers them). `parallelize_module` alone would make two matrices
    of the tie; `apply_tensor_parallel` makes one.

    Raises:
        TieError: a tie that does not hold, or a style in the model's own plan that torch does not have.

    Example:
        >>> from bowline.models import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1, n_positions=8))
        >>> for name, style in tensor_parallel_plan(model).items():
        ...     print(name, type(style).__name__)
        lm_head ColwiseParallel
        transformer.wte RowwiseParallel
        transformer.h.0.mlp.c_fc ColwiseConv1D
        transformer.h.0.mlp.c_proj RowwiseConv1D
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from bowline.distributed.conv1d_styles import ColwiseConv1D, RowwiseConv1D

    expect_module(model)
    plan: dict[str, Any] = {}
    for end in _ends(model).values():
        path = end.name.rpartition(".")[0]
        plan[path] = (
            RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
            if is_lookup(end.module)
            else ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        )
    styles = {COLUMNS: (ColwiseParallel, ColwiseConv1D), ROWS: (RowwiseParallel, RowwiseConv1D)}
    for name, style in _layer_styles(model).items():
        if style in styles:
            plan[name] = styles[style][is_conv1d(model.get_submodule(name))]()
    return plan


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> TiedLoss:
    """Splits `model` in place over a one-dimensional mesh by `tensor_parallel_plan`; the tie stays one parameter.

    Every process has to call this, with the same model and afterwards the same batches. The tied matrix becomes one
    DTensor, split by its rows, evenly or not; lookups and the loss use it without gathering logits (`use_tied_loss`,
    whose handle is returned). Build the optimizer afterwards. Its parameters are DTensors and plain tensors:
    `foreach=False`, or a group for each kind, keeps torch's fast paths from mixing the two. With FSDP2, call
    `fully_shard` afterwards, on another dimension of the mesh.

    Attention is split where every process gets whole heads, and stays whole otherwise.

    Raises:
        TieError: a tie that does not hold, a vocabulary with fewer rows than processes, processes that disagree, or a
            model that is sharded already.
        UsageError: a mesh of several dimensions, or a model without a head that `use_tied_loss` can take.
    """
    if getattr(mesh, "ndim", None) != 1:
        raise UsageError(
            f"mesh has {getattr(mesh, 'ndim', 'no')} dimensions, expected one",
            help='give the dimension of tensor parallelism, as mesh["tp"]',
            argument="mesh",
        )
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    check_before_sharding(model, mesh)
    ends = _ends(model)
    for name, end in ends.items():
        if is_dtensor(end.tensor):
            raise TieError(
                f"{name}: is {placement_of(end.tensor)} already, expected a whole matrix",
                help="call apply_tensor_parallel once, and before fully_shard",
            )
    plan = tensor_parallel_plan(model)
    for name in ends:
        plan.pop(name.rpartition(".")[0], None)
    whole = _unsplit_attention(model, mesh.size())
    if whole:
        plan = {name: style for name, style in plan.items() if not set(ATTENTION) & set(name.split("."))}
    loss = use_tied_loss(model)
    split: dict[int, nn.Parameter] = {}
    for end in ends.values():
        held = end.tensor
        if id(held) not in split:
            spread = distribute_tensor(held.detach(), mesh, [Shard(0)])
            split[id(held)] = nn.Parameter(spread, requires_grad=held.requires_grad)
    for end, made in [(end, split[id(end.tensor)]) for end in ends.values()]:
        end.put(made)
    if plan:
        parallelize_module(model, mesh, plan)
    if not whole:
        for name, style in _layer_styles(model).items():
            if style == SUMMED:
                _sum_gradients(model.get_submodule(name), mesh)
    check_ties(model).raise_if_broken()
    return loss


def _ends(model: nn.Module) -> dict[str, Slot]:
    """The places of the vocabulary's matrices: of the ties, or of the embedding and the head if they are untied."""
    known = slots(model)
    found = find_ties(model).ties
    missing = [tie for tie in declared_ties(model) if tie not in found and not _connected(tie, known)]
    if missing:
        raise TieError(
            f"{missing[0]}: is declared, and the ends are not one parameter",
            help="bowline.tie_weights(model), before it is split",
        )
    names = dict.fromkeys(name for tie in found for name in (tie.target, tie.source) if known[name].tensor.ndim == 2)
    if not names:
        get = (getattr(model, f"get_{end}_embeddings", None) for end in ("input", "output"))
        modules = [module for call in get if call is not None and (module := call()) is not None]
        names = dict.fromkeys(
            slot.name for slot in known.values() if slot.attribute == "weight" and slot.module in modules
        )
    if not names:
        raise UsageError(
            f"{type(model).__name__}: has no tie and no embedding that it names, expected a language model",
            argument="model",
        )
    return {name: known[name] for name in sorted(names)}


def _connected(tie: Tie, known: Mapping[str, Slot]) -> bool:
    return tie.target in known and tie.source in known and known[tie.target].tensor is known[tie.source].tensor


def _layer_styles(model: nn.Module) -> dict[str, str]:
    """The style of each module in the layers: by the model's own plan, or by `LAYERS`."""
    wanted = getattr(model, "_tp_plan", None) or LAYERS.get(_model_type(model), {})
    heads = {id(end.module) for end in _ends(model).values()}
    found = {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in wanted.items() if _names(pattern, name)), None)
        if style is None or id(module) in heads:
            continue
        if style not in (COLUMNS, ROWS, SUMMED):
            raise TieError(
                f"{name}: the model's tp_plan has the style {style!r}, expected {COLUMNS}, {ROWS} or {SUMMED}",
                help="split it by transformers' own DistributedConfig",
            )
        if style == SUMMED or isinstance(module, nn.Linear) or is_conv1d(module):
            found[name] = style
    return found


def _names(pattern: str, name: str) -> bool:
    return fnmatch.fnmatchcase(f".{name}", pattern if pattern.startswith("*") else f".{pattern}")


def _model_type(model: nn.Module) -> str:
    config: Any = getattr(model, "config", None)
    stated: Any = config.get("model_type") if isinstance(config, Mapping) else getattr(config, "model_type", None)
    return str(stated)


def _unsplit_attention(model: nn.Module, processes: int) -> bool:
    """Whether some process would get a part of a head."""
    config: Any = getattr(model, "config", None)
    config = getattr(config, "get_text_config", lambda: config)()
    counts = [getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")]
    return any(count is not None and count % processes for count in counts)


def _sum_gradients(module: nn.Module, mesh: DeviceMesh) -> None:
    """Sums the gradients of parameters that each process uses for its own heads.

    During the forward pass the module finds, in place of each parameter, a tensor whose gradient is summed. A hook of
    the parameter itself would be lost when `fully_shard` replaces the parameter.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    def before(module: nn.Module, arguments: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            whole = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
            module.__dict__[name] = whole.to_local(grad_placements=[Partial()])

    def after(module: nn.Module, arguments: object, output: object) -> None:
        for name in module._parameters:
            module.__dict__.pop(name, None)

    for part in module.modules():
        part.register_forward_pre_hook(before)
        part.register_forward_hook(after, always_call=True)
