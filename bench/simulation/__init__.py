"""Speculative decoding worked out instead of measured: what a round is worth, on devices that are only described."""
