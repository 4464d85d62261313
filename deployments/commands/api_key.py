"""Owns `outrider api-key`: a new key for the public API, and the entry to add for it."""

from __future__ import annotations

from typing import Annotated

import typer
import yaml
from pydantic import ValidationError

from deployments.access_config import KeyEntry, TenantLimits
from deployments.console import err, out
from router.api_keys import key_hash, key_id, make_key


def api_key(
    name: Annotated[str, typer.Argument(help="The tenant; several keys may share one, and then its limits.")],
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Calls a minute; default: no limit.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Prompt and output tokens a minute; default: no limit.")
    ] = None,
    concurrent_streams: Annotated[int, typer.Option(min=1, help="Generate calls open at a time.")] = 64,
) -> None:
    """Make an API key. Its entry goes to standard output; the key is shown on standard error, this once."""
    limits = TenantLimits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent_streams=concurrent_streams,
    )
    key = make_key()
    try:
        entry = KeyEntry(name=name, id=key_id(key), sha256=key_hash(key), limits=limits)
    except ValidationError as error:
        raise typer.BadParameter("give 1 to 128 characters", param_hint="NAME") from error
    content = [{**entry.model_dump(exclude={"limits"}), "limits": limits.model_dump(exclude_none=True)}]
    err.print(key, markup=False, soft_wrap=True)
    err.print(
        "[dim]This is the key; it is kept nowhere. The lines below go into the file that access.api_keys names.[/]"
    )
    out.print(yaml.safe_dump(content, sort_keys=False), end="", markup=False, soft_wrap=True)
