"""Traces read back: spans from Jaeger or a file, a request rebuilt from them, and how that is drawn."""
