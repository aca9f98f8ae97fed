"""Records survive the way to JSON and back, and what is no record is refused with the field's name."""

import json
from typing import Any

import pytest
from vllm_graft.facts import EngineFacts, ModelFacts, RunFacts
from vllm_graft.records import RecordError, from_json, to_json

FACTS = RunFacts(
    schema=1,
    run_id="run-1",
    model=ModelFacts(("Qwen3_5ForCausalLM",), 16, 48, 0, 1, 256),
    engine=EngineFacts("turboquant_k8v4", "mtp", 3, 1, "docker"),
)


def changed(**changes: Any) -> str:
    document = json.loads(to_json(FACTS))
    for path, value in changes.items():
        section, _, key = path.partition("__")
        if key:
            document[section][key] = value
        else:
            document[section] = value
    return json.dumps(document)


def test_a_record_comes_back_equal() -> None:
    assert from_json(RunFacts, to_json(FACTS)) == FACTS
    assert from_json(RunFacts, to_json(FACTS, indent=2)) == FACTS


def test_null_is_a_value_where_it_is_allowed() -> None:
    found = from_json(RunFacts, changed(model__experts=None, engine__speculative_method=None))
    assert found.model.experts is None
    assert found.engine.speculative_method is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "document: got \\[\\]; expected an object"),
        (changed(schema=2), "schema: got 2; expected 1"),
        (changed(run_id=7), "run_id: got 7; expected a string"),
        (changed(model=[]), "model: got \\[\\]; expected an object"),
        (changed(model__architectures="Qwen"), 'model.architectures: got "Qwen"; expected a list'),
        (changed(model__architectures=[1]), "model.architectures\\[0\\]: got 1; expected a string"),
        (changed(engine__tensor_parallel_size="2"), 'engine.tensor_parallel_size: got "2"; expected an integer'),
        (changed(engine__tensor_parallel_size=True), "engine.tensor_parallel_size: got true"),
        (changed(engine__tensor_parallel_size=None), "engine.tensor_parallel_size: got null"),
        (changed(engine__runtime="podman"), 'engine.runtime: got "podman"; expected "docker" or "host"'),
        (changed(engine__extra=1), "engine.extra: unknown key; known are kv_cache_dtype"),
        (json.dumps({"schema": 1, "run_id": "a"}), "model: missing"),
    ],
)
def test_a_wrong_document_is_refused_by_field(text: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        from_json(RunFacts, text)
