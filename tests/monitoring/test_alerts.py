"""The alert rules and every query, by Prometheus' own tools."""

import subprocess
from pathlib import Path

import pytest
import yaml

from launcher.monitoring import files
from launcher.monitoring.services import ENDPOINTS
from tests.monitoring.queries import alert_rules, all_queries

CASES = Path(__file__).with_name("alerts.yaml")


def run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_the_configuration_that_is_rendered(promtool: str, tmp_path: Path) -> None:
    jobs = tuple(files.Job(name, target) for name, target in ENDPOINTS.items())
    for name, text in files.files("rtx4090", jobs).items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert f"{len(alert_rules())} rules found" in run(
        promtool, "check", "config", str(tmp_path / files.PROMETHEUS_FILE)
    )


def test_each_alert_fires_when_it_should_and_only_then(promtool: str) -> None:
    assert "SUCCESS" in run(promtool, "test", "rules", str(CASES))


def test_no_alert_is_without_a_case_in_which_it_fires() -> None:
    cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fires == {rule["alert"] for rule in alert_rules()}


@pytest.mark.parametrize("rule", alert_rules(), ids=lambda rule: rule["alert"])
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, dict[str, str]]) -> None:
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")


def test_every_query_of_a_page_is_one_of_prometheus(promtool: str, tmp_path: Path) -> None:
    rules = [{"record": f"q{number}", "expr": query} for number, (_, query) in enumerate(all_queries())]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}), encoding="utf-8")
    assert f"{len(rules)} rules found" in run(promtool, "check", "rules", str(path))


def test_a_query_that_is_none_is_seen(promtool: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("groups: [{name: all, rules: [{record: q, expr: 'sum(rate(a[1m])'}]}]", encoding="utf-8")
    assert subprocess.run([promtool, "check", "rules", str(path)], capture_output=True, check=False).returncode != 0
