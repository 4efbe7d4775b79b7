"""What one of two processes runs: a transformers model under DDP and FSDP2, with `use_tied_loss` and without."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it

from bowline.errors import UsageError
from bowline.functional.deferred import Product
from bowline.nn.modules.tied_loss import use_tied_loss

V, STEPS = 50, 3
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp that looks for unused parameters": {"find_unused_parameters": True},
    "ddp, static": {"static_graph": True},
    "ddp, compiled": {},
    "fsdp": {"reshard_after_forward": False},
    "fsdp that frees the matrix between": {"reshard_after_forward": True},
    "fsdp, the head a unit": {},
}
FREED = ("fsdp that frees the matrix between", "fsdp, the head a unit")
LOSSES = ("in the model", "outside")


def llama(tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=V, tie_word_embeddings=tied, **sizes))


def wrapped(model: Any, kind: str) -> Any:
    if kind.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model, **KINDS[kind])
        return torch.compile(model, backend="aot_eager") if kind == "ddp, compiled" else model
    mesh = init_device_mesh("cpu", (2,))
    if kind == "fsdp, the head a unit":
        fully_shard(model.lm_head, mesh=mesh)
    return fully_shard(model, mesh=mesh, **KINDS[kind])


def loss_of(model: Any, ids: torch.Tensor, where: str) -> torch.Tensor:
    if where == "in the model":
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return loss
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].reshape(-1, V).float(), ids[:, 1:].reshape(-1))


def train(kind: str, tied: bool, where: str, rank: int, ours: bool) -> dict[str, Any]:
    """The losses, the sums of the gradients of all steps, how often logits were made, and what was refused."""
    model = llama(tied)
    if ours:
        use_tied_loss(model)
    model = wrapped(model, kind)
    generator = torch.Generator().manual_seed(rank)
    losses: list[float] = []
    with patch.object(Product, "logits", autospec=True, side_effect=Product.logits) as made:
        for _ in range(STEPS):
            try:
                loss = loss_of(model, torch.randint(3, V, (2, 7), generator=generator), where)
            except UsageError as error:
                return {"refused": str(error)}
            loss.backward()
            losses.append(loss.item())
    gradients = {}
    for name, parameter in model.named_parameters():
        whole: Any = parameter.grad
        gradients[name] = (whole.full_tensor() if hasattr(whole, "full_tensor") else whole).clone()
    return {"losses": losses, "gradients": gradients, "made": made.call_count}


def main(rank: int, store: str, out: str) -> None:
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = {
        (kind, tied, where): [train(kind, tied, where, rank, ours) for ours in (False, True)]
        for kind in KINDS
        for tied in (True, False)
        for where in LOSSES
        if not (tied and kind == "fsdp, the head a unit")
    }
    torch.save(found, f"{out}.{rank}")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    # FSDP's mesh keeps the group, and a thread of gloo that outlives the interpreter may abort the process.
    os._exit(0)
