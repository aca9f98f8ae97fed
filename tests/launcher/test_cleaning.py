"""What can be removed: sizes and reasons, dry unless asked, and nothing that is in use or another program's."""

import os
from pathlib import Path

import pytest

from launcher import cleaning, durable
from launcher.cleaning import Leftover, Volume
from launcher.errors import Refused, UsageError
from launcher.images.pins import load_pins
from launcher.plan import Plan
from launcher.planner import Inputs, make
from launcher.profile import load_model, load_profile

OLD, NEW = "graft-desk-cache-000000000000", "graft-desk-cache-111111111111"


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "state"
    monkeypatch.setenv("GRAFT_STATE", str(root))
    monkeypatch.delenv("GRAFT_MODELS", raising=False)
    monkeypatch.delenv("GRAFT_PROFILES", raising=False)
    write(root / "desk" / "compose.yaml", f"volumes:\n  cache:\n    name: {NEW}\n")
    for at, name in enumerate(("failed-1.log", "failed-2.log", "server.log")):
        write(root / "desk" / "logs" / name, "x" * 5000)
        os.utime(root / "desk" / "logs" / name, (at, at))
    write(root / "desk" / "secrets" / "api_key", "key")
    models = root / "cache" / "models"
    write(models / "smollm2-135m-instruct" / "config.json", "{}")
    write(models / "mine" / "graft-model.json", "{}")
    write(models / "of-another-program" / "config.json", "{}")
    write(models / ".tiny.0123456789ab.partial" / ".parts" / "model.safetensors", "half" * 5000)
    write(root / "cache" / "vllm" / "compiled", "c")
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def volumes() -> tuple[Volume, ...]:
    return (
        Volume(OLD, "graft-desk", 7_000_000, 0),
        Volume(NEW, "graft-desk", 8_000_000, 0),
        Volume("graft-desk-cache-222222222222", "graft-desk", 9_000_000, 1),
        Volume("graft-elsewhere-cache-333333333333", "graft-elsewhere", 1, 0),
    )


def by_name(found: tuple[Leftover, ...]) -> dict[str, Leftover]:
    return {one.name: one for one in found}


def cpu_plan() -> Plan:
    profile = load_profile("cpu")
    return make(Inputs(profile=profile, model=load_model(profile.model), pin=load_pins().of(profile.vllm))).plan


def test_only_what_no_start_would_use_is_safe(state: Path) -> None:
    found = by_name(cleaning.find((), volumes()))
    verdicts = {name: one.verdict for name, one in found.items()}
    assert verdicts == {
        OLD: "safe",
        NEW: "by-name",
        "graft-desk-cache-222222222222": "in-use",
        "graft-elsewhere-cache-333333333333": "by-name",
        "cache/vllm": "by-name",
        "desk/logs/failed-1.log": "safe",
        "desk/logs/failed-2.log": "by-name",
        "models/.tiny.0123456789ab.partial": "safe",
        "models/smollm2-135m-instruct": "by-name",
        "models/mine": "by-name",
    }
    assert found["models/smollm2-135m-instruct"].why == "the model of cpu"
    assert found["models/mine"].why == "no profile uses it"
    assert found["models/.tiny.0123456789ab.partial"].size_bytes >= 20_000


def test_without_names_the_safe_ones_go_and_the_rest_stays(state: Path) -> None:
    found = cleaning.find((), ())
    before = {path for path in state.rglob("*") if path.is_file()}
    for one in cleaning.chosen(found, ()):
        cleaning.remove(one)
    gone = {path.relative_to(state).as_posix() for path in before if not path.exists()}
    assert gone == {"desk/logs/failed-1.log", "cache/models/.tiny.0123456789ab.partial/.parts/model.safetensors"}


def test_a_model_goes_when_it_is_named(state: Path) -> None:
    (one,) = cleaning.chosen(cleaning.find((), ()), ("models/mine",))
    cleaning.remove(one)
    assert {path.name for path in (state / "cache" / "models").iterdir()} == {
        "smollm2-135m-instruct",
        "of-another-program",
        ".tiny.0123456789ab.partial",
    }


def test_what_a_running_service_uses_cannot_be_named(state: Path) -> None:
    found = cleaning.find((cpu_plan(),), ())
    for name, why in (("models/smollm2-135m-instruct", "cpu serves it"), ("cache/vllm", "a server uses it")):
        with pytest.raises(Refused, match=why):
            cleaning.chosen(found, (name,))


def test_what_is_not_in_the_list_cannot_be_named(state: Path) -> None:
    found = cleaning.find((), ())
    for name in ("models/of-another-program", "desk/secrets/api_key", "../x", "/etc"):
        with pytest.raises(UsageError, match="nothing of Graft with this name"):
            cleaning.chosen(found, (name,))


def test_a_download_that_is_under_way_is_in_use(state: Path) -> None:
    path = state / "cache" / "models" / ".tiny.0123456789ab.partial"
    before = by_name(cleaning.find((), ()))
    with durable.held(path, "fetching"):
        assert by_name(cleaning.find((), ()))[f"models/{path.name}"].verdict == "in-use"
        with pytest.raises(Refused, match="in use by another process"):
            cleaning.remove(before[f"models/{path.name}"])
    assert path.is_dir()


def test_links_are_not_followed_and_not_listed(state: Path, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "graft-model.json", "{}")
    write(tmp_path / "elsewhere" / "logs" / "failed-1.log", "x")
    (state / "cache" / "models" / "linked").symlink_to(tmp_path / "elsewhere")
    (state / "linked").symlink_to(tmp_path / "elsewhere")
    assert not any("linked" in name for name in by_name(cleaning.find((), ())))


def test_half_downloads_in_a_folder_of_the_users_go_by_name_only(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFT_MODELS", str(tmp_path / "shared"))
    write(tmp_path / "shared" / ".tiny.0123456789ab.partial" / "x", "x")
    assert by_name(cleaning.find((), ()))["models/.tiny.0123456789ab.partial"].verdict == "by-name"


def test_nothing_there_is_an_empty_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFT_STATE", str(tmp_path / "nothing"))
    monkeypatch.delenv("GRAFT_MODELS", raising=False)
    assert cleaning.find((), ()) == ()
