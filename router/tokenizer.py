"""Owns text ↔ token ids for one model folder: vocabulary, special tokens and chat template, without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import InvalidArgument, ModelNotFound

_TEMPLATE_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A Hugging Face folder's tokenizer.

    Args:
        folder: holds tokenizer.json, and as far as they exist tokenizer_config.json, config.json,
            generation_config.json and chat_template.jinja.

    Raises:
        ModelNotFound: naming the file that is missing or cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._backend = _load_backend(self.folder / "tokenizer.json")
        settings = _read_json(self.folder / "tokenizer_config.json")
        self._template_tokens = _template_tokens(settings)
        self._template = _load_template(self.folder, settings)
        added = self._backend.get_added_tokens_decoder()
        self._vocab = self._backend.get_vocab(with_added_tokens=True)
        self._tokens = {token_id: token for token, token_id in self._vocab.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.eos_token_ids = self._eos_token_ids()
        self.vocab_size = max(self._vocab.values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt: with the model's own leading tokens, unless the text already begins with them."""
        bos = self._template_tokens.get("bos_token")
        return self.encode(text, add_special_tokens=not (bos and text.startswith(bos)))

    def count(self, text: str) -> int:
        """Number of tokens of `text`, special tokens not added."""
        return len(self.encode(text))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; ids without a token (a padded vocabulary) decode to nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of an id; None for an id that has no token."""
        return self._tokens.get(token_id)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text of a conversation, up to where the assistant answers.

        Raises:
            InvalidArgument: the model has no chat template, or its template refuses the messages.
        """
        if self._template is None:
            raise InvalidArgument("chat", "messages", "a raw prompt: this model has no chat template")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._template_tokens,
            )
        except jinja2.TemplateError as error:
            raise InvalidArgument("chat.messages", str(error), "messages the model's template accepts") from error

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a conversation; the template writes the special tokens itself."""
        return self.encode(self.render_chat(messages))

    def fingerprint(self) -> str:
        """SHA-256 over every (id, token) and the special ids: equal for models that may be paired."""
        digest = hashlib.sha256()
        for token, token_id in sorted(self._vocab.items(), key=lambda item: item[1]):
            digest.update(f"{token_id}\0{token}\0".encode())
        digest.update(repr(sorted(self.special_ids)).encode())
        return digest.hexdigest()

    def _eos_token_ids(self) -> tuple[int, ...]:
        for name in ("generation_config.json", "config.json"):
            found = _read_json(self.folder / name).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
        eos = self._vocab.get(self._template_tokens.get("eos_token", ""))
        return () if eos is None else (eos,)


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelNotFound(f"{path} does not exist; a model folder needs its tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception for every malformed file
        raise ModelNotFound(f"{path} is not a tokenizer: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelNotFound(f"{path} holds no JSON object")
    return content


def _template_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Names a template may use, e.g. bos_token, with their text; older folders store {"content": text}."""
    tokens = {name: settings.get(name) for name in _TEMPLATE_TOKENS}
    plain = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: str(token) for name, token in plain.items() if token is not None}


def _load_template(folder: Path, settings: Mapping[str, Any]) -> jinja2.Template | None:
    path = folder / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else settings.get("chat_template")
    if isinstance(source, list):  # several named templates
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    if source is None:
        return None
    try:
        return _template_environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ModelNotFound(f"the chat template in {folder} is malformed: {error}") from error


class _Generation(jinja2.ext.Extension):
    """Accepts `{% generation %}` blocks, which only training reads."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _template_environment() -> ImmutableSandboxedEnvironment:
    """Templates come with the model and are not trusted; whitespace rules are those they are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(value: object, *, ensure_ascii: bool = False, indent: int | None = None, **rest: Any) -> str:
    """JSON as the model was trained on: jinja's own filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **rest)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
