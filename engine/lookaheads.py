"""Owns the lookaheads of a draft's sessions: how they begin, which the next forward takes further, when they are sent.

Whoever waits for a proposal comes first. All that a lookahead costs is time on a device that would idle: it plans with
what its forwards have taken (engine.pace).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import replace

from engine.ahead import Choice, Lookahead, how_many, outcomes
from engine.draft_session import DraftSession
from engine.pace import Pace
from engine.planner import Demand
from engine.proposal import EarlyProposals, RunAhead
from engine.runner import Runner

DRAFTER = "draft_model"
_MOST_SLOWDOWN = 1.25
"""Of a forward that somebody waits for, by what runs ahead in it."""


class Lookaheads:
    """What the sessions of one engine draft ahead.

    Args:
        sessions: those that are open; shared with the engine.
        runner: the device.
        clock: seconds, monotonic.
    """

    def __init__(self, sessions: Mapping[int, DraftSession], runner: Runner, clock: Callable[[], float]) -> None:
        self._sessions, self._runner, self._clock = sessions, runner, clock
        self._pace = Pace()

    def saw_forward(self, num_rows: int, seconds: float) -> None:
        """One forward of the draft, whatever for."""
        self._pace.saw(num_rows, seconds)

    def begin(self, draft: DraftSession, grown: Tokens[Choice] = ()) -> None:
        """Begins to draft on behind what may come of what is being verified.

        Args:
            draft: the session.
            grown: what the draft has chosen behind all of that already; all but the last have been computed.
        """
        run_ahead, sequence = draft.run_ahead, draft.sequence
        num_computed = sequence.num_computed - draft.state.length
        if run_ahead is None or num_computed < 0 or not sequence.block_table:
            return
        room = self._runner.max_context_length - len(sequence.tokens) - 1
        plan = replace(run_ahead, num_speculative_tokens=min(run_ahead.num_speculative_tokens, room // 2))
        if plan.num_speculative_tokens <= 0:
            return
        draws = not draft.sampling.greedy and draft.sampling.seed is None
        found = outcomes(draft.drafted, plan.acceptance if draws else None, grown[0] if grown else None)
        width = how_many(found, plan, self._rows_for(plan))
        num_done = num_computed + len(grown[1:])
        draft.lookahead = Lookahead(draft.state, draft.drafted, num_done, found[:width], plan, draft.ahead_since)
        if grown:
            draft.lookahead.take_over(grown)

    def demands(self, num_owing: int) -> list[Demand]:
        """Rows of those that run ahead. Where somebody waits for a proposal, only so many that he waits little longer.

        With what was sent already the draft goes on when there is nothing else to do, one session at a time, because
        whoever comes next has to wait for the forward under way.
        """
        room = self._pace.rows_within(_MOST_SLOWDOWN * self._pace.seconds(num_owing)) if num_owing else float("inf")
        ahead = [(key, draft) for key, draft in self._sessions.items() if draft.is_ahead and not draft.is_grown]
        if not ahead and not num_owing:
            ahead = [(key, draft) for key, draft in self._sessions.items() if draft.goes_on][:1]
        demands: list[Demand] = []
        for key, draft in ahead:
            if draft.lookahead is None or draft.lookahead.width > room:
                continue
            room -= draft.lookahead.width
            demands.append(Demand(key, draft.sequence, draft.lookahead.tree(), draft.lookahead.num_done))
        return demands

    def due(self) -> list[tuple[int, EarlyProposals]]:
        """The early proposals that are done, or would be late after one forward more."""
        growing = [draft.lookahead.width for draft in self._sessions.values() if draft.lookahead and draft.is_ahead]
        owing = sum(1 for draft in self._sessions.values() if draft.wanted or draft.looks_out)
        next_done = self._clock() + self._pace.seconds(owing + sum(growing))
        found: list[tuple[int, EarlyProposals]] = []
        for key, draft in self._sessions.items():
            lookahead = draft.lookahead
            if lookahead is None:
                continue
            if not lookahead.sent and (next_done > lookahead.deadline or lookahead.is_complete):
                early = lookahead.send(DRAFTER)
                if early is not None:
                    found.append((key, early))
            lookahead.keep_free(self._clock() + self._pace.seconds(lookahead.width))
        return found

    def drop(self) -> None:
        """Blocks are short: what is drafted ahead goes before anything that somebody waits for."""
        for draft in self._sessions.values():
            draft.lookahead = None
            draft.sequence.trim(self._runner.pool)

    def stop_growing(self) -> None:
        """Those there are stay as they are."""
        for draft in self._sessions.values():
            if draft.lookahead is not None:
                draft.lookahead.stop_growing()

    def _rows_for(self, run_ahead: RunAhead) -> Callable[[float], float]:
        """How many rows one session may have in a forward if so many forwards are to fit into its time."""
        sharing = sum(1 for other in self._sessions.values() if other.run_ahead is not None)

        def rows_for(num_forwards: float) -> float:
            rows = self._pace.rows_within(run_ahead.budget_s / num_forwards)
            return min(rows, self._runner.budget.max_proposal_tokens) / sharing

        return rows_for
