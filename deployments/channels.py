"""Owns how a caller reaches a server of the public API: the channel, and the credential that goes with every call."""

from __future__ import annotations

import os

import grpc

API_KEY = "OUTRIDER_API_KEY"
"""Environment variable with the API key, or token, to send."""
_TLS = "https://"
_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),  # a server that restarts is found within a second of its return
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


def bearer(credential: str | None) -> list[tuple[str, str]]:
    """Metadata that says who calls: by `credential`, or where that is None by $OUTRIDER_API_KEY. "" says nothing."""
    sent = os.environ.get(API_KEY, "") if credential is None else credential
    return [("authorization", f"Bearer {sent}")] if sent else []


def open_channel(address: str) -> grpc.Channel:
    """TLS behind `https://`, with the certificates that $GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names or gRPC comes with."""
    if not address.startswith(_TLS):
        return grpc.insecure_channel(address, options=_OPTIONS)
    return grpc.secure_channel(address.removeprefix(_TLS), grpc.ssl_channel_credentials(), options=_OPTIONS)
