"""What a move to another vLLM release would change; nothing is pulled, built or started."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_graft.decide import affects
from vllm_graft.fixes import FIXES
from vllm_graft.patch import Patch

from launcher import engine_env
from launcher.errors import CheckFailed
from launcher.images.pins import load_pins
from launcher.plan import Flag, Plan
from launcher.prepare import Options, host_facts, planned
from launcher.profile import Profile
from launcher.state import CHECKOUT

PARSER_PROGRAM = CHECKOUT / "launcher" / "parse_flags.py"
PARSERS = {"0.32.0": engine_env.ENGINE, "0.33.0": engine_env.VLLM_0_33}
"""The environment that holds each release's own parser of `vllm serve`."""
PARSER_TIMEOUT_S = 300


@dataclass(frozen=True)
class FixChanges:
    """What becomes of the fixes."""

    retired: tuple[str, ...]
    """Fixes that the newer release is outside of: upstream has what they did."""
    unknown: tuple[str, ...]
    """Fixes that it should get, and whose code there was not read: they would not be applied."""
    added: tuple[str, ...]


@dataclass(frozen=True)
class RefusedFlag:
    """A flag of the running service that the newer parser does not take."""

    flag: str
    complaint: str


@dataclass(frozen=True)
class Memory:
    """What the memory model says of one release; None where it has nothing to count."""

    verdict: str | None
    kv_cache_bytes: int | None
    context_tokens: int | None


@dataclass(frozen=True)
class Preview:
    """All that differs."""

    vllm: tuple[str, str]
    base: tuple[str | None, str | None]
    fixes: FixChanges
    refused_flags: tuple[RefusedFlag, ...] | None
    """None: not known, since the environment with that release's parser is not installed."""
    parser_remedy: str
    """How to know, where it is not known."""
    plan_flags: tuple[tuple[str, str | None, str | None], ...]
    """Flags that the new plan sets otherwise: name, value before, value after; None where it is not set."""
    memory: tuple[Memory, Memory]


def preview(options: Options, profile: Profile, target: Profile, running: Plan | None) -> Preview:
    """Compare the running plan, else the profile's, with the plan for the target's release.

    Raises:
        CheckFailed: the newer parser does not run.
    """
    if running is not None:
        options = replace(options, model=options.model or running.model, runtime=running.runtime)
    before = running or planned(options, profile, host_facts(profile)).plan
    after = planned(options, target, host_facts(target)).plan
    parser = PARSERS.get(target.vllm)
    is_here = parser is not None and engine_env.is_installed(parser)
    return Preview(
        vllm=(before.vllm, target.vllm),
        base=(before.image.base if before.image else None, load_pins().of(target.vllm).reference),
        fixes=fix_changes(FIXES, before.vllm, target.vllm),
        refused_flags=refused_flags(parser, before.flags) if parser is not None and is_here else None,
        parser_remedy=f"graft engine install {parser.name}" if parser is not None else "",
        plan_flags=flag_changes(before.flags, after.flags),
        memory=(_memory(before), _memory(after)),
    )


def fix_changes(fixes: Sequence[Patch], before: str, after: str) -> FixChanges:
    """Return what becomes of the fixes between two releases."""
    return FixChanges(
        retired=tuple(fix.id for fix in fixes if affects(fix, before) and not affects(fix, after)),
        unknown=tuple(fix.id for fix in fixes if affects(fix, after) and after not in fix.fingerprints),
        added=tuple(
            fix.id for fix in fixes if not affects(fix, before) and affects(fix, after) and after in fix.fingerprints
        ),
    )


def flag_changes(before: Sequence[Flag], after: Sequence[Flag]) -> tuple[tuple[str, str | None, str | None], ...]:
    """Return the flags whose values differ."""
    old, new = ({flag.name: flag.value or "set" for flag in flags} for flags in (before, after))
    names = dict.fromkeys((*old, *new))
    return tuple((name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))


def refused_flags(env: engine_env.EngineEnv, flags: Sequence[Flag]) -> tuple[RefusedFlag, ...]:
    """Ask an environment's own parser about each flag by itself.

    Raises:
        CheckFailed: it does not run.
    """
    lines = [[flag.name] if flag.value is None else [flag.name, flag.value] for flag in flags]
    try:
        done = subprocess.run(
            [str(env.python), "-P", str(PARSER_PROGRAM)],
            input=json.dumps(lines),
            capture_output=True,
            text=True,
            check=False,
            timeout=PARSER_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"{env.folder.name}: its parser gave no answer in {PARSER_TIMEOUT_S} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise CheckFailed(f"{env.folder.name}: its parser does not run: {last}; graft engine install {env.name}")
    said: list[str | None] = json.loads(done.stdout.splitlines()[-1])
    return tuple(RefusedFlag(" ".join(line), one) for line, one in zip(lines, said, strict=True) if one is not None)


def _memory(plan: Plan) -> Memory:
    fit = plan.fit
    return Memory(
        verdict=None if fit is None else str(fit["verdict"]["value"]),
        kv_cache_bytes=None if fit is None else int(fit["kv"]["available_bytes"]),
        context_tokens=plan.max_model_len,
    )
