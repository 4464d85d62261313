"""Owns what is read of metrics: one look at all endpoints as a Sample, and what changed between two of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from engine.errors import OutriderError

PREFIX = "ray_outrider_"
ROUTER = "router"
"""Label of the router that exports a series: Ray's WorkerId."""

_ROUTER_BY_RAY = "WorkerId"
_BY_RAY = frozenset({"Component", "NodeAddress", "SessionName", "Version", _ROUTER_BY_RAY})
_BY_OPENTELEMETRY = "otel_"


class UnreadableMetrics(OutriderError):
    """An answer is not in Prometheus' text format. The message names the endpoint."""


@dataclass(frozen=True, slots=True)
class Series:
    """One series.

    Attributes:
        name: without `ray_outrider_`; that of a counter ends in `_total`.
        source: the endpoint it was read from.
        labels: those of our own, and the router.
    """

    name: str
    source: str
    labels: frozenset[tuple[str, str]]

    def label(self, name: str) -> str:
        """Its value; "" where there is none."""
        return dict(self.labels).get(name, "")


@dataclass(frozen=True, slots=True)
class Sample:
    """One look.

    Attributes:
        at_s: when, in seconds of a monotonic clock.
        sources: endpoints that answered.
        values: what they said; no NaN and no infinity is among it.
    """

    at_s: float
    sources: frozenset[str]
    values: Mapping[Series, float]

    @classmethod
    def of(cls, at_s: float, answers: Mapping[str, str]) -> Sample:
        """From the text of each endpoint that answered. Raises UnreadableMetrics."""
        values = {series: value for source, text in answers.items() for series, value in parse(text, source)}
        return cls(at_s, frozenset(answers), values)

    def gauge(self, name: str, by: str, **where: str) -> dict[str, float]:
        """The values of a gauge by a label. Where several routers say the same of one thing, the largest."""
        found: dict[str, float] = {}
        for series, value in self._named(name, where):
            key = series.label(by)
            found[key] = max(value, found.get(key, value))
        return found

    def _named(self, name: str, where: Mapping[str, str]) -> Iterator[tuple[Series, float]]:
        for series, value in self.values.items():
            if series.name == name and where.items() <= dict(series.labels).items():
                yield series, value


def parse(text: str, source: str) -> Iterator[tuple[Series, float]]:
    """Our own series in an exposition, which has thousands of Ray's. Raises UnreadableMetrics."""
    own = (line for line in text.splitlines() if PREFIX in line)
    try:
        for family in text_string_to_metric_families("\n".join(own) + "\n"):
            for sample in family.samples:
                if sample.name.startswith(PREFIX) and math.isfinite(sample.value):
                    yield Series(sample.name.removeprefix(PREFIX), source, _labels(sample.labels)), sample.value
    except (ValueError, IndexError) as error:
        raise UnreadableMetrics(f"{source}: not metrics in Prometheus' text format: {error}") from error


def _labels(given: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    own = {
        name: value for name, value in given.items() if name not in _BY_RAY and not name.startswith(_BY_OPENTELEMETRY)
    }
    return frozenset((own | {ROUTER: given.get(_ROUTER_BY_RAY, "")}).items())


@dataclass(frozen=True, slots=True)
class Change:
    """What happened between two samples."""

    before: Sample
    after: Sample

    @property
    def seconds(self) -> float:
        return max(self.after.at_s - self.before.at_s, 1e-9)

    def increases(self, name: str, by: Iterable[str] = (), **where: str) -> dict[tuple[str, ...], float]:
        """How much the counter `name` grew, by values of the labels `by`, added up over all others."""
        found: dict[tuple[str, ...], float] = {}
        labels = tuple(by)
        for series, value in self.after._named(name, where):
            key = tuple(series.label(label) for label in labels)
            found[key] = found.get(key, 0.0) + self._increase(series, value)
        return found

    def increase(self, name: str, **where: str) -> float:
        """The same, added up over everything."""
        return sum(self.increases(name, **where).values())

    def quantile(self, name: str, share: float, **where: str) -> float | None:
        """Of what the histogram `name` saw meanwhile, linear within a bucket; None if it saw nothing.

        What lies above the last bound is given as that bound.
        """
        grown = self.increases(f"{name}_bucket", ("le",), **where)
        buckets = sorted((float(bound), count) for (bound,), count in grown.items())
        total = buckets[-1][1] if buckets else 0.0
        if total <= 0.0:
            return None
        low, seen = 0.0, 0.0
        for bound, count in buckets:
            if count >= share * total:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (share * total - seen) / max(count - seen, 1e-9)
            low, seen = bound, max(count, seen)
        return low

    def _increase(self, series: Series, value: float) -> float:
        """A counter that is lower than before has begun anew; one that was not there begins with its first event.

        That of an endpoint that did not answer before may be old, and says nothing yet.
        """
        known = self.before.values.get(series)
        if known is None:
            return value if series.source in self.before.sources else 0.0
        return value - known if value >= known else value
