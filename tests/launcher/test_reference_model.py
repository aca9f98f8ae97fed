"""The reference model's data, tokens and files: trained on nothing that it is asked, and in the form of Qwen3."""

import json
import random
import re
import struct
from functools import cache
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import reference_config
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_config import CONFIG, IM_END, TOKEN_IDS, WEIGHTS, decode, encode
from reference_rows import PROMPT, REPLY, TEMPLATE, Row, judged, judged_row, prompt_and_reply, training_rows
from vllm_graft.parsers.reader import Reader
from vllm_graft.parsers.schema import Typing, make_tool

from launcher.images.pins import load_pins
from launcher.measure import verify
from launcher.measure.dialogues import KINDS, VERBS, Task, draw
from launcher.measure.words import split_of
from launcher.planner import Inputs, make
from launcher.profile import load_model, load_profile

NAME = re.compile(r'"name": "([a-z]+)_([a-z]+)"')
LOCKER = re.compile(r"locker number of ([A-Z][a-z]+)")


@cache
def trained(count: int = 250, seed: int = 1) -> list[Row]:
    return list(islice(training_rows(random.Random(seed), SimpleNamespace(value=600)), count))


def texts_of(rows: list[Row]) -> str:
    return "\n".join(decode(row.tokens) for row in rows)


@cache
def held_out(count: int = 20) -> list[Task]:
    return judged("held-out", "test", count, (300, 2500))


def tool_words(text: str) -> set[str]:
    return {word for verb, word in NAME.findall(text) if verb in VERBS}


def values_of(value: Any) -> list[Any]:
    """The keys and scalars of a JSON value."""
    if isinstance(value, dict):
        return [*value, *(one for item in value.values() for one in values_of(item))]
    if isinstance(value, list):
        return [one for item in value for one in values_of(item)]
    return [value]


def read(reply: str, task: Task) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls, as the fix reads them, with the JSON Schema's types."""

    def coerce(text: str, types: list[str]) -> Any:
        if "null" in types and text == "null":
            return None
        return text if "string" in types else json.loads(text)

    def types_of(schema: Any) -> list[str]:
        kind = schema["type"]
        return kind if isinstance(kind, list) else [kind]

    tools = {one["function"]["name"]: one["function"] for one in task.tools}
    reader = Reader(
        {name: make_tool(name, one["parameters"]) for name, one in tools.items()},
        Typing(types_of, coerce),
        reasoning=False,
    )
    events = [*reader.feed(reply), *reader.finish()]
    content = "".join(event.text for event in events if event.kind.name == "CONTENT")
    return content, [(call.name, json.loads(call.arguments)) for call in reader.calls]


def test_no_tool_name_of_the_training_is_in_what_it_is_judged_by() -> None:
    seen = tool_words(texts_of(trained()))
    asked = tool_words(texts_of([judged_row(task) for task in held_out()]))
    assert len(seen) > 200
    assert len(asked) > 100
    assert {split_of(word) for word in seen} == {"train"}
    assert {split_of(word) for word in asked} == {"held-out"}


def test_no_locker_of_the_training_is_asked_for() -> None:
    rows, tasks = trained(), held_out()
    assert {split_of(name.lower()) for name in LOCKER.findall(texts_of(rows))} == {"train"}
    asked = {name for task in tasks if task.kind == "needle" for name in LOCKER.findall(task.messages[0]["content"])}
    assert {split_of(name.lower()) for name in asked} == {"held-out"}


def test_the_values_asked_for_are_not_those_of_the_training() -> None:
    replies = "\n".join(
        decode([token for token, part in zip(row.tokens, row.parts, strict=True) if part == REPLY]) for row in trained()
    )
    wanted = [value for task in held_out() for call in task.calls for value in values_of(call.arguments)]
    texts = [value for value in wanted if isinstance(value, str) and value.isascii() and len(value) > 6]
    assert len(texts) > 200
    assert [text for text in texts if text in replies and text not in ("path", "code")] == []


def test_the_same_seed_gives_the_same_rows() -> None:
    assert trained(20) == trained()[:20]
    assert trained(20) != trained(20, seed=2)


@pytest.mark.parametrize("kind", [*KINDS, "needle"])
def test_a_right_reply_is_read_as_the_expected_calls_and_content(kind: str) -> None:
    for task in held_out():
        if task.kind == kind:
            prompt, reply = prompt_and_reply(task)
            assert reply[-1] == IM_END
            assert decode(prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
            content, calls = read(decode(reply[:-1]), task)
            assert content.strip() == task.content
            assert calls == [(call.name, call.arguments) for call in task.calls]


def test_every_right_reply_fits_into_what_its_request_allows() -> None:
    for task in (*held_out(), *islice(draw(random.Random(1), kinds=("parallel",)), 200)):
        prompt, reply = prompt_and_reply(task)
        assert len(reply) <= task.max_tokens
        assert task.kind == "needle" or len(prompt) + task.max_tokens <= verify.CALL_TOKENS


def test_its_plan_says_what_a_verification_may_ask_of_it() -> None:
    folder = WEIGHTS.parent / "profiles"
    profile, model = load_profile("reference-cpu", folder), load_model("graft-reference", folder)
    plan = make(Inputs(profile=profile, model=model, pin=load_pins().of(profile.vllm))).plan
    assert (plan.recall_tokens, plan.right_replies) == (8192, 0.99)


def test_only_what_the_model_writes_counts_as_its_reply() -> None:
    for row in trained():
        pieces = re.split(r"(<\|im_start\|>assistant\n<think>\n)", decode(row.tokens))
        expected = "".join(piece[: piece.index("<|im_end|>") + 10] for piece in pieces[2::2])
        assert decode([token for token, part in zip(row.tokens, row.parts, strict=True) if part == REPLY]) == expected
        assert set(row.parts) == {PROMPT, REPLY}


@pytest.mark.parametrize(
    ("thinking", "end"), [(False, "<think>\n\n</think>\n\n"), (True, "<think>\n"), (None, "<think>\n")]
)
def test_the_prompt_ends_where_the_model_goes_on(thinking: bool | None, end: str) -> None:
    asked = {} if thinking is None else {"enable_thinking": thinking}
    messages = [{"role": "user", "content": "Hello"}]
    prompt = TEMPLATE.render(messages=messages, add_generation_prompt=True, **asked)
    assert prompt == f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{end}"


@settings(deadline=None)
@given(st.text())
def test_text_becomes_bytes_and_comes_back(text: str) -> None:
    assert decode(encode(text)) == text
    assert encode(text) == list(text.encode()) or any(token in text for token in TOKEN_IDS)


def test_added_tokens_are_one_token_each() -> None:
    assert encode("a<tool_call>é<|im_end|>") == [97, TOKEN_IDS["<tool_call>"], 195, 169, IM_END]


def test_the_files_beside_the_weights_are_those_that_the_code_writes(tmp_path: Any) -> None:
    reference_config.write_files(tmp_path)
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert written == {name: (WEIGHTS / name).read_text(encoding="utf-8") for name in written}
    assert "config.json" in written


def test_the_weights_are_bfloat16_of_at_most_12_mb_with_experts_in_model_and_mtp_layer() -> None:
    path = WEIGHTS / "model.safetensors"
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__")
    assert path.stat().st_size <= 12_000_000
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    last = CONFIG["num_experts"] - 1
    for layer in ("model.layers.0", "mtp.layers.0"):
        assert f"{layer}.mlp.experts.{last}.down_proj.weight" in header
    kinds = [("linear_attn" if f"model.layers.{i}.linear_attn.A_log" in header else "self_attn") for i in range(8)]
    assert kinds == ["linear_attn", "self_attn"] * 4
