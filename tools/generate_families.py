"""Writes `src/bowline/families/tables/transformers.json` from two transformers versions.

    python tools/generate_families.py PYTHON_WITH_4 PYTHON_WITH_5 [--facts FOLDER]

`--facts` keeps the facts of each version in FOLDER, and reuses the files that exist there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src" / "bowline" / "families" / "tables" / "transformers.json"
FLAG = "tie_word_embeddings"
BATCH = 150

Json = dict[str, Any]


def ask(interpreter: str, destination: Path, names: list[str]) -> Any:
    """Run the inspector under `interpreter` and return its output, which is kept at `destination` and reused."""
    if not destination.exists():
        command = [interpreter, "-m", "tools.inspect_transformers", str(destination), *names]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return json.loads(destination.read_text(encoding="utf-8"))


def observe(interpreter: str, folder: Path) -> Json:
    """The facts of every class under `interpreter`, with a process for each batch to limit memory."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ask(interpreter, folder / "names.json", [])
    facts: Json = {"classes": {}, "flags": {}, "failed": {}}
    for start in range(0, len(names), BATCH):
        batch = ask(interpreter, folder / f"{start:04}.json", names[start : start + BATCH])
        facts["version"] = batch["version"]
        for key in ("classes", "flags", "failed"):
            facts[key] |= batch[key]
    return facts


def gate_paths(versions: dict[str, Json], family: str) -> set[str]:
    """All keys that decide a tie of any class of `family` in any version."""
    return {
        path
        for facts in versions.values()
        for known in facts["classes"].values()
        if known["family"] == family
        for tie in known["declaration"]["ties"]
        for path in tie["gate"]["paths"]
    }


def most_common(versions: dict[str, Json], family: str, key: str) -> str | None:
    """The path that most classes of `family` give for `key`; the newer version and classes with a head count more."""
    votes: Counter[str] = Counter()
    for version, facts in versions.items():
        for known in facts["classes"].values():
            if known["family"] == family and known[key] is not None:
                votes[known[key]] += (10 if known["declaration"]["head"] else 1) * (100 if version == "5" else 1)
    return min(votes, key=lambda path: (-votes[path], path)) if votes else None


def flag_defaults(versions: dict[str, Json], family: str) -> Json:
    """{version: {path: default}} for the levels that carry the flag, decide a tie, or are the top."""
    known = {version: facts["flags"].get(family, {}) for version, facts in versions.items()}
    deciding = gate_paths(versions, family) | {FLAG}
    newest = known["5"] or known["4"]
    carried = {path for path, (value, words) in newest.items() if value is not None and (words or known["5"])}
    return {
        version: {path: value for path, (value, _) in sorted(levels.items()) if path in deciding | carried}
        for version, levels in known.items()
        if levels
    }


def family_row(versions: dict[str, Json], family: str) -> Json:
    """The row of a family in the table."""
    return {
        "vocab_size": most_common(versions, family, "vocab_size"),
        "hidden_size": most_common(versions, family, "hidden_size"),
        "flags": flag_defaults(versions, family),
    }


def class_row(versions: dict[str, Json], name: str) -> Json:
    """The row of a class in the table: a declaration for each version, "=" if version 4 declares the same as 5."""
    found = {version: facts["classes"].get(name) for version, facts in versions.items()}
    newest = found["5"] or found["4"]
    declarations = {version: known and known["declaration"] for version, known in found.items()}
    if declarations["4"] == declarations["5"]:
        declarations["4"] = "="
    return {"family": newest["family"], "prefix": newest["prefix"], **declarations}


def unbuilt_rows(versions: dict[str, Json]) -> Json:
    """{class: {version: reason}} of the classes that could not be built and declare ties, or cannot be imported."""
    rows: Json = {}
    for version, facts in versions.items():
        for name, failure in facts["failed"].items():
            if failure["declares"] is not False:
                rows.setdefault(name, {})[version] = failure["reason"]
    return rows


def merge(versions: dict[str, Json]) -> Json:
    """Merge the facts of both versions into the table. `versions` maps "4" and "5" to the inspector's output."""
    names = sorted({name for facts in versions.values() for name in facts["classes"]})
    classes = {name: class_row(versions, name) for name in names}
    return {
        "format": 1,
        "transformers": {version: facts["version"] for version, facts in versions.items()},
        "families": {f: family_row(versions, f) for f in sorted({row["family"] for row in classes.values()})},
        "classes": classes,
        "unbuilt": dict(sorted(unbuilt_rows(versions).items())),
    }


def lines(table: Json) -> Iterator[str]:
    """The table as JSON with one line for each family, class or failure, so that diffs are readable."""
    yield "{"
    parts = list(table.items())
    for part, (key, value) in enumerate(parts):
        comma = "," if part + 1 < len(parts) else ""
        if key in ("families", "classes", "unbuilt"):
            yield f"{json.dumps(key)}: {{"
            rows = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in value.items()]
            yield ",\n".join(rows)
            yield "}" + comma
        else:
            yield f"{json.dumps(key)}: {json.dumps(value)}{comma}"
    yield "}"


def summary(table: Json, versions: dict[str, Json]) -> Iterator[str]:
    """The counts of the table, and the classes that could not be built."""
    yield f"{len(table['families'])} families, {len(table['classes'])} classes, {len(table['unbuilt'])} not built"
    for facts in versions.values():
        ties = [tie for known in facts["classes"].values() for tie in known["declaration"]["ties"]]
        tied = sum(bool(known["declaration"]["ties"]) for known in facts["classes"].values())
        never = sum(bool(known["never_made"]) for known in facts["classes"].values())
        yield (
            f"transformers {facts['version']}: {len(facts['classes'])} classes, {tied} with ties ({len(ties)} in all), "
            f"{never} declare a tie that no flag makes"
        )
        rules = Counter(tie["gate"].get("rule", f"{len(tie['gate']['paths'])} paths") for tie in ties)
        yield f"  gates: {dict(sorted(rules.items()))}"
    for name, reasons in table["unbuilt"].items():
        yield from (f"  not built in {version}: {name}: {reason}" for version, reason in reasons.items())


def main() -> None:
    """Run the inspector in both versions, merge, write the table and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python4", help="an interpreter with transformers 4")
    parser.add_argument("python5", help="an interpreter with transformers 5")
    parser.add_argument("--facts", type=Path, help="folder that keeps what each version said")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.facts or Path(scratch)
        versions = {"4": observe(options.python4, folder / "4"), "5": observe(options.python5, folder / "5")}
    table = merge(versions)
    TABLE.write_text("\n".join(lines(table)) + "\n", encoding="utf-8")
    print("\n".join(summary(table, versions)))


if __name__ == "__main__":
    main()
