"""The fixes among vLLM's own metrics: what became of each in every process, read again at each scrape.

Only the API server exports them. Where vLLM runs several of those, its /metrics shows what prometheus_client keeps in
files, and these are not among it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from vllm_graft.patch import Process
from vllm_graft.records import RecordError
from vllm_graft.report import ProcessReport, read_directory

OUTCOME = "graft_fix_outcome"
INFO = "graft_info"


class FixMetrics(Collector):
    """The reports of this process and of those beside it that are alive."""

    def __init__(self) -> None:
        self.own: ProcessReport | None = None
        self.directory: Path | None = None
        """Where the others write theirs; None: not known."""

    def describe(self) -> Iterable[Metric]:
        """Name the families, so that a second collector is refused."""
        return families(())

    def collect(self) -> Iterator[Metric]:
        """Yield both families."""
        if self.own is not None:
            yield from families((*self._beside(self.own.run_id), self.own))

    def _beside(self, run_id: str | None) -> list[ProcessReport]:
        if self.directory is None:
            return []
        try:
            found = read_directory(self.directory)
        except (OSError, RecordError):
            # An error here would take all of vLLM's metrics away; the processes that are missing then say enough.
            return []
        return [report for report in found if report.run_id == run_id and _is_alive(report.pid)]


def families(reports: Sequence[ProcessReport]) -> tuple[Metric, Metric]:
    """The metrics of these reports; of two by processes of one name the last counts."""
    outcome = GaugeMetricFamily(
        OUTCOME, "What became of a fix in a process; always 1.", labels=("fix", "process", "outcome", "required")
    )
    info = GaugeMetricFamily(INFO, "A process and what it runs; always 1.", labels=("process", "graft", "vllm"))
    latest = {report.process: report for report in reports if Process.MODEL_INSPECTION not in report.roles}
    for report in latest.values():
        info.add_metric((report.process, report.graft, report.vllm), 1)
        for fix in report.fixes:
            outcome.add_metric((fix.id, report.process, str(fix.outcome), str(fix.required).lower()), 1)
    return outcome, info


METRICS = FixMetrics()


def export(report: ProcessReport, directory: Path | None) -> None:
    """Export the fixes of this process and, where GRAFT_REPORTS names a folder, of the others; the last call counts."""
    if METRICS.own is None:
        REGISTRY.register(METRICS)
    METRICS.own, METRICS.directory = report, directory


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
