"""Writes a model with other tools, one output a call, and loads it again in the tool that wrote it.

    PYTHON -m tools.output_writers NAME SOURCE PLACE

Runs in the environment of the tool, without Bowline. Beside PLACE it writes PLACE.json: the tool with its version, and
what the tool made of both ends when it loaded its own output. `tools/outputs.py` has the table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["WRITERS"]

Facts = dict[str, Any]
Writer = Callable[[Path, Path], Facts]
WRITERS: dict[str, Writer] = {}
TEXTS = [f"The embedding and the head of model {number} share one matrix, one row for a token." for number in range(16)]


def writer(name: str, **options: Any) -> Callable[[Callable[..., Facts]], Callable[..., Facts]]:
    """Register a function as the writer `name`, with these options."""

    def register(function: Callable[..., Facts]) -> Callable[..., Facts]:
        WRITERS[name] = lambda source, place: function(source, place, **options)
        return function

    return register


def tool(*names: str) -> str:
    """The installed versions of distributions."""
    return ", ".join(f"{name} {version(name)}" for name in names)


def load(source: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(source, **options).eval()


def ends(model: Any) -> Facts:
    """What the head and the embedding of a model in memory are."""
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    return {
        "shared": getattr(head, "weight", None) is table.weight,
        "head": type(head).__name__,
        "table": type(table).__name__,
    }


# --- bitsandbytes -----------------------------------------------------------------------------------------------------


@writer("bitsandbytes-nf4", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
@writer("bitsandbytes-int8", load_in_8bit=True)
@writer("bitsandbytes-nf4-head", load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["none"])
@writer(
    "bitsandbytes-fp4-head",
    load_in_4bit=True,
    bnb_4bit_quant_type="fp4",
    bnb_4bit_use_double_quant=True,
    llm_int8_skip_modules=["none"],
)
@writer("bitsandbytes-int8-head", load_in_8bit=True, llm_int8_skip_modules=["none"])
def _bitsandbytes(source: Path, place: Path, **options: Any) -> Facts:
    chosen = transformers.BitsAndBytesConfig(**options)
    load(source, quantization_config=chosen, device_map="cpu").save_pretrained(place)
    loaded = load(place, device_map="cpu")
    return {"tool": tool("bitsandbytes", "transformers"), **ends(loaded), **dequantised(loaded.lm_head)}


def dequantised(head: Any) -> Facts:
    """The first values of rows of a quantised head, as bitsandbytes dequantises them."""
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_dequant  # type: ignore[import-not-found]

    weight = head.weight
    if getattr(weight, "quant_state", None) is not None:
        values = dequantize_4bit(weight.data, weight.quant_state)
    elif weight.dtype is torch.int8:
        values = int8_vectorwise_dequant(weight.data, weight.SCB)
    else:
        return {}
    return {"values": values[::4096, :128].tolist()}


# --- GPTQModel --------------------------------------------------------------------------------------------------------


@writer("gptq", method="gptq")
@writer("gptq-head", method="gptq", lm_head=True)
@writer("awq", method="awq", format="gemm")
def _gptqmodel(source: Path, place: Path, **options: Any) -> Facts:
    os.environ["GPTQMODEL_CPU_WORKERS"] = "2"  # of one worker it says that its own pool of two does not fit
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # type: ignore[import-not-found]

    model = GPTQModel.load(str(source), QuantizeConfig(bits=4, group_size=64, **options), device="cpu")
    model.quantize(TEXTS, batch_size=1)
    model.save(str(place))
    backend = BACKEND.GPTQ_TORCH if options["method"] == "gptq" else BACKEND.AWQ_TORCH  # others are compiled first
    loaded = GPTQModel.load(str(place), device="cpu", backend=backend).model
    return {"tool": tool("gptqmodel"), **ends(loaded)}


# --- compressed-tensors -----------------------------------------------------------------------------------------------


GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}


@writer("llmcompressor-w4a16", config_groups={"groups": {"targets": ["Linear"], "weights": GROUPS}}, ignore=["lm_head"])
@writer("llmcompressor-w4a16-head", config_groups={"groups": {"targets": ["Linear"], "weights": GROUPS}})
@writer("llmcompressor-fp8-head", targets="Linear", scheme="FP8_DYNAMIC")
def _llmcompressor(source: Path, place: Path, **options: Any) -> Facts:
    from llmcompressor import oneshot  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]

    model = load(source)
    oneshot(model=model, recipe=QuantizationModifier(**options))
    model.save_pretrained(place, save_compressed=True)
    return {"tool": tool("llmcompressor", "compressed-tensors"), **ends(load(place))}


# --- torchao ----------------------------------------------------------------------------------------------------------


@writer("torchao-int8")
@writer("torchao-int8-head", include_input_output_embeddings=True)
def _torchao(source: Path, place: Path, **options: Any) -> Facts:
    from torchao.quantization import Int8WeightOnlyConfig  # type: ignore[import-not-found]

    chosen = transformers.TorchAoConfig(Int8WeightOnlyConfig(version=2), **options)
    load(source, quantization_config=chosen).save_pretrained(place)
    return {"tool": tool("torchao", "transformers"), **ends(load(place))}


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


@contextmanager
def one_process() -> Iterator[Any]:
    """A group of one process, and its mesh."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())  # type: ignore[attr-defined]
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@writer("fsdp2-full", state="full")
@writer("fsdp2-full-saved", state="full", by="save_pretrained")
@writer("fsdp2-gathered", state="gathered")
@writer("fsdp2-sharded", state="sharded")
@writer("fsdp2-checkpointed", state="gathered", checkpointed=True)
@writer("fsdp2-compiled", state="gathered", compiled=True)
@writer("fsdp2-distributed", state="distributed")
@writer("fsdp2-converted", state="distributed", converted=True)
def _fsdp2(
    source: Path,
    place: Path,
    state: str,
    *,
    by: str = "torch.save",
    checkpointed: bool = False,
    compiled: bool = False,
    converted: bool = False,
) -> Facts:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.fsdp import fully_shard

    model = load(source)
    layer = type(model.model.layers[0])
    if checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, layer))
    with one_process() as mesh:
        for one in model.model.layers:
            fully_shard(one, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        ids = torch.arange(64).view(1, 64)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        facts = {"tool": tool("torch"), **ends(model)}
        model.config.save_pretrained(place)
        if state in ("full", "distributed"):
            chosen = StateDictOptions(full_state_dict=state == "full", cpu_offload=True)
            tensors: Any = get_model_state_dict(model, options=chosen)
        else:
            wrapped: Any = torch.compile(model, backend="eager") if compiled else model
            tensors = wrapped.state_dict()
        if state == "gathered":
            tensors = {name: value.full_tensor() for name, value in tensors.items()}
        if state == "distributed":
            at = place.with_suffix(".distcp") if converted else place
            save(tensors, checkpoint_id=at, no_dist=True)
            if converted:
                dcp_to_torch_save(at, place / "pytorch_model.bin")
                shutil.rmtree(at)
        elif by == "torch.save":
            torch.save(tensors, place / "pytorch_model.bin")
        else:
            model.save_pretrained(place, state_dict=tensors)
    return facts


# --- ONNX -------------------------------------------------------------------------------------------------------------


class Logits(torch.nn.Module):
    """A causal language model from ids to logits, without a cache."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        length = input_ids.shape[1]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        given = {"attention_mask": mask, "position_ids": torch.arange(length)[None]}
        logits: torch.Tensor = self.model(input_ids=input_ids, use_cache=False, **given).logits
        return logits


@writer("onnx-dynamo", dynamo=True)
@writer("onnx-script", dynamo=False)
@writer("onnx-script-unfolded", dynamo=False, do_constant_folding=False)
def _onnx(source: Path, place: Path, **options: Any) -> Facts:
    model = load(source, attn_implementation="eager")
    place.mkdir()
    ids = torch.arange(12).view(1, 12)
    torch.onnx.export(
        Logits(model), (ids,), place / "model.onnx", input_names=["input_ids"], output_names=["logits"], **options
    )
    names = ["torch", "onnx", *(["onnxscript"] if options["dynamo"] else [])]
    return {"tool": tool(*names), **initializers(place / "model.onnx", source)}


def initializers(path: Path, source: Path) -> Facts:
    """How many initializers have the size of the table, and whether they have the same values, as onnx reads them."""
    import numpy as np
    import onnx

    config = json.loads((source / "config.json").read_text())
    rows, width = config["vocab_size"], config["hidden_size"]
    found = [
        onnx.numpy_helper.to_array(one, str(path.parent))
        for one in onnx.load(path, load_external_data=False).graph.initializer
        if sorted(one.dims) == sorted((rows, width))
    ]
    tables = [one if one.shape[0] == rows else one.T for one in found]
    return {"matrices": len(found), "equal": all(np.array_equal(tables[0], one) for one in tables[1:])}


@writer("optimum")
def _optimum(source: Path, place: Path) -> Facts:
    from optimum.exporters.onnx import main_export  # type: ignore[import-not-found]

    main_export(str(source), str(place), task="text-generation", do_validation=False)
    return {
        "tool": tool("optimum-onnx", "optimum", "transformers", "torch"),
        **initializers(place / "model.onnx", source),
    }


# --- an encoder -------------------------------------------------------------------------------------------------------


@writer("encoder", kind="AutoModel")
@writer("encoder-masked", kind="AutoModelForMaskedLM")
def _encoder(source: Path, place: Path, kind: str) -> Facts:
    model = getattr(transformers, kind).from_pretrained(source)
    model.save_pretrained(place)
    head = model.get_output_embeddings()
    shared = head is not None and head.weight is model.get_input_embeddings().weight
    return {"tool": tool("transformers"), "shared": shared, "head": None if head is None else type(head).__name__}


@writer("encoder-int8")
def _encoder_int8(source: Path, place: Path) -> Facts:
    chosen = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = transformers.AutoModel.from_pretrained(source, quantization_config=chosen, device_map="cpu")
    model.save_pretrained(place)
    return {"tool": tool("bitsandbytes", "transformers"), "head": model.get_output_embeddings()}


class States(torch.nn.Module):
    """An encoder from ids to its last states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.model(input_ids=input_ids).last_hidden_state
        return states


@writer("encoder-onnx")
def _encoder_onnx(source: Path, place: Path) -> Facts:
    model = transformers.AutoModel.from_pretrained(source, attn_implementation="eager").eval()
    place.mkdir()
    ids = torch.arange(12).view(1, 12)
    torch.onnx.export(States(model), (ids,), place / "model.onnx", input_names=["input_ids"], dynamo=True)
    return {"tool": tool("torch", "onnx", "onnxscript"), **initializers(place / "model.onnx", source)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(WRITERS))
    parser.add_argument("source", type=Path)
    parser.add_argument("place", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    facts = WRITERS[arguments.name](arguments.source, arguments.place)
    arguments.place.with_suffix(".json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
