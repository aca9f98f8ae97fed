"""Run once per vLLM environment, with its Python: what the tests in test_in_vllm.py ask of a real vLLM.

Prints JSON: `contract` is {order: {fix: {check: problem}}}, where an empty problem is a check that held; `prove` is the
command's answer; `loader` is {scenario: what came of it} under vLLM's own plugin loader.
"""

import contextlib
import importlib
import inspect
import io
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import vllm_graft.plugin
from vllm_graft import __main__ as commands
from vllm_graft.decide import affects
from vllm_graft.engine import Attempt, Engine, resolve, signature_problem, stale_copies
from vllm_graft.facts import vllm_version
from vllm_graft.fixes import FIXES
from vllm_graft.patch import Outcome, Patch, Process, Target
from vllm_graft.plugin import Plugin

ORDERS = ("target imported after the plugin", "target imported before the plugin")


def import_targets(patch: Patch) -> None:
    for path in (patch.target.path, *patch.target.also, *patch.target.reads):
        importlib.import_module(path.partition(":")[0])


def current(patch: Patch) -> Any:
    return patch.extension.current() if patch.extension else resolve(patch.target.path).value


def check(patch: Patch, engine: Engine, vllm: str, attempt: Attempt) -> dict[str, str]:
    found = {"fingerprint is known": "" if attempt.outcome is not Outcome.DRIFTED else attempt.reason}
    found["applies"] = "" if attempt.outcome is Outcome.APPLIED else f"{attempt.outcome}: {attempt.reason}"
    if attempt.outcome is not Outcome.APPLIED:
        return found
    import_targets(patch)
    applied = engine.applied(patch.id)
    engine.apply(patch, vllm)
    found["apply twice is apply once"] = "" if current(patch) is applied.replacement else "bound again"
    found["caller reaches it"] = "" if patch.reached() is applied.replacement else f"got {patch.reached()}"
    stale = [] if patch.extension else list(stale_copies(applied))
    found["no stale alias"] = ", ".join(stale)
    shape_problem = signature_problem if inspect.isfunction(applied.original) else subclass_problem
    found["signature is kept"] = shape_problem(applied.original, applied.replacement)
    return found


def subclass_problem(original: Any, replacement: Any) -> str:
    if not inspect.isclass(original):
        return ""
    for name, method in vars(replacement).items():
        stock = inspect.getattr_static(original, name, None)
        plain, stock_plain = getattr(method, "__func__", method), getattr(stock, "__func__", stock)
        if inspect.isfunction(plain) and inspect.isfunction(stock_plain):
            problem = signature_problem(stock_plain, plain)
            if problem:
                return f"{name}: {problem}"
    return "" if issubclass(replacement, original) else "no subclass"


def check_all() -> dict[str, dict[str, str]]:
    vllm = vllm_version()
    assert vllm is not None
    engine, found = Engine(), {}
    fixes = [patch for patch in FIXES if affects(patch, vllm)]
    for patch in fixes:
        found[patch.id] = check(patch, engine, vllm, engine.apply(patch, vllm))
    for patch in reversed(fixes):
        if patch.id in engine:
            original = engine.applied(patch.id).original
            engine.undo(patch.id)
            found[patch.id]["undo restores the same object"] = "" if current(patch) is original else f"{current(patch)}"
    return found


def drifted() -> Patch:
    return Patch(
        id="drifted-fix",
        title="A fix for code that has changed",
        symptom="none",
        upstream=("https://example.invalid/1",),
        processes=(Process.API_SERVER,),
        affects=">=0.32.0,<=0.33.0",
        kind="wrap",
        target=Target("vllm.plugins:load_plugins_by_group"),
        fingerprints={"0.32.0": "0" * 16, "0.33.0": "0" * 16},
        build=lambda original: original,
        reached=lambda: None,
        remove_when="never",
        proof="tests/patches/test_in_vllm.py",
    )


def load(fixes: tuple[Patch, ...], environ: Mapping[str, str]) -> str:
    """Let vLLM load its plugins as at a process's start, with these fixes and settings."""
    import vllm.plugins

    vllm.plugins.plugins_loaded = False
    plugin = vllm_graft.plugin.PLUGIN = Plugin(fixes, environ)
    try:
        vllm.plugins.load_general_plugins()
    except Exception as error:  # noqa: BLE001 - which error comes through is what is asked
        return f"raised {type(error).__name__}: {error}"
    assert plugin.report is not None, "vLLM did not call the plugin"
    return ", ".join(f"{fix.id} {fix.outcome}" for fix in plugin.report.fixes)


def check_loader() -> dict[str, str]:
    return {
        "all fixes": load(FIXES, {}),
        "optional drifted": load((drifted(),), {}),
        "required drifted": load((drifted(),), {"GRAFT_REQUIRE": "drifted-fix"}),
        "wrong setting": load((drifted(),), {"GRAFT_REQUIRE": "no-such-fix"}),
        "wrong facts": load((), {"GRAFT_FACTS": os.devnull}),
    }


def check_prove() -> dict[str, Any]:
    answer = io.StringIO()
    with contextlib.redirect_stdout(answer):
        code = commands.main(["prove", "--json"])
    return {"code": code, **json.loads(answer.getvalue())}


if __name__ == "__main__":
    early = sorted(name for name in sys.modules if name.partition(".")[0] in ("vllm", "torch"))
    assert not early, f"imported before a fix was decided on: {early}"
    # The second round finds all modules imported and, since every fix was undone, all targets as vLLM has them.
    contract = {order: check_all() for order in ORDERS}
    print(json.dumps({"contract": contract, "prove": check_prove(), "loader": check_loader()}))
