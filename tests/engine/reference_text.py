"""Compare transformers' tokenizer and chat template with those of the training; run by a Python that has transformers.

Standard output: a JSON object that counts what was compared. The exit status is not 0 when anything differs.
"""

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "reference_model"))

from reference_config import ADDED_TOKENS, WEIGHTS, encode  # noqa: E402 - after the folder is on the path
from reference_rows import judged, prompt_and_reply  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(WEIGHTS))
    rng = random.Random(1)
    texts = ["", " a", "\x00\x7f\x80\t\r\n  ", "".join(map(chr, range(0x250))), "".join(ADDED_TOKENS)]
    texts += [
        "".join(chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))) for _ in range(40))
    ] * 50
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids != encode(text) or tokenizer.decode(ids) != text:
            raise SystemExit(f"{text!r}: {ids}, {tokenizer.decode(ids)!r}")
    prompts = 0
    for task in judged("held-out", "text", 10, (300,)):
        prompt = tokenizer.apply_chat_template(
            _with_objects(task.messages),
            tools=list(task.tools) or None,
            add_generation_prompt=True,
            enable_thinking=False,
            return_dict=False,
        )
        if prompt != prompt_and_reply(task)[0]:
            raise SystemExit(f"{task.kind}: the template gives {tokenizer.decode(prompt)!r}")
        prompts += 1
    print(json.dumps({"texts": len(texts), "prompts": prompts}))


def _with_objects(messages: tuple[dict, ...]) -> list[dict]:  # type: ignore[type-arg]
    """The messages with their calls' arguments as objects, as vLLM hands them to the template."""
    found = json.loads(json.dumps(messages))
    for message in found:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return found  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
