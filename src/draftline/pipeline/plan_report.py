"""What `draftline plan` found, as lines for people and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from draftline.capacity import Expectation, Rates, row_traffic_bytes_per_s
from draftline.monitor.verdict import rate
from draftline.pipeline.runplan import DeviceMemory


@dataclass(frozen=True, slots=True)
class PlanReport:
    """A recommended split.

    Attributes:
        device: what one worker runs on.
        workers: N.
        how: where the rates come from.
        rates: of one target and one drafter.
        chosen: the best split that fits.
        ranked: all splits, the best first; fit or not.
        memory: estimated for each device of the chosen split.
        memory_bytes: what a device has.
        row_bytes, bytes_per_token: of captured states.
        averaging_bytes, averaging_s: of one averaging.
        data_tokens: of the whole plan, all epochs; None where no data is prepared yet.
    """

    device: str
    workers: int
    how: str
    rates: Rates
    chosen: Expectation
    ranked: tuple[Expectation, ...]
    memory: tuple[DeviceMemory, ...]
    memory_bytes: int
    row_bytes: int
    bytes_per_token: float
    averaging_bytes: int
    averaging_s: float
    data_tokens: int | None

    @property
    def traffic_bytes_per_s(self) -> float:
        """Captured states that change devices; none where target and drafter share one."""
        return 0.0 if self.workers == 1 else row_traffic_bytes_per_s(self.chosen.tokens_per_s, self.bytes_per_token)

    @property
    def data_s(self) -> float | None:
        """Seconds that the planned data takes."""
        return None if self.data_tokens is None else self.data_tokens / self.chosen.tokens_per_s

    def split_line(self) -> str:
        """The recommendation in one line."""
        chosen = self.chosen
        if self.workers == 1:
            return f"one target and one drafter share {self.device}: {rate(chosen.tokens_per_s)} expected"
        return f"{chosen.targets}:{chosen.drafters} (targets:drafters) on {self.workers} x {self.device}: " + (
            f"{rate(chosen.tokens_per_s)} expected; targets wait {chosen.target_waiting:.0%}, "
            f"drafters {chosen.drafter_waiting:.0%}, averaging {chosen.averaging:.1%}"
        )

    def lines(self) -> list[str]:
        """Plain lines for people."""
        target, drafter = self.rates.target_tokens_per_s, self.rates.drafter_tokens_per_s
        lines = [
            f"one target: {rate(target)}; one drafter: {rate(drafter)} ({self.how})",
            self.split_line(),
            *(self._rank_line(e) for e in sorted(self.ranked, key=lambda e: -e.targets) if self.workers > 1),
            *self._memory_lines(),
            f"bytes between devices: {self.traffic_bytes_per_s / 1e9:.2f} GB/s of states "
            f"({self.row_bytes / 2**20:.1f} MiB a row), {self.averaging_bytes / 1e9:.1f} GB an averaging "
            f"({self.averaging_s:.2g} s)",
        ]
        if self.data_s is None:
            return [*lines, "no data is prepared yet: figures are for full rows of one sample"]
        return [*lines, f"time for the data: {_duration(self.data_s)} for {self.data_tokens} tokens, all epochs"]

    def to_json(self) -> str:
        """Everything, for programs."""
        content: dict[str, Any] = asdict(self)
        content["memory"] = [asdict(m) | {"total_bytes": m.total_bytes} for m in self.memory]
        content |= {"traffic_bytes_per_s": self.traffic_bytes_per_s, "data_s": self.data_s}
        return json.dumps(content, indent=2)

    def _rank_line(self, expectation: Expectation) -> str:
        is_chosen = (expectation.targets, expectation.drafters) == (self.chosen.targets, self.chosen.drafters)
        return (
            f"  {expectation.targets}:{expectation.drafters}  {rate(expectation.tokens_per_s)}, targets wait "
            f"{expectation.target_waiting:.0%}, drafters wait {expectation.drafter_waiting:.0%}"
            + (" <- recommended" if is_chosen else "")
        )

    def _memory_lines(self) -> list[str]:
        """Devices with the same parts share a line."""
        alike: dict[str, list[str]] = {}
        for memory in self.memory:
            parts = ", ".join(f"{name} {size / 2**30:.2f}" for name, size in memory.parts.items())
            line = f"{memory.total_bytes / 2**30:.2f} of {self.memory_bytes / 2**30:.0f} GiB estimated ({parts})"
            alike.setdefault(line, []).append(memory.device)
        return [f"memory {', '.join(devices)}: {line}" for line, devices in alike.items()]


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
