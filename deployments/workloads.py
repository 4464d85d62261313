"""Owns the workload file: the classes of requests, and what acceptance to expect of each before one was seen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from deployments.yaml_file import ConfigError, Section, explain, read_yaml

PACKAGED = Path(__file__).parent / "workloads.yaml"

Probability = Annotated[float, Field(ge=0.0, le=1.0)]


class Workload(Section):
    """One class of requests."""

    draft_acceptance: Annotated[tuple[Probability, ...], Field(min_length=1)]
    """Chance that the target accepts the draft model's first, second, … token of a round if it has accepted those
    before; the last number holds for all further ones. What is observed takes its place."""


Workloads = dict[Annotated[str, Field(min_length=1)], Workload]

_checked: TypeAdapter[Workloads] = TypeAdapter(Workloads)


def read_workloads(path: str | Path) -> Workloads:
    """The classes in a file, by name.

    Raises:
        ConfigError: no such file, not YAML, or a value that is not allowed; names file, class and field.
    """
    content = read_yaml(Path(path), str(path))
    try:
        return _checked.validate_python({} if content is None else content)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, lambda _: Workload.model_fields)}") from error
