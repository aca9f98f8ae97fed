"""Every metric that a page or an alert reads is exported, by each pinned vLLM and by what stands beside it."""

import json
import os
import re
import subprocess
from pathlib import Path

import httpx
import pytest

from launcher.state import CHECKOUT
from tests.compose.conftest import missing
from tests.monitoring.conftest import JOBS, METRICS, free_port, names_in, program
from tests.monitoring.queries import all_metrics, metrics

HAPROXY = """\
defaults
  mode http
  timeout connect 1s
  timeout client 5s
  timeout server 5s
frontend edge
  bind 127.0.0.1:{port}
  http-request use-service prometheus-exporter
"""
AT_NO_START = {"http_requests_total"}
"""Made by the HTTP server's library with the first request."""


def test_the_pages_and_alerts_read_what_was_scraped() -> None:
    scraped = frozenset.union(*(names_in((METRICS / f"{job}.txt").read_text(encoding="utf-8")) for job in JOBS))
    assert all_metrics() - scraped == {"up"}


def test_names_are_told_from_labels_and_words() -> None:
    query = 'sum by (finished_reason) (rate(vllm:request_success_total{job="up"}[1m])) * on (uuid) nvidia_smi_gpu_info'
    assert metrics(query) == {"vllm:request_success_total", "nvidia_smi_gpu_info"}


@pytest.mark.parametrize("folder", [".venv-engine", ".venv-vllm-0.33"])
def test_each_pinned_vllm_has_the_metrics_that_are_read(folder: str) -> None:
    python = CHECKOUT / folder / "bin" / "python"
    if not python.is_file():
        missing(f"no {folder}; `make test` installs it")
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("GRAFT_", "VLLM_"))}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "VLLM_PLUGINS": "", "OMP_NUM_THREADS": "1"}
    argv = [str(python), str(Path(__file__).with_name("names_program.py"))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environ, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    names = frozenset(json.loads(done.stdout.splitlines()[-1]))
    wanted = all_metrics("vllm:") | all_metrics("process_")
    assert wanted
    assert wanted <= names


def test_haproxy_has_the_metrics_that_are_read(tmp_path: Path) -> None:
    haproxy, port = program("haproxy"), free_port()
    configuration = tmp_path / "haproxy.cfg"
    configuration.write_text(HAPROXY.format(port=port), encoding="utf-8")
    with subprocess.Popen([haproxy, "-db", "-f", str(configuration)], stderr=subprocess.DEVNULL) as edge:
        try:
            transport = httpx.HTTPTransport(retries=5)
            with httpx.Client(transport=transport, trust_env=False) as client:
                text = client.get(f"http://127.0.0.1:{port}/metrics").text
        finally:
            edge.terminate()
    wanted = all_metrics("haproxy_")
    assert wanted
    assert wanted <= names_in(text)


def test_the_relay_makes_the_metrics_that_are_read() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (CHECKOUT / "launcher/operate/gateway").glob("*.py"))
    made = set(re.findall(r'"(graft_relay_[a-z_]+)"', source))
    read = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in all_metrics("graft_relay_")}
    assert read
    assert read <= {re.sub(r"_total$", "", name) for name in made}
