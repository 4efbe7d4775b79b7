"""What each process runs: tied models in pipeline stages, with `PipelineTie` and without, and what it refuses."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it
from torch.torch_version import TorchVersion

from bowline.distributed.pipeline_tie import PipelineTie
from bowline.errors import BowlineError
from bowline.functional.row_shard import is_dtensor
from tests.distributed.models import BATCHES, FAMILIES, RATE, VOCABULARY
from tests.distributed.process_group import joined

__all__ = ["MAX_NORM", "NAMES", "PENALTY", "V_RUNS", "next_token_loss", "optimizer_of", "tiny", "token_loss"]

MAX_NORM = 0.5
"""Below the norm of every step, so that a norm that counts a matrix twice changes the parameters."""
PENALTY = 0.1
V_RUNS = TorchVersion(torch.__version__) >= "2.13"
"""torch 2.11 sends from a rank to itself, and gloo cannot."""
NAMES = ("wte.weight", "lm_head.weight")


def tiny(name: str, vocabulary: int = VOCABULARY) -> Any:
    """The model, with four layers and the same numbers on every process."""
    torch.manual_seed(0)
    layers = {"gpt2": {"n_layer": 4}, "bert": {"num_hidden_layers": 4, "max_position_embeddings": 16}, "t5": {}}
    return FAMILIES[name](vocab_size=vocabulary, **layers[name])


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=PENALTY)


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class GPT2Stage(nn.Module):
    """Some layers of a GPT-2, with the embeddings before the first and the head behind the last."""

    def __init__(self, model: Any, at: int, of: int) -> None:
        super().__init__()
        body = model.transformer
        if at == 0:
            self.wte, self.wpe = copy.deepcopy(body.wte), copy.deepcopy(body.wpe)
        share = len(body.h) // of
        self.h = nn.ModuleDict(
            {str(layer): copy.deepcopy(body.h[layer]) for layer in range(at * share, at * share + share)}
        )
        if at == of - 1:
            self.ln_f, self.lm_head = copy.deepcopy(body.ln_f), copy.deepcopy(model.lm_head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "wte"):
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.h.values():
            x = block(x, None, None)
        return self.lm_head(self.ln_f(x)) if hasattr(self, "lm_head") else x


class BertStage(nn.Module):
    """One half of a BERT: its embeddings with two layers, or two layers with its head, whose two biases are one."""

    def __init__(self, model: Any, at: int, of: int) -> None:
        super().__init__()
        if at == 0:
            self.embeddings = copy.deepcopy(model.bert.embeddings)
        share = len(model.bert.encoder.layer) // of
        self.layer = nn.ModuleDict(
            {str(at * share + i): copy.deepcopy(model.bert.encoder.layer[at * share + i]) for i in range(share)}
        )
        if at == of - 1:
            self.predictions = copy.deepcopy(model.cls.predictions)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "embeddings"):
            places = torch.arange(x.shape[1])[None]
            x = self.embeddings(self.embeddings.word_embeddings(x), places, torch.zeros_like(places))
        for block in self.layer.values():
            x = block(x, None)
        return self.predictions(x) if hasattr(self, "predictions") else x


def whole(stages: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The parameters of these stages in full."""
    named = [pair for stage in stages for pair in stage.named_parameters(remove_duplicate=False)]
    return {
        name: (held.full_tensor() if hasattr(held, "full_tensor") else held).detach().clone() for name, held in named
    }


def parameters_of(stages: Sequence[nn.Module]) -> list[nn.Parameter]:
    return list(dict.fromkeys(parameter for stage in stages for parameter in stage.parameters()))


def naive_norm(parameters: Sequence[nn.Parameter]) -> float:
    """The norm over all ranks as torch's own would be: every copy counts."""
    square = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]) ** 2
    distributed.all_reduce(square)
    return float(square**0.5)


def apart(stages: Sequence[nn.Module], names: Sequence[str], group: Any) -> float:
    """The largest difference between the copies of all ranks."""
    held = {name: value for name, value in whole(stages).items() if name in names}
    everyone: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(everyone, list(held.values()), group=group)
    first, *rest = [value for some in everyone for value in some]
    return max(float((value - first).abs().max()) for value in rest)


def mean_of(losses: list[torch.Tensor], group: Any) -> float:
    """The mean of the last stage's losses, on every rank."""
    total = torch.tensor([float(sum(loss.detach() for loss in losses)), float(len(losses))])
    distributed.all_reduce(total, group=group)
    return float(total[0] / total[1])


def trained(
    schedule: Any,
    stages: Sequence[nn.Module],
    tie: PipelineTie | None,
    *,
    names: Sequence[str] = NAMES,
    ends: tuple[bool, bool],
    clips: bool = True,
    attached: bool = False,
    rows: slice = slice(None),
    group: Any = None,
) -> dict[str, Any]:
    """Ten steps: each one's loss, norm, naive norm and distance between the copies."""
    group = group or distributed.group.WORLD
    parameters = parameters_of(stages)
    optimizer = optimizer_of(parameters)
    if tie is not None and attached:
        tie.attach(optimizer)
    found: dict[str, Any] = {"losses": [], "norms": [], "naive": [], "apart": []}
    for batch in BATCHES:
        losses: list[torch.Tensor] = []
        inputs = (batch[rows],) if ends[0] else ()
        schedule.step(*inputs, target=batch[rows] if ends[1] else None, losses=losses)
        if tie is not None and not attached:
            tie.reduce_gradients()
            if not any(is_dtensor(parameter) for parameter in parameters):  # torch's norm does not mix them
                found["naive"].append(naive_norm(parameters))
        if tie is not None and clips:
            found["norms"].append(float(tie.clip_grad_norm_(parameters, MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        if tie is not None:
            tie.check()
        found["losses"].append(mean_of(losses, group))
        found["apart"].append(apart(stages, names, group))
    found["parameters"] = whole(stages)
    return found


def two_stages(
    kind: Any,
    make: Callable[..., nn.Module] = GPT2Stage,
    model: str = "gpt2",
    *,
    names: Sequence[str] = NAMES,
    loss: Callable[..., torch.Tensor] = next_token_loss,
    tied: bool = True,
    **options: Any,
) -> dict[str, Any]:
    rank, count = distributed.get_rank(), distributed.get_world_size()
    module = make(tiny(model), rank, count)
    if tied and rank == count - 1:
        with torch.no_grad():
            module.get_parameter(names[-1]).normal_()  # the source's values replace them
    stage = PipelineStage(module, rank, count, torch.device("cpu"))
    tie = PipelineTie(stage, names, distributed.group.WORLD) if tied else None
    schedule = kind(stage, n_microbatches=4, loss_fn=loss)
    return trained(schedule, [module], tie, names=names, ends=(rank == 0, rank == count - 1), **options)


def chunks(kind: Any, places: dict[int, list[int]], *, shared: bool = False) -> dict[str, Any]:
    """Four stages on two ranks: `places` says which rank has which. Both ends of one rank may be one parameter."""
    model = tiny("gpt2")
    mine = places[distributed.get_rank()]
    modules = [GPT2Stage(model, at, 4) for at in mine]
    held: Any = dict(zip(mine, modules, strict=True))
    refused, names = "", list(NAMES)
    if shared:  # its schedule must not scale gradients, because it would do so for each stage
        names = ["0.wte.weight", "1.lm_head.weight"]
        if 0 in mine:
            held[3].lm_head.weight = held[0].wte.weight
        refused = said(lambda: PipelineTie(modules, NAMES, distributed.group.WORLD))
    elif 3 in mine:
        with torch.no_grad():
            held[3].lm_head.weight.normal_()
    stages = [PipelineStage(module, at, 4, torch.device("cpu")) for module, at in zip(modules, mine, strict=True)]
    tie = PipelineTie(nn.ModuleList(modules) if shared else stages, names, distributed.group.WORLD)
    loss = (lambda *given: next_token_loss(*given) / 4) if shared else next_token_loss
    schedule = kind(stages, n_microbatches=4, loss_fn=loss, scale_grads=not shared)
    found = trained(schedule, modules, tie, ends=(0 in mine, 3 in mine))
    if shared:
        found["losses"] = [4 * value for value in found["losses"]]
    return {**found, "refused": refused, "names": tie.names}


class T5Exchange:
    """The encoder on rank 0, the decoder and the head on rank 1: what a schedule's `step` does, by hand."""

    def __init__(self, model: Any) -> None:
        self.rank = distributed.get_rank()
        self.model = model

    def stage(self) -> nn.Module:
        """The rank's own modules; on rank 1 the decoder's table and the head are two parameters."""
        if self.rank == 0:
            return nn.ModuleDict({"encoder": self.model.encoder})
        self.model.lm_head.weight = nn.Parameter(torch.randn_like(self.model.lm_head.weight))
        return nn.ModuleDict({"decoder": self.model.decoder, "lm_head": self.model.lm_head})

    def step(self, *inputs: torch.Tensor, target: torch.Tensor | None, losses: list[torch.Tensor]) -> None:
        if self.rank == 0:
            memory = self.model.encode(inputs[0]).last_hidden_state
            distributed.send(memory.detach(), 1)
            grad = torch.empty_like(memory)
            distributed.recv(grad, 1)
            memory.backward(grad)
            return
        assert target is not None
        memory = torch.empty(*target.shape, 16)
        distributed.recv(memory, 0)
        memory.requires_grad_()
        hidden = self.model.decoder(self.model._shift_right(target), memory=memory).last_hidden_state
        loss = token_loss(self.model.lm_head(hidden * 16**-0.5), target)
        loss.backward()
        losses.append(loss.detach())
        assert memory.grad is not None
        distributed.send(memory.grad, 0)


def encoder_decoder() -> dict[str, Any]:
    exchange = T5Exchange(tiny("t5"))
    stage = exchange.stage()
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    tie = PipelineTie(stage, names, distributed.group.WORLD)
    rank = distributed.get_rank()
    return {"names": tie.names, **trained(exchange, [stage], tie, names=names, ends=(rank == 0, rank == 1))}


# --- refusals and single calls ----------------------------------------------------------------------------------------


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except BowlineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def end(rows: int = 9, width: int = 4, **options: Any) -> nn.Module:
    """The embedding on rank 0, and the head on rank 1."""
    torch.manual_seed(distributed.get_rank())
    if distributed.get_rank() == 0:
        return nn.ModuleDict({"wte": nn.Embedding(rows, width, **options)})
    return nn.ModuleDict({"lm_head": nn.Linear(width, rows, bias=False, **options)})


def weight_of(stage: nn.Module) -> nn.Parameter:
    return next(stage.parameters())


def refusals() -> dict[str, str]:
    rank, world = distributed.get_rank(), distributed.group.WORLD
    frozen = end()
    if rank == 1:
        frozen.requires_grad_(False)
    alias: Any = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
    alias["lm_head"].weight = nn.Parameter(alias["wte"].weight.detach())
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    cases: dict[str, Callable[[], object]] = {
        "shape": lambda: PipelineTie(end(9 + rank), NAMES, world),
        "dtype": lambda: PipelineTie(end(dtype=(torch.float32, torch.bfloat16)[rank]), NAMES, world),
        "frozen": lambda: PipelineTie(frozen, NAMES, world),
        "two sources": lambda: PipelineTie(end(), NAMES, world, source=rank),
        "source outside": lambda: PipelineTie(end(), NAMES, world, source=2),
        "no source": lambda: PipelineTie(end() if rank else None, NAMES[1:], world),
        "misspelt": lambda: PipelineTie(end(), ["wte.weight", "lm_haed.weight"], world),
        "only one": lambda: PipelineTie(end(), "wte.weight", world),
        "no module": lambda: PipelineTie(end() if rank else "stage", NAMES, world),
        "no name": lambda: PipelineTie(end(), [], world),
        "alias": lambda: PipelineTie(alias if rank else end(), NAMES, world),
        "whole mesh": lambda: PipelineTie(end(), NAMES, mesh),
        "no group": lambda: PipelineTie(end(), NAMES, None),
        "mesh": lambda: PipelineTie(end(), NAMES, mesh["pp"]),
    }
    return {name: said(call) for name, call in cases.items()}


def with_gradients(value: float = 1.0) -> tuple[nn.Module, PipelineTie, torch.optim.Optimizer]:
    stage = end()
    tie = PipelineTie(stage, NAMES, distributed.group.WORLD)
    weight_of(stage).grad = torch.full((9, 4), value)
    return stage, tie, torch.optim.SGD(stage.parameters(), lr=0.1)


def twice() -> dict[str, Any]:
    """A second sum in one step, in each way in which a loop can ask for it."""
    found: dict[str, Any] = {}
    stage, tie, optimizer = with_gradients()
    tie.reduce_gradients()
    found["second"] = said(tie.reduce_gradients)
    found["value"] = weight_of(stage).grad.clone()  # type: ignore[union-attr]
    weight_of(stage).sum().backward()
    found["more backward"] = said(tie.reduce_gradients)
    found["then clipped"] = said(lambda: tie.clip_grad_norm_(stage.parameters(), 1.0))
    optimizer.zero_grad(set_to_none=False)
    found["zeroed in place"] = said(tie.reduce_gradients)
    optimizer.zero_grad()
    weight_of(stage).sum().backward()
    tie.reduce_gradients()
    found["next step"] = weight_of(stage).grad.clone()  # type: ignore[union-attr]

    stage, tie, optimizer = with_gradients()
    handle = tie.attach(optimizer)
    tie.reduce_gradients()
    before = weight_of(stage).detach().clone()
    optimizer.step()
    found["attached and called"] = (before - weight_of(stage)).detach()
    torch.nn.utils.clip_grad_norm_(stage.parameters(), 0.1)
    found["attached, torch's clip"] = said(optimizer.step)
    optimizer.zero_grad()
    found["closure"] = said(lambda: optimizer.step(lambda: 0.0))
    handle.remove()
    optimizer.step()
    return found


def single_calls() -> dict[str, Any]:
    rank, found = distributed.get_rank(), dict[str, Any]()
    stage, tie, _ = with_gradients()
    weight_of(stage).grad = None if rank == 1 else weight_of(stage).grad
    tie.reduce_gradients()
    found["none is zero"] = weight_of(stage).grad

    stage, tie, _ = with_gradients()
    if rank == 1:
        with torch.no_grad():
            weight_of(stage)[3, 2] += 1e-6
    found["differs"] = said(tie.check)
    tie.broadcast()
    found["equal again"] = said(tie.check)

    loaded = {"lm_head.weight": torch.full((9, 4), 7.0)} if rank else {"wte.weight": torch.full((9, 4), 5.0)}
    stage.load_state_dict(loaded, assign=True)
    found["after assign"] = said(tie.check)
    tie.broadcast()
    found["loaded"] = weight_of(stage).detach().clone()
    weight_of(stage).grad = torch.ones(9, 4)
    tie.reduce_gradients()
    found["grad of the new"] = weight_of(stage).grad

    stage.requires_grad_(False)
    weight_of(stage).grad = None
    found["frozen later"] = said(tie.reduce_gradients)
    tie.broadcast()
    tie.reduce_gradients()
    found["frozen everywhere"] = weight_of(stage).grad is None

    stage, tie, _ = with_gradients()
    setattr(stage, "wte" if rank == 0 else "lm_head", nn.Identity())
    found["gone"] = said(tie.reduce_gradients)

    stage, tie, _ = with_gradients()
    if rank == 1:
        setattr(stage, "lm_head", nn.Identity())  # noqa: B010 - a ModuleDict has no such attribute to a type checker
    found["gone on one rank"] = [said(tie.check), said(tie.broadcast)]

    stage, tie, _ = with_gradients(3.0)
    found["largest"] = float(tie.clip_grad_norm_(stage.parameters(), 1.0, float("inf")))
    found["clipped"] = weight_of(stage).grad

    one, other = end(), end(7)
    ties = [PipelineTie(each, NAMES, distributed.group.WORLD) for each in (one, other)]
    for each in (one, other):
        weight_of(each).grad = torch.ones_like(weight_of(each))
    both = [weight_of(one), weight_of(other)]
    found["two ties"] = float(ties[0].clip_grad_norm_(both, 1.0, others=ties[1:]))

    sparse = end(sparse=True) if rank == 0 else end()
    tie = PipelineTie(sparse, NAMES, distributed.group.WORLD)
    if isinstance(sparse, nn.ModuleDict) and rank == 0:
        sparse["wte"](torch.tensor([2])).sum().backward()
    tie.reduce_gradients()
    found["sparse"] = weight_of(sparse).grad

    half = end(dtype=torch.bfloat16)
    tie = PipelineTie(half, NAMES, distributed.group.WORLD)
    weight_of(half).grad = torch.ones(9, 4, dtype=torch.bfloat16)
    found["bfloat16 norm"] = tie.clip_grad_norm_(half.parameters(), 1.0)
    found["bfloat16"] = weight_of(half).grad
    tie.check()
    return found


# --- four processes ---------------------------------------------------------------------------------------------------


def with_fsdp(mesh: DeviceMesh, *, tied: bool = True) -> dict[str, Any]:
    """Two stages, each sharded over two ranks, which share out the rows of a batch."""
    at, part = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
    module = GPT2Stage(tiny("gpt2"), at, 2)
    for block in module.h.values():
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(module, mesh=mesh["dp"])
    stage = PipelineStage(module, at, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    tie = PipelineTie(stage, NAMES, mesh["pp"]) if tied else None
    schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=next_token_loss)
    rows = slice(2 * part, 2 * part + 2)
    return trained(schedule, [module], tie, ends=(at == 0, at == 1), rows=rows)


def with_tensor_parallel(mesh: DeviceMesh) -> dict[str, Any]:
    """Two stages, whose ends are sharded by rows over two ranks, although they are not one parameter."""
    at = mesh.get_local_rank("pp")
    module = GPT2Stage(tiny("gpt2", VOCABULARY + 1), at, 2)
    plan = {
        "wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    name = "lm_head" if at else "wte"
    parallelize_module(module, mesh["tp"], {name: plan[name]})
    stage = PipelineStage(module, at, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    tie = PipelineTie(stage, NAMES, mesh["pp"])
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=next_token_loss)
    return trained(schedule, [module], tie, ends=(at == 0, at == 1))


def gradient_placed_otherwise(mesh: DeviceMesh) -> dict[str, Any]:
    """A whole gradient for rows that are sharded, as a row-wise embedding has it before torch 2.14."""
    at = mesh.get_local_rank("pp")
    stage = nn.ModuleDict({"lm_head": nn.Linear(4, 9, bias=False)} if at else {"wte": nn.Embedding(9, 4)})
    for part in stage.children():
        fully_shard(part, mesh=mesh["tp"])
    tie = PipelineTie(stage, NAMES, mesh["pp"])
    weight: Any = weight_of(stage)
    numbers = torch.arange(36.0).view(9, 4)
    weight.grad = distribute_tensor(numbers, mesh["tp"], [Shard(0) if at else Replicate()])
    tie.reduce_gradients()
    return {"placement": str(weight.grad.placements), "whole": weight.grad.full_tensor(), "wanted": 2 * numbers}


def unlike_placements(mesh: DeviceMesh) -> dict[str, str]:
    """One end sharded by rows and the other by columns, of a square matrix; and one sharded, the other whole."""
    at = mesh.get_local_rank("pp")

    def square(axis: int, plan: Any) -> nn.Module:
        stage: nn.Module = nn.ModuleDict({"lm_head": nn.Linear(4, 4, bias=False)})
        if at == 0:
            stage = nn.ModuleDict({"wte": nn.Embedding(4, 4)})
        if plan is not None:
            for part in stage.children():
                fully_shard(part, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(axis))
        return stage

    return {
        "axis": said(lambda: PipelineTie(square(at, True), NAMES, mesh["pp"])),
        "whole": said(lambda: PipelineTie(square(0, at or None), NAMES, mesh["pp"])),
    }


def gathered(mesh: DeviceMesh) -> dict[str, str]:
    """A stage whose ends a forward pass without a backward pass has left gathered."""
    at = mesh.get_local_rank("pp")
    stage: Any = GPT2Stage(tiny("gpt2"), at, 2)
    fully_shard(stage, mesh=mesh["dp"])
    tie = PipelineTie(stage, NAMES, mesh["pp"])
    stage(torch.ones(1, 3, dtype=torch.int64) if at == 0 else torch.ones(1, 3, 16))
    refused = said(tie.broadcast)
    stage.reshard()
    return {"refused": refused, "resharded": said(tie.broadcast)}


def main() -> None:
    with joined():
        out = Path(sys.argv[1])
        found: dict[str, Any] = {}
        if distributed.get_world_size() == 2:
            bert_names = ("embeddings.word_embeddings.weight", "predictions.decoder.weight")
            bert: dict[str, Any] = {"make": BertStage, "model": "bert", "names": bert_names, "loss": token_loss}
            alternate, v_shape = {0: [0, 2], 1: [1, 3]}, {0: [0, 3], 1: [1, 2]}
            found["gpipe"] = two_stages(ScheduleGPipe)
            found["1f1b"] = two_stages(Schedule1F1B, attached=True)
            found["attached"] = two_stages(ScheduleGPipe, attached=True, clips=False)
            found["interleaved"] = chunks(ScheduleInterleaved1F1B, alternate)
            if V_RUNS:
                found["v"] = chunks(ScheduleZBVZeroBubble, v_shape)
                found["v shared"] = chunks(ScheduleZBVZeroBubble, v_shape, shared=True)
            found["plain"] = two_stages(ScheduleGPipe, tied=False)
            found["bert"] = two_stages(ScheduleGPipe, **bert)
            found["t5"] = encoder_decoder()
            found["refusals"] = refusals()
            found["twice"] = twice()
            found["single"] = single_calls()
        else:
            fsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
            tensors = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
            found["four stages"] = two_stages(Schedule1F1B)
            found["fsdp"] = with_fsdp(fsdp)
            found["fsdp plain"] = with_fsdp(fsdp, tied=False)
            found["tensor parallel"] = with_tensor_parallel(tensors)
            found["placed otherwise"] = gradient_placed_otherwise(tensors)
            found["placements"] = unlike_placements(fsdp)
            found["gathered"] = gathered(fsdp)
        torch.save(found, out / f"{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
