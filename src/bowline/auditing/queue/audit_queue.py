"""Audits many places by several processes; one that crashes, hangs or is killed costs its own result alone."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bowline.auditing.report.audit_run import AuditFailure, Run
from bowline.auditing.report.json_format import record_of

__all__ = ["PlaceResult", "audited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceResult:
    """The result of one audit: its exit code (0, 1 or 2), and the content of its JSON report."""

    path: str
    code: int
    record: Mapping[str, Any]

    @property
    def codes(self) -> frozenset[str]:
        """The codes of its findings."""
        reports = [*self.record["checkpoints"], *self.record["adapters"]]
        return frozenset(finding["code"] for report in reports for finding in report["findings"])


def audited(
    places: Iterable[str], *, jobs: int, time_limit: float, options: Mapping[str, Any]
) -> Iterator[PlaceResult]:
    """The outcome of each place, in the order in which they are done.

    Args:
        places: what to audit, each in a process of its own.
        jobs: how many at once.
        time_limit: seconds for one; its process is killed then, and the outcome says so.
        options: keyword arguments of `audit_place`, as JSON can hold them.
    """
    waiting = iter(places)
    with selectors.DefaultSelector() as selector:
        workers = [_Worker(options) for _ in range(jobs)]
        try:
            busy = [worker for worker in workers if worker.take(next(waiting, None), selector)]
            while busy:
                until = min(worker.began for worker in busy) + time_limit
                ready = {key.data for key, _ in selector.select(max(0.0, until - time.monotonic()))}
                for worker in list(busy):
                    outcome = worker.outcome() if worker in ready else None
                    if outcome is None and time.monotonic() - worker.began > time_limit:
                        outcome = worker.stopped(f"took more than {time_limit:g} s, and was stopped")
                    if outcome is None:
                        continue
                    worker.rest(selector)
                    yield outcome
                    if not worker.take(next(waiting, None), selector):
                        busy.remove(worker)
        finally:
            for worker in workers:
                worker.end()


@dataclass(eq=False)
class _Worker:
    """One process of `audit_worker`, started when it is needed, and again after it has ended."""

    options: Mapping[str, Any]
    path: str = ""
    began: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    held: bytearray = field(default_factory=bytearray)
    """Bytes of an answer that is not whole yet."""

    def take(self, path: str | None, selector: selectors.BaseSelector) -> bool:
        """Begin with a place; False if there is none."""
        if path is None:
            return False
        self.path, self.began = path, time.monotonic()
        for _ in range(2):  # a worker that has ended meanwhile is replaced
            process = self.process or self._started()
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(path).encode() + b"\n")
                process.stdin.flush()
                break
            except OSError:
                self.end()
        assert self.process is not None
        assert self.process.stdout is not None
        selector.register(self.process.stdout, selectors.EVENT_READ, self)
        return True

    def rest(self, selector: selectors.BaseSelector) -> None:
        """The answer is there, or will not come."""
        for key in list(selector.get_map().values()):
            if key.data is self:
                selector.unregister(key.fileobj)
        if self.process is not None and self.process.poll() is not None:
            self.end()

    def outcome(self) -> PlaceResult | None:
        """Read what has come; the outcome, once it is whole."""
        assert self.process is not None
        assert self.process.stdout is not None
        got = os.read(self.process.stdout.fileno(), 1 << 20)
        if not got:
            self.end()
            return self.failed("its process ended without a result")
        self.held += got
        if not self.held.endswith(b"\n"):
            return None
        for line in self.held.splitlines():
            with suppress(ValueError):  # part of an answer, of a child that was killed while it wrote
                answer = json.loads(line)
                if isinstance(answer, dict) and "record" in answer:
                    self.held.clear()
                    return PlaceResult(path=self.path, code=answer["code"], record=answer["record"])
                if isinstance(answer, dict) and "died" in answer:
                    self.held.clear()
                    return self.failed(f"its process {answer['died']}")
        return None

    def stopped(self, why: str) -> PlaceResult:
        """Kill the process and what it started."""
        self.end()
        return self.failed(why)

    def failed(self, why: str) -> PlaceResult:
        """An outcome without a report."""
        help_ = "audit it alone, with --headers-only or a larger --time-limit"
        run = Run(reports=(), failures=(AuditFailure(path=self.path, message=f"{self.path}: {why}", help=help_),))
        return PlaceResult(path=self.path, code=2, record=record_of(run))

    def end(self) -> None:
        """End the process, its child too."""
        if self.process is not None:
            with suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
            self.process.communicate()
        self.process = None
        self.held.clear()

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "bowline.auditing.queue.audit_worker", json.dumps(dict(self.options))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        return self.process
