"""Owns the tool-calling prompts: system messages with JSON tool schemas, an optional example turn, and a request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

from engine.distill.prompts.grammar import fill
from engine.distill.prompts.tool_data import REQUESTS, SLOTS, TOOLS

_FORMS = (
    'Answer with exactly one JSON object of the form {"name": TOOL, "arguments": {...}} and nothing else.',
    'Reply with one JSON object {"name": ..., "arguments": {...}} only.',
    'Respond with a single JSON object that has the keys "name" and "arguments". Do not add any text.',
    'Choose one tool and answer with {"name": TOOL, "arguments": {...}}.',
)
_OPENINGS = (
    "You call tools. You have these tools:",
    "You call tools. These tools exist:",
    "You are an assistant that calls tools. Available tools:",
    "You have access to the following functions:",
)
_REMINDERS = (
    " Reply with the JSON object only.",
    " Answer with JSON only.",
    " Reply with the JSON object only.",
    "",
)


@dataclass(frozen=True, slots=True)
class _Call:
    """A request in words and the call that answers it."""

    request: str
    name: str
    arguments: dict[str, object]


def tool_messages(random: Random) -> list[dict[str, str]]:
    """One conversation that ends with a request for a tool call."""
    wanted = random.choice(list(REQUESTS))
    others = random.sample([name for name in TOOLS if name != wanted], k=random.choice((0, 1, 1, 1, 2)))
    names = [*others, wanted]
    random.shuffle(names)
    indent = random.choice((None, None, None, None, 2))
    schemas = json.dumps([_schema(name) for name in names], indent=indent)
    messages = [
        {"role": "system", "content": f"{random.choice(_OPENINGS)}\n{schemas}\n{random.choice(_FORMS)}"},
    ]
    reminder = random.choice(_REMINDERS)
    shown = [name for name in others if name in REQUESTS]
    if shown and random.random() < 0.6:
        example = _call(random.choice(shown), random)
        answer = json.dumps({"name": example.name, "arguments": example.arguments})
        messages.append({"role": "user", "content": example.request + reminder})
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": _call(wanted, random).request + reminder})
    return messages


def _call(name: str, random: Random) -> _Call:
    """Fills one request for tool ``name``; the same values fill the example arguments."""
    request, arguments = random.choice(REQUESTS[name])
    filled = fill(f"{request}\x00{json.dumps(arguments)}", SLOTS, random)
    words, call = filled.split("\x00")
    return _Call(words, name, {key: _typed(name, key, value) for key, value in json.loads(call).items()})


def _typed(name: str, key: str, value: object) -> object:
    """Turns a filled-in number back into a number where the schema wants one."""
    kind = TOOLS[name][1][key].split(":")[0]
    if isinstance(value, str) and kind in ("integer", "number"):
        return float(value) if "." in value else int(value)
    return value


def _schema(name: str) -> dict[str, object]:
    """The JSON schema of a tool; its parameters are written as ``type:description`` or ``type:description:a|b``."""
    description, parameters, required = TOOLS[name]
    properties: dict[str, object] = {}
    for key, compact in parameters.items():
        kind, _, rest = compact.partition(":")
        text, _, choices = rest.partition(":")
        entry: dict[str, object] = {"type": kind}
        if kind == "array":
            entry["items"] = {"type": "string"}
        if text:
            entry["description"] = text
        if choices:
            entry["enum"] = choices.split("|")
        properties[key] = entry
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"name": name, "description": description, "parameters": schema}
