"""Runs other tools on checkpoints whose tie is known, beside `bowline audit`: `make compared-tools`.

    python -m tools.compared_tools MLX_MODEL_DOCTOR MERGEKIT_YAML

The arguments are the programs of the two tools, each in an environment of its own. The output is a page in Markdown,
kept with its date in `benchmarks/results`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from benchmarks.measure import machine
from safetensors.torch import load_file, load_model, save_file, save_model

from bowline.auditing import audit
from bowline.auditing.rules import Severity
from bowline.demo import faults, layouts
from bowline.demo.layouts import Layout

__all__ = ["main"]

HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"
TIED_CHECK = "text/weights.tied_embedding"


def main() -> None:
    """Print the page."""
    doctor, mergekit = (Path(argument) for argument in sys.argv[1:])
    with tempfile.TemporaryDirectory() as place:
        lines = [
            "# Other tools beside the audit",
            "",
            f"{machine(['bowline-ties', 'safetensors', 'torch'])}, "
            f"mlx-model-doctor {version(doctor, 'mlx-model-doctor')}, mergekit {version(mergekit, 'mergekit')}",
            "",
            "Rerun: `make compared-tools`. The checkpoints are tiny and made here, so their truth is known.",
            "",
            "## mlx-model-doctor",
            "",
            "Its check of ties reads names in headers. It knows no values, and so no difference between a copy and a "
            "trained head.",
            "",
            "| checkpoint | truth | mlx-model-doctor's check of ties | bowline audit |",
            "|---|---|---|---|",
            *doctor_rows(doctor, Path(place, "doctor")),
            "",
            "## mergekit",
            "",
            "A linear merge of two Llamas, half and half. The config is the first model's.",
            "",
            "| first | second | the result stores a head | its flag | bowline audit |",
            "|---|---|---|---|---|",
            *merge_rows(mergekit, Path(place, "merge")),
            "",
            "## safetensors",
            "",
            "| call | on a tied model | on one whose head has other values |",
            "|---|---|---|",
            *safetensors_rows(Path(place)),
        ]
    print("\n".join(lines))


def version(program: Path, package: str) -> str:
    """The version of a package in the environment of a program."""
    code = f"import importlib.metadata as found; print(found.version({package!r}))"
    return subprocess.run(
        [str(program.parent / "python"), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def found_by_audit(place: Path) -> str:
    """The state of the first tie, and the codes of warnings and errors."""
    report = audit(place)
    codes = [finding.code for finding in report.findings if finding.severity is not Severity.INFO]
    state = report.evidence.ties[0].state
    return f"{state.value if state else 'not known'}; {' '.join(dict.fromkeys(codes)) or 'nothing'}"


def checkpoints() -> Iterator[tuple[str, str, Layout]]:
    """Checkpoints by name, each with its truth."""
    untied = layouts.llama()
    tied = untied.without_tensor(HEAD).with_config(tie_word_embeddings=True)
    table = tied.tensor(TABLE)
    yield "Llama", "tied, one matrix", tied
    yield "Llama", "untied, two matrices", untied
    yield "Llama", "tied, an equal copy beside it", tied.with_tensor(HEAD, table)
    yield "Llama", "a trained head, and the flag says tied", tied.with_tensor(HEAD, table * np.float32(1.01))
    yield "Llama", "the head was lost", untied.without_tensor(HEAD)
    for case in faults.CASES:
        if {"BW101", "BW102"} & case.expected and "Llama" not in case.title:
            yield case.title, case.story, case.build()


def doctor_rows(program: Path, place: Path) -> Iterator[str]:
    """What mlx-model-doctor says of each checkpoint."""
    for number, (name, truth, layout) in enumerate(checkpoints()):
        directory = place / str(number)
        layout.write(directory)
        done = subprocess.run(
            [str(program), "check", "local", str(directory), "--format", "json"],
            capture_output=True,
            text=True,
            check=False,
        )
        results = json.loads(done.stdout)
        (check,) = (one for one in walk(results) if one.get("check_id") == TIED_CHECK)
        yield f"| {name} | {truth} | {check['status']}: {check['message']} | {found_by_audit(directory)} |"


def walk(value: object) -> Iterator[dict[str, str]]:
    """Every object inside a JSON value."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(inner)


def merge_rows(program: Path, place: Path) -> Iterator[str]:
    """What mergekit makes of two models whose ties differ."""
    made = {}
    for seed in (0, 1):
        untied = layouts.llama(seed=seed)
        made[f"untied {seed}"] = untied
        made[f"tied {seed}"] = untied.without_tensor(HEAD).with_config(tie_word_embeddings=True)
        made[f"a head of its own, flag true {seed}"] = untied.with_config(tie_word_embeddings=True)
    for number, layout in enumerate(made.values()):
        layout.write(place / str(number))
    paths = {name: place / str(number) for number, name in enumerate(made)}
    kinds = ("tied", "untied", "a head of its own, flag true")
    for first in kinds:
        for second in kinds:
            result = place / f"{first} and {second}".replace(" ", "-").replace(",", "")
            recipe = {
                "merge_method": "linear",
                "dtype": "float32",
                "models": [
                    {"model": str(paths[name]), "parameters": {"weight": 0.5}} for name in (f"{first} 0", f"{second} 1")
                ],
            }
            recipe_file = result.with_suffix(".yml")
            recipe_file.write_text(json.dumps(recipe))  # JSON is YAML
            done = subprocess.run(
                [str(program), str(recipe_file), str(result), "--no-copy-tokenizer"],
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            if done.returncode:
                yield f"| {first} | {second} | no result: {done.stderr.strip().splitlines()[-1]} | | |"
                continue
            flag = json.loads((result / "config.json").read_text())["tie_word_embeddings"]
            stored = any(HEAD in load_file(file) for file in result.glob("*.safetensors"))
            flag_word, stored_word = str(flag).lower(), "yes" if stored else "no"
            yield f"| {first} | {second} | {stored_word} | {flag_word} | {found_by_audit(result)} |"


def safetensors_rows(place: Path) -> Iterator[str]:
    """What the calls of safetensors do with a tied model, and with its file once the head differs."""
    import torch
    from torch import nn

    def build() -> nn.ModuleDict:
        model = nn.ModuleDict({"wte": nn.Embedding(9, 4), "lm_head": nn.Linear(4, 9, bias=False)})
        model["lm_head"].weight = model["wte"].weight
        return model

    def said(call: object) -> str:
        try:
            answer = call()  # type: ignore[operator]
        except RuntimeError as error:
            return f"refused: {' '.join(str(error).split()):.150}"
        return str(answer)

    file, other = place / "model.safetensors", place / "other.safetensors"
    model = build()
    refused = said(lambda: save_file(model.state_dict(), place / "state.safetensors"))
    shared = refused.partition(",")[0]
    yield f"| `save_file(model.state_dict())` | {shared} | the same: the two names share memory |"
    save_model(model, str(file))
    yield f"| `save_model(model)` | stores {', '.join(f'`{name}`' for name in load_file(file))} | |"
    table = model.get_parameter("wte.weight").detach()
    save_file({"wte.weight": table.clone(), HEAD: table * 1.5}, other)
    own = said(lambda: load_model(build(), str(file)))
    strict = said(lambda: load_model(build(), str(other)))
    yield f"| `load_model(model)` | {own.replace('(set(), [])', 'loads it; one matrix')} | {strict} |"
    again = build()
    load_model(again, str(other), strict=False)
    loaded = again.get_parameter("wte.weight").detach()
    which = "the head's" if torch.equal(loaded, table * 1.5) else "the embedding's"
    yield f"| `load_model(model, strict=False)` | loads it; one matrix | no error: both ends get {which} values |"


if __name__ == "__main__":
    main()
