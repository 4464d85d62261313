"""Owns what a simulation has to assume because no data sheet says it: each number by name, with a default and a why."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import InvalidArgument

FIELD = "--assume"

Share = Annotated[float, Field(gt=0.0, le=1.0)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(ge=0.0)]


class Assumptions(BaseModel):
    """All of them may be replaced; what was assumed is printed with every result."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    bandwidth_share: Share = 0.8
    """Of the memory bandwidth in the data sheet, what reading weights and KV reaches."""
    compute_share: Share = 0.6
    """Of the dense FLOPs in the data sheet, what matrix products reach."""
    layer_s: Seconds = 15e-6
    """Of each layer, what is neither: launches, norms, gaps between kernels. This is with CUDA graphs; ten launches
    without them take 50e-6 and more."""
    forward_s: Seconds = 100e-6
    """The same of each forward: preparing inputs, logits, sampling."""
    allreduce_s: Seconds = 12e-6
    """Of each all-reduce, two a layer, besides the bytes."""
    memory_share: Share = 0.9
    """Of a GPU's memory, what weights and KV may take; the rest is for activations and the CUDA context."""
    wait_s: Seconds = 2e-3
    """Of a round that waits for its draft, what is neither drafting nor verifying: router, gRPC, queues."""
    gap_s: Seconds = 0.2e-3
    """Between two forwards of the target where the second need not wait."""
    reserve_s: Seconds = 2.5e-3
    """Of a verification, what a draft that runs ahead cannot use: its news and its answer are on the way."""
    link_s: Seconds = 0.0
    """Round trips between router and devices, both links together, besides what `wait_s` and `reserve_s` have."""
    recall: Probability = 0.75
    """Chance that the target's choice is among the draft's first `num_ranked` tokens where it is not the first."""
    num_ranked: Annotated[int, Field(ge=1, le=7)] = 4
    """Tokens at each position that a draft running ahead goes on from."""
    in_time: Probability = 0.9
    """Of the outcomes it drafted for, those whose tokens are at the target in time. On emulated devices 0.96 with one
    session, 0.86 with 8, 0.77 with 64 on two cores."""

    def replaced(self, given: Sequence[str]) -> Self:
        """The same with others, each as NAME=VALUE. Raises InvalidArgument."""
        content = self.model_dump()
        for text in given:
            name, sign, value = (part.strip() for part in text.partition("="))
            if name not in content or not sign:
                near = difflib.get_close_matches(name, content, n=1, cutoff=0.5)
                guess = f" (did you mean {near[0]}?)" if near else ""
                raise InvalidArgument(FIELD, text, f"NAME=VALUE with a NAME of {', '.join(content)}{guess}")
            content[name] = value
        try:
            return type(self).model_validate(content)
        except ValidationError as error:
            (first, *_) = error.errors(include_url=False)
            name, found = str(first["loc"][0]), first["input"]
            raise InvalidArgument(FIELD, f"{name}={found}", _lower(first["msg"])) from error


def _lower(text: str) -> str:
    """pydantic's sentence as the end of one of ours."""
    return text.removeprefix("Input should be ").replace("Input", "input", 1)
