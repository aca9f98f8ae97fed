"""The live view: finished phases stay, the running one moves where there is a screen."""

import io

import pytest
from rich.console import Console

from launcher.cli.live import Live


def console(*, is_terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=is_terminal, width=120, color_system=None)


def shown(one: Console) -> str:
    assert isinstance(one.file, io.StringIO)
    return one.file.getvalue()


def test_each_finished_phase_leaves_one_line_with_its_time() -> None:
    one = console(is_terminal=False)
    with Live(one) as live:
        live.phase("load")
        live.progress(1, 2, "")
        live.phase("canary")
    lines = [line for line in shown(one).splitlines() if line.startswith("  ok ")]
    assert [line.rsplit(" ", 2)[0] for line in lines] == ["  ok load weights", "  ok ask a question"]


def test_a_phase_that_fails_says_so() -> None:
    one = console(is_terminal=False)

    def build() -> None:
        with Live(one) as live:
            live.phase("build")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        build()
    assert "failed build the image" in shown(one)


def test_notes_stay_and_are_not_read_as_markup() -> None:
    one = console(is_terminal=False)
    with Live(one) as live:
        live.note("[red] is not a colour here")
    assert "[red] is not a colour here" in shown(one)


def test_a_line_of_the_log_is_shown_beside_a_phase_that_counts_nothing() -> None:
    one = console(is_terminal=True)
    with Live(one) as live:
        live.phase("start")
        live.line("Resolved architecture: [LlamaForCausalLM]")
        live._progress.refresh()
    assert "Resolved architecture: [LlamaForCausalLM]" in shown(one)
