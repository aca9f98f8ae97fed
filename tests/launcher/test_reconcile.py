"""The command `reconcile` with a stand-in for vLLM's environment: what it is asked, what is made of its answers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher import bring
from launcher.cli import base
from launcher.errors import CheckFailed, UsageError
from launcher.measure.html_report import html
from launcher.reconcile import prompts, report
from launcher.reconcile.run import Pair, Settings, reconcile
from launcher.reconcile.sides import parse

LOGITS = {
    "kl_mean": 0.001,
    "kl_max": 0.004,
    "kl_worst_row": 1,
    "kl": [0.0, 0.004],
    "top1_agreement": 0.5,
    "perplexity_a": 20.0,
    "perplexity_b": 21.0,
}


def point(name: str, layer: int | None, strain: float) -> dict[str, Any]:
    return {
        "name": name,
        "layer": layer,
        "max_abs": 0.5,
        "relative": strain / 50,
        "worst_row": strain / 25,
        "worst_column": strain / 100,
        "cosine": 0.999,
        "tolerance": 0.01,
        "strain": strain,
        "within": strain <= 1,
    }


def first(**changes: Any) -> dict[str, Any]:
    where = {
        "row": 5,
        "prompt": 1,
        "position": 2,
        "token": 77,
        "row_share": 0.1,
        "rows": 8,
        "rows_beyond": 8,
        "row_runs": "0-7",
        "column": 40,
        "column_share": 0.98,
        "columns": 64,
        "columns_beyond": 1,
        "column_runs": "40",
        "head": None,
    }
    return point("layers.1.mlp.up_proj", 1, 9.0) | where | changes


def found(beyond: bool) -> dict[str, Any]:
    points = [
        point("embed", None, 0.0),
        point("layers.0.mlp", 0, 0.7),
        point("layers.0", 0, 0.4),
        point("layers.1.mlp.up_proj", 1, 9.0 if beyond else 0.5),
        point("layers.1", 1, 3.0 if beyond else 0.6),
        point("logits", None, 0.5),
    ]
    answer = {"points": points, "first": first() if beyond else None, "logits": LOGITS}
    return answer | {"dtype": "bfloat16", "only_a": [], "only_b": []}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def stand_in(folder: Path, compared: dict[str, Any]) -> Path:
    """A program in Python's place that keeps each request, and answers it; the side "broken" ends without an answer."""
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, pathlib, sys\n"
        "file = pathlib.Path(sys.argv[3])\n"
        "request = json.loads(file.read_text())\n"
        f"with open({str(folder / 'requests')!r}, 'a') as kept: kept.write(json.dumps(request) + '\\n')\n"
        "if request.get('options', {}).get('load_format') == 'broken': sys.exit('no memory')\n"
        "if request['do'] == 'capture': pathlib.Path(request['out']).mkdir()\n"
        f"compared = json.loads({json.dumps(compared)!r})\n"
        "answer = {'rows': [[1, 2, 3]]} if request['do'] == 'capture' else compared\n"
        "if request.get('options', {}).get('load_format') == 'wrong': answer = {'error': 'vLLM does not start'}\n"
        "file.with_suffix('.answer.json').write_text(json.dumps(answer))\n"
    )
    program.chmod(0o755)
    return program


def test_a_side_is_an_engine_a_folder_and_options(model: Path) -> None:
    side = parse(f"vllm:{model}?kv_cache_dtype=fp8&fixes=off&enforce_eager=false&block_size=32")
    assert (side.engine, side.model) == ("vllm", model)
    assert side.given() == {"kv_cache_dtype": "fp8", "fixes": False, "enforce_eager": False, "block_size": 32}
    assert parse(f"transformers:{model}").given() == {}


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_side_may_stand_in_a_file_beside_its_model(model: Path, suffix: str) -> None:
    file = model.parent / f"side.{suffix}"
    document = {"engine": "vllm", "model": "model", "kv_cache_dtype": "fp8"}
    file.write_text(json.dumps(document))
    side = parse(str(file))
    assert (side.model, side.given()) == (model, {"kv_cache_dtype": "fp8"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("llama.cpp:{0}", "write transformers:FOLDER, vllm:FOLDER"),
        ("{0}", "write transformers:FOLDER, vllm:FOLDER"),
        ("vllm:{0}/no", r"no config\.json"),
        ("vllm:{0}?kv_dtype=fp8", "kv_dtype: .*; options of vllm are dtype, quantization, kv_cache_dtype"),
        ("vllm:{0}?enforce_eager=perhaps", "enforce_eager: "),
        ("vllm:{0}?gdn_prefill_backend=cuda", "gdn_prefill_backend: .*'flashinfer', 'triton' or 'cutedsl'"),
        ("vllm:{0}?dtype", "option=value"),
        ("transformers:{0}?kv_cache_dtype=fp8", "options of transformers are dtype, device"),
        ("{0}/no.yaml", "No such file"),
        ("{0}/config.json", "needs the keys engine"),
    ],
)
def test_a_side_that_is_none_is_told(model: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse(text.format(model))


def test_prompts_are_a_text_or_lines_of_json(tmp_path: Path) -> None:
    assert prompts.read(None)[0] == prompts.BUNDLED.read_text(encoding="utf-8")
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('"one"\n\n{"prompt": "two"}\n{"text": "three"}\n[1, 2]\n')
    assert prompts.read(lines) == ["one", "two", "three", [1, 2]]
    lines.write_text('"one"\n[1, "two"]\n')
    with pytest.raises(UsageError, match=r"prompts\.jsonl:2: write a string"):
        prompts.read(lines)
    lines.write_text("")
    with pytest.raises(UsageError, match="is empty"):
        prompts.read(lines)


def test_each_side_is_recorded_once_with_the_same_tokens_and_nothing_is_left(model: Path, tmp_path: Path) -> None:
    python = stand_in(tmp_path, found(beyond=False))
    a, *others = map(parse, (f"transformers:{model}", f"vllm:{model}", f"vllm:{model}?fixes=off"))
    work = tmp_path / "work"
    work.mkdir()
    phases: list[str] = []
    pairs = list(reconcile(a, others, ["text"], Settings(), python, phases.append, work))
    assert [pair.b for pair in pairs] == [side.name for side in others]
    assert all(pair.agree for pair in pairs)
    requests = [json.loads(line) for line in (tmp_path / "requests").read_text().splitlines()]
    assert [request["do"] for request in requests] == ["capture", "capture", "compare", "capture", "compare"]
    assert [request["rows"] for request in requests] == [None, *[[[1, 2, 3]]] * 4]
    assert requests[3]["options"] == {"fixes": False}
    assert phases == [f"A: {a.name}", f"B: {others[0].name}", "compare", f"B: {others[1].name}", "compare"]
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("load_format", "error", "said"),
    [("wrong", UsageError, "vLLM does not start"), ("broken", CheckFailed, r"ended with 1. It said:\nno memory")],
)
def test_a_side_that_does_not_run_says_why(
    model: Path, tmp_path: Path, load_format: str, error: type[Exception], said: str
) -> None:
    python = stand_in(tmp_path, found(beyond=False))
    sides = [parse(f"vllm:{model}"), parse(f"vllm:{model}?load_format={load_format}")]
    with pytest.raises(error, match=said):
        list(reconcile(sides[0], sides[1:], ["text"], Settings(), python, lambda phase: None))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "column 40 has 98% of the error; 8 of 8 rows, most in row 5 (prompt 1, position 2, token 77)"),
        (
            {"column_share": 0.02, "columns_beyond": 32, "column_runs": "32-63", "head": 1},
            "32 of 64 columns (32-63), most in column 40 (head 1); 8 of 8 rows",
        ),
        (
            {"column_share": 0.1, "columns_beyond": 0, "row_share": 1.0},
            "row 5 (prompt 1, position 2, token 77) has 100%",
        ),
    ],
)
def test_the_sentence_names_layer_row_and_column(changes: dict[str, Any], said: str) -> None:
    sentence = report.where(first(**changes))
    assert sentence.startswith("first at layers.1.mlp.up_proj: relative error 0.09 in a column and 0.36 in a row")
    assert said in sentence


def test_the_report_has_every_point_the_plots_and_the_cost() -> None:
    pairs = [Pair("vllm:x", "vllm:x?kv_cache_dtype=fp8", found(beyond=True), True)]
    document = report.document(pairs, Settings(), "text")
    assert not document["passed"]
    assert [check["passed"] for check in document["checks"]] == [False, True]
    assert json.loads(json.dumps(document))["pairs"][0]["first"]["column"] == 40
    assert [row["name"] for row in report.layer_rows(pairs[0])] == [
        *("embed", "layers.0.mlp", "layers.1.mlp.up_proj", "logits")
    ]
    assert report.quality_rows(pairs)[1] == ("vllm:x?kv_cache_dtype=fp8", "21", "+5.00%", "0.001", "0.004", "50.00%")
    page = html(report.page(pairs, Settings(), "text"))
    assert page.count("<svg") == 2
    assert "cut at 4" in page
    assert page.count("<td>layers.1.mlp.up_proj</td>") == 1


def test_kl_that_is_no_number_fails() -> None:
    broken = found(beyond=False) | {"logits": LOGITS | {"kl_mean": None, "kl_max": None, "perplexity_b": None}}
    pair = Pair("a", "b", broken, False)
    assert not pair.agree
    first_check, kl = report.checks([pair])
    assert "compiled layers cannot be seen" in first_check.said
    assert (kl.passed, kl.said) == (False, "mean infinite nats, at most 0.012; largest infinite")


@pytest.mark.parametrize("beyond", [False, True])
def test_the_command_prints_writes_and_ends_with_the_verdict(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beyond: bool
) -> None:
    monkeypatch.setattr(bring, "install", lambda env, report: pytest.fail("another Python was named"))
    python = stand_in(tmp_path, found(beyond))
    monkeypatch.chdir(tmp_path)
    command = ["reconcile", "transformers:model", "vllm:model", "--python", python.name, "--out", ".", "--work", "."]
    result = CliRunner().invoke(base.app, command, standalone_mode=False)
    assert isinstance(result.exception, CheckFailed) == beyond, result.output
    assert ("FAIL" in result.output) == beyond
    assert "column 40 has 98%" in result.output or not beyond
    assert json.loads((tmp_path / "reconcile.json").read_text())["passed"] == (not beyond)
    assert (tmp_path / "reconcile.html").read_text().startswith("<!doctype html>")


def test_one_side_alone_is_refused(model: Path) -> None:
    with pytest.raises(UsageError, match="name two or more"):
        CliRunner().invoke(base.app, ["reconcile", f"vllm:{model}"], catch_exceptions=False, standalone_mode=False)
