"""Audits a list of checkpoints on a Dask cluster, with the lines of `bowline audit --output-format jsonl`.

    python examples/audit_cluster.py LIST --output-file FILE --workers 4
    python examples/audit_cluster.py LIST --output-file FILE --scheduler tcp://HOST:8786

Every worker needs Bowline installed and the paths of LIST under the same names: a shared file system, or repositories
of the Hub. The same command, started again, audits what FILE does not have yet. Exit code: 0 clean, 1 findings, 2 if
anything could not be audited.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dask.distributed import Client, LocalCluster, as_completed

from bowline.auditing.queue.audit_queue import audited
from bowline.auditing.queue.place_list import expanded, read_places
from bowline.auditing.queue.results_file import ResultsFile
from bowline.auditing.report.json_format import render_line
from bowline.errors import BowlineError


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("list", type=Path, help="a text file with one path a line")
    parser.add_argument("--output-file", type=Path, required=True, help="the file to which results are added")
    parser.add_argument("--scheduler", help="the address of a running cluster; without it, one is started here")
    parser.add_argument("--workers", type=int, default=2, help="processes of the cluster that is started here")
    parser.add_argument("--batch", type=int, default=20, help="checkpoints that a worker is given at once")
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds after which one audit is stopped")
    parser.add_argument("--headers-only", action="store_true", help="read no values")
    return parser.parse_args()


def audit_batch(places: Sequence[str], *, time_limit: float, options: dict[str, Any]) -> list[tuple[int, str]]:
    """The exit code and the line of each place. It runs on a worker, and each audit in a process of its own."""
    outcomes = audited(places, jobs=1, time_limit=time_limit, options=options)
    return [(outcome.code, render_line(outcome.path, outcome.record)) for outcome in outcomes]


def audit_all(places: Sequence[str], given: argparse.Namespace, client: Client) -> int:
    """Audits what the file of results lacks; returns the exit code."""
    with ResultsFile(given.output_file) as results:
        left = [place for place in places if place not in results.done]
        batches = [left[start : start + given.batch] for start in range(0, len(left), given.batch)]
        shared = {"time_limit": given.time_limit, "options": {"values": not given.headers_only}}
        tasks = dict(zip(client.map(audit_batch, batches, pure=False, **shared), batches, strict=True))
        codes = Counter(results.done[place] for place in places if place in results.done)
        for task, answer in as_completed(tasks, with_results=True, raise_errors=False):
            if task.status != "finished":  # its worker was lost, more often than Dask tries again
                print(f"error: {len(tasks[task])} not audited, a worker was lost: {answer[1]}", file=sys.stderr)
                codes[2] += len(tasks[task])
                continue
            for code, line in answer:
                results.add(line)
                codes[code] += 1
    print(f"{len(places)} listed, {len(left)} of them audited by this run", file=sys.stderr)
    print(f"{codes[0]} clean, {codes[1]} with findings, {codes[2]} could not be audited", file=sys.stderr)
    return max(codes, default=0)


def main() -> int:
    """Connects to the cluster, or starts one on this machine."""
    given = options()
    try:
        places = list(dict.fromkeys(expanded(read_places(given.list))))
        if given.scheduler is not None:
            with Client(given.scheduler) as client:
                return audit_all(places, given, client)
        with (
            LocalCluster(n_workers=given.workers, threads_per_worker=1, dashboard_address=None) as cluster,
            Client(cluster) as client,
        ):
            return audit_all(places, given, client)
    except BowlineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
