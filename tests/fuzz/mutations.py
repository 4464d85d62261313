"""Ways to spoil a message: its fields, or its bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import Any, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

_INTEGERS: dict[int, tuple[int, ...]] = {
    FieldDescriptor.TYPE_UINT32: (0, 1, 127, 128, 2**31 - 1, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_SINT32: (0, -1, -2, 5, -(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**32, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_INT64: (0, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.TYPE_FIXED64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (0, 1, 2, 3, -1, 2**31 - 1),
    FieldDescriptor.TYPE_BOOL: (0, 1),
}
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 5e-324, 1e30, -1e300, 1e300, math.nan, math.inf, -math.inf)
_TEXTS = (
    "",
    "x",
    "auto",
    "ngram",
    "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    "\x00\r\n",
    "ü",
    "𝔘" * 3000,
    "y" * 50_000,
)
_LENGTHS = (0, 1, 2, 3, 17, 200, 1_500)
_MOST_SPOILT = 3


def spoil_fields(message: Message, rng: Random) -> None:
    """Puts odd values into one field or a few of `message`, wherever they lie in it."""
    for _ in range(rng.randrange(1, _MOST_SPOILT + 1)):
        owner = rng.choice(list(_messages(message)))
        _spoil(owner, rng.choice(list(owner.DESCRIPTOR.fields)), rng)


def _messages(message: Message) -> Iterator[Message]:
    """`message` and those in it."""
    yield message
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for inner in value if field.is_repeated else (value,):
                yield from _messages(inner)


def _spoil(owner: Message, field: FieldDescriptor, rng: Random) -> None:
    if rng.random() < 0.15:
        owner.ClearField(field.name)
    elif field.is_repeated:
        _spoil_list(getattr(owner, field.name), field, rng)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(owner, field.name).SetInParent()
    else:
        setattr(owner, field.name, _odd_value(field, rng))


def _spoil_list(values: Any, field: FieldDescriptor, rng: Random) -> None:
    kind = rng.randrange(4)
    if kind == 0 and len(values):
        del values[rng.randrange(len(values)) :]
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        copies = [values[rng.randrange(len(values))] for _ in range(rng.randrange(1, 4))] if len(values) else []
        values.extend([type(copy).FromString(copy.SerializeToString()) for copy in copies] or [values.add()])
    elif kind == 1 and len(values):
        values[rng.randrange(len(values))] = _odd_value(field, rng)
    elif kind == 2:
        value = _odd_value(field, rng)
        values.extend([value] * (3 if isinstance(value, str) else rng.choice(_LENGTHS)))
    else:
        values.append(_odd_value(field, rng))


def _odd_value(field: FieldDescriptor, rng: Random) -> Any:
    if field.type in _INTEGERS:
        return rng.choice(_INTEGERS[field.type])
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_TEXTS)
    return rng.choice(FLOATS)


def spoil_bytes(data: bytes, rng: Random) -> bytes:
    """One or a few accidents to `data`."""
    for _ in range(rng.randrange(1, _MOST_SPOILT + 1)):
        data = rng.choice(_ACCIDENTS)(data, rng)
    return data


def _flip(data: bytes, rng: Random) -> bytes:
    if not data:
        return data
    spoilt = bytearray(data)
    spoilt[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(spoilt)


def _cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _drop(data: bytes, rng: Random) -> bytes:
    begin = rng.randrange(len(data) + 1)
    return data[:begin] + data[begin + rng.randrange(1, 6) :]


def _repeat(data: bytes, rng: Random) -> bytes:
    begin = rng.randrange(len(data) + 1)
    end = rng.randrange(begin, len(data) + 1)
    return data[:end] + data[begin:end] + data[end:]


def _insert(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]


def _unknown_field(data: bytes, rng: Random) -> bytes:
    number = rng.choice((15, 77, 2**20, 2**29 - 1))
    return data + delimited(number, rng.randbytes(rng.randrange(20)))


def _huge_varint(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + b"\xff" * rng.randrange(1, 12) + data[at:]


_ACCIDENTS: tuple[Callable[[bytes, Random], bytes], ...] = (
    _flip, _flip, _cut, _drop, _repeat, _insert, _unknown_field, _huge_varint,
)  # fmt: skip


def varint(value: int) -> bytes:
    """As protobuf writes it."""
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def delimited(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def frame_of(requests: list[bytes]) -> bytes:
    """A frame of DraftRequests or VerificationRequests, whatever its requests are."""
    return b"".join(delimited(1, request) for request in requests)


def parsed(message_type: type[Message], data: bytes) -> Any | None:
    """The message, or None for bytes that are none."""
    try:
        return cast(Any, message_type).FromString(data)
    except DecodeError:
        return None
