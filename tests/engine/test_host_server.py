"""A real vLLM engine through the host runtime: the right answer, failures that are noticed, a stop that is one."""

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator

import psutil
import pytest
from vllm_graft import __main__ as vllm_graft

from launcher.ask import ask, is_healthy
from launcher.ready import Event, NotReady, PhaseStarted, Progress, Ready, follow
from launcher.runtime import RunState, host
from launcher.service import status
from tests.engine.conftest import Bench, Running

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]


def engine_processes(service: host.HostService) -> list[psutil.Process]:
    """Return the live processes of the server's session besides its leader."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            is_ours = os.getsid(process.pid) == service.record.pid != process.pid
            found += [process] if is_ours and process.status() != psutil.STATUS_ZOMBIE else []
    return found


def killing_the_engine(service: host.HostService, events: Iterable[Event]) -> Iterator[Event]:
    """Pass events on; when the engine begins, kill its process."""
    for event in events:
        if isinstance(event, PhaseStarted) and event.phase == "engine":
            (engine,) = [process for process in engine_processes(service) if "EngineCore" in process.name()]
            engine.kill()
        yield event


def test_the_first_answer_is_right(server: Running) -> None:
    last = server.events[-1]
    assert isinstance(last, Ready)
    assert "Paris" in last.answer.text
    assert last.answer.completion_tokens
    assert last.answer.finish_reason == "stop"


def test_the_phases_of_a_real_log_are_seen_in_order(server: Running) -> None:
    phases = [event.phase for event in server.events if isinstance(event, PhaseStarted)]
    assert phases == ["start", "engine", "load", "serve", "canary"]
    assert Progress("load", 1, 1) in server.events


def test_a_later_command_finds_it_healthy_in_under_two_seconds(server: Running) -> None:
    begun_s = time.monotonic()
    found = host.find(server.state)
    assert found is not None
    assert found.state() == RunState("running")
    assert is_healthy(found.base_url)
    assert time.monotonic() - begun_s < 2
    assert found.record.run_id == server.plan.run_id


def test_an_answer_comes_piece_by_piece(server: Running) -> None:
    pieces: list[str] = []
    answer = ask(server.service.base_url, "Write one sentence about the sea.", max_tokens=24, on_text=pieces.append)
    assert len(pieces) > 3
    assert "".join(pieces) == answer.text
    assert answer.model == server.plan.served_name


def test_it_listens_on_this_machine_only(server: Running) -> None:
    addresses = {
        connection.laddr.ip
        for process in [psutil.Process(server.service.record.pid), *engine_processes(server.service)]
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == server.plan.port
    }
    assert addresses == {"127.0.0.1"}


def test_its_reports_say_which_fixes_are_in_from_the_log_and_from_the_files(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAFT_STATE", str(server.state.root.parent))
    found = status(server.state.root.name)
    assert found is not None
    assert found.is_good
    assert set(found.applied) == set(server.plan.required_fixes) != set()
    for where in (("--reports", server.state.reports_dir), ("--log", server.service.log_file)):
        assert vllm_graft.main(["status", *map(str, where)]) == vllm_graft.OK
        said = capsys.readouterr().out
        assert all(f"{fix}: applied (required): in place of vllm." in said for fix in found.applied)
        assert all(f"{process} (pid " in said for process in ("MainProcess", "EngineCore", "VllmWorker-0"))


def test_a_flag_that_vllm_does_not_know_is_named_at_once(bench: Bench) -> None:
    plan = bench.plan("--no-such-flag")
    service = bench.start("unknown-flag", plan)
    with pytest.raises(NotReady, match="unrecognized arguments: --no-such-flag") as caught:
        list(follow(service, plan.served_name))
    assert caught.value.state == RunState("exited", exit_code=2)
    service.stop()


def test_an_engine_that_is_killed_while_it_starts_ends_the_start(bench: Bench) -> None:
    plan = bench.plan()
    service = bench.start("killed", plan)
    begun_s = time.monotonic()
    with pytest.raises(NotReady, match="the server ended with exit code 1") as caught:
        list(killing_the_engine(service, follow(service, plan.served_name)))
    assert time.monotonic() - begun_s < 60
    assert caught.value.lines
    service.stop()
    assert not engine_processes(service)


@pytest.mark.stops_server
def test_a_stop_ends_every_process_and_frees_the_port(server: Running) -> None:
    assert engine_processes(server.service)
    found = host.find(server.state)
    assert found is not None
    found.stop()
    assert not engine_processes(server.service)
    assert host.find(server.state) is None
    assert not is_healthy(server.service.base_url)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.plan.port)) != 0
