"""Owns the `emulation` section of a configuration: how long emulated devices take, how well the draft knows the target.

A profile (bench/profiles/*.yaml) is a configuration with this section, which `outrider serve --config` runs as any.
What it says is in seconds of the emulated devices; `dilation` stretches all of it alike where this machine is too small
to carry the system's own work at full speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from bench.emulated_model import NUM_WORDS, VOCAB_SIZE

if TYPE_CHECKING:
    from engine.emulated import EmulatedDevice, ForwardTime
    from engine.settings import EngineSettings
    from engine.stubs import EmulatedDraft, EmulatedTarget

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Seconds = Annotated[float, Field(ge=0.0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class DeviceTimes(_Section):
    """What one emulated device takes, and how far it is from the router."""

    step_s: Annotated[float, Field(gt=0.0)]
    """A forward of one row."""
    row_share: Share
    """Each further row whose logits are wanted, as a share of `step_s`."""
    prompt_row_share: Share | None = None
    """Each row of a prompt, as a share of `step_s`; unset it is `row_share`."""
    context_token_s: Seconds = 0.0
    """Each token of context, once for each session in the forward."""
    rtt_s: Seconds = 0.0
    """Round trip between router and device, besides what this machine's own loopback takes."""

    def seconds(self, num_sessions: float, rows_each: float, context: float) -> float:
        """Of a forward that generates: so many sessions of `context` tokens, so many rows of each; all may be means."""
        rows = 1.0 + self.row_share * (num_sessions * rows_each - 1.0)
        return self.step_s * rows + num_sessions * context * self.context_token_s

    def forward_time(self, dilation: float) -> ForwardTime:
        """For the device, stretched."""
        from engine.emulated import ForwardTime

        prompt_row_share = self.row_share if self.prompt_row_share is None else self.prompt_row_share
        times = ForwardTime(
            base_s=self.step_s,
            per_row_s=self.row_share * self.step_s,
            per_prompt_row_s=prompt_row_share * self.step_s,
            per_context_token_s=self.context_token_s,
        )
        return times.stretched(dilation)


class Emulation(_Section):
    """Devices that are not there: their engines are real, their forwards only take the time."""

    target: DeviceTimes
    """The target's device."""
    draft: DeviceTimes
    """The draft's device."""
    alpha: Share = 0.8
    """Probability that the draft's first choice is the target's."""
    alpha_changes: dict[Annotated[int, Field(ge=1)], Share] = Field(default_factory=dict)
    """Other values of `alpha`, each from a length of the sequence, prompt included, on."""
    recall: Share = 0.95
    """Probability that the target's first choice is among the draft's first `num_ranked` where it is not the first."""
    num_ranked: Annotated[int, Field(ge=1, le=7)] = 4
    """Tokens the draft ranks."""
    top_probability: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.84
    """Of the target's first choice at temperature 0.8. A token that a draft of alpha 0.8 samples at this temperature is
    accepted with a probability of 0.80; it would be 0.71 for 0.7, and 0.77 for 0.8."""
    dilation: Annotated[float, Field(gt=0.0)] = 1.0
    """Stretches all emulated times, the network's too. 1 is full speed."""

    def varied(self, *, rtt_s: float | None = None, draft_rtt_s: float | None = None, **changes: Any) -> Self:
        """The same with other fields, checked again; `rtt_s` is for both devices, `draft_rtt_s` for the draft's."""
        content = self.model_dump() | changes
        for name, seconds in (("target", rtt_s), ("draft", rtt_s), ("draft", draft_rtt_s)):
            if seconds is not None:
                content[name] = content[name] | {"rtt_s": seconds}
        return type(self).model_validate(content)

    @property
    def target_one_way_s(self) -> float:
        """What the network adds to each message between router and target, stretched."""
        return self.dilation * self.target.rtt_s / 2

    @property
    def draft_one_way_s(self) -> float:
        """What it adds to each between router and draft."""
        return self.dilation * self.draft.rtt_s / 2

    def target_stub(self) -> EmulatedTarget:
        from engine.stubs import EmulatedTarget

        return EmulatedTarget(VOCAB_SIZE, NUM_WORDS, self.top_probability)

    def draft_stub(self) -> EmulatedDraft:
        from engine.stubs import Agreement, EmulatedDraft

        alpha = ((0, self.alpha), *sorted(self.alpha_changes.items()))
        return EmulatedDraft(self.target_stub(), Agreement(alpha, self.recall, self.num_ranked))

    def target_device(self, settings: EngineSettings) -> EmulatedDevice:
        from engine.emulated import EmulatedDevice

        return EmulatedDevice(settings, self.target_stub(), self.target.forward_time(self.dilation))

    def draft_device(self, settings: EngineSettings) -> EmulatedDevice:
        from engine.emulated import EmulatedDevice

        return EmulatedDevice(settings, self.draft_stub(), self.draft.forward_time(self.dilation))

    def reference(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What a greedy request must output, token by token."""
        from engine.emulated import reference

        return reference(self.target_stub(), prompt, num_tokens)
