"""How long each phase of a step took."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(kw_only=True)
class Clock:
    """Seconds of each phase of a step."""

    marks: list[tuple[str, float]] = field(default_factory=lambda: [("start", time.monotonic())])

    def lap(self, name: str) -> None:
        """The phase *name* ends now."""
        self.marks.append((name, time.monotonic()))

    def figures(self, num_tokens: int) -> dict[str, float]:
        """``seconds`` and ``tokens_per_second`` of the whole step, of the trainer alone, and the seconds of each phase."""
        phases = dict.fromkeys((name for name, _ in self.marks[1:]), 0.0)
        for (_, start), (name, end) in pairwise(self.marks):
            phases[name] += end - start
        seconds = self.marks[-1][1] - self.marks[0][1]
        return {
            "seconds": seconds,
            "tokens_per_second": num_tokens / seconds,
            "trainer_tokens_per_second": num_tokens / (phases.get("logprobs", 0.0) + phases["update"]),
            **{f"seconds/{name}": value for name, value in phases.items()},
        }
