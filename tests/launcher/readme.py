"""README's generated tables: `python -m tests.launcher.readme` writes them again."""

import re
from pathlib import Path

from vllm_graft.fixes import FIXES

from launcher.images.pins import load_pins
from launcher.planner import Inputs, make
from launcher.prepare import Options, shipped_and_own
from launcher.profile import load_model
from launcher.survey import pinned_versions
from launcher.views import fixes_markdown, profiles_markdown

README = Path(__file__).parents[2] / "README.md"


def tables() -> dict[str, str]:
    """Return the tables by the names of their marks; planned from what is shipped, whatever lies on this machine."""
    pins = load_pins(lock=Path("no-digests-recorded.json"))
    plans = [make(Inputs(one, load_model(one.model), pins.of(one.vllm))) for one in shipped_and_own(Options())]
    return {"profiles": profiles_markdown(plans), "fixes": fixes_markdown(FIXES, pinned_versions())}


def with_tables(text: str) -> str:
    """Return README's text with its tables as they should be."""
    for name, table in tables().items():
        marked = re.compile(rf"(<!-- {name}: [^\n]*-->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
        found = marked.search(text)
        assert found is not None, f"README.md: the marks of {name} are not there"
        text = f"{text[: found.start()]}{found[1]}{table}\n{text[found.end() :]}"
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text(encoding="utf-8")), encoding="utf-8")
