"""What each process runs: losses, lookups and a model whose tied matrix is split over the processes by its rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from bowline.distributed import apply_tensor_parallel
from bowline.errors import BowlineError
from bowline.functional.loss import AdapterTerms, chosen_backend, linear_cross_entropy
from bowline.functional.loss.logits import linear_logits
from bowline.functional.row_shard import RowShard
from bowline.functional.tied_lookup import tied_embedding
from bowline.nn import use_tied_loss
from tests.distributed.models import built
from tests.distributed.process_group import joined

WIDTH, LEAD = 16, (3, 7)
FIRST = 26
"""Rows of the first process, of 51; of 50 it has 25."""
OPTIONS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"backend": "chunked"},
    "logits": {"backend": "logits"},
    "reference": {"backend": "reference"},
    "scale": {"logit_scale": 0.3},
    "softcap": {"softcap": 2.0, "backend": "chunked"},
    "smoothing": {"label_smoothing": 0.1, "logit_scale": 0.7},
    "smoothing and softcap": {"label_smoothing": 0.1, "softcap": 2.0},
    "smoothing alone": {"label_smoothing": 1.0},
    "smoothing and masked": {"label_smoothing": 0.2, "mask_ids": [0, 30, 7]},
    "smoothing, softcap, masked": {"label_smoothing": 0.2, "softcap": 2.0, "mask_ids": [0, 30, 7], "logit_scale": 2.0},
    "z_loss": {"z_loss": 0.01, "backend": "chunked"},
    "class_weight": {"class_weight": True},
    "class_weight, sum": {"class_weight": True, "reduction": "sum", "label_smoothing": 0.1},
    "masked": {"mask_ids": [1, 2, 40], "backend": "chunked"},
    "first process masked": {"mask_ids": list(range(FIRST)), "label_smoothing": 0.1},
    "second process masked": {"mask_ids": list(range(25, 50)), "return_logits": True, "z_loss": 0.1},
    "ignored is a token": {"ignore_index": 3},
    "ignored is a token of the second": {"ignore_index": 29, "backend": "chunked"},
    "all ignored": {"labels": -100},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none", "backend": "chunked"},
    "lse": {"return_lse": True, "reduction": "none"},
    "lse of a mean": {"return_lse": True, "backend": "chunked"},
    "logits returned": {"return_lse": True, "return_logits": True, "mask_ids": [5]},
    "whole bias": {"bias": "plain"},
    "replicated bias": {"bias": "replicate", "label_smoothing": 0.1},
    "split bias": {"bias": "shard", "label_smoothing": 0.1, "softcap": 3.0},
    "first process masked, with a bias": {"mask_ids": list(range(FIRST)), "bias": "plain"},
    "all at once": {
        "bias": "plain",
        "logit_scale": 0.7,
        "softcap": 4.0,
        "label_smoothing": 0.1,
        "z_loss": 0.01,
        "class_weight": True,
        "mask_ids": [0, 45],
        "return_lse": True,
        "ignore_index": 9,
    },
    "replicated hidden": {"hidden": Replicate()},
    "hidden split by batch": {"hidden": Shard(0)},
    "hidden split by sequence": {"hidden": Shard(1), "backend": "chunked", "bias": "plain"},
}
"""Arguments of `linear_cross_entropy`, and how bias and hidden are given; labels: all the same."""
SIZES = (51, 50)
PLANS: Mapping[str, Any] = {
    "without the head": {},
    "split logits": {"lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)},
    "gathered logits": {"lm_head": ColwiseParallel(output_layouts=Replicate())},
}
IDS = torch.tensor([[4, 30, 4, 12, 30, 50], [0, 25, 26, 49, 12, 4]])
PADDINGS = (None, 0, 4, 30, -1)


def arguments(size: int, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """hidden, weight, labels and the options of a case, on one process."""
    torch.manual_seed(len(name))
    options = dict(OPTIONS[name])
    options.pop("hidden", None)
    hidden, weight = torch.randn(*LEAD, WIDTH), torch.randn(size, WIDTH)
    if options.get("bias"):
        options["bias"] = torch.randn(size)
    if options.get("class_weight"):
        options["class_weight"] = torch.rand(size)
    allowed = torch.tensor([token for token in range(size) if token not in options.get("mask_ids", ())])
    labels = allowed[torch.randint(len(allowed), LEAD)]
    labels[0, 2] = options.get("ignore_index", -100)
    if "labels" in options:
        labels = torch.full(LEAD, options.pop("labels"))
    return hidden, weight, labels, options


def results(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: dict[str, Any]) -> list[Any]:
    """What the loss returns, then the gradients of hidden, weight and bias, of a sum that uses all of it."""
    leaves = [one.requires_grad_() for one in (hidden, weight, options.get("bias")) if one is not None]
    found = linear_cross_entropy(hidden, weight, labels, **options)
    returned = [whole(one) for one in (found if isinstance(found, tuple) else (found,))]
    total = sum(((one.masked_fill(one == -torch.inf, 0.0)).cos().sum() for one in returned[1:]), 2 * returned[0].sum())
    total.backward()
    return [one.detach() for one in returned] + [whole(leaf.grad) for leaf in leaves]


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except (BowlineError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def split(tensor: torch.Tensor, mesh: DeviceMesh) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(tensor, mesh, [Shard(0)]))


def loss_case(size: int, name: str, mesh: DeviceMesh) -> list[Any]:
    hidden, weight, labels, options = arguments(size, name)
    placement = OPTIONS[name].get("hidden")
    if placement is not None:
        hidden = distribute_tensor(hidden, mesh, [placement])
    given = OPTIONS[name].get("bias")
    if given in ("replicate", "shard"):
        options["bias"] = distribute_tensor(options["bias"], mesh, [Shard(0) if given == "shard" else Replicate()])
    matrix = split(weight, mesh)
    found = results(hidden, matrix, labels, options)
    grad: Any = matrix.grad
    assert tuple(grad.placements) == (Shard(0),), grad
    if placement is not None:
        given_back: Any = hidden.grad
        assert tuple(given_back.placements) == (placement,), given_back
    return found


class Sent(TorchDispatchMode):
    """Counts the bytes that go into collectives, by operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            first = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.bytes.append((str(func).split(".")[1].strip("_"), sum(one.nbytes for one in first)))
        return func(*args, **(kwargs or {}))


def communication(size: int, mesh: DeviceMesh, **options: Any) -> dict[str, Any]:
    hidden, weight = torch.randn(*LEAD, WIDTH, requires_grad=True), split(torch.randn(size, WIDTH), mesh)
    labels = torch.zeros(LEAD, dtype=torch.int64)
    with Sent() as forward:
        loss = linear_cross_entropy(hidden, weight, labels, **options)
    with Sent() as backward:
        loss.backward()
    return {"forward": forward.bytes, "backward": backward.bytes}


def logits_alone(mesh: DeviceMesh) -> list[torch.Tensor]:
    """Logits with every option and a bias, in full, and the gradients that they give."""
    hidden, weight, _, _ = arguments(51, "plain")
    hidden.requires_grad_()
    bias = torch.linspace(-1, 1, 51, requires_grad=True)
    found = linear_logits(hidden, split(weight, mesh), bias=bias, logit_scale=0.5, softcap=2.0, mask_ids=[1, 40])
    whole_logits = whole(found)
    whole_logits.masked_fill(whole_logits.isinf(), 0.0).square().sum().backward()
    assert hidden.grad is not None
    assert bias.grad is not None
    return [whole_logits.detach(), hidden.grad, bias.grad]


def models_logits(name: str, mesh: DeviceMesh) -> list[torch.Tensor]:
    """Logits that Bowline's own model gives without labels, while it is split, and before."""
    model: Any = built(name).eval()
    ids: dict[str, Any] = {"input_ids": torch.arange(1, 9)[None]}
    if name == "t5":
        ids["decoder_input_ids"] = ids["input_ids"]
    with torch.no_grad():
        before = model(**ids).logits
        apply_tensor_parallel(model, mesh)
        return [whole(model(**ids).logits), before]


def lookup(padding_idx: int | None, mesh: DeviceMesh, spread: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)
    weight, factor = split(torch.randn(51, WIDTH), mesh), torch.randn(*IDS.shape, WIDTH)
    ids = distribute_tensor(IDS, mesh, [Replicate()]) if spread else IDS
    rows = tied_embedding(ids, weight, padding_idx)
    assert isinstance(rows, DTensor) == spread
    (whole(rows) * factor).sum().backward()
    return [whole(rows).detach(), whole(weight.grad)]


def both_ends(mesh: DeviceMesh, backend: str) -> list[torch.Tensor]:
    torch.manual_seed(2)
    weight = split(torch.randn(51, WIDTH), mesh)
    rows = tied_embedding(IDS, weight, 4)
    first = RowShard.of(weight).part()
    loss = linear_cross_entropy(rows.tanh(), weight, IDS.flip(0), backend=backend)
    assert RowShard.of(weight).part() is first, "both ends have one local part"
    loss.backward()
    return [loss.detach(), whole(weight.grad)]


def compiled(mesh: DeviceMesh) -> list[Any]:
    """As the case "plain", from a function that torch compiles."""
    hidden, weight, labels, _ = arguments(51, "plain")
    leaves = hidden.requires_grad_(), split(weight, mesh)
    loss = torch.compile(lambda one, other: linear_cross_entropy(one, other, labels), backend="aot_eager")(*leaves)
    (2 * loss).backward()
    return [loss.detach(), *(whole(leaf.grad) for leaf in leaves)]


def twice(mesh: DeviceMesh) -> list[torch.Tensor]:
    """The gradients of two steps; the first step's loss, and so its graph, is kept."""
    torch.manual_seed(3)
    weight, kept, gradients = split(torch.randn(51, WIDTH), mesh), [], []
    for _ in range(2):
        kept.append(linear_cross_entropy(tied_embedding(IDS, weight), weight, IDS))
        kept[-1].backward()
        gradients.append(whole(weight.grad))
        weight.grad = None
    return gradients


def without_positions(mesh: DeviceMesh) -> list[torch.Tensor]:
    hidden, weight = torch.ones(0, WIDTH, requires_grad=True), split(torch.ones(51, WIDTH), mesh)
    loss = linear_cross_entropy(hidden, weight, torch.zeros(0, dtype=torch.int64), label_smoothing=0.1)
    loss.backward()
    return [loss.detach(), whole(weight.grad)]


class Widest(TorchDispatchMode):
    """The most numbers of a tensor in memory whose last axis is the vocabulary."""

    def __init__(self, size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size, self.numbers = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (list, tuple)) else [found]:
            if type(one) is torch.Tensor and one.device.type != "meta" and one.ndim and one.shape[-1] == self.size:
                self.numbers = max(self.numbers, one.numel())
        return found


def model_case(plan: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    model: Any = built("llama")
    ids = torch.randint(1, 51, (3, 9), generator=torch.Generator().manual_seed(3))
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    parallelize_module(model, mesh, {"model.embed_tokens": table, **plan})
    model.lm_head.weight = model.model.embed_tokens.weight
    handle = use_tied_loss(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with Widest(51) as widest:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    status = handle.status
    with torch.no_grad(), Widest(51) as asked:
        logits = model(input_ids=ids).logits
        logits = (logits.full_tensor() if hasattr(logits, "full_tensor") else logits) + 0
    return {
        "ids": ids,
        "losses": losses,
        "widest": widest.numbers,
        "fallbacks": status.fallbacks,
        "parameters": {name: whole(parameter).detach() for name, parameter in model.named_parameters()},
        "logits": logits,
        "widest asked for": asked.numbers,
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
    }


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    rank = distributed.get_rank()
    hidden, labels, weight = torch.ones(4, 6), torch.zeros(4, dtype=torch.int64), torch.ones(8, 6)
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    both = distribute_tensor(weight, mesh, [Shard(0)])
    elsewhere = distribute_tensor(hidden, square, [Shard(0), Shard(0)])
    terms = AdapterTerms(left=torch.ones(4, 1), right=torch.ones(8, 1))

    def loss(matrix: torch.Tensor, given: torch.Tensor = labels, **options: Any) -> Callable[[], object]:
        return lambda: linear_cross_entropy(hidden, matrix, given, **options)

    calls: dict[str, Callable[[], object]] = {
        "columns": loss(distribute_tensor(weight, mesh, [Shard(1)])),
        "partial": loss(DTensor.from_local(weight, mesh, [Partial()])),
        "replicated": loss(distribute_tensor(weight, mesh, [Replicate()])),
        "two axes": loss(distribute_tensor(weight, square, [Shard(0), Shard(0)])),
        "no rows": lambda: linear_cross_entropy(hidden, distribute_tensor(weight[:1], mesh, [Shard(0)]), labels),
        "adapters": loss(both, adapters=terms),
        "backend": loss(both, backend="torch"),
        "label": loss(both, torch.full((4,), 8)),
        "labels differ": loss(both, labels + rank),
        "numbers of labels differ": lambda: linear_cross_entropy(hidden[: 4 - rank], both, labels[: 4 - rank]),
        "another mesh": lambda: linear_cross_entropy(elsewhere, both, labels),
        "ids differ": lambda: tied_embedding(labels + rank, both),
        "no such id": lambda: tied_embedding(labels + 8, both),
        "negative id": lambda: tied_embedding(labels - 1, both),
        "lookup of columns": lambda: tied_embedding(labels, distribute_tensor(weight, mesh, [Shard(1)])),
    }
    return {name: said(call) for name, call in calls.items()}


def main() -> None:
    with joined():
        out, rank = Path(sys.argv[1]), int(os.environ["RANK"])
        mesh = init_device_mesh("cpu", (2,))
        found: dict[str, Any] = {
            "losses": {(size, name): loss_case(size, name, mesh) for size in SIZES for name in OPTIONS},
            "rows": len(RowShard.of(split(torch.ones(51, WIDTH), mesh)).part()),
            "backend": chosen_backend(torch.ones(2, WIDTH), split(torch.ones(51, WIDTH), mesh)),
            "sent": {size: communication(size, mesh) for size in (50, 5000)},
            "sent, smoothed": communication(50, mesh, label_smoothing=0.1, z_loss=0.1, softcap=2.0),
            "lookups": {padding: lookup(padding, mesh) for padding in PADDINGS},
            "spread ids": lookup(30, mesh, spread=True),
            "logits": logits_alone(mesh),
            "families": {name: models_logits(name, mesh) for name in ("gpt2", "bert", "t5")},
            "both ends": {backend: both_ends(mesh, backend) for backend in ("chunked", "logits", "reference")},
            "compiled": compiled(mesh),
            "twice": twice(mesh),
            "without positions": without_positions(mesh),
            "models": {name: model_case(plan, mesh) for name, plan in PLANS.items()},
            "refused": refusals(mesh),
        }
        torch.save(found, out / f"{rank}.pt")


if __name__ == "__main__":
    main()
