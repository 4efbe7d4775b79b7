"""Benchmarks a training step of a model with PEFT's adapters, with `use_tied_loss` and without.

The model has Gemma's vocabulary and width, two layers and random weights, or is the trained SmolLM2-135M. Each kind of
adapter is put on before or after `use_tied_loss`. Every step runs in a process of its own: the peak is that of the
process above what is resident with the model and its adapters, the time is the median of the steps after the first.
Loss and gradients are held against the same step in float64.

`python -m benchmarks adapted_loss` runs all of it; `python -m benchmarks.adapted_loss MODEL KIND WAY MODE` one process.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import machine, median, peak_of_process, reset_peak

__all__ = ["KINDS", "run"]

SMOLLM2 = Path(__file__).parents[1] / ".peers" / "real" / "smollm2"
"""The trained model, where `make real` has fetched it."""
TOKENS = (2, 256)
STEPS = 3
WAYS = ("without", "use_tied_loss, then PEFT", "PEFT, then use_tied_loss")
MODES = ("eager", "checkpointing", "compiled")
LORA: dict[str, Any] = {"r": 16, "lora_alpha": 32}
LAYERS = ["q_proj", "v_proj"]
KINDS: dict[str, dict[str, Any] | None] = {
    "no adapter": None,
    "LoRA on q and v": {"target_modules": LAYERS},
    "LoRA on the head": {"target_modules": ["lm_head"]},
    "LoRA on the embedding": {"target_modules": ["embed_tokens"]},
    "LoRA on both ends": {"target_modules": ["lm_head", "embed_tokens"]},
    "trained rows": {"target_modules": LAYERS, "trainable_token_indices": list(range(100, 120))},
    "a saved head": {"target_modules": LAYERS, "modules_to_save": ["lm_head"]},
}
MODELS = {"gemma": "Gemma's vocabulary: V 262,144, D 640, two layers", "smollm2": "SmolLM2-135M: V 49,152, D 576"}


def built(name: str) -> Any:
    """The model, in float32."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if name == "smollm2":
        return transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    config = transformers.Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=640,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        intermediate_size=2048,
        tie_word_embeddings=True,
    )
    return transformers.Gemma3ForCausalLM(config)


def prepared(name: str, kind: str, way: str, mode: str) -> Any:
    """The model with its adapters, stirred, and with the tied loss if the way has it."""
    from bowline.nn import use_tied_loss

    model, config = built(name), KINDS[kind]
    if way == WAYS[1]:
        use_tied_loss(model)
    if config is not None:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**LORA | config))
        torch.manual_seed(1)
        with torch.no_grad():
            for tensor in model.parameters():
                if tensor.requires_grad:
                    tensor.add_(torch.randn_like(tensor), alpha=0.01)
    if way == WAYS[2]:
        use_tied_loss(model)
    if mode == "checkpointing":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if config is not None:
            model.enable_input_require_grads()
    return model.train()


def one(name: str, kind: str, way: str, mode: str, place: str) -> dict[str, float]:
    """A process's steps: seconds, peak above the model, and how far loss and gradients are from float64's."""
    exact = Path(place) / f"{name}-{kind}.pt"
    model = prepared(name, kind, way, mode)
    if way == "float64":
        model = model.double()
    ids = torch.randint(5, model.config.vocab_size, TOKENS, generator=torch.Generator().manual_seed(0))
    learning = {key: tensor for key, tensor in model.named_parameters() if tensor.requires_grad}
    call = torch.compile(model) if mode == "compiled" else model
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before, seconds = reset_peak(), []
    for _ in range(1 if way == "float64" else STEPS):
        model.zero_grad(set_to_none=True)
        began = time.perf_counter()
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        seconds.append(time.perf_counter() - began)
    peak = peak_of_process() - before
    gradients = {key.replace("_orig_mod.", ""): tensor.grad for key, tensor in learning.items()}
    if way == "float64":
        torch.save({"loss": loss.detach(), **gradients}, exact)
        return {}
    wanted = torch.load(exact, mmap=True)
    errors = [
        float((gradient.double() - wanted[key]).norm() / wanted[key].norm().clamp(min=1e-30))
        for key, gradient in gradients.items()
        if gradient is not None
    ]
    return {
        "seconds": median(seconds[1:]),
        "peak": peak,
        "loss": abs(float(loss) - float(wanted["loss"])) / float(wanted["loss"]),
        "gradient": max(errors),
    }


def _in_a_process(*what: str) -> dict[str, float]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.adapted_loss", *what]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found


def table(name: str, mode: str, place: str) -> list[str]:
    """One model in one mode, as Markdown."""
    lines = [
        f"## {MODELS[name]}; {mode}",
        "",
        "| adapter | way | s a step | time | MB above the model | memory | loss off float64 | gradients |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        if not (Path(place) / f"{name}-{kind}.pt").exists():
            _in_a_process(name, kind, "float64", "eager", place)
        plain: dict[str, float] = {}
        for way in WAYS if KINDS[kind] is not None else WAYS[:2]:
            found = _in_a_process(name, kind, way, mode, place)
            plain = plain or found
            lines.append(
                f"| {kind} | {way if KINDS[kind] is not None or way == WAYS[0] else 'use_tied_loss'} | "
                f"{found['seconds']:.2f} | {found['seconds'] / plain['seconds']:.2f} | {found['peak']:.0f} | "
                f"{found['peak'] / plain['peak']:.2f} | {found['loss']:.1e} | {found['gradient']:.1e} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return [*lines, ""]


def run() -> str:
    """Runs all models and modes; returns Markdown."""
    lines = [
        "# A training step with adapters",
        "",
        f"float32, {TOKENS[0]} x {TOKENS[1]} tokens, LoRA of rank {LORA['r']}, 20 trained rows; "
        f"{torch.get_num_threads()} threads. The losses are off by their share, gradients by the largest relative norm "
        "of a tensor's difference.",
        "",
        machine(["bowline-ties", "torch", "transformers", "peft"]),
        "",
    ]
    names = [name for name in MODELS if name != "smollm2" or SMOLLM2.is_dir()]
    with tempfile.TemporaryDirectory() as place:
        return "\n".join([*lines, *(line for name in names for mode in MODES for line in table(name, mode, place))])


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(one(*sys.argv[1:])))
