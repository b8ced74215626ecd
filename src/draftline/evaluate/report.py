"""What an evaluation found, as plain data: JSON to a file, a table to the terminal.

Everywhere: acceptance length tau = tokens committed per target forward after the prefill, the target's own token
counted, pooled over rounds. Intervals are 95 % intervals by prompt (see `stats`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from draftline.data.storage import require_writable_file, write_text_atomic
from draftline.decode.generation import TAU_DEFINITION
from draftline.evaluate.stats import LEAST_PROMPTS

SCHEMA_VERSION = 3
ALL_SETS = "all"


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PromptResult(_Data):
    """One prompt under one method. `tokens` were committed in `rounds`; the prefill's token is not among them.

    Seconds are 0 for a prompt that was decoded in a batch, or only counted along a text.
    """

    prompt_id: str
    prompt_set: str
    prompt_tokens: int
    output_tokens: int
    tokens: int
    rounds: int
    prefill_s: float
    decode_s: float


class GroupResult(_Data):
    """Prompts that share a category, a language or a range of lengths."""

    kind: Literal["category", "language", "prompt length"]
    name: str
    n_prompts: int
    acceptance_length: float | None
    interval: tuple[float, float] | None


class Divergence(_Data):
    """First token at which an output leaves the target's own plain output."""

    prompt_id: str
    position: int
    plain_token: int | None
    token: int | None
    gap: float | None = Field(
        description="The target's best logit minus that of `token`, in plain decoding; null: not among its best 16, or "
        "one text ended."
    )
    tolerance: float


class Equality(_Data):
    """Outputs against the target's own plain greedy output.

    The first token that differs is a near-tie if the target's logit of it is within the tolerance of the arithmetic of
    the best one (1e-4 in fp32; in 16 bits two units in the last place of the best logit); else it is a divergence.
    """

    equal: int
    near_ties: list[Divergence]
    divergences: list[Divergence]


class MethodResult(_Data):
    """One method on one prompt set (or on all of them).

    Attributes:
        replayed: tree rounds counted along the target's own output, not decoded (no time, no equality).
        acceptance_length: tau; None if every output ended with the prefill's token.
        acceptance_length_unclipped: tau without rounds that a length limit or stop token cut.
        target_forwards: verifying forwards, one a round. replay_forwards: those that repaired recurrent state.
        drafted_by_position, accepted_by_position: index 0 is slot 1 of the block (depth 1 of a tree).
        full_block_share: share of unclipped rounds in which every slot was accepted.
        mean_tree_nodes: drafts verified a round, the root not counted.
        timed_prompts: prompts decoded one at a time; prefill_s, decode_s, tokens_per_s and speedup are of these alone.
        tokens_per_s: tokens behind the prefill's own by decoding seconds. speedup: against plain in the same run.
        speedup_interval: by prompt.
        batch_tokens_per_s: output tokens of all prompts by the seconds of their batches, prefills included.
    """

    prompt_set: str
    method: str
    drafter: str | None
    replayed: bool
    n_prompts: int
    output_tokens: int
    acceptance_length: float | None
    interval: tuple[float, float] | None
    acceptance_length_unclipped: float | None
    target_forwards: int
    replay_forwards: int
    forwards_per_token: float | None
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    full_block_share: float | None
    mean_tree_nodes: float | None
    timed_prompts: int
    prefill_s: float
    decode_s: float
    tokens_per_s: float | None
    speedup: float | None
    speedup_interval: tuple[float, float] | None
    batch_tokens_per_s: float | None
    equality: Equality | None
    groups: list[GroupResult]
    prompts: list[PromptResult]


class Comparison(_Data):
    """Drafter B against drafter A with one method, paired by prompt; `difference` is B minus A in tau.

    Attributes:
        verdict: `NAME is better` or `undecided`; never decided on fewer than `least_prompts`.
        note: what makes the two differ beside their weights; None if nothing is known.
    """

    method: str
    a: str
    b: str
    difference: float
    interval: tuple[float, float]
    verdict: str
    n_prompts: int
    prompts_needed: int | None
    least_prompts: int = LEAST_PROMPTS
    note: str | None = None


class TreeRounds(_Data):
    """A tree grown from the very blocks that the chain drafted, both walked along the target's greedy text.

    Attributes:
        rounds: those of the chain. chain_tokens, tree_tokens: committed in them, the target's own counted.
        rounds_with_chain: rounds whose tree holds every draft of the chain.
        rounds_not_below_chain: those among them in which the tree accepts at least as many drafts as the chain.
        rounds_below_chain: those in which it accepts fewer. Not 0: a fault of the code, and a warning of the report.
    """

    drafter: str
    method: str
    rounds: int
    chain_tokens: int
    tree_tokens: int
    rounds_with_chain: int
    rounds_not_below_chain: int
    rounds_below_chain: int

    @property
    def promise(self) -> str:
        """The counts in words; the two numbers are equal unless decoding is broken."""
        return (
            f"{self.drafter} {self.method}: accepted no less than the chain in {self.rounds_not_below_chain} of the "
            f"{self.rounds_with_chain} rounds in which it holds the chain"
        )


class EvalReport(_Data):
    """Results, and all that must be known to repeat them."""

    schema_version: int = SCHEMA_VERSION
    definition: str = TAU_DEFINITION
    target: dict[str, Any]
    drafters: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    versions: dict[str, str]
    results: list[MethodResult]
    comparisons: list[Comparison]
    tree_rounds: list[TreeRounds]
    warnings: list[str]

    def find(self, method: str, drafter: str | None = None, prompt_set: str = ALL_SETS) -> MethodResult:
        """The result of one method, one drafter and one prompt set ("all": over all sets).

        Raises:
            KeyError: there is none.
        """
        for result in self.results:
            if (result.method, result.drafter, result.prompt_set) == (method, drafter, prompt_set):
                return result
        raise KeyError((method, drafter, prompt_set))

    @property
    def divergences(self) -> int:
        """Outputs that left the target's own, near-ties not counted, over all methods (each prompt set once)."""
        return sum(
            len(r.equality.divergences) for r in self.results if r.equality is not None and r.prompt_set == ALL_SETS
        )

    @property
    def rounds_below_chain(self) -> int:
        """Rounds in which a tree that holds the chain accepted less: 0 unless decoding is broken, see `warnings`."""
        return sum(found.rounds_below_chain for found in self.tree_rounds)

    def write(self, path: Path) -> None:
        """JSON file, replaced as a whole; folders are made. Raises UserError if it cannot be written."""
        require_writable_file(path)
        write_text_atomic(path, json.dumps(self.model_dump(mode="json"), indent=2) + "\n")

    def print(self) -> None:
        """Table on the terminal."""
        from draftline.evaluate.table import print_report

        print_report(self)
