"""Benchmarks: what `outrider bench` runs, and the prompts it runs by default."""
