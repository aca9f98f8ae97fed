"""The commands that start nothing, through `launcher.cli.main`: what they print and the exit codes they end with."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import cli
from launcher.profile import model_files, profile_files

DATA = Path(__file__).parents[1] / "data"
HOSTS = yaml.safe_load((DATA / "failures/hosts.yaml").read_text(encoding="utf-8"))["hosts"]
KV_LOGS = DATA / "kv_logs.json"
GPU_PROFILES = [name for name in profile_files(None) if name != "cpu"]
DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Graft = Callable[..., Ended]


@pytest.fixture
def graft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Graft:
    """Run the command line in this process, with state and models in an empty folder."""
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("GRAFT_MODELS", raising=False)
    monkeypatch.delenv("GRAFT_PROFILES", raising=False)

    def run(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["graft", *map(str, arguments)])
        try:
            cli.main()
            exit_code = 0
        except SystemExit as end:
            exit_code = int(end.code or 0)
        captured = capsys.readouterr()
        return Ended(exit_code, captured.out, captured.err)

    return run


@pytest.mark.parametrize("profile", GPU_PROFILES)
def test_every_profile_is_planned_for_its_own_card(graft: Graft, profile: str) -> None:
    card = {"a5000-x2": "24GiB"}.get(profile, profile.removesuffix("-x2"))
    ended = graft("plan", profile, "--card", card)
    assert ended.exit_code == 0
    for part in (profile, "head room", "KV pool:", "65,536", "131,072", "262,144", "Required fixes:"):
        assert part in ended.out
    made = graft("plan", profile, "--card", card, "--json").document
    fit = made["fit"]
    assert fit["verdict"]["value"] in ("FITS", "LIKELY")
    assert sum(term["size_bytes"] for term in fit["waterfall"]) == fit["card"]["total_bytes"]
    assert 0 < made["max_model_len"] <= fit["largest_context_tokens"]
    assert {term["basis"] for term in fit["waterfall"]} <= {"exact", "fitted", "assumed", "measured"}
    assert made["problems"] == []


@pytest.mark.parametrize("profile", GPU_PROFILES)
@pytest.mark.parametrize("card", ["rtx3090", "rtx4090", "rtx5090", "24GiB", "48GiB", "16GiB"])
def test_no_context_is_planned_that_would_not_boot(graft: Graft, profile: str, card: str) -> None:
    made = graft("plan", profile, "--card", card, "--json").document
    fit, refused = made["fit"], [one for one in made["problems"] if one["severity"] == "refuse"]
    if fit is None or fit["verdict"]["value"] == "NO":
        assert refused
    if fit is not None and made["max_model_len"]:
        assert made["max_model_len"] <= fit["largest_context_tokens"] or refused
    if fit is not None and fit["blockers"]:
        assert made["max_model_len"] is None
        assert fit["largest_context_tokens"] == fit["advisable_context_tokens"] == 0


def test_a_card_alone_chooses_the_profile_of_the_nearest_one(graft: Graft) -> None:
    assert graft("plan", "--card", "5090", "--json").document["profile"] == "rtx5090"
    assert graft("plan", "--card", "24GiB", "--json").document["profile"] == "rtx4090"


def test_the_rule_of_the_card_that_is_named_refuses_the_kv_cache(graft: Graft) -> None:
    made = graft("plan", "rtx5090", "--card", "rtx3090", "--json").document
    assert made["fit"] is None
    assert [problem["cause"] for problem in made["problems"]] == ["kv-cache-dtype-unsupported"]
    assert "refuses every FP8 KV cache below 8.9" in made["problems"][0]["message"]


def test_advice_replaces_numbers_only_when_it_is_asked_for(graft: Graft, tmp_path: Path) -> None:
    (tmp_path / "tight.yaml").write_text("extends: rtx4090\nserve: {gpu_memory_utilization: 0.98}\n", encoding="utf-8")
    options = ("tight", "--profiles", tmp_path, "--card", "rtx4090")
    obeyed, advised = graft("explain", *options), graft("explain", *options, "--advise")
    assert "0.98" in obeyed.out
    assert "0.98" not in advised.out
    assert "unsafe by" in graft("plan", *options).out
    assert graft("plan", *options, "--json").document["advice"]["safe"] is False


def test_the_waterfall_is_drawn_and_a_folder_that_is_not_there_is_named(graft: Graft, tmp_path: Path) -> None:
    picture = tmp_path / "memory.svg"
    assert graft("plan", "rtx5090", "--card", "rtx5090", "--svg", picture).exit_code == 0
    assert "on rtx5090" in picture.read_text(encoding="utf-8")
    missing = tmp_path / "none" / "memory.svg"
    ended = graft("plan", "rtx5090", "--card", "rtx5090", "--svg", missing)
    assert (ended.exit_code, str(missing) in ended.err) == (2, True)


def test_every_flag_is_explained(graft: Graft) -> None:
    flags = graft("explain", "rtx4090", "--card", "rtx4090", "--json").document["flags"]
    assert all(flag["reason"] and flag["source"] for flag in flags)
    names = [flag["name"] for flag in flags]
    for name in ("--max-model-len", "--max-num-seqs", "--language-model-only", "--compilation-config"):
        assert name in names
    (one,) = graft("explain", "rtx4090", "--card", "rtx4090", "--flag", "max-model-len", "--json").document["flags"]
    assert "LIKELY" in one["reason"]
    chunk = graft("explain", "rtx4090", "--card", "rtx4090", "--flag", "max-num-batched-tokens", "--json").document
    assert "blocks of 2112 tokens, 1.95 to a chunk" in chunk["flags"][0]["reason"]
    assert graft("explain", "rtx4090", "--card", "rtx4090", "--flag", "nope").exit_code == 2


def test_models_are_listed_for_every_card_and_for_one(graft: Graft) -> None:
    listed = graft("models", "--json").document
    assert len(listed) == len(GPU_PROFILES)
    for card in listed:
        assert {model["model"] for model in card["models"]} == set(model_files(None))
        ranks = [("FITS", "LIKELY", "UNKNOWN", "NO").index(model["verdict"]) for model in card["models"]]
        assert ranks == sorted(ranks)
        for model in card["models"]:
            assert (model["advisable_context_tokens"] > 0) == (model["verdict"] in ("FITS", "LIKELY"))
    (one,) = graft("models", "--card", "24GiB", "--json").document
    assert one["card"] == "24GiB with the settings of rtx4090"
    assert "qwen3.6-27b-int4" in graft("models", "--card", "24GiB").out


def test_any_config_is_fitted_on_the_card_that_is_named(graft: Graft, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DENSE), encoding="utf-8")
    ended = graft("fit", path, "--card", "24GiB")
    assert ended.exit_code == 0
    assert "KV cache fp8" in ended.out
    fitted = graft("fit", tmp_path, "--card", "3090", "--json").document
    assert fitted["settings"]["kv_cache_dtype"] == "int8_per_token_head"
    assert 0 < fitted["context_tokens"] <= fitted["largest_context_tokens"]
    refused = graft("fit", path, "--profile", "rtx4090")
    assert (refused.exit_code, "turboquant-boundary-layers" in refused.err) == (3, True)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"architectures": None}, "architectures is missing"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_attention"),
        ({"quantization_config": {"quant_method": "odd"}}, "odd does not say its bits"),
    ],
)
def test_what_is_missing_in_a_config_is_named(graft: Graft, tmp_path: Path, changes: Any, named: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DENSE | changes), encoding="utf-8")
    ended = graft("fit", path, "--card", "24GiB")
    assert ended.exit_code == 2
    assert named in ended.err
    assert str(path) in ended.err


def test_recorded_boots_are_reproduced_and_one_that_is_off_ends_with_1(graft: Graft, tmp_path: Path) -> None:
    assert graft("fit", "--check", KV_LOGS).exit_code == 0
    assert graft("fit", "--check", KV_LOGS, "--json").document["ok"] is True
    document = json.loads(KV_LOGS.read_text(encoding="utf-8"))
    boot = next(boot for boot in document["boots"] if boot["exact"] and boot["expected_num_blocks"])
    boot["expected_num_blocks"] += 1
    wrong = tmp_path / "boots.json"
    wrong.write_text(json.dumps(document), encoding="utf-8")
    ended = graft("fit", "--check", wrong)
    assert ended.exit_code == 1
    assert "not reproduced" in ended.err
    assert graft("fit", "--check", wrong, "--json").document["ok"] is False
    del boot["kv_cache_dtype"]
    wrong.write_text(json.dumps(document), encoding="utf-8")
    ended = graft("fit", "--check", wrong)
    assert (ended.exit_code, "kv_cache_dtype" in ended.err) == (2, True)


@pytest.mark.parametrize("host", HOSTS, ids=[host["id"] for host in HOSTS])
def test_every_recorded_host_is_checked_from_its_facts(graft: Graft, tmp_path: Path, host: dict[str, Any]) -> None:
    path = tmp_path / "host.json"
    path.write_text(json.dumps({"facts": host["facts"], "plan": host["plan"]}), encoding="utf-8")
    ended = graft("check", "--facts", path, "--json")
    found, expected = ended.document, host["expect"]
    assert found["verdict"] == expected["verdict"]
    assert set(expected["causes"]) <= set(found["causes"]) <= {*expected["causes"], *expected.get("may_also", [])}
    assert ended.exit_code == (3 if found["verdict"] == "refuse" else 0)
    for key in ("selected_uuids", "gpu_mode"):
        if key in expected:
            assert found[key] == expected[key]


def test_a_log_is_diagnosed_and_ends_with_1(graft: Graft, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("ValueError: No available memory for the cache blocks.\n", encoding="utf-8")
    ended = graft("diagnose", log, "--json")
    assert (ended.exit_code, ended.document["cause"]) == (1, "no-kv-cache-memory")
    log.write_text("INFO: Application startup complete.\n", encoding="utf-8")
    assert graft("diagnose", log).exit_code == 0
    assert graft("diagnose", tmp_path / "none.log").exit_code == 2


def test_a_failure_of_unknown_cause_ends_with_1_and_the_last_words(graft: Graft, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("INFO: hello\nTraceback (most recent call last):\nKeyError: 'new'\n", encoding="utf-8")
    ended = graft("diagnose", log)
    assert ended.exit_code == 1
    assert "unknown cause: no rule knows this failure" in ended.out
    assert "KeyError: 'new'" in ended.out
    ended = graft("diagnose", log, "--json")
    assert (ended.exit_code, ended.document["cause"]) == (1, None)
    assert ended.document["excerpt"][-1] == "KeyError: 'new'"


@pytest.mark.parametrize("kind", ["profile", "model"])
def test_the_schemas_are_printed(graft: Graft, kind: str) -> None:
    assert graft("schema", kind).document["type"] == "object"


def test_profiles_and_fixes_are_listed(graft: Graft) -> None:
    assert {one["profile"] for one in graft("profiles", "--json").document} == set(profile_files(None))
    assert all(fix["proof"] for fix in graft("fixes", "--json").document)
    assert graft("profiles").exit_code == graft("fixes").exit_code == 0


def test_a_render_names_the_files_that_it_wrote(graft: Graft, tmp_path: Path) -> None:
    files = graft("render", "cpu", "--json").document
    assert files
    for path, size in files.items():
        assert Path(path).stat().st_size == size
        assert Path(path).is_relative_to(tmp_path / "state")


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "nothing-like-it"),
        ("plan", "rtx4090", "--model", "nothing-like-it"),
        ("plan", "rtx4090", "--card", "big"),
        ("plan", "cpu", "--card", "24GiB"),
        ("plan", "--no-such-option"),
        ("plan", "rtx4090", "rtx3090"),
        ("models", "--profile", "cpu"),
        ("fit",),
        ("fit", "nothing-like-it", "--card", "24GiB"),
        ("fit", ".", "--profile", "cpu"),
        ("fit", "--check", "nothing-like-it"),
        ("check", "--facts", "nothing-like-it"),
        ("schema", "nothing-like-it"),
        ("nothing-like-it",),
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_2_and_one_message(graft: Graft, arguments: tuple[str, ...]) -> None:
    ended = graft(*arguments)
    assert ended.exit_code == 2
    assert ended.err.startswith("graft: ")
    assert "Traceback" not in ended.err


def test_an_interrupted_command_ends_with_130(graft: Graft, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.prepare.matches", interrupted)
    assert graft("profiles").exit_code == 130
