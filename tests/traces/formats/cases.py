"""The conformance table: what each stack's importer does with each thing that goes wrong, and what proves it.

Every case makes a window of three sequences; something is wrong with the middle one. A cell holds the outcome:

    kept     every delivered row counts as a route
    masked   the rows concerned count for nothing, under both policies
    refused  an error under ``strict`` that names the sequence; ``lenient`` masks them and reports it
    error    an error under both policies
    -        the form cannot hold the case

The docs' table is made from here: ``python tests/traces/formats/cases.py docs/formats.md``.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from forms import NAMES, PADDED, TENSORS, Window

LAYERS, TOP_K, TOKENS, WRONG = 4, 2, (13, 24, 17), 1


def routes(rows, *, num_experts=32, layers=LAYERS, top_k=TOP_K, seed=0):
    """[rows, L, K]: distinct ids in a row, none of which is 0, so that no row looks like filler."""
    noise = np.random.default_rng(seed).random((rows, layers, min(num_experts - 1, 64)))
    return 1 + np.argsort(noise, axis=2)[:, :, :top_k]


def plain(*, last=0, **options):
    """Rows for all tokens but the last, or for all."""
    return Window(
        ids=[routes(n - 1 + last, seed=n, **{k: v for k, v in options.items() if k != "dtype"}) for n in TOKENS],
        tokens=list(TOKENS),
    )


@dataclass(frozen=True)
class Scene:
    """A window with something wrong, and which rows of its middle sequence are routes nonetheless."""

    window: Window
    good: dict
    """Row to ids [L, K], of the middle sequence, when the rows concerned are masked."""
    kept: dict | None = None
    """The same when they count."""
    options: dict = field(default_factory=dict)
    drops: tuple = ()


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    title: str
    reports: str
    make: Callable
    outcome: dict
    """By form; ``""`` is every other form."""
    message: str = ""

    def expected(self, form):
        return self.outcome.get(form, self.outcome.get("", "-"))


def rows_of(ids, but=()):
    return {row: ids[row] for row in range(len(ids)) if row not in set(but)}


def _last_absent(form):
    window = plain()
    return Scene(window, rows_of(window.ids[WRONG]))


def _last_real(form):
    window = plain(last=1)
    return Scene(window, rows_of(window.ids[WRONG], [TOKENS[WRONG] - 1]), rows_of(window.ids[WRONG]))


def _last_made_up(form):
    window, n = plain(last=1), TOKENS[WRONG]
    for ids in window.ids:
        ids[-1] = {
            "slime": np.arange(LAYERS * TOP_K).reshape(LAYERS, TOP_K) % 32, "miles": -1, "prime-rl": ids[-2], "verifiers-nodes": ids[-2],
        }.get(form, 0 if form.startswith("verl") else np.arange(TOP_K))  # fmt: skip
    return Scene(window, rows_of(window.ids[WRONG], [n - 1]))


def _too_few(form):
    window = plain()
    window.ids[WRONG] = window.ids[WRONG][:-2]
    return Scene(window, rows_of(window.ids[WRONG]))


def _too_many(form):
    window = plain()
    window.ids[WRONG] = routes(TOKENS[WRONG] + 2, seed=5)
    return Scene(window, {})


def _cut_tokens(form):
    window = plain()
    window.ids[WRONG], window.tokens[WRONG] = routes(20, seed=5), 8
    return Scene(window, {})


def _spoiled(value, rows=range(5, 10)):
    def make(form):
        window = plain()
        original = window.ids[WRONG].copy()
        window.ids[WRONG][list(rows)] = value
        return Scene(window, rows_of(original, rows), rows_of(window.ids[WRONG]))

    return make


def _duplicate(form):
    window = plain()
    window.ids[WRONG][7, 2] = [3, 3]
    return Scene(window, rows_of(window.ids[WRONG], [7]))


def _partly(form):
    window = plain()
    window.ids[WRONG][7, 2, 1] = -1
    return Scene(window, rows_of(window.ids[WRONG], [7]))


def _physical(form):
    window = plain()
    window.ids[WRONG][7, 2, 1] = 32
    return Scene(window, rows_of(window.ids[WRONG], [7]))


def _experts(num_experts, dtype):
    def make(form):
        window = plain()
        for ids in window.ids:
            ids[3, 1] = [num_experts - 1, num_experts - 2]
        window.num_experts = num_experts
        window.dtype = dtype if form in ("vllm", "prime-rl", "verifiers-nodes", "skyrl-padded", "skyrl-records") else np.int32
        return Scene(window, {}, rows_of(window.ids[WRONG]))

    return make


def _dense(form):
    window = plain()
    for ids in window.ids:
        ids[:, 0] = 0
    kept = {row: ids[1:] for row, ids in rows_of(window.ids[WRONG]).items()}
    return Scene(window, kept, kept, drops=(0,))


def _draft(form):
    window = plain()
    window.model = {"num_layers": LAYERS - 1}
    return Scene(window, {})


def _without(form):
    window = plain()
    window.ids[WRONG] = None
    return Scene(window, {}, {})


def _nothing(form):
    window = plain()
    window.ids = [None] * 3
    window.model = {"top_k": TOP_K, "num_layers": LAYERS}
    return Scene(window, {})


def _widths(form):
    """Sequences of one window in different dtypes, as prime-rl chooses them from each response's values."""
    window = plain()
    window.num_experts = 300
    window.ids[WRONG][3, 1] = [299, 7]
    return Scene(window, {}, rows_of(window.ids[WRONG]), options={"dtypes": (np.uint8, np.uint16, np.uint8)})


def _lost_share(form):
    window = plain()
    for ids in window.ids:
        ids[len(ids) // 4 :] = 0
    return Scene(window, rows_of(window.ids[WRONG][: (TOKENS[WRONG] - 1) // 4]))


def _repeats(form):
    window = plain()
    window.ids[WRONG][2:] = window.ids[WRONG][2]
    return Scene(window, {}, rows_of(window.ids[WRONG]))


def _turns(kind):
    def make(form):
        window, turns = plain(), []
        for n, ids in zip(TOKENS, window.ids, strict=True):
            cut = n - 4
            first, again = ids[: cut - 1], ids[: cut - 1].copy()
            if kind == "delta":
                turns.append([(0, first, cut), (cut - 1, ids[cut - 1 :], n)])
            elif kind == "history":
                turns.append([(0, first, cut), (0, ids, n)])
            elif kind == "differ":
                again[2] = routes(1, seed=99)[0]
                turns.append([(0, again, cut), (0, ids, n)])
            elif kind == "boundary":
                # The first turn ends in a row for its last token, which was not fed in: zeros, and the later turn has it.
                turns.append([(0, np.concatenate([first, np.zeros_like(first[:1])]), cut), (cut - 1, ids[cut - 1 :], n)])
            else:
                turns.append([(0, first, cut), (cut + 9, ids[cut - 1 :], n)])
        window.turns = turns
        good = rows_of(window.ids[WRONG])
        if kind == "differ":
            good[2] = turns[WRONG][0][1][2]
        if kind == "beyond":
            good = {}
        return Scene(window, good, good)

    return make


ALL = dict.fromkeys(NAMES, "kept")
TURNS = ("vllm", "sglang", "slime", "miles", "nemo-rl-envelope", "prime-rl")
ZEROS = ("vllm", "sglang", "verl-padded", "verl-jagged", "verl-veomni", "prime-rl", "verifiers-nodes", "areal")
MINUS = ("sglang", "miles", "nemo-rl-padded", "nemo-rl-envelope", "areal", "arrays-npz", "arrays-jsonl")
EARLY = tuple(name for name in NAMES if name.startswith(("verl", "nemo", "prime", "verifiers", "skyrl")))
FIXED = (*PADDED, "megatron")
"""Forms in which no sequence can have more rows than tokens."""


def but(outcome, **groups):
    """An outcome for every form, and others for some: ``masked=ZEROS``."""
    table = dict.fromkeys(NAMES, outcome)
    for other, names in groups.items():
        table |= dict.fromkeys(names, "-" if other == "none" else other)
    return table


CASES = [
    Case("the last token has no row", "all", _last_absent, but("kept")),
    Case("the last row is real", "sglang#20964", _last_real, but("kept", masked=("nemo-rl-padded", "nemo-rl-envelope"))),
    Case("the last row is made up", "verl#7075, prime-rl#1807", _last_made_up,
         but("masked", none=("vllm", "sglang", "areal", "megatron", "arrays-npz", "arrays-jsonl", "nemo-rl-padded", "nemo-rl-envelope"))),
    Case("two rows too few", "ms-swift#9799, verifiers#1672", _too_few, but("refused", masked=EARLY, none=("megatron",)),
         r"sequence 1 has 21 recorded rows for 24 tokens"),
    Case("two rows too many", "ms-swift#9799", _too_many, but("refused", none=FIXED), r"1 has (26|20) recorded rows for (24|18) tokens"),
    Case("tokens cut, routes not", "verifiers#1394", _cut_tokens, but("refused", none=FIXED), r"(20 recorded rows for 8|14 recorded rows for 2) tokens"),
    Case("a hole of zero rows", "vllm#39568", _spoiled(0), but("refused", masked=ZEROS), r"sequence 1 has 5 rows with all zero"),
    Case("rows of -1", "sglang#36404", _spoiled(-1), but("refused", masked=MINUS), r"sequence 1 has 5 rows with all -1"),
    Case("a row partly -1", "NeMo-RL", _partly, but("refused"), r"sequence 1 has 1 rows with a negative id; row 7, layer 2"),
    Case("an expert twice in a row", "verl#4986", _duplicate, but("refused", masked=("verl-veomni",)), r"row 7, layer 2 is \[3, 3\]"),
    Case("an id of E or more", "vllm-ascend#8501", _physical, but("refused"), r"row 7, layer 2 .* are these physical ids"),
    Case("id 255 of 256 experts", "sglang#9499", _experts(256, np.uint8), but("kept")),
    Case("id 511 of 512 experts", "prime-rl#3051", _experts(512, np.uint16), but("kept")),
    Case("id 32,768 of 32,769 experts", "verl#7407", _experts(32_769, np.int32), but("kept")),
    Case("dense layers are zero", "all", _dense, but("kept", none=("megatron",))),
    Case("more columns than decoder layers", "vllm#48622, sglang#26980", _draft, but("error"), r"leave draft \(MTP\) layers out"),
    Case("a sequence without routes", "vllm#39917, slime#1145", _without, but("kept", masked=TENSORS, none=("megatron",))
         | {"arrays-npz": "kept"}),
    Case("no sequence has routes", "slime#1909, RL#3327", _nothing, but("refused", none=("megatron",)), r"3 of 3 sequences have no recorded routes"),
    Case("three quarters of the rows lost", "vllm-ascend#15451", _lost_share, but("refused"), r"(all zero|are no routes)"),
    Case("widths differ between sequences", "verifiers#2043", _widths, but("-", kept=("vllm", "slime", "miles", "prime-rl", "verifiers-nodes", "areal", "skyrl-records", "nemo-rl-envelope"))),
    Case("22 equal rows", "sglang#36404", _repeats, but("kept")),
    Case("turns as deltas", "sglang#24851, vllm#37094", _turns("delta"), but("-", kept=TURNS)),
    Case("turns with the whole history", "verl#6029", _turns("history"), but("-", kept=(*TURNS, "areal"))),
    Case("histories that differ", "verl#6054", _turns("differ"), but("-", refused=(*TURNS, "areal")), r"1 rows from row 0 on that a later turn recorded differently"),
    Case("a turn's last row is made up", "prime-rl#1807", _turns("boundary"), but("-", kept=("vllm", "sglang", "prime-rl", "nemo-rl-envelope"))),
    Case("a turn starts beyond its tokens", "vllm#35744, vllm#37118", _turns("beyond"), but("-", refused=TURNS), r"rows 0 .. \d+ for \d+ tokens|recorded rows"),
]  # fmt: skip


def table():
    """The matrix in Markdown."""
    lines = [
        "| case | reported in | " + " | ".join(NAMES) + " |",
        "|---|---|" + "---|" * len(NAMES),
    ]
    for case in CASES:
        lines.append(f"| {case.title} | {case.reports} | " + " | ".join(case.expected(name) for name in NAMES) + " |")
    return "\n".join(lines)


BEGIN, END = "<!-- conformance: made from tests/traces/formats/cases.py -->", "<!-- end of conformance -->"


def rewritten(page):
    """A page with its table made anew."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text()))
