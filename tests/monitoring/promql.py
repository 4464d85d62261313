"""What is wrong with an expression: a metric or label that does not exist, a value that no label holds, two sides that
never match.

The labels of a result are inferred bottom-up, so that a rule that reads another is checked against what that yields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import promql_parser
from promql_parser import MatchOp

from tests.monitoring.exported import VALUES

Labels = frozenset[str]
_NUMBERS: Labels | None = None  # a scalar has no labels
_RATES = {"rate", "irate", "increase"}


class BadExpression(Exception):
    """Says what is wrong."""


def labels_of(expression: str, known: Mapping[str, Labels]) -> Labels:
    """Labels of the result. Raises BadExpression.

    Args:
        known: labels of every series there is.
    """
    try:
        parsed = promql_parser.parse(expression)
    except ValueError as error:
        raise BadExpression(str(error)) from error
    labels = _labels(parsed, known)
    if labels is None:
        raise BadExpression("a number, no series")
    return labels


def names_of(expression: str) -> set[str]:
    """Names of the series that an expression reads."""
    found: set[str] = set()

    def note(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector) and node.name is not None:
            found.add(node.name)

    promql_parser.walk(promql_parser.parse(expression), note)
    return found


def _labels(node: Any, known: Mapping[str, Labels]) -> Labels | None:
    kinds = [kind for kind in _BY_KIND if isinstance(node, kind)]
    if not kinds:
        raise BadExpression(f"{type(node).__name__} is not understood")
    return _BY_KIND[kinds[0]](node, known)


def _selected(selector: Any, known: Mapping[str, Labels]) -> Labels:
    if selector.name not in known:
        raise BadExpression(f"no metric {selector.name}")
    labels = known[selector.name]
    for matcher in selector.matchers.matchers:
        if matcher.name not in labels:
            raise BadExpression(f"{selector.name} has no label {matcher.name}")
        allowed = VALUES.get(matcher.name)
        wanted = matcher.value.split("|") if matcher.op in (MatchOp.Re, MatchOp.NotRe) else [matcher.value]
        if allowed is not None and not allowed.issuperset(wanted):
            raise BadExpression(f"{matcher.name} is never {matcher.value!r}")
    return labels


def _called(call: Any, known: Mapping[str, Labels]) -> Labels | None:
    found = [labels for labels in (_labels(argument, known) for argument in call.args) if labels is not None]
    if call.func.name in _RATES:
        (name,) = names_of(call.prettify())
        if not name.endswith(("_total", "_bucket", "_count")):
            raise BadExpression(f"{call.func.name} of {name}, which is no counter")
    if call.func.name == "histogram_quantile":
        if "le" not in found[0]:
            raise BadExpression("a quantile without le")
        return found[0] - {"le"}
    return found[0] if found else _NUMBERS


def _aggregated(node: Any, known: Mapping[str, Labels]) -> Labels:
    inner = _labels(node.expr, known) or frozenset()
    if node.modifier is None:
        return frozenset()
    named = frozenset(node.modifier.labels)
    _require(named, inner, "aggregated")
    return named if str(node.modifier).startswith("by") else inner - named


def _combined(node: Any, known: Mapping[str, Labels]) -> Labels | None:
    left, right = _labels(node.lhs, known), _labels(node.rhs, known)
    if left is None or right is None:
        return right if left is None else left
    matching = None if node.modifier is None else node.modifier.matching
    if matching is None:
        if left != right:
            raise BadExpression(f"the sides of {node.op} differ in {sorted(left ^ right)} and never match")
        return left
    named = frozenset(matching.labels)
    _require(named, left & right, "matched")
    is_set = str(node.op) in ("and", "or", "unless")
    return left if is_set else named


def _require(wanted: Labels, there: Labels, doing: str) -> None:
    if missing := wanted - there:
        raise BadExpression(f"{doing} by {sorted(missing)}, which is not there")


_BY_KIND: dict[type, Callable[[Any, Mapping[str, Labels]], Labels | None]] = {
    promql_parser.NumberLiteral: lambda *_: _NUMBERS,
    promql_parser.VectorSelector: _selected,
    promql_parser.MatrixSelector: lambda node, known: _selected(node.vector_selector, known),
    promql_parser.SubqueryExpr: lambda node, known: _labels(node.expr, known),
    promql_parser.ParenExpr: lambda node, known: _labels(node.expr, known),
    promql_parser.UnaryExpr: lambda node, known: _labels(node.expr, known),
    promql_parser.Call: _called,
    promql_parser.AggregateExpr: _aggregated,
    promql_parser.BinaryExpr: _combined,
}
