"""Expositions as Ray's metrics agent serves them, made from numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from deployments.top.samples import Change, Sample

URL = "http://node:8080/metrics"
Lines = Mapping[str, float]


def exposition(lines: Lines, router: str = "aaaaaaaa11") -> str:
    """Each key is a name, or a name with labels as `name|label=value|label=value`."""
    text = ["# HELP ray_gcs_nodes Others' metrics.", "# TYPE ray_gcs_nodes gauge", 'ray_gcs_nodes{State="ALIVE"} 1.0']
    for key, value in lines.items():
        name, *labels = key.split("|")
        pairs = [tuple(label.split("=")) for label in labels] + [("WorkerId", router), ("SessionName", "s")]
        inner = ",".join(f'{label}="{given}"' for label, given in pairs)
        text.append(f"ray_outrider_{name}{{{inner}}} {value}")
    return "\n".join(text) + "\n"


def sample(at_s: float, *texts: str, sources: Iterable[str] = (URL,)) -> Sample:
    """One look: a text for every source, or all texts from the only one."""
    places = list(sources)
    answers = dict(zip(places, texts, strict=True)) if len(places) > 1 else {places[0]: "".join(texts)}
    return Sample.of(at_s, answers)


def change(before: Lines, after: Lines, seconds: float = 10.0) -> Change:
    return Change(sample(0.0, exposition(before)), sample(seconds, exposition(after)))


def buckets(name: str, **counts: float) -> Lines:
    """Cumulative counts by bound, `le_0_1` for 0.1; the last is repeated for +Inf."""
    lines = {f"{name}_bucket|le={bound[3:].replace('_', '.')}": count for bound, count in counts.items()}
    return {**lines, f"{name}_bucket|le=+Inf": max(counts.values())}


QUIET: Lines = {
    "num_requests_running": 0.0,
    "num_requests_waiting": 0.0,
    "engine_sessions|kind=target|replica=10.0.0.1:41": 0.0,
    "engine_sessions|kind=draft|replica=10.0.0.2:42": 0.0,
}
BEFORE: Lines = {
    **QUIET,
    "generation_tokens_total": 1000.0,
    "requests_total|outcome=stop": 10.0,
    "rounds_total|reason=none": 400.0,
    "spec_decode_num_drafts_total|drafter=draft_model": 400.0,
    "spec_decode_num_draft_tokens_total|drafter=draft_model|workload=none": 1600.0,
    "spec_decode_num_accepted_tokens_total|drafter=draft_model|workload=none": 800.0,
    "target_busy_seconds_total|target=10.0.0.1:41": 50.0,
    "target_bubble_seconds_total|target=10.0.0.1:41": 5.0,
    "target_forwards_total|target=10.0.0.1:41": 500.0,
    **buckets("inter_token_latency_seconds", le_0_01=100, le_0_05=100, le_0_1=100),
}
AFTER: Lines = {
    **QUIET,
    "num_requests_running": 3.0,
    "num_requests_waiting": 1.0,
    "engine_sessions|kind=target|replica=10.0.0.1:41": 3.0,
    "kv_cache_usage_perc|kind=target|replica=10.0.0.1:41": 0.25,
    "kv_blocks_free|kind=target|replica=10.0.0.1:41": 768.0,
    "generation_tokens_total": 1500.0,
    "requests_total|outcome=stop": 14.0,
    "requests_total|outcome=Overloaded": 1.0,
    "rounds_total|reason=none": 480.0,
    "rounds_total|reason=temperature": 20.0,
    "spec_decode_num_drafts_total|drafter=draft_model": 480.0,
    "spec_decode_num_draft_tokens_total|drafter=draft_model|workload=none": 1800.0,
    "spec_decode_num_draft_tokens_total|drafter=draft_model|workload=code": 120.0,
    "spec_decode_num_accepted_tokens_total|drafter=draft_model|workload=none": 960.0,
    "spec_decode_num_accepted_tokens_total|drafter=draft_model|workload=code": 80.0,
    "spec_decode_num_rounds_ahead_total": 50.0,
    "spec_decode_num_early_hits_total": 40.0,
    "spec_decode_num_wasted_draft_tokens_total": 480.0,
    "target_busy_seconds_total|target=10.0.0.1:41": 56.0,
    "target_bubble_seconds_total|target=10.0.0.1:41": 7.0,
    "target_forwards_total|target=10.0.0.1:41": 620.0,
    **buckets("inter_token_latency_seconds", le_0_01=180, le_0_05=198, le_0_1=200),
}
