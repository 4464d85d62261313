"""Owns the memory check: resident memory of every process of a running system, over many requests.

    python -m bench.memory [--config demo] [--requests 1000] [--concurrency 4]

Memory is summed over this process's descendants (Ray, Serve, HAProxy, target, draft, router), as RSS, which counts
pages shared between processes once for each of them and so is an upper bound.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from bench.prompts import Prompt, read_prompts
from cluster.local import free_port
from deployments.client import Ask, Client
from deployments.commands.serve import with_port
from deployments.config_file import load_config
from deployments.system import local_system

PROMPTS = Path(__file__).with_name("prompts.jsonl")
MAX_TOKENS = 12
GIB = 2**30


def resident_bytes() -> dict[str, int]:
    """Resident memory by kind of process: the two engines, the router, and everything else."""
    totals = {"target": 0, "draft": 0, "router": 0, "Ray and the rest": 0}
    for process in psutil.Process().children(recursive=True):
        try:
            title, memory = " ".join(process.cmdline()), process.memory_info().rss
        except psutil.Error:
            continue  # it ended between the listing and the question
        kinds = [kind for kind in ("target", "draft", "router") if f":{kind.capitalize()}" in title]
        totals[kinds[0] if kinds else "Ray and the rest"] += memory
    return totals


def ask(address: str, prompt: Prompt, index: int) -> None:
    """One short request; every fifth is decoded plainly and every seventh is sampled."""
    sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.7 if index % 7 == 0 else 0.0}
    with Client(address) as client:
        speculation = "off" if index % 5 == 0 else "auto"
        client.generate(Ask(prompt=prompt.text, messages=prompt.messages, sampling=sampling, speculation=speculation))


def measure(config: str, requests: int, concurrency: int) -> Iterator[tuple[int, dict[str, int]]]:
    """Requests answered so far and memory then, ten times over the run."""
    prompts = read_prompts(PROMPTS)
    with local_system(with_port(load_config(config), free_port())) as address, ThreadPoolExecutor(concurrency) as pool:
        yield 0, resident_bytes()
        step = max(requests // 10, 1)
        for begin in range(0, requests, step):
            batch = range(begin, min(begin + step, requests))
            list(pool.map(lambda index: ask(address, prompts[index % len(prompts)], index), batch))
            yield batch[-1] + 1, resident_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="demo")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=4)
    options = parser.parse_args()
    header_printed = False
    for answered, totals in measure(options.config, options.requests, options.concurrency):
        if not header_printed:
            sys.stdout.write(f"| requests | {' | '.join(totals)} | all |\n|{'---|' * (len(totals) + 2)}\n")
            header_printed = True
        cells = [f"{total / GIB:.2f}" for total in (*totals.values(), sum(totals.values()))]
        sys.stdout.write(f"| {answered} | {' | '.join(cells)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
