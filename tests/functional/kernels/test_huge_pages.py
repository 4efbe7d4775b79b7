"""Page faults, counted by the kernel, of writing a fresh buffer."""

import resource
from pathlib import Path

import pytest
import torch

from bowline.functional.kernels.huge_pages import on_huge_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NUMBERS = 2**25
PAGES = NUMBERS * 4 // resource.getpagesize()


def faults_of_writing(buffer: torch.Tensor) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    buffer.fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(
    not SETTING.exists() or "[madvise]" not in SETTING.read_text(), reason="no huge pages for who asks for them"
)
def test_a_large_buffer_is_mapped_in_huge_pages() -> None:
    assert faults_of_writing(torch.empty(NUMBERS)) > PAGES / 2
    assert faults_of_writing(on_huge_pages(torch.empty(NUMBERS))) < PAGES / 2


@pytest.mark.parametrize("numbers", [0, 5, 2**22])
def test_it_is_the_same_tensor_and_keeps_what_is_in_it(numbers: int) -> None:
    buffer = torch.arange(numbers)
    same = on_huge_pages(buffer)
    assert same is buffer
    assert torch.equal(buffer, torch.arange(numbers))


def test_a_tensor_without_memory_is_left_alone() -> None:
    assert on_huge_pages(torch.empty(NUMBERS, device="meta")).is_meta
