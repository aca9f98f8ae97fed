"""Downloads that break: tried again from the byte where they broke off, or refused with one cause and what to do."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from launcher.errors import Refused
from launcher.weights import hub, transfer
from launcher.weights.events import FetchEvent, Origin
from launcher.weights.fetch import ensure_model
from tests.launcher.weights.fake_hub import FILES, REPO, REVISION, Serve, ignore, listing_of, model, safetensors

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "RETRY_WAITS_S", (0.05,) * 9)
    monkeypatch.setattr(transfer, "POLL_INTERVAL_S", 0.05)


def test_a_connection_that_is_cut_is_continued_at_its_byte(serve: Serve, tmp_path: Path) -> None:
    large = safetensors(1_000_000)
    handler = serve(files={**FILES, WEIGHTS: large}, cut_after=[600_000])
    folder = ensure_model(model(), tmp_path, ignore)
    assert (folder / WEIGHTS).read_bytes() == large
    assert [asked for asked in handler.asked if WEIGHTS in asked] == [f"GET {WEIGHTS} 0", f"GET {WEIGHTS} {1 << 19}"]


def test_a_download_that_began_is_continued_though_the_hub_has_a_newer_commit(serve: Serve, tmp_path: Path) -> None:
    newer = "f" * 40
    handler = serve(newest=newer)
    parts = tmp_path / f".tiny.{REVISION}.partial" / transfer.PARTS
    parts.mkdir(parents=True)
    (parts / WEIGHTS).write_bytes(FILES[WEIGHTS][:999])
    origin = Origin.read(ensure_model(model(), tmp_path, ignore))
    assert origin is not None
    assert origin.revision == REVISION
    assert f"GET {WEIGHTS} 999" in handler.asked
    assert {file.path for file in origin.files if file.sha256} == set(FILES)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_download_whose_commit_is_gone_begins_with_the_newest(serve: Serve, tmp_path: Path) -> None:
    serve()
    (tmp_path / f".tiny.{'e' * 40}.partial").mkdir()
    events: list[FetchEvent] = []
    origin = Origin.read(ensure_model(model(), tmp_path, events.append))
    assert origin is not None
    assert origin.revision == REVISION
    assert any("has no eeeeeeeeeeee any more" in event.note for event in events)


def test_a_left_over_that_is_longer_than_the_file_is_not_continued(serve: Serve, tmp_path: Path) -> None:
    serve()
    parts = tmp_path / f".tiny.{REVISION}.partial" / transfer.PARTS
    parts.mkdir(parents=True)
    (parts / WEIGHTS).write_bytes(FILES[WEIGHTS] + b"more")
    assert (ensure_model(model(), tmp_path, ignore) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


def test_a_transfer_that_stalls_is_told_by_file_and_total_then_ended_and_continued(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STALL_TIMEOUT_S", 0.8)
    handler = serve(stall_after=[40_000])
    events: list[FetchEvent] = []
    folder = ensure_model(model(), tmp_path, events.append)
    assert (folder / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert any("nothing came for 0.8 s" in event.note and "trying again" in event.note for event in events)
    under_way = next(event for event in events if any(file.path == WEIGHTS for file in event.files))
    assert next(file.total_bytes for file in under_way.files if file.path == WEIGHTS) == len(FILES[WEIGHTS])
    assert under_way.total_bytes == sum(len(content) for content in FILES.values())
    assert next(asked for asked in handler.asked if WEIGHTS in asked) == f"GET {WEIGHTS} 0"


def test_a_server_error_is_tried_again(serve: Serve, tmp_path: Path) -> None:
    serve(file_errors=[503])
    events: list[FetchEvent] = []
    assert (ensure_model(model(), tmp_path, events.append) / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    (note,) = (event.note for event in events if "trying again" in event.note)
    assert f"{WEIGHTS}: HTTP 503 Service Unavailable" in note


def test_a_server_error_that_stays_is_the_cause(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "RETRY_WAITS_S", (0.05,))
    serve(file_errors=[502] * 9)
    with pytest.raises(Refused, match=r"broke off: .*HTTP 502 Bad Gateway.*it continues"):
        ensure_model(model(), tmp_path, ignore)


def test_too_many_requests_are_waited_for_as_the_hub_says(serve: Serve, tmp_path: Path) -> None:
    handler = serve(file_errors=[429])
    assert (ensure_model(model(), tmp_path, ignore) / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert sum(WEIGHTS in asked for asked in handler.asked) == 2


@pytest.mark.parametrize(("status", "said"), [(401, "accept its licence"), (404, "--from")])
def test_a_refused_file_is_not_asked_for_again(serve: Serve, tmp_path: Path, status: int, said: str) -> None:
    handler = serve(file_errors=[status] * 9)
    with pytest.raises(Refused, match=rf"broke off: .*HTTP {status} .*{said}"):
        ensure_model(model(), tmp_path, ignore)
    assert sum(WEIGHTS in asked for asked in handler.asked) == 1


def test_a_gated_model_comes_with_its_token_which_is_shown_to_the_hub_alone(serve: Serve, tmp_path: Path) -> None:
    handler = serve(token="hf_secret")
    with pytest.raises(Refused, match=r"gated; accept its licence .*--token-file"):
        ensure_model(model(), tmp_path, ignore)
    handler.shown.clear()
    events: list[FetchEvent] = []
    folder = ensure_model(model(), tmp_path, events.append, token="hf_secret")
    assert set(handler.shown) == {"Bearer hf_secret"}
    written = b"".join(path.read_bytes() for path in folder.iterdir())
    assert b"hf_secret" not in written
    assert "hf_secret" not in repr((events, hub.Hub("https://hub", "hf_secret")))


def test_the_server_that_a_hub_sends_to_does_not_see_the_token(serve: Serve, tmp_path: Path) -> None:
    elsewhere = serve()
    handler = serve(elsewhere=os.environ["HF_ENDPOINT"], token="hf_secret")
    folder = ensure_model(model(), tmp_path, ignore, token="hf_secret")
    assert (folder / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert (set(handler.shown), set(elsewhere.shown)) == ({"Bearer hf_secret"}, {None})


def test_a_hub_that_only_stalls_is_given_up_and_no_process_shows_the_token(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "STALL_TIMEOUT_S", 0.4)
    monkeypatch.setattr(transfer, "RETRY_WAITS_S", ())
    serve(token="hf_secret", stall_after=[0] * 9)
    seen: list[bytes] = []

    def look_at_processes(event: FetchEvent) -> None:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if b"hub_download.py" in (command := (folder / "cmdline").read_bytes()):
                    seen.append(command + (folder / "environ").read_bytes())
            except OSError:
                continue

    with pytest.raises(Refused, match=rf"{REPO}: the download broke off: nothing came for 0.4 s.*it continues"):
        ensure_model(model(), tmp_path, look_at_processes, token="hf_secret")
    assert not (tmp_path / "tiny").exists()
    assert seen
    assert not any(b"hf_secret" in process for process in seen)


def test_a_download_ends_with_the_process_that_began_it(serve: Serve, tmp_path: Path) -> None:
    serve(stall_after=[10])
    program = (
        "from pathlib import Path\nfrom launcher.weights.fetch import ensure_model\n"
        "from tests.launcher.weights.fake_hub import model\n"
        f"ensure_model(model(), Path({str(tmp_path)!r}), lambda event: print('event', flush=True))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        while not (downloads := psutil.Process(launcher.pid).children()):
            assert launcher.stdout.readline()
        launcher.kill()
    gone, alive = psutil.wait_procs(downloads, timeout=10)
    assert (len(gone), alive) == (1, [])


def test_a_second_fetch_of_the_model_waits_its_turn(serve: Serve, tmp_path: Path) -> None:
    serve()
    work = tmp_path / f".tiny.{REVISION}.partial"
    work.mkdir()
    holder = (
        f"import sys\nfrom pathlib import Path\nfrom launcher import durable\n"
        f"with durable.held(Path({str(work)!r}), 'busy'):\n print('held', flush=True)\n sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(Refused, match="another fetch of this model is under way"):
            ensure_model(model(), tmp_path, ignore)
        other.communicate()
    assert ensure_model(model(), tmp_path, ignore) == tmp_path / "tiny"


def test_a_disk_that_fills_up_during_a_download_is_named(small_disk: Path, serve: Serve) -> None:
    serve()
    listing = listing_of()
    with pytest.raises(Refused, match=r"No space left on device.*free some space on the disk of .*it continues"):
        transfer.download(hub.Hub(hub.endpoint()), REPO, listing, small_disk / "partial", ignore)
    with pytest.raises(Refused, match=r"0\.0 GB free.*still needs"):
        ensure_model(model(), small_disk, ignore)
    assert not (small_disk / "tiny").exists()
