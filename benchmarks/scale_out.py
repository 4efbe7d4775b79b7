"""Counts the bytes that each process sends in a step, by scheme, beside a formula; and what the formulas say of scale.

A tied BERT takes a step on gloo with 2 and 4 processes. Every collective is seen by a dispatch mode; what a process
sends of it is counted as a ring sends it: of a tensor of S bytes on n processes, an all-gather and a reduce-scatter
(n - 1)/n S, an all-reduce twice that, and a message S.

`python -m benchmarks scale_out` runs it; `python -m benchmarks.scale_out PLACE` is one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - as torch's own documentation calls it
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.measure import machine

__all__ = ["Sizes", "memory", "run", "sent"]

WIDTH, LAYERS, VOCABULARY, LENGTH, ROWS = 64, 4, 4096, 32, 4
SCHEMES = ("ddp", "fsdp", "tp", "tp, logits gathered", "pp")
COUNTS = (2, 4)
LARGE_VOCABULARY, LARGE_WIDTH, LARGE_DEPTH, LARGE_POSITIONS = 2**18, 4096, 32, 8192
LARGE_COUNTS = (8, 64, 1024)
NOTHING = ("wait_tensor", "wrap_tensor", "barrier", "recv", "monitored")
"""Operations by which a process sends nothing, or nothing that it has not sent already."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that the formulas need: numbers in table, layers and rest, and positions that a process computes."""

    table: int
    layers: int
    rest: int
    depth: int
    positions: int
    width: int
    vocabulary: int
    number: int = 4
    """Bytes of a number."""


def sent(scheme: str, sizes: Sizes, processes: int) -> float:
    """The bytes that a process sends in a step, by the formula of the scheme; of `pp`, an end stage.

    `tp` sends the hidden states of 2 lookups and losses, of 2 sums a layer forward and 4 backward, the gradient of the
    head's bias, and 3 numbers a position for the loss.
    """
    ring = (processes - 1) / processes
    states = sizes.positions * sizes.width
    split = 2 * ring * (6 * sizes.depth * states + 2 * states) + ring * sizes.vocabulary
    numbers = {
        "ddp": 2 * ring * (sizes.table + sizes.layers + sizes.rest),
        "fsdp": ring * (3 * sizes.layers + 2 * (sizes.table + sizes.rest)),
        "tp": split + 2 * ring * 3 * sizes.positions,
        "tp, logits gathered": split + ring * sizes.positions * sizes.vocabulary,
        "pp": states + sizes.table,
    }
    return numbers[scheme] * sizes.number


def memory(scheme: str, sizes: Sizes, processes: int, state: int = 16) -> float:
    """Bytes of parameters, gradients and AdamW's moments on a process, `state` bytes a number; of `pp`, an end stage.

    FSDP2 also has the parameters of the model's own group, the table among them, whole between forward and backward.
    """
    everything = sizes.table + sizes.layers + sizes.rest
    return {
        "ddp": state * everything,
        "fsdp": state * everything / processes + sizes.number * (sizes.table + sizes.rest),
        "tp": state * everything / processes,
        "tp, logits gathered": state * everything / processes + 2 * sizes.number * sizes.positions * sizes.vocabulary,
        "pp": state * (sizes.layers / processes + sizes.table + sizes.rest),
    }[scheme]


class CountedBytes(TorchDispatchMode):
    """Adds up what this process sends in collectives and messages, as a ring sends it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0.0
        self.by_name: dict[str, float] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith(("c10d::", "_c10d_functional::")):
            found = _sent_by(name.partition("::")[2].strip("_"), args, kwargs)
            self.total += found
            self.by_name[name] = self.by_name.get(name, 0.0) + found
        return func(*args, **kwargs)


def _sent_by(name: str, args: Any, kwargs: Any) -> float:
    from torch import distributed

    c10d: Any = distributed.distributed_c10d

    def bytes_of(value: Any) -> float:
        if isinstance(value, torch.Tensor):
            return 1.0 * value.numel() * value.element_size()
        return sum(map(bytes_of, value)) if isinstance(value, (list, tuple)) else 0.0

    group: Any = None
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in each._type().qualified_name():
            group = distributed.ProcessGroup.unbox(each)
        elif isinstance(each, str) and each not in ("sum", "max", "min", "avg"):
            group = c10d._resolve_process_group(each)
    if name.startswith(NOTHING):
        return 0.0
    assert group is not None, name
    count: int = group.size()
    ring = (count - 1) / count
    if name.startswith(("allreduce", "all_reduce")):
        return 2 * ring * bytes_of(args[0])
    if name.startswith("allgather"):
        return ring * bytes_of(args[0])
    if name.startswith("all_gather"):
        return ring * count * bytes_of(args[0])
    if name.startswith("reduce_scatter"):
        return ring * bytes_of(args[1] if isinstance(args[1], (list, torch.Tensor)) else args[0])
    if name.startswith(("send", "broadcast")):
        return bytes_of(args[0])
    raise AssertionError(f"{name}: expected a collective that is counted")


def _bert() -> Any:
    from bowline.models import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "intermediate_size": 4 * WIDTH,
        "max_position_embeddings": LENGTH,
    }
    return BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def _sizes(model: Any) -> Sizes:
    table = model.bert.embeddings.word_embeddings.weight.numel()
    layers = sum(each.numel() for each in model.bert.encoder.parameters())
    whole = sum(each.numel() for each in model.parameters())
    return Sizes(
        table=table,
        layers=layers,
        rest=whole - table - layers,
        depth=LAYERS,
        positions=ROWS * LENGTH,
        width=WIDTH,
        vocabulary=VOCABULARY,
    )


def _step(scheme: str, ids: torch.Tensor) -> Callable[[], None]:
    """The forward and backward pass of a new model by a scheme, with what synchronises its gradients."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from bowline.distributed import apply_tensor_parallel, shard_groups
    from bowline.train.parallel.pipeline import Pipeline

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    model: Any = _bert()
    if scheme == "pp":
        from contextlib import nullcontext

        pipeline = Pipeline(model, mesh, lambda number: nullcontext())
        pipeline.tie()
        batch = {"input_ids": ids, "labels": ids}

        def run_stages() -> None:
            pipeline.step([(0, batch)], lambda given: 1.0)
            model.zero_grad()

        return run_stages
    if scheme == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif scheme == "fsdp":
        for group in shard_groups(model):
            fully_shard(group, mesh=mesh)
    else:
        apply_tensor_parallel(model, mesh)
        if scheme != "tp":

            def with_logits() -> None:
                whole: Any = model(input_ids=ids).logits
                F.cross_entropy(whole.full_tensor().flatten(0, 1), ids.flatten()).backward()

            return with_logits

    def run() -> None:
        model(input_ids=ids, labels=ids).loss.backward()

    return run


def process(place: Path) -> None:
    """One process: counts what it sends in a second step, when everything has been set up."""
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    for scheme in SCHEMES:
        step = _step(scheme, ids)
        step()
        with CountedBytes() as counted:
            step()
        found[scheme] = {"total": counted.total, "by": counted.by_name}
    (place / f"{distributed.get_rank()}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def counted(processes: int) -> list[Mapping[str, Any]]:
    """Runs this number of processes, and returns what each of them counted."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--nnodes=1"]
        command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*command, "-m", "benchmarks.scale_out", place], check=True, env=environment)
        return [json.loads((Path(place) / f"{rank}.json").read_text()) for rank in range(processes)]


def run() -> str:
    """Runs the processes; returns Markdown."""
    load = machine(["bowline-ties", "torch"])
    sizes = _sizes(_bert())
    found = {count: counted(count) for count in COUNTS}
    lines = [
        "# What each process sends and holds, by scheme",
        "",
        load,
        "",
        f"A tied BERT: V = {VOCABULARY:,} tokens, D = {WIDTH}, {LAYERS} layers, {sizes.table:,} numbers in the table, "
        f"{sizes.layers:,} in the layers and {sizes.rest:,} in the rest; {sizes.positions} positions a process, "
        "float32, on gloo. Counted are the bytes that a process sends in a step's forward and backward pass, by the "
        "collectives that it calls, as a ring sends them; `pp` is an end stage, with one batch.",
        "",
        "| processes | scheme | counted bytes | formula | counted / formula |",
        "|---|---|---|---|---|",
    ]
    for count, processes in found.items():
        for scheme in SCHEMES:
            seen, wanted = processes[0][scheme]["total"], sent(scheme, sizes, count)
            lines.append(f"| {count} | {scheme} | {seen:,.0f} | {wanted:,.0f} | {seen / wanted:.3f} |")
    large = Sizes(
        table=LARGE_VOCABULARY * LARGE_WIDTH,
        layers=LARGE_DEPTH * 12 * LARGE_WIDTH**2,
        rest=LARGE_WIDTH,
        depth=LARGE_DEPTH,
        positions=LARGE_POSITIONS,
        width=LARGE_WIDTH,
        vocabulary=LARGE_VOCABULARY,
        number=2,
    )
    lines += [
        "",
        "## By the formulas, at scale",
        "",
        f"V = {LARGE_VOCABULARY:,}, D = {LARGE_WIDTH:,}, {LARGE_DEPTH} layers of 12 D² numbers, "
        f"{LARGE_POSITIONS:,} positions a process and step, numbers of 2 bytes, 16 bytes a parameter for parameter, "
        "gradient and AdamW's state. The table has "
        f"{large.table / 1e9:.2f} of {(large.table + large.layers) / 1e9:.2f} thousand million numbers. Nothing of "
        "this was run.",
        "",
        "| processes | scheme | GB sent a step | GB held |",
        "|---|---|---|---|",
    ]
    for count in LARGE_COUNTS:
        for scheme in SCHEMES:
            lines.append(
                f"| {count:,} | {scheme} | {sent(scheme, large, count) / 1e9:,.2f} | "
                f"{memory(scheme, large, count) / 1e9:,.1f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    process(Path(sys.argv[1]))
