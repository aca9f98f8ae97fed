"""A report can be pasted into an issue: nothing private is in it, and what helps is."""

import json
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.redact import SHORTEST_PART, redact

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz01234567"
API_KEY = "graft-7f3a9c1e5b2d4860"
PASSPHRASE = 'correct "horse"/battery+staple'
SECRETS = (TOKEN, API_KEY, PASSPHRASE)
REPORTS = Path(__file__).parents[1] / "data" / "failures"

PRIVATE = [
    ("HF_TOKEN=" + TOKEN, TOKEN[3:]),
    ("token " + TOKEN[:12] + "... was refused", TOKEN[:12]),
    ("token hf_abcdef... was refused", "hf_abcdef"),
    ("ends with ..." + TOKEN[-8:], TOKEN[-8:]),
    ("Authorization: Bearer " + API_KEY, API_KEY),
    ('"authorization": "Bearer abc.def-ghi"', "abc.def-ghi"),
    ("curl -H 'Authorization: Basic dXNlcjpwYXNz'", "dXNlcjpwYXNz"),
    ("curl -H 'x-api-key: 0123abcd'", "0123abcd"),
    ("Cookie: session=abc; other=def", "other=def"),
    ("vllm serve --api-key topsecretkey --port 8000", "topsecretkey"),
    ("'api_key': ['topsecretkey']", "topsecretkey"),
    ("VLLM_API_KEY=topsecretkey", "topsecretkey"),
    ("password: hunter22", "hunter22"),
    ("webhook=https://example.org/hook/123", "example.org/hook"),
    ("posting to https://hooks.slack.com/services/T0/B0/xyz", "T0/B0/xyz"),
    ("git clone https://alice:pw@git.example.org/x", "alice:pw"),
    ("key sk-proj-abcd1234", "sk-proj-abcd1234"),
    ("ghp_0123456789abcdefghij", "ghp_0123456789"),
    ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc", "eyJhbGciOiJIUzI1NiJ9"),
    ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\n-----END OPENSSH PRIVATE KEY-----", "b3BlbnNzaC1rZXk"),
    ("quoted " + quote(PASSPHRASE, safe=""), "battery"),
    ("in JSON " + json.dumps(PASSPHRASE), "staple"),
    ("/home/alice/models", "alice"),
    ("/mnt/c/Users/Alice/models", "Alice"),
    ("C:\\Users\\Alice\\models", "Alice"),
    ("/media/alice/disk", "alice"),
    ("mail alice@example.org", "alice@example.org"),
    ("alice@tower:~/graft$ make up", "tower"),
    ("bind 192.168.1.17:8000", "192.168.1.17"),
    ('INFO:     172.19.0.1:50310 - "POST /v1/chat/completions"', "172.19.0.1"),
    ("bind [2001:db8::8a2e:370:7334]:8000", "2001:db8"),
    ("addr fe80::1c2d:3e4f%eth0", "fe80::1c2d"),
    ("ether 02:42:ac:13:00:02", "02:42:ac:13:00:02"),
    ("GPU-1b2c3d4e-0000-4000-8000-00000000000a", "3d4e-0000"),
    ("MIG-1b2c3d4e-0000-4000-8000-00000000000a", "3d4e-0000"),
    ("Serial Number : 1324021000000", "1324021000000"),
    ("Nov 30 02:37:17 tower kernel: NVRM: Xid", "tower"),
    ("tower:421:490 [0] NCCL INFO x", "tower"),
    ("[2025-10-13 09:06:25] tower:421:490 [0] misc/shmutils.cc:129 NCCL WARN x", "tower"),
    ("Connection closed by remote peer tower<40311>", "tower"),
    ("Linux tower 6.8.0-60-generic #63-Ubuntu SMP", "tower"),
    ('"hostname": "tower"', "tower"),
    ("http://nas.fritz.home/models and printer.local", "nas.fritz"),
]


@pytest.mark.parametrize(("text", "private"), PRIVATE, ids=[text[:40] for text, _ in PRIVATE])
def test_private_value_is_taken_out(text: str, private: str) -> None:
    assert private in text
    assert private not in redact(text, SECRETS)


@pytest.mark.parametrize(
    "text",
    [
        "HF_TOKEN: absent",
        "hf_xet 1.5.1, hf_config, hf_overrides={}, hf_hub_offline",
        "bind 127.0.0.1:8000, 0.0.0.0:8000, [::1]:8000, [::]:8000",
        "driver 580.126.09, kernel 6.6.87.2-microsoft-standard-WSL2, nvidia-cublas==13.0.0.19",
        "(EngineCore pid=88) INFO 06-30 13:53:17 [core.py:139] max_num_batched_tokens=4128, eos_token_id=151645",
        "'num_speculative_tokens': 3, generation throughput: 31.2 tokens/s",
        "NVRM: Xid (PCI:0000:09:00): 79, pid=0",
        "/home/vllm/.cache/vllm, /models/Qwen3.6-27B-int4-AutoRound, /root/.cache",
        "c10::Error, std::runtime_error, at::native::copy_",
        "https://huggingface.co/example-org/Gated-27B-Instruct/resolve/main/config.json",
    ],
)
def test_what_helps_to_read_a_report_stays(text: str) -> None:
    assert redact(text, SECRETS) == text


def test_names_of_this_machine_are_taken_out_as_words() -> None:
    text = "tower.example.org is tower, watchtower is not; Alice runs it, malice does not; see /srv/acme/models/Qwen/x"
    assert redact(text, users=["alice", "root"], hosts=["tower.example.org"], folders=["/srv/acme/models", "/"]) == (
        "[host] is [host], watchtower is not; [user] runs it, malice does not; see [folder]/Qwen/x"
    )


def test_users_of_every_machine_stay() -> None:
    assert redact("root runs vllm", users=["root", "vllm"]) == "root runs vllm"


def test_an_empty_secret_takes_nothing_out() -> None:
    assert redact("nothing to hide", ["", " "]) == "nothing to hide"


def test_a_short_secret_is_taken_out_whole() -> None:
    assert redact("key a1b2 and a1b", ["a1b2"]) == "key [secret] and a1b"


@pytest.mark.parametrize("path", sorted(REPORTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_redacting_a_report_twice_changes_nothing(path: Path) -> None:
    once = redact(path.read_text(encoding="utf-8"), SECRETS)
    assert redact(once, SECRETS) == once


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from([text for text, _ in PRIVATE]), st.text(max_size=12)), max_size=8),
    st.sampled_from([" ", "\n", ""]),
)
def test_redacting_any_text_twice_changes_nothing(parts: list[str], separator: str) -> None:
    once = redact(separator.join(parts), SECRETS, users=["alice", "secret"], hosts=["tower", "ip"])
    assert redact(once, SECRETS, users=["alice", "secret"], hosts=["tower", "ip"]) == once


@settings(max_examples=80, deadline=None)
@given(
    st.text(alphabet=st.characters(codec="ascii", categories=("L", "N")), min_size=SHORTEST_PART, max_size=40),
    st.text(max_size=20),
    st.data(),
)
def test_no_part_of_a_known_secret_is_left(secret: str, around: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(secret) - SHORTEST_PART))
    end = data.draw(st.integers(start + SHORTEST_PART, len(secret)))
    redacted = redact(f"{around} {secret[start:end]} {around}", [secret])
    left = redacted.replace("[secret]", "\0")
    parts = [secret[at : at + SHORTEST_PART] for at in range(len(secret) - SHORTEST_PART + 1)]
    assert [part for part in parts if part in left] == []


def test_long_logs_and_long_words_are_redacted_in_no_time() -> None:
    line = 'INFO:     172.19.0.1:50310 - "POST /v1/chat/completions HTTP/1.1" 200 OK for alice@tower:~'
    assert "172.19" not in redact(f"{line}\n" * 2_000 + "a" * 20_000 + "-" * 20_000 + ":" * 20_000, SECRETS)
