"""The house as the design draws it: imports run one way, nothing heavy is loaded unasked, names are there."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import bowline
from tests.checkpoints import GPT2, WTE, table, write

ROOT = Path(bowline.__file__).parent
MODULES = sorted(
    module.name for module in pkgutil.walk_packages([str(ROOT)], "bowline.") if not module.name.endswith("__main__")
)
ROOMS = (
    "errors",
    "tie",
    "geometry",
    "recipes",
    "families",
    "checkpoint",
    "plots",
    "audit",
    "nn",
    "models",
    "train",
    "study",
    "demo",
    "cli",
)
"""From the ground up: a room sees what comes before it, and nothing after."""
FLOOR = {
    "errors": set(),
    "tie": set(),
    "geometry": {"errors"},
    "recipes": {"errors"},
    "families": {"errors", "tie"},
    "checkpoint": {"errors", "tie", "families"},
    "plots": {"errors", "geometry", "recipes"},
    "audit": {"errors", "tie", "geometry", "recipes", "families", "checkpoint"},
    "nn": {"errors", "tie", "geometry", "recipes", "families", "checkpoint"},
    "models": {"errors", "tie", "recipes", "families", "checkpoint", "nn"},
    "train": {"errors", "tie", "recipes", "families", "checkpoint", "nn", "models"},
    "study": {"errors", "tie", "geometry", "recipes", "families", "checkpoint", "plots", "nn", "models", "train"},
    "demo": {"errors", "tie", "geometry", "families", "checkpoint", "audit", "nn", "models"},
    "cli": set(ROOMS) - {"cli"},
}
WITHOUT_TORCH = ("errors", "tie", "geometry", "recipes", "families", "checkpoint", "plots", "audit", "cli")
FRAMEWORKS = {"torch", "transformers", "safetensors", "tokenizers", "jax", "tensorflow"}


def room(module: str) -> str:
    """`bowline.audit.rules.flag` is in the room `audit`."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def path_of(module: str) -> Path:
    base = ROOT.joinpath(*module.split(".")[1:])
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def imports(module: str) -> set[str]:
    """Every module that this one imports, at the top, in a function, or for types only."""
    found = set()
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively: say the whole name"
            base = node.module or ""
            found |= {f"{base}.{alias.name}" if base == "bowline" else base for alias in node.names}
    return found


def test_every_room_is_drawn_here() -> None:
    assert {room(module) for module in MODULES} == set(ROOMS) == set(FLOOR)


@pytest.mark.parametrize("module", MODULES)
def test_imports_run_one_way(module: str) -> None:
    own = room(module)
    for imported in imports(module):
        if imported.split(".")[0] == "bowline" and not imported.startswith("bowline.__"):
            assert room(imported) == own or room(imported) in FLOOR[own], f"{module} imports {imported}"


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) in WITHOUT_TORCH])
def test_rooms_without_torch_import_no_framework(module: str) -> None:
    assert {imported.split(".")[0] for imported in imports(module)} & FRAMEWORKS == set()


@pytest.mark.parametrize("module", MODULES)
def test_every_file_is_a_room_and_not_a_hall(module: str) -> None:
    assert len(path_of(module).read_text().splitlines()) <= 450


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
    command = ["bowline", "audit", str(path), *options]
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
    from bowline.audit import audit
    from bowline.checkpoint import open_checkpoint

    assert dir(bowline) == sorted(bowline.__all__)
    assert {name for name in bowline.__all__ if not hasattr(bowline, name)} == set()
    assert set(bowline._HOMES) | {"audit"} == set(bowline.__all__)
    assert bowline.open_checkpoint is open_checkpoint
    assert bowline.audit.audit is audit  # type: ignore[attr-defined]


def test_the_names_that_a_type_checker_sees_are_the_public_ones() -> None:
    seen = set()
    for node in ast.walk(ast.parse((ROOT / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bowline"):
            seen |= {alias.name for alias in node.names}
    assert seen == set(bowline.__all__)


def test_a_name_that_needs_torch_says_so_where_there_is_none() -> None:
    for name in ("tie_weights", "nn"):
        ask = f"try:\n    bowline.{name}\nexcept ImportError as error:\n    print(error)"
        code = f"sys.modules['torch'] = None\nimport bowline\n{ask}"
        done = subprocess.run([sys.executable, "-c", f"import sys\n{code}"], capture_output=True, text=True, check=True)
        assert done.stdout == f"bowline.{name} needs torch, which is not installed: pip install 'bowline[torch]'\n"


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'bowline' has no attribute 'adit'"):
        bowline.adit  # noqa: B018


def test_bowline_audit_is_a_function_and_a_room(tmp_path: Path) -> None:
    from bowline.audit import audit

    report = bowline.audit(write(tmp_path, {WTE: table()}, GPT2))
    assert report.clean
    assert inspect.signature(bowline.audit) == inspect.signature(audit)
    assert (type(bowline.audit).__call__.__doc__ or "").startswith("Audit one checkpoint")


def test_a_room_is_an_attribute_once_it_is_asked_for() -> None:
    rooms = sorted(set(ROOMS) - {"cli", "demo"})
    for name in rooms:
        loaded = loaded_by(f"import bowline; assert bowline.{name}.__name__ == 'bowline.{name}'")
        assert f"bowline.{name}" in loaded
        assert not loaded & FRAMEWORKS or name not in WITHOUT_TORCH
    assert frozenset(rooms) == bowline._ROOMS


# --- examples -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_run(module: str) -> None:
    outcome = doctest.testmod(importlib.import_module(module), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert outcome.failed == 0


@pytest.mark.parametrize("module", MODULES)
def test_every_file_begins_with_what_it_is_for(module: str) -> None:
    assert ast.get_docstring(ast.parse(path_of(module).read_text()))


def test_the_families_data_is_shipped_with_the_package() -> None:
    for name in ("table.json", "vllm.json", "llama_cpp.json"):
        assert json.loads((ROOT / "families" / name).read_bytes())
    assert (ROOT / "py.typed").exists()
