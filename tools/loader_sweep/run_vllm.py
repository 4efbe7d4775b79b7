"""Loads checkpoints in vLLM on the CPU and says what became of the head. Runs in vLLM's own environment.

Every parameter is filled with NaN before the weights are loaded, so that what is left uninitialised is seen.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch

for missing in ("nms", "qnms"):  # torchvision's operators, which its wheel has for CUDA only; models import them
    torch.library.define(f"torchvision::{missing}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import vllm
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader import base_loader, get_model
from vllm.model_executor.models import is_text_generation_model, registry

from tools.loader_sweep.request_loop import serve

HEADS = ("lm_head", "output_projection", "decoder")
"""The names of modules that are heads, if their class does not say it."""
Weights = dict[str, torch.Tensor]


def made_quick() -> None:
    """Skip what is done once per server: collecting garbage, and asking a new process about each class."""
    gc.collect()
    gc.freeze()
    gc.collect = lambda *_: 0
    torch.accelerator.empty_cache = lambda: None
    registry._run_in_subprocess = lambda ask: ask()
    create = base_loader.initialize_model

    def filled(*args: Any, **kwargs: Any) -> Any:
        model = create(*args, **kwargs)
        with torch.no_grad():
            for tensor in model.parameters():
                if tensor.is_floating_point():
                    tensor.fill_(float("nan"))
        return model

    base_loader.initialize_model = filled


def loaded(directory: Path) -> Any:
    """The model as the server would build it. Raises what vLLM raises."""
    arguments = EngineArgs(
        model=str(directory),
        dtype="bfloat16",
        load_format="auto",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=32,
        disable_log_stats=True,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


def in_one_process() -> None:
    """Set up the groups of processes, of one each; without a model's config also those that experts need."""
    with set_current_vllm_config(VllmConfig()):
        meeting = Path(tempfile.mkdtemp()) / "meeting"
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "gloo")
        initialize_model_parallel(1, 1)


def fate_of(directory: Path, head: str, embedding: str) -> tuple[str, str]:
    """The fate of the head, and vLLM's words where it refuses."""
    try:
        model = loaded(directory)
    except (Exception, SystemExit) as error:  # a refusal is an outcome
        return "refused", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    stored = tensors_of(directory)
    own, table = stored.get(head), stored.get(embedding)
    tables, heads = ends(model, table if table is not None else own)
    if not tables:
        return "refused", "no module with a vocabulary was found"
    if not heads and not is_text_generation_model(model):
        return "dropped", "an embedding model"
    heads = heads or tables
    held = heads[0]
    if any(held is one for one in tables):
        alike = own is None or (equal(held, own) and (table is None or len(own) == len(table)))
        return (("tied" if alike else "dropped") if equal(held, table) else "random"), ""
    if own is not None and equal(held, own):
        return "kept", ""
    if equal(held, table):
        return ("tied" if own is None else "dropped"), "a copy"
    return "random", ""


def ends(model: Any, like: Any) -> tuple[list[Any], list[Any]]:
    """The parameters of the input embeddings and of the heads that have a table's width."""
    tables, heads = [], []
    for name, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2 or weight.shape[1] != like.shape[1]:
            continue
        if isinstance(module, ParallelLMHead) or name.rpartition(".")[2] in HEADS:
            heads.append(weight)
        elif isinstance(module, (VocabParallelEmbedding, torch.nn.Embedding)) and abs(len(weight) - len(like)) <= 128:
            tables.append(weight)
    return tables, heads


def equal(held: torch.Tensor, stored: torch.Tensor | None) -> bool:
    """Whether a parameter holds a stored tensor, as far as both have rows."""
    if stored is None:
        return False
    rows = min(len(held), len(stored))
    return torch.equal(held[:rows], stored[:rows].to(held.dtype))


def tensors_of(directory: Path) -> Weights:
    """The stored tensors."""
    if (directory / "model.safetensors").exists():
        return load_file(directory / "model.safetensors")
    found: Weights = torch.load(directory / "pytorch_model.bin", weights_only=True)
    return found


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    made_quick()
    in_one_process()
    serve(f"vLLM {vllm.__version__}", fate_of)
