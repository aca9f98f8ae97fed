"""A gateway in front of a fake engine, for all tests that need one."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway import stack
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.stack import Stack


@pytest.fixture(scope="session", autouse=True)
def haproxy() -> None:
    lacking = stack.lacking()
    if lacking is not None:
        pytest.skip(lacking)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine() as engine:
        yield engine


@pytest.fixture
def gateway(engine: FakeEngine, tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path, engine.port) as gateway:
        yield gateway
