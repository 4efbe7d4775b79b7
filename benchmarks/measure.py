"""Time and memory of a command, and what machine this is."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["Measured", "interleaved", "machine", "measure", "median", "peak_of", "peak_of_process", "reset_peak"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of a command."""

    seconds: float
    peak_anonymous_mb: float
    exit_code: int


def measure(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Measured:
    """Run a command; its peak anonymous memory (children not counted) is polled from the system."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **(environment or {})}
    )
    status = Path(f"/proc/{process.pid}/status")
    peak = 0
    while process.poll() is None:
        try:
            text = status.read_text()
        except OSError:
            break
        peak = max(peak, *(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon")), 0)
        time.sleep(0.002)
    process.wait()
    return Measured(seconds=time.perf_counter() - started, peak_anonymous_mb=peak / 1024, exit_code=process.returncode)


def interleaved(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[Measured]]:
    """Each command once a round, so that what else the machine does falls on all of them."""
    results: dict[str, list[Measured]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            results[name].append(measure(command))
    return results


def peak_of(call: Callable[[], object], forget: Callable[[], object]) -> float:
    """Peak resident megabytes of one call, in this process, above what was resident before it.

    One call warms up; `forget` drops what it left behind; freed memory is given back to the system, and the kernel's
    high-water mark is set back (`/proc/self/clear_refs`).
    """
    call()
    forget()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    before = reset_peak()
    call()
    return peak_of_process() - before


def reset_peak() -> float:
    """Resident megabytes of this process now; its peak counts from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS") / 1024


def peak_of_process() -> float:
    """The most resident megabytes of this process since `reset_peak`."""
    return _status("VmHWM") / 1024


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def machine(packages: Sequence[str]) -> str:
    """Date, processor, cores and versions, one line."""
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} absent")
    load = os.getloadavg()[0]
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {model}, {os.cpu_count()} cores, load {load:.1f}, "
        f"Python {platform.python_version()}, {', '.join(versions)}"
    )
