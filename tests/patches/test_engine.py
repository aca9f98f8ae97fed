"""The engine on stand-in modules: what is put in, what is refused, and that nothing is left behind."""

import functools
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import pytest
from vllm_graft.engine import Engine, UndoError, signature_problem
from vllm_graft.fingerprint import fingerprint
from vllm_graft.patch import Extension, Outcome, Patch, Target

MakeStock = Callable[[Mapping[str, str]], Any]
MakePatch = Callable[..., Patch]

SUMS = """
def answer(value, factor=1):
    return value * factor


class Model:
    scale = 2

    def forward(self, value):
        return value

    @staticmethod
    def name():
        return "stock"

    @classmethod
    def kind(cls):
        return cls.__name__

    @property
    def size(self):
        return self.scale


class Child(Model):
    pass


CONSTANT = 3
"""
CALLER = """
from STOCK.sums import answer


def call(value):
    return answer(value)
"""
REGISTRY = """
class Fast:
    def speed(self):
        return 1


BACKENDS = {"fast": Fast}


def pick():
    return BACKENDS["fast"]
"""


def doubled(original: Any) -> Any:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return 2 * original(*args, **kwargs)

    return replacement


def test_a_function_is_wrapped_and_given_back(stock: MakeStock, make_patch: MakePatch) -> None:
    sums = stock({"sums": SUMS}).module("sums")
    original, engine = sums.answer, Engine()
    patch = make_patch(f"{sums.__name__}:answer", doubled)

    attempt = engine.apply(patch, "1.0")
    assert (attempt.outcome, attempt.fingerprint) == (Outcome.APPLIED, patch.fingerprints["1.0"])
    assert sums.answer(3, factor=2) == 12
    assert patch.id in engine

    engine.undo(patch.id)
    assert sums.answer is original
    assert patch.id not in engine


def test_applying_twice_is_applying_once(stock: MakeStock, make_patch: MakePatch) -> None:
    sums, engine = stock({"sums": SUMS}).module("sums"), Engine()
    patch = make_patch(f"{sums.__name__}:answer", doubled)
    first = engine.apply(patch, "1.0")
    bound = sums.answer
    assert engine.apply(patch, "1.0") == first
    assert sums.answer is bound
    assert sums.answer(1) == 2


def test_a_target_that_nobody_imported_is_imported(stock: MakeStock, make_patch: MakePatch) -> None:
    package, engine = stock({"sums": SUMS}), Engine()
    path = package.path("sums:answer")
    patch = make_patch(path, doubled)
    del sys.modules[package.path("sums")]
    assert engine.apply(patch, "1.0").outcome is Outcome.APPLIED
    assert package.module("sums").answer(1) == 2


@pytest.mark.parametrize("version", ["1.0", "1.0+cu129", "1.0.0"])
def test_the_fingerprint_is_that_of_the_public_version(stock: MakeStock, make_patch: MakePatch, version: str) -> None:
    sums = stock({"sums": SUMS}).module("sums")
    patch = make_patch(f"{sums.__name__}:answer", doubled)
    outcome = Engine().apply(patch, version).outcome
    assert outcome is (Outcome.APPLIED if version != "1.0.0" else Outcome.DRIFTED)


def test_a_changed_source_is_drift_and_changes_nothing(stock: MakeStock, make_patch: MakePatch) -> None:
    sums = stock({"sums": SUMS}).module("sums")
    original = sums.answer
    patch = make_patch(f"{sums.__name__}:answer", doubled, fingerprints={"1.0": "0" * 16})
    attempt = Engine().apply(patch, "1.0")
    assert attempt.outcome is Outcome.DRIFTED
    assert attempt.fingerprint == fingerprint([original])
    assert "not 0000000000000000 as in vLLM 1.0" in attempt.reason
    assert sums.answer is original


def test_a_version_without_a_fingerprint_is_drift(stock: MakeStock, make_patch: MakePatch) -> None:
    sums = stock({"sums": SUMS}).module("sums")
    attempt = Engine().apply(make_patch(f"{sums.__name__}:answer", doubled), "1.1")
    assert attempt.outcome is Outcome.DRIFTED
    assert f"no fingerprint is recorded for vLLM 1.1; found {fingerprint([sums.answer])}" in attempt.reason


@pytest.mark.parametrize("path", ["gone:answer", "sums:gone", "sums:Gone.forward", "sums:Child.forward"])
def test_a_target_that_is_gone_is_drift(stock: MakeStock, make_patch: MakePatch, path: str) -> None:
    """An inherited method is gone too: replacing it on the child would miss every other class."""
    package = stock({"sums": SUMS})
    patch = make_patch(package.path(path), doubled, fingerprints={"1.0": "0" * 16})
    attempt = Engine().apply(patch, "1.0")
    assert attempt.outcome is Outcome.DRIFTED
    assert "does not" in attempt.reason


def test_a_target_that_has_no_source_is_drift(stock: MakeStock, make_patch: MakePatch) -> None:
    package = stock({"sums": SUMS})
    patch = make_patch(package.path("sums:CONSTANT"), doubled, fingerprints={"1.0": "0" * 16})
    attempt = Engine().apply(patch, "1.0")
    assert attempt.outcome is Outcome.DRIFTED
    assert "an object of type int has no source" in attempt.reason


def test_what_the_replacement_relies_on_is_part_of_the_fingerprint(stock: MakeStock, make_patch: MakePatch) -> None:
    package = stock({"sums": SUMS, "caller": CALLER})
    path = package.path("sums:answer")
    alone = make_patch(path, doubled).fingerprints["1.0"]
    target = Target(path, reads=(package.path("sums:Model.forward"), package.path("registry")))
    (package.folder / package.name / "registry.py").write_text(REGISTRY)
    with_reads = make_patch(path, doubled, target=target)
    assert with_reads.fingerprints["1.0"] != alone
    assert Engine().apply(with_reads, "1.0").outcome is Outcome.APPLIED


@pytest.mark.parametrize(
    ("statement", "cause"),
    [("import surely_not_installed", "surely_not_installed"), ("raise OSError('libcudart.so.13')", "libcudart.so.13")],
)
def test_a_module_that_fails_to_import_is_a_failure_with_its_cause(
    stock: MakeStock, make_patch: MakePatch, statement: str, cause: str
) -> None:
    package = stock({"broken": f"{statement}\n"})
    patch = make_patch(package.path("broken:answer"), doubled, fingerprints={"1.0": "0" * 16})
    attempt = Engine().apply(patch, "1.0")
    assert attempt.outcome is Outcome.FAILED
    assert cause in attempt.reason


def test_a_module_that_is_being_imported_is_pending(stock: MakeStock, make_patch: MakePatch) -> None:
    package, engine = stock({"sums": SUMS}), Engine()
    sums = package.module("sums")
    patch = make_patch(package.path("sums:answer"), doubled)
    sums.__spec__._initializing = True
    attempt = engine.apply(patch, "1.0")
    assert attempt.outcome is Outcome.PENDING
    assert "is being imported" in attempt.reason
    sums.__spec__._initializing = False
    assert engine.apply(patch, "1.0").outcome is Outcome.APPLIED


def test_by_value_copies_are_rebound_and_given_back(stock: MakeStock, make_patch: MakePatch) -> None:
    package, engine = stock({"sums": SUMS, "caller": CALLER}), Engine()
    sums, caller = package.module("sums"), package.module("caller")
    original = sums.answer
    target = Target(package.path("sums:answer"), also=(package.path("caller:answer"),))
    patch = make_patch(target.path, doubled, target=target, reached=lambda: caller.call.__globals__["answer"])
    assert engine.apply(patch, "1.0").outcome is Outcome.APPLIED
    assert caller.call(3) == 6
    engine.undo(patch.id)
    assert caller.answer is original
    assert caller.call(3) == 3


def test_a_copy_that_is_made_later_is_the_replacement(stock: MakeStock, make_patch: MakePatch) -> None:
    package, engine = stock({"sums": SUMS, "caller": CALLER}), Engine()
    package.module("sums")
    target = Target(package.path("sums:answer"), also=(package.path("caller:answer"),))
    assert engine.apply(make_patch(target.path, doubled, target=target), "1.0").outcome is Outcome.APPLIED
    assert package.module("caller").call(3) == 6


def test_a_copy_that_build_brings_in_is_rebound_too(stock: MakeStock, make_patch: MakePatch) -> None:
    package, engine = stock({"sums": SUMS, "caller": CALLER}), Engine()
    package.module("sums")

    def build(original: Any) -> Any:
        package.module("caller")
        return doubled(original)

    target = Target(package.path("sums:answer"), also=(package.path("caller:answer"),))
    assert engine.apply(make_patch(target.path, build, target=target), "1.0").outcome is Outcome.APPLIED
    assert package.module("caller").call(3) == 6


def test_a_copy_that_is_not_listed_fails_and_is_named(stock: MakeStock, make_patch: MakePatch) -> None:
    package = stock({"sums": SUMS, "caller": CALLER})
    sums, caller = package.module("sums"), package.module("caller")
    original = sums.answer
    attempt = Engine().apply(make_patch(package.path("sums:answer"), doubled), "1.0")
    assert attempt.outcome is Outcome.FAILED
    assert attempt.reason.startswith(package.path("caller:answer"))
    assert sums.answer is caller.answer is original


def test_a_listed_copy_that_is_none_is_drift(stock: MakeStock, make_patch: MakePatch) -> None:
    package = stock({"sums": SUMS, "caller": CALLER})
    sums, _ = package.module("sums"), package.module("caller")
    original = sums.answer
    target = Target(package.path("sums:answer"), also=(package.path("caller:call"),))
    attempt = Engine().apply(make_patch(target.path, doubled, target=target), "1.0")
    assert attempt.outcome is Outcome.DRIFTED
    assert "is not a copy of" in attempt.reason
    assert sums.answer is original


@pytest.mark.parametrize("method", ["forward", "name", "kind"])
def test_methods_of_every_kind_keep_their_kind(stock: MakeStock, make_patch: MakePatch, method: str) -> None:
    package, engine = stock({"sums": SUMS}), Engine()
    model = package.module("sums").Model
    raw = vars(model)[method]
    patch = make_patch(
        package.path(f"sums:Model.{method}"), doubled, reached=lambda: getattr(package.module("sums").Child, method)
    )
    assert engine.apply(patch, "1.0").outcome is Outcome.APPLIED
    expected = {"forward": lambda: model().forward(2) == 4, "name": lambda: model().name() == "stockstock"}
    expected["kind"] = lambda: package.module("sums").Child.kind() == "ChildChild"
    assert expected[method]()
    engine.undo(patch.id)
    assert vars(model)[method] is raw


def test_a_property_is_replaced_as_a_whole(stock: MakeStock, make_patch: MakePatch) -> None:
    package, engine = stock({"sums": SUMS}), Engine()
    model = package.module("sums").Model
    raw = vars(model)["size"]
    patch = make_patch(package.path("sums:Model.size"), lambda original: property(lambda self: 2 * original.fget(self)))
    assert engine.apply(patch, "1.0").outcome is Outcome.APPLIED
    assert model().size == 4
    engine.undo(patch.id)
    assert vars(model)["size"] is raw


def test_a_replacement_that_the_caller_does_not_reach_fails(stock: MakeStock, make_patch: MakePatch) -> None:
    package = stock({"sums": SUMS})
    sums = package.module("sums")
    original = sums.answer
    attempt = Engine().apply(make_patch(package.path("sums:answer"), doubled, reached=lambda: original), "1.0")
    assert attempt.outcome is Outcome.FAILED
    assert "vLLM's own caller still reaches" in attempt.reason
    assert sums.answer is original


def test_a_check_that_raises_fails_and_gives_the_original_back(stock: MakeStock, make_patch: MakePatch) -> None:
    package = stock({"sums": SUMS})
    sums = package.module("sums")
    original = sums.answer
    attempt = Engine().apply(make_patch(package.path("sums:answer"), doubled, reached=lambda: 1 // 0), "1.0")
    assert (attempt.outcome, attempt.reason.partition(":")[0]) == (Outcome.FAILED, "ZeroDivisionError")
    assert sums.answer is original


def _other_signature(original: Any) -> Any:
    return lambda value: original(value)


def _other_default(original: Any) -> Any:
    return lambda value, factor=2: original(value, factor)


def _hidden_signature(original: Any) -> Any:
    @functools.wraps(original)
    def replacement(value: Any) -> Any:
        return original(value)

    return replacement


def _coroutine(original: Any) -> Any:
    async def replacement(value: Any, factor: int = 1) -> Any:
        return original(value, factor)

    return replacement


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda original: original, "returned the original"),
        (_other_signature, "signature (value, factor=1) became (value)"),
        (_other_default, "signature (value, factor=1) became (value, factor=2)"),
        (_hidden_signature, "which is not what it shows"),
        (_coroutine, "coroutinefunction: False before, True after"),
        (lambda original: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_a_replacement_of_another_shape_is_refused(
    stock: MakeStock, make_patch: MakePatch, build: Callable[[Any], Any], reason: str
) -> None:
    package = stock({"sums": SUMS})
    sums = package.module("sums")
    original = sums.answer
    attempt = Engine().apply(make_patch(package.path("sums:answer"), build), "1.0")
    assert attempt.outcome is Outcome.FAILED
    assert reason in attempt.reason
    assert sums.answer is original


def test_annotations_may_differ() -> None:
    def typed(value: int, factor: int = 1) -> int:
        return value * factor

    assert signature_problem(lambda value, factor=1: value, typed) == ""


def test_a_class_is_replaced_by_a_subclass_only(stock: MakeStock, make_patch: MakePatch) -> None:
    package, engine = stock({"sums": SUMS.replace("class Child(Model):\n    pass\n", "")}), Engine()
    path = package.path("sums:Model")
    attempt = engine.apply(make_patch(path, lambda original: type("Model", (), {})), "1.0")
    assert attempt.outcome is Outcome.FAILED
    assert "no subclass" in attempt.reason
    better = make_patch(path, lambda original: type("Model", (original,), {"scale": 5}))
    assert engine.apply(better, "1.0").outcome is Outcome.APPLIED
    assert package.module("sums").Model().size == 5


def test_two_fixes_of_one_target_lie_on_each_other(stock: MakeStock, make_patch: MakePatch) -> None:
    package, engine = stock({"sums": SUMS}), Engine()
    sums = package.module("sums")
    original = sums.answer
    below = make_patch(package.path("sums:answer"), doubled, id="below")
    above = make_patch(package.path("sums:answer"), doubled, id="above")
    assert engine.apply(below, "1.0").outcome is Outcome.APPLIED
    attempt = engine.apply(above, "1.0")
    assert (attempt.outcome, attempt.fingerprint) == (Outcome.APPLIED, below.fingerprints["1.0"])
    assert sums.answer(1) == 4
    with pytest.raises(UndoError, match=r"below: .* is on top of it"):
        engine.undo("below")
    engine.undo_all()
    assert sums.answer is original


def test_a_method_is_fingerprinted_below_a_replaced_class(stock: MakeStock, make_patch: MakePatch) -> None:
    package, engine = stock({"sums": SUMS.replace("class Child(Model):\n    pass\n", "")}), Engine()
    replaced = make_patch(package.path("sums:Model"), lambda original: type("Model", (original,), {}), id="whole-class")
    target = Target(package.path("sums:answer"), reads=(package.path("sums:Model.forward"),))
    reader = make_patch(target.path, doubled, target=target, id="reader")
    assert engine.apply(replaced, "1.0").outcome is Outcome.APPLIED
    assert engine.apply(reader, "1.0").outcome is Outcome.APPLIED


def test_foreign_code_on_top_is_not_thrown_away(stock: MakeStock, make_patch: MakePatch) -> None:
    package, engine = stock({"sums": SUMS}), Engine()
    sums = package.module("sums")
    patch = make_patch(package.path("sums:answer"), doubled)
    engine.apply(patch, "1.0")
    sums.answer = foreign = doubled(sums.answer)
    with pytest.raises(UndoError, match="on top of it"):
        engine.undo(patch.id)
    assert sums.answer is foreign
    assert patch.id in engine


MakeExtension = Callable[[ModuleType], Extension]


def registered(package: Any, make_patch: MakePatch, extension: Extension, **values: Any) -> Patch:
    registry = package.module("registry")
    return make_patch(
        package.path("registry:Fast"),
        lambda original: type("Faster", (original,), {"speed": lambda self: 1 + original.speed(self)}),
        **{"kind": "register", "extension": extension, "reached": registry.pick} | values,
    )


def test_a_registered_replacement_goes_through_the_extension_point(
    stock: MakeStock, make_patch: MakePatch, registry_extension: MakeExtension
) -> None:
    package, engine = stock({"registry": REGISTRY}), Engine()
    registry = package.module("registry")
    patch = registered(package, make_patch, registry_extension(registry))
    assert engine.apply(patch, "1.0").outcome is Outcome.APPLIED
    assert registry.pick()().speed() == 2
    assert registry.Fast().speed() == 1, "the stock class stays where it is"
    engine.undo(patch.id)
    assert registry.pick() is registry.Fast


def test_two_registered_fixes_lie_on_each_other(
    stock: MakeStock, make_patch: MakePatch, registry_extension: MakeExtension
) -> None:
    package, engine = stock({"registry": REGISTRY}), Engine()
    registry = package.module("registry")
    for name in ("below", "above"):
        patch = registered(package, make_patch, registry_extension(registry), id=name)
        assert engine.apply(patch, "1.0").outcome is Outcome.APPLIED
    assert registry.pick()().speed() == 3
    with pytest.raises(UndoError):
        engine.undo("below")
    engine.undo_all()
    assert registry.pick() is registry.Fast


def test_an_extension_point_that_somebody_else_uses_is_left_alone(
    stock: MakeStock, make_patch: MakePatch, registry_extension: MakeExtension
) -> None:
    package = stock({"registry": REGISTRY})
    registry = package.module("registry")
    registry.BACKENDS["fast"] = foreign = type("Foreign", (), {})
    attempt = Engine().apply(registered(package, make_patch, registry_extension(registry)), "1.0")
    assert attempt.outcome is Outcome.FAILED
    assert "Foreign, which is neither" in attempt.reason
    assert registry.pick() is foreign


def test_a_registration_without_effect_fails(stock: MakeStock, make_patch: MakePatch) -> None:
    package = stock({"registry": REGISTRY})
    registry = package.module("registry")
    idle = Extension(install=lambda value: None, current=registry.pick, restore=lambda value: None)
    attempt = Engine().apply(registered(package, make_patch, idle), "1.0")
    assert attempt.outcome is Outcome.FAILED
    assert "the extension point still gives" in attempt.reason


def test_a_fingerprint_looks_below_decorators_and_ignores_indentation(stock: MakeStock) -> None:
    decorated = "import functools\n\n\n@functools.lru_cache\ndef answer(value):\n    return value\n"
    nested = "class Holder:\n    @staticmethod\n    def answer(value):\n        return value\n"
    package = stock({"decorated": decorated, "nested": nested})
    engine = Engine()
    assert engine.stock(package.path("decorated:answer")).cache_info().hits == 0
    assert len(fingerprint([engine.stock(package.path("decorated:answer"))])) == 16
    flat = stock({"flat": "@staticmethod\ndef answer(value):\n    return value\n"})
    paths = (package.path("nested:Holder.answer"), flat.path("flat:answer"))
    assert len({fingerprint([engine.stock(path)]) for path in paths}) == 1
