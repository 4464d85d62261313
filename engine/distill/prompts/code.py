"""Owns the programming prompts: write, change, fix, convert, query, explain."""

from __future__ import annotations

import json
from random import Random

from engine.distill.prompts.code_data import CHANGES, SCHEMAS, SLOTS, SNIPPETS, WRITE
from engine.distill.prompts.grammar import fill


def code_prompt(random: Random) -> str:
    """One request for code or about code."""
    make = random.choices((_write, _change, _query, _convert), weights=(42, 34, 14, 10))[0]
    return make(random)


def _write(random: Random) -> str:
    return fill(random.choice(WRITE), SLOTS, random)


def _change(random: Random) -> str:
    language, snippet = random.choice(SNIPPETS)
    instruction = random.choice(CHANGES)
    code = f"```{language}\n{snippet}\n```"
    if random.random() < 0.15:
        filled = fill(f"{code}\x00{instruction}", SLOTS, random)
        return "\n\n".join(filled.split("\x00"))
    return fill(f"{instruction}\n\n{code}", SLOTS, random)


def _query(random: Random) -> str:
    tables, questions = random.choice(SCHEMAS)
    dialect = random.choice(("SQL", "PostgreSQL", "SQLite", "MySQL", "SQL"))
    request = random.choice(
        (
            "Tables: {tables}. Write a {dialect} query that {question}.",
            "Given the tables {tables}, write a {dialect} query that {question}.",
            "I have these tables: {tables}. I need a {dialect} query that {question}. Explain it shortly.",
            "Write a {dialect} query that {question}. The tables are {tables}. Output only the query.",
        )
    )
    question = fill(random.choice(questions), SLOTS, random)
    return request.format(tables=tables, dialect=dialect, question=question)


def _convert(random: Random) -> str:
    names = random.sample(SLOTS["setting"], k=random.randint(3, 8))
    values = {name: random.choice((random.randint(1, 4000), random.choice(SLOTS["word"]), True, 0.5)) for name in names}
    forms = {
        "environment variables": "\n".join(f"{name.upper()}={value}" for name, value in values.items()),
        "JSON": json.dumps(values, indent=2),
        "INI lines": "\n".join(f"{name} = {value}" for name, value in values.items()),
        "YAML": "\n".join(f"{name}: {json.dumps(value)}" for name, value in values.items()),
        "CSV": "name,value\n" + "\n".join(f"{name},{value}" for name, value in values.items()),
        "a Python dict": "settings = " + json.dumps(values, indent=4).replace("true", "True"),
        "a Markdown table": "| name | value |\n|---|---|\n"
        + "\n".join(f"| {name} | {value} |" for name, value in values.items()),
    }
    source, target = random.sample(list(forms), k=2)
    request = random.choice(
        (
            f"Convert this from {source} to {target}. Output only the result.",
            f"Turn these settings into {target}.",
            f"Rewrite the following {source} as {target} and keep the order.",
            f"Here are some settings as {source}. Write them as {target}, sorted by name.",
        )
    )
    return f"{request}\n\n{forms[source]}"
