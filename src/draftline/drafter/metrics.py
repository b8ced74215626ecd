"""What a drafter's rows tell, as additive sums: rows, drafters and rounds combine by `+`.

All sums of one or many rows live in one fp64 vector on the device; reading it is one copy to the host. Ratios are
formed last, from sums, so an average of averages cannot happen.

Chain acceptance length of a block = 1 + number of leading slots whose draft is the label: what greedy decoding would
commit there, the bonus token included. It is counted per block, over blocks whose K = B - 1 slots are all
supervised; blocks that the conversation's end cuts short are summed apart, because they can only pull it down.
Tree acceptance length of a block = 1 + number of leading labels that a draft tree of so many nodes holds, grown from
the block's marginals; over the same blocks.
With a candidate selector a draft is what the selector takes behind the data's own token: as long as the walk is right
that is what it walks on, so the chain's count is that of real decoding. Ranks and recalls stay those of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from draftline.drafter.drafts import BlockDrafts, SlotDrafts
from draftline.drafter.head import SlotValues
from draftline.drafter.loss import LossTerms
from draftline.drafter.selector import PathScores
from draftline.drafter.selector_loss import SelectorOutcome

RECALL_AT = (1, 2, 4, 8, 16)
CALIBRATION_BINS = 10
TERMS = ("ce", "kl", "tv", "reverse_kl", "cap")
_SCALARS = (
    "numerator",
    "denominator",
    *TERMS,
    "supervised_slots",
    "teacher_agreements",
    "rows",
    "empty_rows",
    "nonfinite_rows",
    "blocks",
    "acceptance_sum",
    "acceptance_blocks",
    "truncated_sum",
    "truncated_blocks",
    "selector_ce",
    "selector_weight",
    "candidate_slots",
    "picked_slots",
    "base_acceptance_sum",
    "oracle_acceptance_sum",
)
_COUNTS = (
    "supervised_slots",
    "rows",
    "empty_rows",
    "nonfinite_rows",
    "blocks",
    "acceptance_blocks",
    "truncated_blocks",
)
_SLOT_SUMS = ("count", "weight", *(f"recall_{k}" for k in RECALL_AT), "nll", "confidence")
_BIN_SUMS = ("bin_count", "bin_confidence", "bin_correct")


@dataclass(frozen=True, slots=True)
class TreeMetric:
    """Trees that validation grows, and the rule that grows them (it lives with tree decoding).

    Attributes:
        budgets: drafts of the trees, the root not counted.
        accepted: (log-probabilities [A, K, R] and ids [A, K, R] of the likeliest tokens of each slot, labels [A, K],
            bool [A, K] where they are known, budgets) -> leading labels inside each tree, int64 [A, N].
        accepted_paths: the same for blocks of a candidate selector: (scores, labels, known, budgets).
    """

    budgets: tuple[int, ...]
    accepted: Callable[[Tensor, Tensor, Tensor, Tensor, tuple[int, ...]], Tensor]
    accepted_paths: Callable[[PathScores, Tensor, Tensor, tuple[int, ...]], Tensor] | None = None

    def count(self, drafts: BlockDrafts, labels_AK: Tensor, known_AK: Tensor) -> Tensor:
        """Leading labels that each block's trees hold, int64 [A, N]."""
        if isinstance(drafts, SlotDrafts):
            return self.accepted(*drafts, labels_AK, known_AK, self.budgets)
        assert self.accepted_paths is not None
        return self.accepted_paths(drafts, labels_AK, known_AK, self.budgets)

    @property
    def width(self) -> int:
        """Tokens to keep of a slot: a tree needs no more than it has nodes."""
        return max(self.budgets)


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What one row's pass gave, as `sum_row` needs it. All of shape [A, B] or scalars, without graph.

    Attributes:
        mask_AB: supervised slots.
        weight_AB: their weights.
        values: of the head, shape [A * B] each.
        numerator, denominator: of the row's loss.
        gradient_size: any scalar that is not finite if the row's gradient is not.
        tree_budgets, tree_accepted_AN: trees that were scored, and the labels each block's tree holds.
        selector: what a candidate selector found.
    """

    mask_AB: Tensor
    weight_AB: Tensor
    values: SlotValues
    numerator: Tensor
    denominator: Tensor
    gradient_size: Tensor
    tree_budgets: tuple[int, ...] = ()
    tree_accepted_AN: Tensor | None = None
    selector: SelectorOutcome | None = None


class StepStats:
    """Sums over rows. `vector` is fp64: scalars, K entries per slot sum, calibration bins, then one sum per tree.

    Attributes:
        vector: the sums.
        block_size: B; slots 1..B-1 are counted, so K = B - 1.
        tree_budgets: drafts of the trees that were scored; none in training.
    """

    __slots__ = ("block_size", "tree_budgets", "vector")

    def __init__(self, vector: Tensor, block_size: int, tree_budgets: tuple[int, ...] = ()) -> None:
        self.vector, self.block_size, self.tree_budgets = vector, block_size, tree_budgets

    @classmethod
    def zeros(cls, block_size: int, device: torch.device | str = "cpu", tree_budgets: tuple[int, ...] = ()) -> Self:
        """Sums of no row at all."""
        size = len(_SCALARS) + len(_SLOT_SUMS) * (block_size - 1) + len(_BIN_SUMS) * CALIBRATION_BINS
        size += len(tree_budgets)
        return cls(torch.zeros(size, dtype=torch.float64, device=device), block_size, tree_budgets)

    @classmethod
    def of_empty_row(cls, block_size: int, device: torch.device | str, tree_budgets: tuple[int, ...] = ()) -> Self:
        """A row without any supervised slot: counted, and nothing else."""
        stats = cls.zeros(block_size, device, tree_budgets)
        stats.scalar("rows").fill_(1.0)
        stats.scalar("empty_rows").fill_(1.0)
        return stats

    def __add__(self, other: StepStats) -> StepStats:
        if self.block_size != other.block_size:
            raise ValueError(f"sums of block size {self.block_size} and {other.block_size} do not add up")
        if self.tree_budgets != other.tree_budgets:
            raise ValueError(f"sums of trees {self.tree_budgets} and {other.tree_budgets} do not add up")
        return StepStats(self.vector + other.vector.to(self.vector.device), self.block_size, self.tree_budgets)

    def to(self, device: torch.device | str) -> StepStats:
        """A copy on another device: one transfer."""
        return StepStats(self.vector.to(device), self.block_size, self.tree_budgets)

    def scalar(self, name: str) -> Tensor:
        """0-dim view of one scalar sum."""
        return self.vector[_SCALARS.index(name)]

    def per_slot(self, name: str) -> Tensor:
        """View [K] of one per-slot sum; entry i belongs to slot i + 1."""
        k = self.block_size - 1
        start = len(_SCALARS) + _SLOT_SUMS.index(name) * k
        return self.vector[start : start + k]

    def bins(self, name: str) -> Tensor:
        """View [CALIBRATION_BINS] of one calibration sum; bins are equal steps of confidence from 0 to 1."""
        start = len(_SCALARS) + len(_SLOT_SUMS) * (self.block_size - 1) + _BIN_SUMS.index(name) * CALIBRATION_BINS
        return self.vector[start : start + CALIBRATION_BINS]

    @property
    def tree_sums(self) -> Tensor:
        """View [N] of the tree acceptance lengths summed over `acceptance_blocks`, one a budget."""
        return self.vector[self.vector.shape[0] - len(self.tree_budgets) :]

    @property
    def numerator(self) -> Tensor:
        """0-dim: numerator of the whole loss."""
        return self.scalar("numerator")

    @property
    def denominator(self) -> Tensor:
        """0-dim: denominator of the loss and of all terms."""
        return self.scalar("denominator")

    @property
    def acceptance_sum(self) -> Tensor:
        """0-dim: chain acceptance lengths, summed over whole blocks."""
        return self.scalar("acceptance_sum")

    @property
    def acceptance_blocks(self) -> Tensor:
        """0-dim: whole blocks."""
        return self.scalar("acceptance_blocks")

    @property
    def finite(self) -> Tensor:
        """Bool scalar: False if any row's loss or gradient was not finite. Such rows add nothing but their count."""
        return self.scalar("nonfinite_rows") == 0

    @property
    def terms(self) -> dict[str, tuple[Tensor, Tensor]]:
        """(numerator, denominator) of each term, 0-dim, without its coefficient; all share one denominator."""
        return {name: (self.scalar(name), self.denominator) for name in TERMS}

    def summary(self) -> dict[str, Any]:
        """Ratios for people and logs, JSON-able; None where nothing was counted. One copy to the host."""
        host = self.to("cpu")
        scalars = {name: host.scalar(name).item() for name in _SCALARS}
        count = host.per_slot("count")
        return {
            "loss": _ratio(scalars["numerator"], scalars["denominator"]),
            "terms": {name: _ratio(scalars[name], scalars["denominator"]) for name in TERMS},
            "acceptance_length": _ratio(scalars["acceptance_sum"], scalars["acceptance_blocks"]),
            "truncated_acceptance_length": _ratio(scalars["truncated_sum"], scalars["truncated_blocks"]),
            "tree_acceptance_length": {
                str(budget): _ratio(total, scalars["acceptance_blocks"])
                for budget, total in zip(host.tree_budgets, host.tree_sums.tolist(), strict=True)
            },
            "recall": {str(k): _ratios(host.per_slot(f"recall_{k}"), count) for k in RECALL_AT},
            "nll": _ratios(host.per_slot("nll"), count),
            "confidence": _ratios(host.per_slot("confidence"), count),
            "slot_weight": _ratios(host.per_slot("weight"), count),
            "calibration_error": _calibration_error(host),
            "teacher_agreement": _ratio(scalars["teacher_agreements"], scalars["supervised_slots"]),
            "selector": selector_summary(host),
            "counts": {name: int(scalars[name]) for name in _SCALARS if name in _COUNTS},
        }


def sum_row(outcome: RowOutcome) -> StepStats:
    """Sums of one row, on its device, without host sync."""
    mask_AB, values = outcome.mask_AB, outcome.values
    stats = StepStats.zeros(mask_AB.shape[1], mask_AB.device, outcome.tree_budgets)
    weight_Q = outcome.weight_AB.flatten()
    n_valid_A = mask_AB[:, 1:].sum(-1)
    right_Q = values.rank == 0 if outcome.selector is None else outcome.selector.right > 0
    run_A = accepted_run(right_Q.view_as(mask_AB)[:, 1:], mask_AB[:, 1:])
    whole_A = n_valid_A == mask_AB.shape[1] - 1
    cut_A = (n_valid_A > 0) & ~whole_A
    sums = {
        "numerator": outcome.numerator,
        "denominator": outcome.denominator,
        **{name: (weight_Q * getattr(values, name)).sum() for name in TERMS},
        "supervised_slots": n_valid_A.sum(),
        "teacher_agreements": values.agrees.sum(),
        "rows": torch.ones_like(outcome.numerator),
        "empty_rows": n_valid_A.sum() == 0,
        "nonfinite_rows": torch.zeros_like(outcome.numerator),
        "blocks": (n_valid_A > 0).sum(),
        "acceptance_sum": ((1 + run_A) * whole_A).sum(),
        "acceptance_blocks": whole_A.sum(),
        "truncated_sum": ((1 + run_A) * cut_A).sum(),
        "truncated_blocks": cut_A.sum(),
        **_selector_sums(outcome, whole_A),
    }
    stats.vector[: len(_SCALARS)] = torch.stack([sums[name].double() for name in _SCALARS])
    _sum_slots(stats, outcome)
    _sum_bins(stats, outcome)
    if outcome.tree_accepted_AN is not None:
        stats.tree_sums.copy_(((1 + outcome.tree_accepted_AN) * whole_A[:, None]).sum(0))
    return _without_nonfinite(stats, torch.isfinite(outcome.numerator) & torch.isfinite(outcome.gradient_size))


def _selector_sums(outcome: RowOutcome, whole_A: Tensor) -> dict[str, Tensor]:
    """Sums of a candidate selector, and of what the chain would be without it, or if it always chose right."""
    names = ("selector_ce", "selector_weight", "candidate_slots", "picked_slots")
    found, mask_AB = outcome.selector, outcome.mask_AB
    if found is None:
        zero = torch.zeros_like(outcome.numerator)
        return dict.fromkeys((*names, "base_acceptance_sum", "oracle_acceptance_sum"), zero)
    weight_Q, mask_Q = outcome.weight_AB.flatten(), mask_AB.flatten()
    per_slot = (weight_Q * found.ce, weight_Q * found.found, mask_Q * found.found, mask_Q * found.right)

    def length_sum(right_Q: Tensor) -> Tensor:
        return ((1 + accepted_run(right_Q.view_as(mask_AB)[:, 1:], mask_AB[:, 1:])) * whole_A).sum()

    return {
        **{name: value.sum() for name, value in zip(names, per_slot, strict=True)},
        "base_acceptance_sum": length_sum(outcome.values.rank == 0),
        "oracle_acceptance_sum": length_sum(found.found > 0),
    }


def selector_summary(host: StepStats) -> dict[str, float | None] | None:
    """What sums on the host tell of a candidate selector; None without one.

    `recall`: the label is a candidate; `accuracy_found`: right where it is; `base_acceptance_length`: the head alone;
    `oracle_acceptance_length`: of a selector that is always right.
    """
    scalars = {name: host.scalar(name).item() for name in _SCALARS}
    if not scalars["selector_weight"] and not scalars["base_acceptance_sum"]:
        return None
    slots, blocks = scalars["supervised_slots"], scalars["acceptance_blocks"]
    return {
        "ce": _ratio(scalars["selector_ce"], scalars["selector_weight"]),
        "recall": _ratio(scalars["candidate_slots"], slots),
        "accuracy": _ratio(scalars["picked_slots"], slots),
        "accuracy_found": _ratio(scalars["picked_slots"], scalars["candidate_slots"]),
        "base_acceptance_length": _ratio(scalars["base_acceptance_sum"], blocks),
        "oracle_acceptance_length": _ratio(scalars["oracle_acceptance_sum"], blocks),
    }


def accepted_run(correct_AK: Tensor, valid_AK: Tensor) -> Tensor:
    """Leading slots that are valid and right, int32 [A]: sum over k of prod_{i <= k} (r_i v_i)."""
    return (correct_AK & valid_AK).to(torch.int32).cumprod(-1).sum(-1)


def _sum_slots(stats: StepStats, outcome: RowOutcome) -> None:
    values, mask_AK = outcome.values, outcome.mask_AB[:, 1:]
    rank_AK, ce_AK, confidence_AK = (
        x.view_as(outcome.mask_AB)[:, 1:] for x in (values.rank, values.ce, values.confidence)
    )
    tables = {
        "count": mask_AK,
        "weight": outcome.weight_AB[:, 1:],
        **{f"recall_{k}": (rank_AK < k) & mask_AK for k in RECALL_AT},
        "nll": ce_AK * mask_AK,
        "confidence": confidence_AK * mask_AK,
    }
    for name, table_AK in tables.items():
        stats.per_slot(name).copy_(table_AK.sum(0))


def _sum_bins(stats: StepStats, outcome: RowOutcome) -> None:
    values, mask_Q = outcome.values, outcome.mask_AB.flatten()
    bin_Q = (values.confidence * CALIBRATION_BINS).long().clamp_(0, CALIBRATION_BINS - 1)
    columns = {
        "bin_count": mask_Q,
        "bin_confidence": values.confidence * mask_Q,
        "bin_correct": (values.rank == 0) & mask_Q,
    }
    # A product with the one-hot bins, not scatter_add: atomics would make the sums differ between runs.
    member_CQ = (bin_Q == torch.arange(CALIBRATION_BINS, device=bin_Q.device).unsqueeze(-1)).double()
    for name, column_Q in columns.items():
        stats.bins(name).copy_(member_CQ @ column_Q.double())


def _without_nonfinite(stats: StepStats, finite: Tensor) -> StepStats:
    """A row that was not finite adds only its counts: one bad row must not spoil the sums of a round."""
    bad = torch.zeros_like(stats.vector)
    bad[_SCALARS.index("rows")] = 1.0
    bad[_SCALARS.index("nonfinite_rows")] = 1.0
    return StepStats(torch.where(finite, stats.vector, bad), stats.block_size, stats.tree_budgets)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _ratios(part_K: Tensor, whole_K: Tensor) -> list[float | None]:
    return [_ratio(part, whole) for part, whole in zip(part_K.tolist(), whole_K.tolist(), strict=True)]


def _calibration_error(host: StepStats) -> float | None:
    """Expected calibration error: mean over slots of |confidence - accuracy| of the slot's bin."""
    gap = (host.bins("bin_confidence") - host.bins("bin_correct")).abs().sum()
    return _ratio(float(gap), float(host.bins("bin_count").sum()))


def describe_terms(terms: LossTerms) -> str:
    """The objective as a formula, for logs: `0.85 ce + 0.15 kl + 0.1 cap`."""
    return " + ".join(f"{c:g} {name}" for name, c in terms.coefficients().items() if c)
