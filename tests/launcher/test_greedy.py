"""Where rounding decides between two tokens is told by the steps in which the log-probabilities come."""

import random

import pytest

from launcher.measure.greedy import EPSILON, Generated, compare, near_tie


def margins(step: float, count: int) -> list[float]:
    rng = random.Random(count)
    return [step * rng.randrange(1, int(4 / step)) + rng.uniform(-1e-5, 1e-5) for _ in range(count)]


@pytest.mark.parametrize(("step", "nats"), [(0.125, 0.2625), (0.0625, 0.13125), (1 / 64, EPSILON), (1e-4, EPSILON)])
def test_two_steps_of_the_logits_are_a_near_tie(step: float, nats: float) -> None:
    assert near_tie(margins(step, 200)) == pytest.approx(nats)


def test_few_or_vanishing_margins_tell_no_step() -> None:
    assert near_tie([]) == near_tie([0.5] * 3) == near_tie([0.0] * 100) == near_tie([4.0, 8.0] * 100) == EPSILON


def test_a_difference_of_one_step_is_a_near_tie_of_a_large_model_and_wrong_of_a_small_one() -> None:
    reference, candidate = Generated((1, 2, 3), (2.0, 0.125, 1.0)), Generated((1, 5, 6))
    assert compare(reference, candidate, near_tie(margins(0.125, 200))).verdict == "near-tie"
    assert compare(reference, candidate, near_tie(margins(1 / 64, 200))).verdict == "wrong"
