"""Profiles and models: what is accepted, merged and refused, and how the message helps."""

import json
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.profile import SHIPPED, json_schema, load_model, load_profile, model_files, profile_files, user_folder

MINIMAL = "title: Mine\nmodel: smollm2-135m-instruct\nvllm: 0.33.0\nserve:\n  max_num_batched_tokens: 2048\n"


@pytest.fixture
def user(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", profile_files())
def test_every_shipped_profile_is_valid_and_names_a_shipped_model(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.model in model_files()


@pytest.mark.parametrize("name", model_files())
def test_every_shipped_model_is_valid(name: str) -> None:
    assert load_model(name).name == name


@pytest.mark.parametrize("kind", ["profile", "model"])
def test_the_published_schema_is_the_one_of_the_code(kind: str) -> None:
    published = json.loads((SHIPPED / "schema" / f"{kind}.schema.json").read_text())
    assert published == json_schema(kind), f"run: graft schema {kind} > profiles/schema/{kind}.schema.json"  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [*profile_files().values(), *model_files().values()], ids=lambda path: path.stem)
def test_every_shipped_file_points_an_editor_at_its_schema(path: Path) -> None:
    first_line = path.read_text().splitlines()[0]
    prefix = "# yaml-language-server: $schema="
    assert first_line.startswith(prefix)
    assert (path.parent / first_line.removeprefix(prefix)).is_file()


def test_the_card_profiles_start_from_the_known_values() -> None:
    values = {
        name: (load_profile(name).serve.gpu_memory_utilization, load_profile(name).serve.max_num_batched_tokens)
        for name in ("rtx3090", "rtx4090", "rtx5090", "rtx3090-x2", "rtx4090-x2", "a5000-x2")
    }
    assert values == {
        "rtx3090": (0.85, 4128),
        "rtx4090": (0.85, 4128),
        "rtx5090": (0.93, 8192),
        "rtx3090-x2": (0.88, 4128),
        "rtx4090-x2": (0.88, 4128),
        "a5000-x2": (0.88, 4128),
    }


def test_a_user_profile_may_extend_a_shipped_one(user: Path) -> None:
    (user / "desk.yaml").write_text("extends: rtx4090\nserve:\n  port: 9000\n")
    profile = load_profile("desk", user)
    assert (profile.name, profile.serve.port, profile.serve.max_num_batched_tokens) == ("desk", 9000, 4128)
    assert profile.source_of("serve.port") == f"{user}/desk.yaml: serve.port"
    assert profile.source_of("serve.max_num_batched_tokens") == "profiles/rtx4090.yaml: serve.max_num_batched_tokens"
    assert profile.source_of("serve.host").endswith("serve.host (default)")


def test_a_user_profile_may_take_the_name_of_the_one_it_extends(user: Path) -> None:
    (user / "rtx4090.yaml").write_text("extends: rtx4090\nserve:\n  port: 9000\n")
    assert load_profile("rtx4090", user).serve.port == 9000


def test_profiles_that_extend_each_other_are_refused(user: Path) -> None:
    (user / "a.yaml").write_text("extends: b\n")
    (user / "b.yaml").write_text("extends: a\n")
    with pytest.raises(UsageError, match="leads back here"):
        load_profile("a", user)


def test_a_profile_that_extends_nothing_known_is_refused(user: Path) -> None:
    (user / "a.yaml").write_text("extends: rtx9090\n")
    with pytest.raises(UsageError, match=r"a\.yaml: extends: no such profile: rtx9090; there are .*rtx4090"):
        load_profile("a", user)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MINIMAL + "  max_num_sequences: 2\n", r"a\.yaml: serve\.max_num_sequences: no such key"),
        (MINIMAL + "  max_model_len: 32k\n", r"a\.yaml: serve\.max_model_len.*'32k'"),
        (MINIMAL + "  gpu_memory_utilization: 0.9\n", r"a\.yaml: serve\.gpu_memory_utilization: set without gpu"),
        (MINIMAL.replace("title: Mine\n", ""), r"a\.yaml: title: missing"),
        (
            MINIMAL.replace("serve:\n  max_num_batched_tokens: 2048\n", "serve: {}\n"),
            r"max_num_batched_tokens: missing",
        ),
        ("extends: rtx4090\ngpu:\n  count: 2\n", r"serve\.tensor_parallel_size: 1 on 2 GPU"),
        ("- a list\n", r"a\.yaml: a mapping is needed, got list"),
        ("title: [\n", r"a\.yaml: not YAML"),
    ],
)
def test_a_wrong_profile_names_its_file_and_key(user: Path, text: str, message: str) -> None:
    (user / "a.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_profile("a", user)


def test_all_wrong_keys_are_named_at_once(user: Path) -> None:
    (user / "a.yaml").write_text(MINIMAL + "  one: 1\n  two: 2\n")
    with pytest.raises(UsageError) as caught:
        load_profile("a", user)
    assert "serve.one" in str(caught.value)
    assert "serve.two" in str(caught.value)


def test_an_unknown_profile_lists_those_there_are() -> None:
    with pytest.raises(UsageError, match=r"PROFILE=rtx9090: no such profile; there are a5000-x2, cpu"):
        load_profile("rtx9090")


def test_a_user_model_is_found_beside_the_shipped_ones(user: Path) -> None:
    text = "title: Mine\nlicense: MIT\nrepo: me/mine\nquantization: none\nserved_name: mine\n"
    (user / "models" / "mine.yaml").write_text(text)
    assert load_model("mine", user).repo == "me/mine"
    assert "qwen3.6-27b-int4" in model_files(user)


def test_a_profile_folder_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no such folder"):
        user_folder(tmp_path / "gone")
    monkeypatch.setenv("GRAFT_PROFILES", str(tmp_path))
    assert user_folder(None) == tmp_path
