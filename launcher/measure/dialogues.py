"""Dialogues whose only right reply is known: tool calls with given arguments, and plain replies beside offered tools.

Every request says which tool to call with which values, so that a wrong reply is the server's, not the model's. Names
and values are drawn anew from a seed. Standard library only, so that training data can be drawn from it too.
"""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from launcher.measure.words import Split, Words

Kind = Literal["single", "parallel", "nested", "code", "unicode", "null", "no-call", "chain"]
KINDS: tuple[Kind, ...] = get_args(Kind)

SYSTEMS = (
    "",
    "You are a helpful assistant.",
    "Use the tools that you are given. Answer briefly.",
    "You call tools exactly as you are told.",
)
LEAD_INS = ("", "", "Please do this: ", "Now: ", "Do this for me. ")
VERBS = ("get", "set", "find", "send", "open", "move", "make", "list", "run", "read")
ORDINALS = ("First", "Then", "At last")


@dataclass(frozen=True)
class Call:
    """A tool call that must be made."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One request and its right reply."""

    kind: str
    messages: tuple[dict[str, Any], ...]
    """OpenAI chat messages."""
    tools: tuple[dict[str, Any], ...] = ()
    calls: tuple[Call, ...] = ()
    """In this order; without any, `content` is the reply."""
    content: str = ""
    """The whole text beside the calls; surrounding white space does not count."""
    max_tokens: int = 768
    """Room for the right reply, which has up to 670 tokens where every byte is one."""


@dataclass(frozen=True)
class Tool:
    """A tool on offer: its name, and the JSON Schema of each parameter."""

    name: str
    parameters: dict[str, dict[str, Any]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return it as an entry of the request's `tools`."""
        verb, _, thing = self.name.partition("_")
        schema = {"type": "object", "properties": self.parameters, "required": list(self.parameters)}
        function = {"name": self.name, "description": f"{verb.title()} the {thing}.", "parameters": schema}
        return {"type": "function", "function": function}


Maker = Callable[[Words], tuple[dict[str, Any], Any]]
"""Draws the JSON Schema of a parameter, and a value of it."""


def tasks(kind: Kind, rng: random.Random, split: Split = "verify") -> tuple[Task, ...]:
    """Return a dialogue of this kind: one task, or those of a chain, each with the right replies to those before."""
    return _DIALOGUES[kind](Words(rng, split))


def draw(rng: random.Random, split: Split = "verify", kinds: Sequence[Kind] = KINDS) -> Iterator[Task]:
    """Yield tasks for ever, the kinds in turn."""
    while True:
        for kind in kinds:
            yield from tasks(kind, rng, split)


# One dialogue of each kind.


def _single(words: Words) -> tuple[Task, ...]:
    return (_one_call(words, "single", _plain),)


def _nested(words: Words) -> tuple[Task, ...]:
    return (_one_call(words, "nested", _structure),)


def _unicode(words: Words) -> tuple[Task, ...]:
    return (_one_call(words, "unicode", lambda words: ({"type": "string"}, words.unicode_text())),)


def _null(words: Words) -> tuple[Task, ...]:
    return (_one_call(words, "null", _nothing),)


def _one_call(words: Words, kind: str, special: Maker) -> Task:
    tool, call = _tool_and_call(words, special)
    text = f"{words.rng.choice(LEAD_INS)}Call {_phrase(words, call)}."
    return Task(kind, _messages(words, text), _offered(words, [tool]), (call,))


def _parallel(words: Words) -> tuple[Task, ...]:
    count = words.rng.randint(2, 3)
    tools: list[Tool] = []
    calls: list[Call] = []
    for _ in range(count):
        tool = words.rng.choice(tools) if tools and words.rng.random() < 0.4 else _tool(words, _plain)
        if tool not in tools:
            tools.append(tool)
        calls.append(_call(words, tool))
    asked = [f"{ORDINALS[0]}, call {_phrase(words, calls[0])}."]
    asked += [f"{ORDINALS[1]} call {_phrase(words, call)}." for call in calls[1:-1]]
    asked += [f"{ORDINALS[2] if count > 2 else ORDINALS[1]} call {_phrase(words, calls[-1])}."]
    text = f"{words.rng.choice(LEAD_INS)}Make {count} calls in one reply. {' '.join(asked)}"
    return (Task("parallel", _messages(words, text), _offered(words, tools), tuple(calls)),)


def _code(words: Words) -> tuple[Task, ...]:
    tool = Tool(f"{words.rng.choice(VERBS)}_{words.word()}", {"path": {"type": "string"}, "code": {"type": "string"}})
    language, code = _snippet(words)
    call = Call(tool.name, {"path": f"src/{words.word()}.{language}", "code": code})
    text = (
        f"{words.rng.choice(LEAD_INS)}Call {call.name} with path = {_written(call.arguments['path'])} "
        f"and code = the text between the fences, exactly.\n```\n{code}\n```"
    )
    return (Task("code", _messages(words, text), _offered(words, [tool]), (call,)),)


def _no_call(words: Words) -> tuple[Task, ...]:
    word = words.word()
    text = f"{words.rng.choice(LEAD_INS)}Reply with the word {word} and nothing else."
    return (Task("no-call", _messages(words, text), _offered(words, [_tool(words, _plain)]), content=word),)


def _chain(words: Words) -> tuple[Task, ...]:
    """An agent's turns: a call, a call with the id that the first returned, and the closing word."""
    tool, first = _tool_and_call(words, _plain)
    key = words.word(1, 2)
    second_tool = Tool(f"{words.rng.choice(VERBS)}_{words.word()}", {key: {"type": "string"}})
    returned = words.identifier()
    second = Call(second_tool.name, {key: returned})
    text = (
        f"{words.rng.choice(LEAD_INS)}Call {_phrase(words, first)}. Then call {second.name} with {key} = the id that "
        f'{first.name} returns. When all is done, reply "Done."'
    )
    messages = _messages(words, text)
    tools = _offered(words, [tool, second_tool])
    after_first = messages + turn(first, {"id": returned}, "call_1")
    after_second = after_first + turn(second, {"ok": True}, "call_2")
    return (
        Task("chain", messages, tools, (first,)),
        Task("chain", after_first, tools, (second,)),
        Task("chain", after_second, tools, content="Done."),
    )


_DIALOGUES: dict[Kind, Callable[[Words], tuple[Task, ...]]] = {
    "single": _single,
    "parallel": _parallel,
    "nested": _nested,
    "code": _code,
    "unicode": _unicode,
    "null": _null,
    "no-call": _no_call,
    "chain": _chain,
}


# Their parts.


def _messages(words: Words, text: str) -> tuple[dict[str, Any], ...]:
    system = words.rng.choice(SYSTEMS)
    first = ({"role": "system", "content": system},) if system else ()
    return (*first, {"role": "user", "content": text})


def turn(call: Call, returned: dict[str, Any], call_id: str) -> tuple[dict[str, Any], ...]:
    """Return the messages of a call that was made, and of what its tool returned."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    made = {"id": call_id, "type": "function", "function": function}
    return (
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call_id, "content": json.dumps(returned, ensure_ascii=False)},
    )


def _offered(words: Words, wanted: Sequence[Tool]) -> tuple[dict[str, Any], ...]:
    """The wanted tools among up to two others, in any order."""
    names = {tool.name for tool in wanted}
    others = [tool for tool in (_tool(words, _plain) for _ in range(words.rng.randint(0, 2))) if tool.name not in names]
    tools = [*wanted, *{tool.name: tool for tool in others}.values()]
    words.rng.shuffle(tools)
    return tuple(tool.document() for tool in tools)


def _tool_and_call(words: Words, special: Maker) -> tuple[Tool, Call]:
    """A tool of one to four parameters, one of them special, and a call of it."""
    keys = words.distinct(words.rng.randint(1, 4), 1, 3)
    drawn = [special(words), *(_plain(words) for _ in keys[1:])]
    words.rng.shuffle(drawn)
    tool = Tool(_tool_name(words), {key: schema for key, (schema, _) in zip(keys, drawn, strict=True)})
    return tool, Call(tool.name, {key: value for key, (_, value) in zip(keys, drawn, strict=True)})


def _tool(words: Words, special: Maker) -> Tool:
    return _tool_and_call(words, special)[0]


def _tool_name(words: Words) -> str:
    return f"{words.rng.choice(VERBS)}_{words.word()}"


def _call(words: Words, tool: Tool) -> Call:
    return Call(tool.name, {key: _scalar(words, schema["type"]) for key, schema in tool.parameters.items()})


def _phrase(words: Words, call: Call) -> str:
    """`NAME with ...`, the values as JSON."""
    if words.rng.random() < 0.5:
        return f"{call.name} with {_written(call.arguments)}"
    pairs = [f"{key} = {_written(value)}" for key, value in call.arguments.items()]
    listed = pairs[0] if len(pairs) == 1 else f"{', '.join(pairs[:-1])} and {pairs[-1]}"
    return f"{call.name} with {listed}"


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Values.


def _plain(words: Words) -> tuple[dict[str, Any], Any]:
    kind = words.rng.choice(("string", "string", "string", "integer", "integer", "number", "boolean"))
    return {"type": kind}, _scalar(words, kind)


def _scalar(words: Words, kind: str) -> Any:
    match kind:
        case "string":
            return words.text()
        case "integer":
            return words.rng.randint(-999, 99999)
        case "number":
            # With a fraction that is not nothing: 3.0 and 3 are one number in JSON.
            return float(f"{words.rng.randint(-99, 999)}.{words.rng.randint(1, 9)}{words.rng.choice('1357')}")
        case _:
            return words.rng.random() < 0.5


def _structure(words: Words) -> tuple[dict[str, Any], Any]:
    """An array of scalars or of objects, or an object with one inside."""
    shape = words.rng.randint(0, 3)
    if shape == 0:
        kind = words.rng.choice(("string", "integer"))
        items = [_scalar(words, kind) for _ in range(words.rng.randint(1, 4))]
        return {"type": "array", "items": {"type": kind}}, items
    schema, value = _object(words, words.rng.randint(1, 2))
    if shape == 1:
        other = {key: _scalar(words, one["type"]) for key, one in schema["properties"].items()}
        return {"type": "array", "items": schema}, [value, other]
    if shape == 2:
        return schema, value
    key = words.word(1, 2)
    return (
        {"type": "object", "properties": {key: schema}, "required": [key]},
        {key: value},
    )


def _object(words: Words, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    drawn = {key: _plain(words) for key in words.distinct(size, 1, 2)}
    properties = {key: schema for key, (schema, _) in drawn.items()}
    schema = {"type": "object", "properties": properties, "required": list(drawn)}
    return schema, {key: value for key, (_, value) in drawn.items()}


def _nothing(words: Words) -> tuple[dict[str, Any], Any]:
    """Null where null is allowed, or a string that only looks like it where it is not."""
    if words.rng.random() < 0.7:
        return {"type": ["string", "null"]}, None
    return {"type": "string"}, words.rng.choice(("None", "null"))


def _snippet(words: Words) -> tuple[str, str]:
    """A file's ending, and lines of code whose white space, quotes and tags must survive."""
    ending, template = words.rng.choice(_SNIPPETS)
    a, b, c = words.distinct(3)
    for mark, value in (("@A", a.title()), ("@a", a), ("@b", b), ("@c", c), ("@n", str(words.rng.randint(2, 99)))):
        template = template.replace(mark, value)
    return ending, template


_SNIPPETS = (
    ("py", 'def @a(@b):\n    if @b < @n and @b != 0:\n        return "@c\\n"\n    return @b * 2'),
    ("py", 'class @A:\n    """@A of @c."""\n\n    def @b(self):\n        yield {\'@c\': [@n]}'),
    ("js", "const @a = (@b) => {\n  if (@b < @n && @b > 0) {\n    return `${@b}: '@c'`;\n  }\n};"),
    ("html", '<div class="@a">\n  <b>@b</b> &amp; <i>@c</i>\n  <br/>\n</div>'),
    ("xml", '<@a>\n  <@b n="@n">@c</@b>\n</@a>'),
    ("sh", "for @a in *.@b; do\n\techo \"$@a\" | sed 's/@c/@n/' >> @b.log\ndone"),
    ("json", '{\n  "@a": {"@b": [@n, null, true]},\n  "@c": "a \\"quoted\\" word"\n}'),
)
"""Endings and templates: `@a`, `@b` and `@c` are words, `@n` is a number."""
