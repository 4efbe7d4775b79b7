"""Splits a text in llama.cpp's runtime, and continues it greedily: `python llama_cpp_greedy.py MODEL TEXT_FILE COUNT`.

LLAMA_CPP names the folder that `make sweep-llama-cpp` fills. It runs in a process of its own: the runtime aborts
where an assertion fails.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any


def bindings() -> Any:
    """The ctypes bindings of llama-cpp-python, without the rest of that package."""
    place = Path(os.environ["LLAMA_CPP"])
    os.environ["LLAMA_CPP_LIB_PATH"] = str(place / "build" / "bin")
    package = types.ModuleType("llama_cpp")
    package.__path__ = [str(place / "source" / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")


def greedy(file: str, text: str, count: int) -> dict[str, list[Any]]:
    """The ids of the text, and the ids and logits of the `count` most likely tokens after it.

    An encoder reads the text, with what the tokenizer adds to it, and the decoder begins with its start token.
    """
    llama = bindings()
    llama.llama_backend_init()
    parameters = llama.llama_model_default_params()
    parameters.n_gpu_layers = 0
    model = llama.llama_model_load_from_file(file.encode(), parameters)
    if not model:
        sys.exit(f"llama.cpp refuses {file}")
    vocabulary = llama.llama_model_get_vocab(model)
    raw = text.encode()
    encodes = llama.llama_model_has_encoder(model)
    ids = (llama.llama_token * (len(raw) + 8))()
    length = llama.llama_tokenize(vocabulary, raw, len(raw), ids, len(ids), encodes, False)
    prompt = list(ids[:length])
    if not count:
        return {"prompt": prompt, "greedy": [], "logits": []}
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_batch, settings.n_ubatch = 256, 256, 256
    settings.n_threads = settings.n_threads_batch = 1
    context = llama.llama_init_from_model(model, settings)
    size = llama.llama_vocab_n_tokens(vocabulary)
    found: list[int] = []
    heights: list[float] = []
    following = prompt
    if encodes:
        tokens = (llama.llama_token * len(prompt))(*prompt)
        assert llama.llama_encode(context, llama.llama_batch_get_one(tokens, len(prompt))) == 0
        following = [llama.llama_model_decoder_start_token(model)]
    for _ in range(count):
        tokens = (llama.llama_token * len(following))(*following)
        assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(following))) == 0
        logits = llama.llama_get_logits_ith(context, -1)
        scores = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float * size)).contents
        following = [max(range(size), key=scores.__getitem__)]
        found += following
        heights.append(scores[following[0]])
    return {"prompt": prompt, "greedy": found, "logits": heights}


if __name__ == "__main__":
    sys.stdout.write(
        f"{json.dumps(greedy(sys.argv[1], Path(sys.argv[2]).read_text(encoding='utf-8'), int(sys.argv[3])))}\n"
    )
