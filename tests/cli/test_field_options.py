"""Options of a verb that come from the fields of a dataclass."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.testing import CliRunner

from bowline.cli.field_options import with_field_options


@dataclass(frozen=True, kw_only=True)
class Knot:
    strands: int = field(default=3, metadata={"help": "How many strands."})
    tight_end: bool = field(default=False, metadata={"help": "Pull it."})
    kind: str = field(default="bight", metadata={"help": "Which.", "choices": ("bight", "loop")})
    ropes: tuple[str, ...] = field(default=("one",), metadata={"help": "Which ropes.", "metavar": "ROPE"})
    wet: bool | None = field(default=None, metadata={"help": "Of wet rope.", "flag": "--wet/--dry"})
    inner: int = 7


def tied(*arguments: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def verb(out: str = "here", **options: Any) -> None:
        seen.update(options, out=out)

    app = typer.Typer()
    app.command()(with_field_options(verb, Knot))
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen or {"help": result.stdout}


def test_what_is_not_given_is_none_whatever_the_fields_default() -> None:
    assert {name for name, value in tied().items() if value not in (None, [])} == {"out"}


def test_each_option_has_the_type_of_its_field() -> None:
    arguments = ["--strands", "4", "--tight-end", "--kind", "loop", "--ropes", "a", "--ropes", "b", "--dry"]
    assert tied(*arguments, "--out", "there") == {
        "strands": 4, "tight_end": True, "kind": "loop", "ropes": ["a", "b"], "wet": False, "out": "there"
    }  # fmt: skip


def test_a_switch_has_no_opposite_unless_its_flag_spells_one() -> None:
    text = tied("--help")["help"]
    assert "--tight-end" in text and "--no-tight-end" not in text
    assert "--wet" in text and "--dry" in text


def test_a_field_without_help_is_no_option() -> None:
    assert "--inner" not in tied("--help")["help"]


def test_the_options_of_training_are_not_read_for_another_verb() -> None:
    code = (
        "import sys; from bowline.cli import app; app(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert "train" in done.stdout
    assert done.stdout.endswith("False\n")
