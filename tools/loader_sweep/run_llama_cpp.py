"""Converts checkpoints by llama.cpp, loads the result in its runtime, and says what became of the head.

Runs in an environment with torch, transformers and sentencepiece. LLAMA_CPP names the folder that `make
sweep-llama-cpp` fills: `source` (with the converter) and `build`. The made-up models have no tokenizer, so every
converter writes the same made-up vocabulary; the tensors go through the converter as they are. A model of the runtime
that has no `output.weight` computes its logits with `token_embd.weight`.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

os.environ["GGML_NO_BACKTRACE"] = "1"  # an aborting child would start a debugger and hang
PLACE = Path(os.environ["LLAMA_CPP"]).absolute()
SOURCE = PLACE / "source" / "vendor" / "llama.cpp"
sys.path[:0] = [str(SOURCE), str(SOURCE / "gguf-py")]

import conversion
import gguf
import torch

from tools.loader_sweep.request_loop import serve

COMMIT = "0c1e57098"
"""The commit of llama.cpp that llama-cpp-python 0.3.36 carries, as its change log says."""
EMBEDDING_MODELS = ("bert", "nomic-bert", "jina-bert-v2", "jina-bert-v3", "modern-bert", "neo-bert", "eurobert")


def bindings() -> Any:
    """The ctypes bindings of llama-cpp-python, without the rest of that package."""
    os.environ["LLAMA_CPP_LIB_PATH"] = str(PLACE / "build" / "bin")
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(PLACE / "source" / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


def made_up_vocabulary(model: Any) -> None:
    """Write a vocabulary of the config's size, in the form that GPT-2 has."""
    size = model.hparams.get("vocab_size") or model.hparams.get("text_config", {})["vocab_size"]
    writer = model.gguf_writer
    if model.gguf_writer.arch in EMBEDDING_MODELS:
        writer.add_token_type_count(model.hparams.get("type_vocab_size", 1))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{at}" for at in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def converted(directory: Path) -> Path:
    """The GGUF file of a checkpoint, in float32. Raises what the converter raises."""
    with torch.inference_mode():
        hparams = conversion.ModelBase.load_hparams(directory, False)
        architecture = conversion.get_model_architecture(hparams, conversion.ModelType.TEXT)
        model_class = conversion.get_model_class(architecture, mmproj=False)
        file = directory / "model.gguf"
        model = model_class(directory, gguf.LlamaFileType.ALL_F32, file, eager=True)
        model.set_vocab = lambda: made_up_vocabulary(model)
        model.write()
    return file


def loads(library: Any, file: Path) -> bool:
    """Whether the runtime loads the file. In a process of its own: the runtime's assertions abort."""
    child = os.fork()
    if child == 0:
        os.close(2)
        parameters = library.llama_model_default_params()
        parameters.n_gpu_layers = 0
        model = library.llama_model_load_from_file(str(file).encode(), parameters)
        os._exit(0 if model else 1)
    return os.waitpid(child, 0)[1] == 0


def fate_of(library: Any, directory: Path, head: str, embedding: str) -> tuple[str, str]:
    """The fate of the head, and the words of the converter or runtime where they refuse."""
    try:
        file = converted(directory)
    except (Exception, SystemExit) as error:  # a refusal is an outcome
        return "refused", f"converter: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if not loads(library, file):
        return "refused", "runtime"
    reader = gguf.GGUFReader(file)
    held = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors if "blk." not in tensor.name}
    if str(reader.fields["general.architecture"].contents()) in EMBEDDING_MODELS:
        return "dropped", "an embedding model"
    stored = tensors_of(directory)
    own, table, output = stored.get(head), stored.get(embedding), held.get("output.weight")
    if output is not None:
        return ("kept" if equal(output, own) else "tied" if equal(output, table) else "random"), ""
    used = held["token_embd.weight"]
    if equal(used, own):
        return "tied", ""
    return ("tied" if own is None else "dropped") if equal(used, table) else "random", ""


def equal(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Whether the converter's float32 tensor has the values of a stored one."""
    return other is not None and one.shape == other.shape and torch.equal(one, other.float())


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """The stored tensors."""
    from safetensors.torch import load_file

    if (directory / "model.safetensors").exists():
        return load_file(directory / "model.safetensors")
    found: dict[str, torch.Tensor] = torch.load(directory / "pytorch_model.bin", weights_only=True)
    return found


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    library = bindings()
    library.llama_backend_init()
    serve(f"llama.cpp {COMMIT}", partial(fate_of, library))
