"""`graft report`: one file that can be pasted into an issue, and nothing private in it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import issue_report
from launcher.doctor import Examined
from launcher.doctor.findings import examine
from launcher.issue_report import Parts, Private, secrets_in, text_of
from launcher.operate.service_state import StateFile
from launcher.plan import Plan
from launcher.prepare import Options
from launcher.redact import SHORTEST_PART
from launcher.state import ServiceState
from tests.launcher.test_cli_planning import Graft, graft
from tests.launcher.test_diagnose_evidence import SERVED, plan
from tests.launcher.test_doctor import DEMAND, facts

__all__ = ["graft"]

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
KEY = "graft-7f3a9c1e5b2d4860aa"
WEBHOOK = "https://hooks.slack.com/services/T0001/B0002/xyzXYZ123456"
WEBHOOK_PARTS = ("T0001", "B0002", "xyzXYZ123456")
HIDDEN = Private((TOKEN, KEY, *WEBHOOK_PARTS), ("alice",), ("tower.example.org",), ("/srv/acme/graft",))
PRIVATE_LINES = (
    f"HF_TOKEN={TOKEN}",
    f"Authorization: Bearer {KEY}",
    f"posting to {WEBHOOK}",
    f"token {TOKEN[4:16]} was refused",
    "alice@tower:~$ ls /home/alice/models /srv/acme/graft/x",
    "INFO:     192.168.1.17:50310 - GET",
    "tower.example.org is up",
    "mail alice@example.org",
)
WORDS = (TOKEN, KEY, WEBHOOK, TOKEN[4:16], "alice", "tower", "192.168.1.17", "acme", "xyzXYZ123456")


def parts(text: str = "", lines: tuple[str, ...] = PRIVATE_LINES) -> Parts:
    """Return a report's parts with private values in every one of them."""
    found = facts()
    said = " ".join(lines)
    leaky = tuple(replace(one, message=f"{one.message} {said}") for one in examine(found, DEMAND))
    # The plan of a start is not asked for by `text_of`.
    examined = Examined("rtx4090", None, found, leaky, ())  # type: ignore[arg-type]
    base = plan(SERVED)
    flags = tuple(flag.model_copy(update={"source": said}) for flag in base.flags)
    environment = tuple(one.model_copy(update={"value": said}) for one in base.environment)
    leaky_plan: Plan = base.model_copy(update={"flags": flags, "environment": environment})
    return Parts(
        examined,
        leaky_plan,
        log=(*lines, text),
        compose_file=said,
        state={"reason": said},
        events=(json.dumps({"event": said}),),
    )


def test_private_values_everywhere_are_nowhere_in_the_report() -> None:
    text = text_of(parts(), HIDDEN)
    assert [word for word in WORDS if word in text] == []
    for section in ("Checks", "Diagnosis", "Service", "Events", "Plan", "Fixes", "compose.yaml", "Log"):
        assert f"\n## {section}" in text
    assert "--max-model-len 32768" in text
    assert "GPU-0000..." in text


@settings(max_examples=20, deadline=None)
@given(st.text(alphabet=st.characters(codec="ascii", categories=("L", "N")), min_size=12, max_size=30), st.data())
def test_no_part_of_any_secret_is_in_a_report(secret: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(secret) - SHORTEST_PART))
    piece = secret[start : data.draw(st.integers(start + SHORTEST_PART, len(secret)))]
    clean = text_of(parts(lines=()), Private((), (), (), ()))
    text = text_of(parts(piece, (f"x {piece} y",)), Private((secret,), (), (), ()))
    pieces = {secret[at : at + SHORTEST_PART] for at in range(len(secret) - SHORTEST_PART + 1)}
    left = text.replace("[secret]", "\0")
    assert [one for one in pieces if one in left and one not in clean] == []


@pytest.mark.parametrize(
    ("content", "secrets"),
    [
        (f"{KEY}\n", (KEY,)),
        ("short", ("short",)),
        ("", ()),
        (WEBHOOK, WEBHOOK_PARTS),
        ("https://ntfy.example.org/hook?token=a1b2c3d4", ("a1b2c3d4",)),
        (f'{{"keys": [{{"name": "requests_per_minute", "key": "{KEY}"}}]}}', (KEY,)),
        ("-----BEGIN PRIVATE KEY-----\nb3BlbnNzaC1rZXkb3BlbnNzaC1rZXk\n-----END PRIVATE KEY-----\n", ()),
    ],
)
def test_credentials_are_found_in_the_files_of_secrets(content: str, secrets: tuple[str, ...]) -> None:
    assert secrets_in(content) == secrets


def test_secrets_of_the_service_and_of_the_environment_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = ServiceState(tmp_path / "cpu")
    state.secrets_dir.mkdir(parents=True)
    (state.secrets_dir / "webhook_url").write_text(WEBHOOK, encoding="utf-8")
    (tmp_path / "token").write_text(TOKEN, encoding="utf-8")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert set(HIDDEN.secrets) <= set(issue_report.private(state).secrets)


def test_a_report_of_a_failed_start_has_its_cause_and_its_last_words(
    graft: Graft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    state = ServiceState.of("cpu")
    state.logs_dir.mkdir(parents=True)
    line = "ValueError: No available memory for the cache blocks."
    (state.logs_dir / "failed-20260101T000000Z.log").write_text(f"{line}\nHF_TOKEN={TOKEN}\n", encoding="utf-8")
    state.operate_dir.mkdir(parents=True)
    StateFile(state.operate_dir).change(lambda status: status.model_copy(update={"phase": "stopped"}))
    ended = graft("report", "cpu")
    assert ended.exit_code == 0
    text = (tmp_path / "graft-report-cpu.md").read_text(encoding="utf-8")
    assert "no-kv-cache-memory (rule no-memory-for-kv-cache)" in text
    assert line in text
    assert TOKEN not in text
    assert str(tmp_path) not in text
    assert graft("report", "cpu", "--out", tmp_path / "none" / "x.md").exit_code == 2
    assert graft("report", "cpu", "--out", "-").out.startswith("# Graft report: cpu")


def test_a_profile_that_is_wrong_is_named() -> None:
    with pytest.raises(Exception, match="PROFILE=none: no such profile"):
        issue_report.make(Options("none"))
