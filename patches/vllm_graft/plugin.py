"""What vLLM calls in each of its processes: decide on every fix, put in what is wanted, report, and end if it must."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import util

from packaging.version import InvalidVersion, Version

from vllm_graft import __version__
from vllm_graft.decide import Situation, affects, needs_capability, refusal
from vllm_graft.engine import Attempt, Engine
from vllm_graft.facts import (
    GraftError,
    RunFacts,
    Settings,
    SettingsError,
    gpu_facts,
    process_roles,
    read_run_facts,
    vllm_version,
)
from vllm_graft.fixes import FIXES
from vllm_graft.patch import Outcome, Patch, Process
from vllm_graft.report import FixReport, ProcessReport, ordered_roles, summary, to_line, write_file, write_lines

_FORKED = ("EngineCore", "VllmWorker", "ApiServer")


class RequiredFixError(GraftError):
    """A fix that GRAFT_REQUIRE names is not applied in a process that it belongs to."""


class Plugin:
    """The fixes of one process, and whether they have been decided on."""

    def __init__(self, fixes: Sequence[Patch], environ: Mapping[str, str]) -> None:
        self.fixes = tuple(fixes)
        self.engine = Engine()
        self.report: ProcessReport | None = None
        self._environ = environ
        self._lock = threading.RLock()

    def register(self) -> None:
        """Decide on and apply the fixes; a later call only looks again at fixes that are pending.

        Raises:
            SettingsError: a GRAFT_* setting is wrong.
            RequiredFixError: a required fix is not applied.

        """
        with self._lock:
            if self.report is not None and not any(fix.outcome is Outcome.PENDING for fix in self.report.fixes):
                return
            try:
                settings = Settings.read(self._environ, [patch.id for patch in self.fixes])
                run = read_run_facts(settings.facts) if settings.facts else None
            except SettingsError as error:
                roles = process_roles(multiprocessing.current_process().name, sys.argv, None)
                self._publish(self._describe(None, roles, (), str(error)), None)
                raise
            report = self._run(settings, run)
            if report != self.report:
                self._publish(report, settings)
            if report.error:
                raise RequiredFixError(report.error)
            self.report = report
            if report.roles == (Process.API_SERVER,):
                # Imported here: no other process serves metrics.
                from vllm_graft.metrics import export

                export(report, settings.reports)

    def after_fork(self) -> None:
        """Decide again in a forked child of vLLM, which is another process with another role.

        vLLM does not call plugins there: it has inherited the note that it already did.
        """
        if not multiprocessing.current_process().name.startswith(_FORKED):
            return
        self.report = None
        self._lock = threading.RLock()
        try:
            self.register()
        except GraftError as error:
            # multiprocessing swallows every Exception of an after-fork callback; this one has to end the process.
            raise SystemExit(f"vllm_graft: {error}") from error

    def _run(self, settings: Settings, run: RunFacts | None) -> ProcessReport:
        roles = process_roles(multiprocessing.current_process().name, sys.argv, run)
        vllm = vllm_version()
        fixes = []
        for patch in self.fixes:
            attempt = self._attempt(patch, settings, run, roles, vllm)
            required = patch.id in settings.require
            fixes.append(FixReport(patch.id, attempt.outcome, attempt.reason, required, attempt.fingerprint))
        belongs = {patch.id for patch in self.fixes if roles & set(patch.processes)}
        missing = [fix for fix in fixes if fix.required and fix.id in belongs and fix.outcome is not Outcome.APPLIED]
        error = "; ".join(f"required fix {fix.id} is not applied: {fix.outcome}: {fix.reason}" for fix in missing)
        if error:
            error += f". GRAFT_REQUIRE={','.join(sorted(settings.require))} forbids to serve without"
        return self._describe(run, roles, tuple(fixes), error or None)

    def _attempt(
        self, patch: Patch, settings: Settings, run: RunFacts | None, roles: frozenset[Process], vllm: str | None
    ) -> Attempt:
        if patch.id in settings.disable:
            return Attempt(Outcome.DISABLED, "GRAFT_DISABLE names it", None)
        try:
            version = str(Version(vllm or ""))
        except InvalidVersion:
            return Attempt(Outcome.FAILED, f"the version of vLLM is not known: {vllm!r}", None)
        if affects(patch, version) and not roles & set(patch.processes) and patch.id not in self.engine:
            return Attempt(Outcome.NOT_APPLICABLE, f"belongs to {', '.join(patch.processes)}", None)
        capabilities = self._capabilities() if needs_capability(patch) else None
        refused = refusal(patch, Situation(version, run, capabilities))
        if refused is not None:
            return Attempt(refused.outcome, refused.reason, None)
        return self.engine.apply(patch, version)

    def _capabilities(self) -> tuple[tuple[int, int], ...] | None:
        facts = gpu_facts(self._environ)
        return None if facts.unknown else tuple(gpu.capability for gpu in facts.gpus)

    def _describe(
        self, run: RunFacts | None, roles: Collection[Process], fixes: tuple[FixReport, ...], error: str | None
    ) -> ProcessReport:
        return ProcessReport(
            schema=1,
            run_id=run.run_id if run else None,
            pid=os.getpid(),
            process=multiprocessing.current_process().name,
            roles=ordered_roles(roles),
            graft=__version__,
            vllm=vllm_version() or "unknown",
            fixes=fixes,
            error=error,
        )

    def _publish(self, report: ProcessReport, settings: Settings | None) -> None:
        lines = [summary(report), to_line(report)]
        if settings is not None and settings.reports is not None:
            try:
                write_file(report, settings.reports)
            except OSError as error:
                lines.append(f"vllm_graft: GRAFT_REPORTS={settings.reports}: {error}; the log has the report")
        write_lines(lines)


PLUGIN = Plugin(FIXES, os.environ)
util.register_after_fork(PLUGIN, Plugin.after_fork)
