"""Reading from the Hub in a separate process writes nothing and imports nothing too early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bowline
from tests.checkpoint.loopback_hub import LoopbackHub
from tests.checkpoint.places.hub.asking import TOKEN


def run_python(program: str, home: Path, **environment: str) -> str:
    """What `program` prints, with nothing of this process's Hugging Face settings, in an empty directory."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    source = str(Path(bowline.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-B", "-c", program],
        env=kept | {"PYTHONPATH": source, "HF_HOME": str(home), "HOME": str(home)} | environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


READ_ALL = """
from bowline.checkpoint.places.hub import HubRepository
with HubRepository.open_repository("org/name") as files:
    print({name: len(files.read(name)) for name in files.sizes()})
"""


def test_a_whole_run_follows_the_environment_and_writes_nothing_to_disk(hub: LoopbackHub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    printed = run_python(READ_ALL, home, HF_ENDPOINT=hub.endpoint, HF_TOKEN=TOKEN)
    assert printed == "{'config.json': 29, 'empty.txt': 0, 'model.safetensors': 262144}"
    assert list(home.iterdir()) == []
    assert [request.kind for request in hub.requests] == ["api", "resolve", "resolve", "cdn"]
    assert hub.requests[0].headers["authorization"] == f"Bearer {TOKEN}"


def test_importing_the_module_imports_no_http_client(tmp_path: Path) -> None:
    clients = "[name for name in ('huggingface_hub', 'httpx2') if name in sys.modules]"
    program = f"import bowline.checkpoint.places.hub, sys; print({clients})"
    assert run_python(program, tmp_path) == "[]"
