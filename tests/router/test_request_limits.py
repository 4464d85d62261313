"""Most that one request may hold: each limit is named, and met exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.errors import InvalidArgument
from router.requests import (
    Chat,
    ChatMessage,
    GenerateRequest,
    RawPrompt,
    RequestLimits,
    TokenIds,
    check_input,
    check_request,
    fit_to_window,
    output_tokens,
)
from router.service import RouterConfig
from router.tokenizer import Tokenizer
from tests.router.test_service import Served, generate

LIMITS = RequestLimits(
    max_prompt_tokens=20,
    max_output_tokens=30,
    max_stop_strings=2,
    max_stop_chars=5,
    max_stop_token_ids=3,
    max_messages=4,
    max_name_chars=6,
)
HELLO = GenerateRequest(RawPrompt("hello fox"))


def chat(number: int, role: str = "user") -> Chat:
    return Chat((ChatMessage(role, "x"),) * number)


@pytest.mark.parametrize(
    ("within", "beyond", "field"),
    [
        ({"request_id": "x" * 6}, {"request_id": "x" * 7}, "request_id"),
        ({"max_tokens": 30}, {"max_tokens": 31}, "sampling_params.max_tokens"),
        ({"stop": ("a", "b")}, {"stop": ("a", "b", "c")}, "sampling_params.stop"),
        ({"stop": ("a" * 5,)}, {"stop": ("a" * 6,)}, "sampling_params.stop"),
        ({"stop_token_ids": (1, 2, 3)}, {"stop_token_ids": (1, 2, 3, 4)}, "sampling_params.stop_token_ids"),
        ({"input": chat(4)}, {"input": chat(5)}, "chat.messages"),
        ({"input": chat(1, "system")}, {"input": chat(1, "systems")}, "chat.messages.role"),
    ],
)
def test_what_a_request_may_hold(within: dict[str, object], beyond: dict[str, object], field: str) -> None:
    check_request(replace(HELLO, **within), (), (), LIMITS)
    with pytest.raises(InvalidArgument) as refused:
        check_request(replace(HELLO, **beyond), (), (), LIMITS)
    assert refused.value.field == field
    assert len(str(refused.value)) < 200, "what is too large is not sent back"


def test_tokenizing_has_the_same_limits() -> None:
    check_input(chat(4), LIMITS)
    with pytest.raises(InvalidArgument, match="1 to 4 messages"):
        check_input(chat(5), LIMITS)


@pytest.mark.parametrize(("window", "most"), [(1000, 20), (15, 14)])
def test_a_prompt_has_at_most_what_is_allowed_and_what_the_window_takes(window: int, most: int) -> None:
    request = GenerateRequest(TokenIds((1,)))
    assert fit_to_window(request, most, window, 256, LIMITS).max_tokens == min(30, window - most)
    with pytest.raises(InvalidArgument, match=rf"tokenized\.input_ids: found '{most + 1} tokens'.*at most {most} "):
        fit_to_window(request, most + 1, window, 256, LIMITS)


def test_the_default_of_max_tokens_is_within_the_limit() -> None:
    assert output_tokens(HELLO, 256, LIMITS) == 30
    assert output_tokens(HELLO, 256, RequestLimits()) == 256
    assert output_tokens(replace(HELLO, max_tokens=7), 256, LIMITS) == 7


async def test_a_long_text_is_refused_before_it_is_tokenized(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tokenizer, limits=LIMITS)
    monkeypatch.setattr(Tokenizer, "encode_prompt", lambda *_: pytest.fail("tokenized"))
    with pytest.raises(InvalidArgument, match=r"prompt: .*at most 20 tokens"):
        await generate(served, GenerateRequest(RawPrompt("x" * (21 * RouterConfig().max_bytes_per_token + 1))))
    (record,) = served.recorder.requests
    assert record.outcome == "InvalidArgument"


async def test_tokens_are_told_as_they_are_used(tokenizer: Tokenizer) -> None:
    served, spent = Served(tokenizer), list[int]()
    async for _ in served.router.generate(replace(HELLO, max_tokens=40), spent.append):
        pass
    assert spent[0] == tokenizer.count("hello fox")
    assert sum(spent[1:]) == 40
