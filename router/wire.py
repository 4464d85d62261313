"""Owns finding the text field that makes a message unreadable, by walking its bytes along its descriptor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

_MAX_FIELDS = 20_000  # that are looked at: milliseconds, on the event loop, of whatever size the message is
_MAX_SHIFT = 63  # a varint holds 64 bits
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def find_bad_text(data: bytes, message_type: type[Message]) -> str | None:
    """Dotted path of the first string field that holds no UTF-8; None when the bytes are malformed otherwise, or there
    are too many fields before it.
    """
    try:
        return _search(memoryview(data), cast(Descriptor, message_type.DESCRIPTOR), iter(range(_MAX_FIELDS)))
    except (IndexError, ValueError):
        return None


def _search(data: memoryview, descriptor: Descriptor, looks: Iterator[int]) -> str | None:
    for number, content in _delimited_fields(data, looks):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(content):
            return str(field.name)
        if field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type is not None:
            inner = _search(content, field.message_type, looks)
            if inner is not None:
                return f"{field.name}.{inner}"
    return None


def _delimited_fields(data: memoryview, looks: Iterator[int]) -> Iterator[tuple[int, memoryview]]:
    """(field number, content) of the length-delimited fields. Raises IndexError or ValueError on broken bytes, and
    ValueError when `looks`, of which each field takes one, are used up.
    """
    position = 0
    while position < len(data):
        if next(looks, None) is None:
            raise ValueError("too many fields to look at")
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == _VARINT:
            _, position = _varint(data, position)
        elif kind == _FIXED64:
            position += 8
        elif kind == _FIXED32:
            position += 4
        elif kind == _BYTES:
            size, position = _varint(data, position)
            if position + size > len(data):
                raise ValueError("a field reaches past the end of its message")
            yield tag >> 3, data[position : position + size]
            position += size
        else:
            raise ValueError(f"wire type {kind}")


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > _MAX_SHIFT:  # or a message of nothing but continuation bytes would cost its length squared
            raise ValueError("a varint of more than ten bytes")


def _is_utf8(content: memoryview) -> bool:
    try:
        str(content, "utf-8")
    except UnicodeDecodeError:
        return False
    return True
