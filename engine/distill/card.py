"""Owns the model card of a draft: its text, its tables and its curves."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.distill.acceptance import Acceptance
from engine.distill.cost import LinearCost
from engine.distill.model import DraftModel
from engine.distill.prompts import GREEDY_SHARE, SHARES
from engine.distill.settings import DistillSettings
from engine.distill.training import CurvePoint, TrainingState

CLASS_NAMES = {
    "code": "code: writing, changing, converting, SQL, shell",
    "tool": "tool calls: one JSON object for a request and JSON schemas",
    "cot": "word problems in steps",
    "creative": "stories, poems, letters, scenes",
    "general": "questions, lists, e-mails, summaries",
}

NOT_REPEATED = frozenset(
    {
        "target",
        "target_name",
        "output",
        "work",
        "held_out",
        "notes",
        "evaluate_seconds",
        "checkpoint_seconds",
        "threads",
    }
)
"""Settings without a bearing on the draft, or whose paths say nothing to others."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card reports."""

    settings: DistillSettings
    """Settings of the run."""
    target_name: str
    """Name of the target, without a path."""
    draft: DraftModel
    """The finished draft."""
    corpus_tokens: Mapping[str, int]
    """Generated tokens in the corpus, by class."""
    state: TrainingState
    """How long was trained, and the curves."""
    acceptance: Mapping[int, Mapping[str, Acceptance]]
    """Chain length → class → held-out acceptance; empty without held-out prompts."""
    agreement: float
    """Share of held-out tokens at which draft and target agree."""
    head_coverage: float
    """Share of held-out tokens the head can propose."""
    cost: LinearCost
    """Cost of a draft token beside a target step."""


def write_card(facts: CardFacts, folder: Path) -> None:
    """Writes ``README.md`` and, where matplotlib is installed, ``curves.png`` into ``folder``."""
    drawn = draw_curves(facts.state.curve, folder / "curves.png")
    parts = (_front, _making, _data, _sizes, _acceptance)
    sections = [*(part(facts) for part in parts), _curves(facts, drawn), _limits(facts)]
    (folder / "README.md").write_text("\n\n".join(sections) + "\n")


def _front(facts: CardFacts) -> str:
    layers = len(facts.draft.layers)
    return (
        "---\nlicense: apache-2.0\nlanguage: en\ntags: [speculative-decoding, draft-model]\n---\n\n"
        f"# Draft for {facts.target_name}\n\n"
        f"A {layers}-layer Llama that proposes tokens for {facts.target_name}, made by `outrider train draft`. "
        "It is no language model to be used by itself: it shares the target's embedding, which is not stored here, "
        f"and its head knows {len(facts.draft.draft_to_target)} of the target's {facts.draft.config.vocab_size} "
        "tokens. Speculative decoding keeps the target's output exactly as it is; a better or worse draft only "
        "changes the speed.\n\n"
        "Licence: Apache-2.0, like the target's, from whose weights it starts."
    )


def command_line(settings: DistillSettings) -> str:
    """The command that repeats a run, with neutral paths in place of this machine's."""
    changed = []
    for name in DistillSettings.__dataclass_fields__:
        value = getattr(settings, name)
        if name in NOT_REPEATED:
            continue
        if value != DistillSettings.__dataclass_fields__[name].default:
            text = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            changed.append(f"--{name.replace('_', '-')} {text}")
    held_out = " --held-out PROMPTS.jsonl" if settings.held_out else ""
    return " ".join(["outrider train draft --target TARGET --output DRAFT --work WORK" + held_out, *changed])


def _making(facts: CardFacts) -> str:
    settings, state = facts.settings, facts.state
    passes = state.tokens / max(sum(facts.corpus_tokens.values()), 1)
    starts = ", ".join(map(str, settings.layers))
    return (
        f"## How it was made\n\n```\n{command_line(settings)}\n```\n\n"
        f"1. The target continued prompts in batches of {settings.rows} (bfloat16, up to {settings.max_new_tokens} "
        "tokens each); its 16 most probable tokens were stored at every position.\n"
        f"2. The draft's layers started as copies of the target's layers {starts}, its output map as the least-squares "
        "solution that turns the copies' hidden states into the target's final ones.\n"
        f"3. {state.seconds / 60:.0f} minutes of training on {settings.threads} CPU thread(s): {state.step} steps, "
        f"{state.tokens / 1e6:.2f} M predicted tokens ({passes:.1f} passes over the corpus), AdamW, cosine "
        f"schedule, about {settings.batch_tokens} tokens a step. The loss is cross-entropy against the target's stored "
        f"distribution and, with a share of {settings.hard_share:g}, against its best token."
        + (f"\n\n{settings.notes}" if settings.notes else "")
    )


def _data(facts: CardFacts) -> str:
    total = sum(facts.corpus_tokens.values())
    rows = "\n".join(
        f"| {CLASS_NAMES.get(kind, kind)} | {SHARES.get(kind, 0):.0%} | {tokens:,} |"
        for kind, tokens in sorted(facts.corpus_tokens.items(), key=lambda entry: -entry[1])
    )
    return (
        f"## Data\n\n{total:,} tokens, all generated by the target itself from prompts that templates and slot values "
        f"of this project make (seed {facts.settings.seed}). {GREEDY_SHARE:.0%} of them were continued greedily, "
        "the others at temperatures 0.7 to 1.0. Continuations that only repeat themselves were cut off. The prompts "
        "used for measuring are none of these and share no template with them.\n\n"
        f"| class | share of prompts | generated tokens |\n|---|---|---|\n{rows}"
    )


def _sizes(facts: CardFacts) -> str:
    config, cost = facts.draft.config, facts.cost
    own = sum(parameter.numel() for parameter in facts.draft.parameters())
    head = facts.draft.head.numel()
    return (
        "## Size and cost\n\n"
        f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, MLP {config.intermediate_size}, "
        f"{config.num_attention_heads} heads and {config.num_key_value_heads} key-value heads of {config.head_dim}, "
        f"rotary embedding as in the target. {own / 1e6:.2f} M own parameters stored as bfloat16; {head / 1e6:.2f} M "
        "more in the head are rows of the target's embedding.\n\n"
        f"All linear maps of one forward with {cost.rows} rows, bfloat16 weights packed for oneDNN, one CPU thread: "
        f"draft {cost.draft_seconds * 1e3:.2f} ms, target {cost.target_seconds * 1e3:.2f} ms, a share of "
        f"{cost.share:.3f}."
    )


def _acceptance(facts: CardFacts) -> str:
    if not facts.acceptance:
        return "## Acceptance\n\nNot measured: the run had no held-out prompts."
    parts = [
        "## Acceptance\n\nGreedy chains of K draft tokens against the target's greedy answers to held-out prompts, "
        "round by round as the server plays them. *Rate* is accepted / drafted, *length* the tokens per round with the "
        "target's own, and position i counts only where everything before it was accepted."
    ]
    for length, by_class in sorted(facts.acceptance.items()):
        positions = " | ".join(f"{at + 1}" for at in range(length))
        rows = "\n".join(_acceptance_row(kind, found) for kind, found in by_class.items())
        parts.append(f"K = {length}\n\n| class | rate | length | {positions} |\n|{'---|' * (length + 3)}\n{rows}")
    parts.append(
        f"Draft and target agree on {facts.agreement:.1%} of all held-out tokens; the head can propose "
        f"{facts.head_coverage:.1%} of them.\n\n{_positions_finding(facts)}"
    )
    return "\n\n".join(parts)


def _acceptance_row(kind: str, found: Acceptance) -> str:
    positions = " | ".join(f"{share:.3f}" for share in found.by_position)
    return f"| {kind} | {found.rate:.3f} | {found.mean_length:.2f} | {positions} |"


def _positions_finding(facts: CardFacts) -> str:
    longest = facts.acceptance[max(facts.acceptance)]["all"]
    first, later = longest.by_position[0], longest.by_position[1:]
    direction = "do not fall" if not later or min(later) >= first else "fall in part"
    return (
        "The draft was not unrolled over its own proposals in training. It sees tokens and no hidden state of the "
        "target, so as long as its proposals are accepted its context is exactly the target's text, and what it would "
        f"do after a rejected token is never used. Measured, the later positions {direction} below the first "
        f"({first:.3f}, then {', '.join(f'{share:.3f}' for share in later)}): places that are easy follow each other."
    )


def _curves(facts: CardFacts, drawn: bool) -> str:
    picture = "\n\n![loss and held-out acceptance](curves.png)" if drawn else ""
    step = max(len(facts.state.curve) // 10, 1)
    shown = facts.state.curve[::-1][::step][::-1]
    heading = ("minutes", "step", "M tokens", "loss", "agreement", "held-out agreement", "held-out acceptance")
    table = [heading, ("---",) * len(heading), *(_curve_row(point) for point in shown)]
    rows = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
    return f"## Curves\n\nAcceptance at K = {max(facts.settings.draft_tokens)}.{picture}\n\n{rows}"


def _curve_row(point: CurvePoint) -> tuple[str, ...]:
    shares = (point.loss, point.agreement, point.held_out_agreement, point.held_out_acceptance)
    counts = (f"{point.seconds / 60:.1f}", str(point.step), f"{point.tokens / 1e6:.2f}")
    return (*counts, *(f"{share:.3f}" for share in shares))


def _limits(facts: CardFacts) -> str:
    return (
        "## Limits\n\n"
        f"* English prompts of the classes above, answers of up to {facts.settings.max_new_tokens} tokens; other "
        "languages, long contexts and long answers were not trained on.\n"
        "* Tokens outside the head are never proposed; each costs the rest of its round.\n"
        "* Measured greedily. At higher temperatures less is accepted.\n"
        f"* It fits {facts.target_name} with these weights and no other model."
    )


def draw_curves(curve: Sequence[CurvePoint], path: Path) -> bool:
    """Loss and held-out acceptance against tokens trained on, as a picture; False without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None or not curve:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    tokens = [point.tokens / 1e6 for point in curve]
    left.plot(tokens, [point.loss for point in curve], color="tab:blue")
    left.set(xlabel="million tokens trained on", ylabel="loss", title="Loss")
    right.plot(tokens, [point.agreement for point in curve], color="tab:gray", label="agreement in training")
    if not all(math.isnan(point.held_out_agreement) for point in curve):
        right.plot(
            tokens,
            [point.held_out_agreement for point in curve],
            color="tab:orange",
            label="held-out agreement",
        )
        right.plot(
            tokens,
            [point.held_out_acceptance for point in curve],
            color="tab:green",
            label="held-out acceptance",
        )
    right.set(xlabel="million tokens trained on", ylabel="share", title="Agreement and acceptance")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, metadata={"Software": None})
    return True
