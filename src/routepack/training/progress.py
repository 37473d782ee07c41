"""What rank 0 shows while a run goes on: lines on the terminal, and TensorBoard scalars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichBar

from routepack.core.plans import Plan

WARMUP_LINES = 8
"""Lines that the warm-up gets."""
WIDTHS = {
    "step": 5,
    "window": 6,
    "reward": 6,
    "loss": 8,
    "tok/s": 6,
    "microbatches": 12,
    "imbalance": 14,
    "predicted step": 16,
    "moved": 5,
    "plan": 8,
    "exposed": 8,
    "time": 8,
}
"""Title and width of every column."""


@dataclass(kw_only=True)
class Display:
    """Lines, a bar on a terminal, and scalars. On every rank but 0 it shows and writes nothing."""

    enabled: bool
    log_folder: Path
    """TensorBoard scalars go here."""
    console: Console = field(default_factory=Console)
    _bar: RichBar | None = field(default=None, init=False, repr=False)

    def close(self) -> None:
        """Give the terminal back, however the run ended."""
        if self._bar is not None:
            self._bar.stop()

    def _open(self, description: str, total: int, *, resumed: int) -> None:
        if not self.enabled:
            return
        from torch.utils.tensorboard import SummaryWriter

        # Scalars of an earlier run into the same folder are purged, unless this one goes on with it: one run, one curve.
        self._scalars = SummaryWriter(str(self.log_folder), purge_step=None if resumed else 0, flush_secs=10)
        if self.console.is_terminal:
            self._bar = RichBar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(description, total=total)

    def _line(self, text: str) -> None:
        if self.enabled:
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _write(self, phase: str, step: int, figures: Mapping[str, float]) -> None:
        """Write a step's scalars, and move the bar on."""
        if not self.enabled:
            return
        for name, value in figures.items():
            self._scalars.add_scalar(f"{phase}/{name}", value, step)
        if self._bar is not None:
            self._bar.advance(self._task)

    def _finish(self, *lines: str) -> None:
        self.close()
        if self.enabled:
            self._scalars.close()
        for line in lines:
            self._line(line)


@dataclass(kw_only=True)
class Progress(Display):
    """Shows an RL run."""

    _reinforcing: bool = field(default=False, init=False, repr=False)

    def start(self, warmup_steps: int, rl_steps: int, *, resumed: int = 0) -> None:
        """Before the first step, of a run of which *resumed* steps were trained before."""
        self._warmup_steps, self._rl_steps = warmup_steps, rl_steps
        self._open("warm-up", warmup_steps, resumed=resumed)
        if resumed:
            self._line(f"Resumed from a checkpoint: {resumed} of {warmup_steps} + {rl_steps} steps are done.")
        if resumed < warmup_steps:
            self._line(f"Supervised warm-up on demonstrations: {warmup_steps} steps, no reward, experts stay in place.")

    def warmup_step(self, step: int, figures: Mapping[str, float]) -> None:
        """After each supervised step."""
        every = max(1, self._warmup_steps // WARMUP_LINES)
        if (step + 1) % every == 0 or step + 1 == self._warmup_steps:
            self._line(f"{step + 1:>5} loss {figures['loss']:.3f}  {figures['seconds']:.2f} s")
        self._write("warmup", step, figures)

    def rl_step(self, step: int, figures: Mapping[str, float], plan: Plan) -> None:
        """After each RL step."""
        if not self._reinforcing:
            self._reinforcing = True
            self._line("\nReinforcement learning (GRPO) on sampled rollouts; baseline -> planned beside each other:")
            self._line(_columns({title: title for title in WIDTHS if title != "window"}))
            if self._bar is not None:
                self._bar.reset(self._task, description="GRPO", total=self._rl_steps)
        self._line(_columns({"step": f"{step + 1}", "reward": f"{figures['reward']:.3f}", **step_cells(figures, plan)}))
        self._write("rl", step, figures)

    def finish(self, summary: Mapping[str, float], out: Path, plan: Plan | None) -> None:
        """After the last step: the summary, and how to look at what was written."""
        self._finish(*([] if plan is None else [summary_text(summary), look_text(out, plan)]))


@dataclass(kw_only=True)
class WindowProgress(Display):
    """Shows a run over recorded windows."""

    def start(self, num_windows: int, *, resumed: int = 0) -> None:
        """Before the first window, of a run of which *resumed* were trained before."""
        self._open("windows", num_windows, resumed=resumed)
        if resumed:
            self._line(f"Resumed from a checkpoint: {resumed} of {num_windows} windows are done.")
        if resumed < num_windows:
            self._line("Training on recorded windows; baseline -> planned beside each other:")
            self._line(_columns({title: title for title in WIDTHS if title not in ("step", "reward")}))

    def window_step(self, number: int, figures: Mapping[str, float], plan: Plan) -> None:
        """After each window."""
        self._line(_columns({"window": f"{number + 1}", **step_cells(figures, plan)}))
        self._write("windows", number, figures)

    def finish(self, out: Path) -> None:
        """After the last window."""
        self._finish(f"\nEvery window's figures: {out / 'summary.json'}. Curves: tensorboard --logdir {self.log_folder}")


def step_cells(figures: Mapping[str, float], plan: Plan) -> dict[str, str]:
    """What the line of a step of either kind says, by title."""
    parts = plan.parts
    return {
        "loss": f"{figures['loss']:.4f}",
        "tok/s": f"{figures['tokens_per_second']:.0f}",
        "microbatches": f"{plan.num_microbatches} {'certified' if plan.certificate.certified else 'not proven'}",
        "imbalance": f"{parts['baseline.imbalance_mean']:.3f} -> {parts['planned.imbalance_mean']:.3f}",
        "predicted step": f"{plan.baseline_value:.3f} -> {plan.value:.3f}",
        "moved": f"{figures['experts_moved']:.0f}",
        "plan": f"{figures['plan/background_ms']:.0f} ms",
        "exposed": f"{figures['plan/exposed_ms']:.0f} ms",
        "time": f"{figures['seconds']:.1f} s",
    }


def summary_text(summary: Mapping[str, float]) -> str:
    """What the run came to."""
    s = summary
    gain = s["baseline_value"] / s["value"] - 1.0
    rows = [
        ("Mean reward", f"{s['reward_first']:.3f} -> {s['reward_last']:.3f}"),
        ("", f"means of the first and last {s['rewards_averaged_over']} of {s['num_steps']} steps"),
        ("EP-rank imbalance", f"{s['imbalance_baseline']:.3f} baseline -> {s['imbalance_planned']:.3f} planned"),
        ("", "fullest rank / mean, averaged over layers and microbatches"),
        ("Predicted step", f"{s['baseline_value']:.3f} baseline -> {s['value']:.3f} planned, lower bound {s['bound']:.3f}"),
        ("", f"the baseline takes {gain:.1%} longer; the plan lies {s['value_over_bound'] - 1:.2%} above the bound"),
        ("Per step", f"{s['seconds_per_step']:.2f} s, {s['tokens_per_second']:.0f} tokens/s"),
        ("", f"{s['experts_moved_per_step']:.0f} experts moved"),
        ("Planning", f"{s['background_ms']:.0f} ms in the background, {s['exposed_ms']:.0f} ms exposed (medians)"),
    ]
    if s["off_policy_steps"]:
        rows.append(("Off-policy", f"windows were sampled up to {s['off_policy_steps']} step before the weights they trained"))
    if "logprob_difference_max" in s:
        text = f"sampler's and trainer's log-probabilities differ by at most {s['logprob_difference_max']:.1e}"
        rows.append(("Under replay", text))
    return "\n" + "\n".join(f"{label:<18} {text}" for label, text in rows)


def look_text(out: Path, plan: Plan) -> str:
    """The commands that look at what was written."""
    trace, topology = out / "trace.safetensors", plan.topology
    degrees = (
        f"topology.data_parallel_degree={topology.data_parallel_degree} "
        f"topology.expert_parallel_degree={topology.expert_parallel_degree} packer.max_tokens={plan.max_tokens}"
    )
    return f"""
Look at it (trace and plan are the last step's; {out / "summary.json"} has every step's figures):
  routepack verify {out / "plan.safetensors"} {trace}
  routepack plan configs/plan.yaml trace={trace} {degrees}
  tensorboard --logdir {out / "tensorboard"}"""


def _columns(cells: Mapping[str, str]) -> str:
    return " ".join(f"{cell:>{WIDTHS[title]}}" for title, cell in cells.items())
