"""The house as the design draws it: imports run one way, nothing heavy is loaded unasked, names are there."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import bowline
from tests.checkpoints import GPT2, WTE, table, write

ROOT = Path(bowline.__file__).parent
REPOSITORY = Path(__file__).parents[1]
MODULES = sorted(
    module.name for module in pkgutil.walk_packages([str(ROOT)], "bowline.") if not module.name.endswith("__main__")
)
WITHOUT_TORCH = ("auditing", "checkpoint", "edit", "errors", "families", "geometry", "plots", "recipes", "tie")
WITH_TORCH = ("distributed", "functional", "models", "nn", "study", "train")
# fmt: off
NAMES_OF_THE_DESIGN = {
    "Tie", "TieState", "find_ties", "declared_ties", "tie_weights", "untie_weights", "check_ties", "keep_tied",
    "TieGuard", "LMHead", "MLMHead", "linear_cross_entropy", "Recipe", "RECIPES", "init_weights", "expected_loss",
    "load_checkpoint", "save_checkpoint", "load_state", "resize_vocab", "merge_lora", "quantize_tied", "audit",
    "compare", "open_checkpoint", "use_tied_loss", "split_gradient", "apply_once", "unique_parameters", "export",
    "shard_groups", "check_before_sharding", "TiedState", "PipelineTie", "tensor_parallel_plan",
    "apply_tensor_parallel", "check_weight_sync",
}
# fmt: on
FRAMEWORKS = {"torch", "transformers", "safetensors", "tokenizers", "jax", "tensorflow"}


def room(module: str) -> str:
    """`bowline.auditing.rules.tie_flag` is in the room `audit`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def path_of(module: str) -> Path:
    base = ROOT.joinpath(*module.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


# --- the order of the rooms -----------------------------------------------------------------------------------------


def linted(directory: Path) -> subprocess.CompletedProcess[str]:
    """`lint-imports` by the contracts of `.importlinter`, over the package in `directory/src`."""
    command = "import sys; from importlinter.cli import lint_imports_command as lint; lint()"
    return subprocess.run(
        [sys.executable, "-c", command, "--no-cache", "--no-logo", "--config", str(REPOSITORY / ".importlinter")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(directory / "src")},
    )


def test_imports_follow_the_contracts() -> None:
    done = linted(REPOSITORY)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("tie.py", "from bowline.nn.tree import slots", "Rooms, from the ground up"),
        ("auditing/progress.py", "def f(): import torch", "Files, families and the audit work without torch"),
        ("nn/tree/slots.py", "from bowline.nn.ties import ends", "Inside nn"),
        ("functional/kernels/row_sums.py", "from bowline.functional import tied_lookup", "Inside functional"),
        ("checkpoint/places/byte_source.py", "from bowline.checkpoint import durable", "Inside checkpoint"),
        ("models/common/outputs.py", "def f(): from bowline.models import gpt2", "Inside models"),
        ("nn/ties/ends.py", "if False: from bowline.nn.ties import tying", "No two modules or rooms import each other"),
    ],
)
def test_an_import_that_is_turned_around_breaks_its_contract(tmp_path: Path, file: str, line: str, broken: str) -> None:
    shutil.copytree(ROOT, tmp_path / "src" / "bowline", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "src" / "bowline" / file
    path.write_text(f"{path.read_text()}\n{line}\n")
    done = linted(tmp_path)
    assert done.returncode == 1
    assert f"{broken} BROKEN" in done.stdout


def test_no_two_files_have_one_name() -> None:
    """But for the verbs of the command line, which are called as what they do."""
    names = Counter(path.stem for path in ROOT.rglob("*.py") if path.parent.name != "cli" and path.stem != "__init__")
    assert [name for name, times in names.items() if times > 1] == []


def test_no_two_public_classes_have_one_name() -> None:
    """A class has one meaning in the whole tree; a private one, of a file of its own, may be called as another is."""
    classes = Counter(
        node.name
        for path in ROOT.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, times in classes.items() if times > 1] == []


# --- what is loaded -------------------------------------------------------------------------------------------------


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has loaded once it has run `code`."""
    script = f"import sys, json\n{code}\nprint('\\n' + json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_bowline_loads_nothing_of_it() -> None:
    loaded = loaded_by("import bowline")
    assert {name for name in loaded if name.startswith("bowline")} == {"bowline"}
    assert not loaded & {"numpy", "typer", "rich", "httpx2", "huggingface_hub", *FRAMEWORKS}


def test_a_tie_loads_nothing_but_itself() -> None:
    assert not loaded_by("from bowline import Tie, TieState") & {"numpy", "bowline.checkpoint", *FRAMEWORKS}


def audited(path: Path, *options: str) -> set[str]:
    return ran("audit", str(path), *options)


def ran(*arguments: str) -> set[str]:
    command = ["bowline", *arguments]
    run = "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 0, end.code"
    code = f"sys.argv = {command!r}\nfrom bowline.cli import main\n{run}"
    return loaded_by(code)


def test_an_audit_of_headers_loads_no_numpy_and_no_network(tmp_path: Path) -> None:
    loaded = audited(write(tmp_path, {WTE: table()}, GPT2), "--headers-only")
    assert not loaded & {"numpy", "httpx2", "huggingface_hub", *FRAMEWORKS}


def test_an_audit_of_values_loads_numpy_and_no_framework(tmp_path: Path) -> None:
    loaded = audited(write(tmp_path, {WTE: table()}, GPT2))
    assert "numpy" in loaded
    assert not loaded & {"httpx2", "huggingface_hub", *FRAMEWORKS}


def within(loaded: set[str], *parts: str) -> set[str]:
    """The loaded modules of bowline that are one of these, or in one of them."""
    return {name for name in loaded for part in parts if f"{name}.".startswith(f"bowline.{part}.")}


def test_the_version_loads_the_commands_and_the_tables_and_nothing_that_they_run() -> None:
    loaded = ran("--version")
    assert "bowline.cli.audit" in loaded
    assert not within(loaded, "auditing.rules", "auditing.report", "auditing.queue", "checkpoint.durable", "edit")
    assert not loaded & {"rich", "numpy", "httpx2", "huggingface_hub", *FRAMEWORKS}


def test_an_audit_of_plain_safetensors_loads_no_code_for_other_files(tmp_path: Path) -> None:
    """Adapters, quantised layouts, GGUF, ONNX, pt2, SentencePiece and edits are loaded where such a file is met."""
    loaded = audited(write(tmp_path, {WTE: table()}, GPT2), "--headers-only")
    assert "bowline.auditing.rules.tie_flag" in loaded
    graphs = ("onnx.model", "pt2", "graphs.uses")
    formats = ("quantised", "peft_adapter", "gguf.header", "gguf.text_arrays", "sentencepiece_model", *graphs)
    adapters = ("evidence", "gathering", "merge", "report", "audit")
    assert not within(
        loaded,
        *(f"checkpoint.formats.{name}" for name in formats),
        *(f"auditing.adapter_{name}" for name in adapters),
        "auditing.rules.adapter_files",
        "auditing.rules.adapter_ties",
        "auditing.report.adapter_text",
        "auditing.config_fix",
        "checkpoint.durable",
    )


def test_importtime_of_the_command_shows_no_framework(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-X",
        "importtime",
        "-m",
        "bowline",
        "audit",
        str(write(tmp_path, {WTE: table()}, GPT2)),
        "--headers-only",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    names = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "bowline" in names
    assert not names & {"numpy", "httpx2", "huggingface_hub", *FRAMEWORKS}


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_there_and_defined_or_passed_on(module: str) -> None:
    loaded = importlib.import_module(module)
    names = getattr(loaded, "__all__", [])
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(loaded, name)] == []


def test_every_public_name_of_bowline_is_imported_when_it_is_used() -> None:
    from bowline.auditing import audit
    from bowline.edit import open_checkpoint

    names = dir(bowline)
    assert {name for name in names if not hasattr(bowline, name)} == set()
    assert set(names) == NAMES_OF_THE_DESIGN | {*WITHOUT_TORCH, *WITH_TORCH}
    assert bowline.open_checkpoint is open_checkpoint
    assert bowline.audit is audit


def test_a_name_that_needs_torch_says_so_where_there_is_none() -> None:
    for name in ("tie_weights", "nn"):
        ask = f"try:\n    bowline.{name}\nexcept ImportError as error:\n    print(error)"
        code = f"sys.modules['torch'] = None\nimport bowline\n{ask}"
        done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, check=True)
        assert done.stdout == (
            f"bowline.{name} needs torch, which is not installed: "
            "pip install '.[torch]' in a checkout, or 'bowline-ties[torch]' once it is on the index\n"
        )


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'bowline' has no attribute 'adit'"):
        bowline.adit  # type: ignore[attr-defined]  # noqa: B018


def test_a_room_is_an_attribute_once_it_is_asked_for() -> None:
    for name in (*WITHOUT_TORCH, *WITH_TORCH):
        loaded = loaded_by(f"import bowline; assert bowline.{name}.__name__ == 'bowline.{name}'")
        assert f"bowline.{name}" in loaded
        assert not loaded & FRAMEWORKS or name in WITH_TORCH


# --- examples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module: str) -> None:
    outcome = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0


@pytest.mark.parametrize("module", MODULES)
def test_every_file_begins_with_what_it_is_for(module: str) -> None:
    assert ast.get_docstring(ast.parse(path_of(module).read_text()))


def test_the_families_data_is_shipped_with_the_package() -> None:
    for name in ("transformers.json", "vllm.json", "llama_cpp.json", "mlx_lm.json"):
        assert json.loads((ROOT / "families" / "tables" / name).read_bytes())
    assert (ROOT / "py.typed").exists()
