"""Owns what the policy remembers of a session between rounds: whether speculating has been faster than plain decoding.

It judges by measured time, not by acceptance, and switches with hysteresis: off below one multiple, on again above a
higher one, which short probes at growing intervals have to reach.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Thresholds of policy v1.

    Attributes:
        max_temperature: at this temperature and above speculation is off.
        acceptance_floor: least chance of its first token for the draft model to be asked, whatever time says. It does
            not apply to n-grams, which cost no drafting.
        try_above: expected speed, as a multiple of plain decoding, from which on it is tried: only so is it measured.
        off_below: measured speed, as a multiple of plain decoding, below which speculation is switched off.
        on_above: multiple a probe must reach to switch it on again.
        min_tokens: tokens of evidence before it can be switched off.
        first_pause: tokens decoded plainly before the first probe; doubles after every failed probe.
        max_pause: longest such pause.
        probe_rounds: rounds one probe lasts.
        retry_tokens: tokens decoded plainly before asking again whether a draft has come back.
        stretch: tokens decoded plainly at a time during a pause, before looking whether a sure thing has come up.
        sure_above: expected speed, as a multiple of plain decoding, that is not passed up even during a pause.
        run_ahead: let the draft draft on while its proposal is verified.
    """

    max_temperature: float = 0.9
    acceptance_floor: float = 0.05
    try_above: float = 0.95
    off_below: float = 0.98
    on_above: float = 1.03
    min_tokens: int = 12
    first_pause: int = 24
    max_pause: int = 256
    probe_rounds: int = 2
    retry_tokens: int = 16
    stretch: int = 4
    sure_above: float = 1.1
    run_ahead: bool = True


class SpeedGate:
    """Off when speculating rounds measure slower than plain decoding; on again by probes at growing intervals.

    Positions are counts of generated tokens, times are seconds; both come from the caller.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._tokens = self._plain_equivalent = 0.0
        self._evidence = 0
        self._pause = config.first_pause
        self._resume_at = 0
        self._probe_rounds_left = 0
        self.is_open = True

    def pause_left(self, num_generated: int) -> int:
        """Tokens to decode plainly before the next round may speculate; 0 while open or probing."""
        return 0 if self.is_open else max(0, self._resume_at - num_generated)

    def saw_round(self, num_tokens: int, round_s: float, plain_s: float, num_generated: int) -> None:
        """One round that was free to speculate: what it committed and took, and what a plain token takes.

        A round during a pause speculated on a sure thing; it says nothing about ordinary ones.
        """
        if self.pause_left(num_generated - num_tokens):
            return
        self._count(num_tokens, round_s / plain_s)
        if self.is_open:
            if self._evidence >= self._config.min_tokens and self.speedup < self._config.off_below:
                self._close(self._config.first_pause, num_generated)
            return
        self._probe_rounds_left -= 1
        if self._probe_rounds_left <= 0:
            self._judge_probe(num_generated)

    def saw_plain(self, num_generated: int) -> None:
        """One token decoded plainly because nothing promised more; where that goes on, probes are to ask again."""
        if self.is_open:
            self._count(1, 1.0)
            if self._evidence >= self._config.min_tokens and self.speedup < self._config.on_above:
                self._close(self._config.first_pause, num_generated)

    def _count(self, num_tokens: int, plain_equivalent: float) -> None:
        self._tokens = 0.95 * self._tokens + num_tokens
        self._plain_equivalent = 0.95 * self._plain_equivalent + plain_equivalent
        self._evidence += num_tokens

    @property
    def speedup(self) -> float:
        """Measured speed as a multiple of plain decoding."""
        return self._tokens / self._plain_equivalent if self._plain_equivalent else 1.0

    def _judge_probe(self, num_generated: int) -> None:
        if self.speedup >= self._config.on_above:
            self.is_open = True
        else:
            self._close(min(2 * self._pause, self._config.max_pause), num_generated)

    def _close(self, pause: int, num_generated: int) -> None:
        self.is_open = False
        self._pause, self._resume_at = pause, num_generated + pause
        self._probe_rounds_left = self._config.probe_rounds
        self._tokens = self._plain_equivalent = 0.0
        self._evidence = 0
