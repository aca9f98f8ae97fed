"""A real Prometheus scrapes exporters with the rendered configuration: every panel has data, no rule fails."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml

from launcher.monitoring import files
from tests.monitoring.conftest import JOBS, METRICS, exporter, free_port
from tests.monitoring.queries import alert_rules, panel_queries

START_TIMEOUT_S = 30
pytestmark = pytest.mark.timeout(120)


def write_configuration(folder: Path, jobs: tuple[files.Job, ...]) -> Path:
    for name, text in files.files("test", jobs).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    path = folder / files.PROMETHEUS_FILE
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    document["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def wait_until_scraped(client: httpx.Client, looks: int) -> None:
    """Wait until each job has been looked at so many times."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    query = f"count(count_over_time(up[1m]) >= {looks})"
    while time.monotonic() < deadline_s:
        try:
            found = client.get("/api/v1/query", params={"query": query}).json()["data"]["result"]
            if found and int(found[0]["value"][1]) == len(JOBS):
                return
        except (httpx.TransportError, KeyError, ValueError):
            pass
        time.sleep(0.3)
    raise AssertionError(f"not every job was scraped {looks} times: {client.get('/api/v1/targets').text[:2000]}")


@pytest.fixture(scope="module")
def running(prometheus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    with ExitStack() as stack:
        jobs = tuple(
            files.Job(job, stack.enter_context(exporter((METRICS / f"{job}.txt").read_text(encoding="utf-8"))))
            for job in JOBS
        )
        configuration = write_configuration(folder, jobs)
        argv = [prometheus, f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"]
        argv += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        process = stack.enter_context(subprocess.Popen(argv))
        stack.callback(process.terminate)
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False))
        wait_until_scraped(client, looks=4)
        yield client


def test_every_job_is_up(running: httpx.Client) -> None:
    targets = running.get("/api/v1/targets").json()["data"]["activeTargets"]
    assert {target["labels"]["job"]: target["health"] for target in targets} == dict.fromkeys(JOBS, "up")


def test_every_panel_has_data(running: httpx.Client) -> None:
    empty = []
    for where, query in panel_queries():
        answer = running.get("/api/v1/query", params={"query": query}).json()
        assert answer["status"] == "success", f"{where}: {answer}"
        if not answer["data"]["result"]:
            empty.append(f"{where}: {query}")
    assert not empty


def test_every_rule_is_evaluated_without_an_error(running: httpx.Client) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    rules: list[dict[str, str]] = []
    while time.monotonic() < deadline_s and not (rules and all(rule["health"] == "ok" for rule in rules)):
        groups = running.get("/api/v1/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        time.sleep(0.2)
    assert {rule["name"]: rule["health"] for rule in rules} == {rule["alert"]: "ok" for rule in alert_rules()}


def test_a_healthy_service_raises_no_alert(running: httpx.Client) -> None:
    alerts = running.get("/api/v1/alerts").json()["data"]["alerts"]
    assert [alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"] == []
