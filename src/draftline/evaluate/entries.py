"""The lines of an evaluation: each is a method, with a drafter where it needs one, and knows how to decode a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from draftline.decode.budget import AdaptiveBudget, BudgetRule, FixedBudget
from draftline.decode.chain import BoundDrafter, ChainSource
from draftline.decode.cost import default_budgets, measure_cost_curve
from draftline.decode.linear import linear_steps
from draftline.decode.lookup import LookupSource
from draftline.decode.plain import plain_steps
from draftline.decode.sampling import GREEDY, Sampling
from draftline.decode.static_call import CompileMode, parse_compile_mode
from draftline.decode.steps import DraftModel, Session, Steps, Task
from draftline.decode.tree_generate import tree_steps
from draftline.drafter.model import Drafter
from draftline.errors import UserError
from draftline.evaluate.methods import Method, require_drafters
from draftline.evaluate.solo import Sessions

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget

LOOKUP_BLOCK, LOOKUP_NGRAM = 16, 3


@dataclass(frozen=True, slots=True)
class Decoding:
    """How prompts are decoded.

    Attributes:
        sampling: the request's rule.
        batch: prompts decoded together. Acceptance lengths and texts are those of one at a time; times are not.
        timed_prompts: with a batch, so many prompts are decoded again one at a time for the speed columns; 0: none.
        compile: form of the one-at-a-time forwards; see `decode.static_call`.
    """

    sampling: Sampling = GREEDY
    batch: int = 1
    timed_prompts: int = 4
    compile: CompileMode = "off"

    def __post_init__(self) -> None:
        if self.batch < 1 or self.timed_prompts < 0:
            raise UserError(
                f"batch {self.batch}, timed prompts {self.timed_prompts}",
                where="evaluate",
                mend="batch >= 1, timed >= 0",
            )


def decoding_of(
    *,
    batch: int,
    timed: int,
    compile_name: str,
    temperature: float,
    top_p: float,
    top_k: int,
    proposals: str,
) -> Decoding:
    """From the command line's words. Raises UserError for those that mean nothing."""
    if proposals not in ("argmax", "sampled"):
        raise UserError(f"{proposals!r} is no way to draft", where="--proposals", mend="use argmax or sampled")
    kind: Literal["argmax", "sampled"] = "sampled" if proposals == "sampled" else "argmax"
    sampling = Sampling(temperature, top_p, top_k, proposals=kind)
    return Decoding(sampling, batch, timed, parse_compile_mode(compile_name))


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the evaluation.

    Attributes:
        replayed: tree rounds are counted along the plain output instead of decoded.
        budget: of a tree.
    """

    method: Method
    drafter_name: str | None = None
    drafter: DraftModel | None = None
    replayed: bool = False
    budget: BudgetRule | None = None

    @property
    def key(self) -> tuple[str, str | None]:
        """(method, drafter's name or None)."""
        return self.method.name, self.drafter_name

    @property
    def label(self) -> str:
        """The same for people."""
        return self.method.name if self.drafter_name is None else f"{self.drafter_name} {self.method.name}"

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers that its drafter reads; empty without one."""
        return () if self.drafter is None else self.drafter.taps

    def steps(self, session: Session, task: Task, drafter: DraftModel | None) -> Steps:
        """Decodes a task in a session that taps `taps`; `drafter` is this entry's, or a fork of it."""
        if self.method.name == "plain":
            return plain_steps(session, task, record_leaders=task.sampling.is_greedy)
        if drafter is None:
            return linear_steps(session, LookupSource(LOOKUP_BLOCK, LOOKUP_NGRAM), task)
        if self.budget is None:
            return linear_steps(session, ChainSource(drafter), task)
        return tree_steps(session, drafter, task, self.budget)


def bind(
    target: LoadedTarget, drafters: Mapping[str, Drafter | DraftModel], methods: Sequence[Method]
) -> dict[str, DraftModel]:
    """Drafters with their target's embedding and head.

    Raises:
        UserError: a method needs a drafter and there is none; a drafter that none needs, or for another target.
    """
    require_drafters(methods, len(drafters))
    return {
        name: BoundDrafter(drafter, target) if isinstance(drafter, Drafter) else drafter
        for name, drafter in drafters.items()
    }


def widths_of(method: Method, target: LoadedTarget, drafter: DraftModel | None) -> tuple[int, ...]:
    """Tokens of the method's forwards, rising: what compiled decoding prepares."""
    if method.name == "plain":
        return (1,)
    if method.name == "lookup":
        return 1, LOOKUP_BLOCK
    if method.budget is not None:
        return (method.budget + 1,)
    if method.name == "adaptive":
        return tuple(budget + 1 for budget in default_budgets(target.device))
    assert drafter is not None
    return (drafter.block_size,)


def build_entries(
    target: LoadedTarget,
    methods: Sequence[Method],
    sessions: Sessions,
    typical_prompt: Sequence[int],
    sampling: Sampling,
) -> list[Entry]:
    """Plain first, for the others are measured against it.

    Raises:
        UserError: trees on a recurrent target without what counts them there.
    """
    replayed = target.has_recurrent_layers
    _check_replay(methods, sampling, replayed=replayed)
    entries = [Entry(m) for m in methods if not m.needs_drafter]
    entries.sort(key=lambda entry: entry.method.name != "plain")
    for name, drafter in sessions.drafters.items():
        for method in methods:
            if not method.needs_drafter:
                continue
            budget: BudgetRule | None = FixedBudget(method.budget) if method.budget else None
            if method.name == "adaptive":
                session = sessions.open(drafter.taps, widths_of(method, target, drafter))
                budget = AdaptiveBudget(measure_cost_curve(target, drafter, typical_prompt, session=session))
            entries.append(Entry(method, name, drafter, replayed and method.is_tree, budget))
    return entries


def _check_replay(methods: Sequence[Method], sampling: Sampling, *, replayed: bool) -> None:
    trees = [m.name for m in methods if m.is_tree]
    if not replayed or not trees:
        return
    if not (sampling.is_greedy and any(m.name == "plain" for m in methods)):
        raise UserError(
            f"{', '.join(trees)} on a target with recurrent layers is counted along its plain greedy output",
            where="evaluate",
            mend="add the method plain and decode greedily",
        )
    if "adaptive" in trees:
        raise UserError(
            "adaptive needs the time of a verified tree, which a recurrent target cannot give",
            where="evaluate",
            mend="use tree@N",
        )
