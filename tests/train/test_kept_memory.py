"""Page faults, counted by the kernel, of allocating and freeing the same large tensors again."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bowline.train.loop.allocator import OF_THE_USER, kept_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
PAGES = 2**26 // resource.getpagesize()
"""Of a tensor of 64 MiB."""


def faults_of_another() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OF_THE_USER:
        monkeypatch.delenv(name, raising=False)


def test_freed_memory_is_used_again() -> None:
    """In a process of its own: where something is mapped above the heap of a long run of tests, it cannot grow."""
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert int(done.stdout) < 10 * PAGES  # small blocks come between the first ones


def test_at_its_end_freed_memory_goes_back_and_is_mapped_anew() -> None:
    with kept_memory(CPU):
        faults_of_another()
    assert faults_of_another() > PAGES / 2
    assert faults_of_another() > PAGES / 2


def test_an_error_ends_it_too() -> None:
    with pytest.raises(ZeroDivisionError), kept_memory(CPU):
        faults_of_another()
        1 / 0  # noqa: B018
    assert faults_of_another() > PAGES / 2


@pytest.mark.parametrize("name", OF_THE_USER)
def test_what_the_environment_says_of_allocation_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "")
    with kept_memory(CPU):
        faults_of_another()
        assert faults_of_another() > PAGES / 2


def test_nothing_changes_for_an_accelerator() -> None:
    with kept_memory(torch.device("cuda")):
        faults_of_another()
        assert faults_of_another() > PAGES / 2


if __name__ == "__main__":
    with kept_memory(CPU):
        sys.stdout.write(str(sum(faults_of_another() for _ in range(40))))
