"""Sizes of the experiment: as run on a GPU, and tiny."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# Sets that are decoded in the end; `dev` chooses (learning rates, the recommended recipe) and is never reported.
KEPT_SETS = ("gsm8k", "arena", "general")


@dataclass(frozen=True)
class Settings:
    """Everything that decides a figure beside the code.

    Attributes:
        gsm8k_train: most training prompts of GSM8K; of the others at most half as many each.
        gsm8k_kept, arena_kept, general_kept, dev_kept: prompts kept from training; dev ones are GSM8K's, too.
        max_prompt_tokens: longer prompts are left out.
        batch: prompts answered together.
        row_tokens: tokens of a training row.
        block_divisor, anchor_divisor: of every recipe's block and anchors; 1 but for tiny runs.
        num_layers: of the drafter; as many taps.
        head_chunk_positions: large, for fewer launches: the head is small here.
        rates: learning rates tried, the same for each side.
        main_s, ablation_s, tune_s: training seconds of one run.
        marks: shares of the main runs at which acceptance is measured.
        budget: of the tree that stands beside the chain everywhere.
        curve_budgets: trees of the main runs, walked on the first `curve_prompts` of gsm8k.
        decode_prompts: of gsm8k, decoded for real in the main runs; other_prompts: of each other kept set;
            mark_prompts: at each mark (gsm8k, the chain).
        peer_samples, peer_anchors: samples of a batch of the peer and its anchors in each (their product is ours).
        peer_tokens: every sample is padded to it.
        long_s: training seconds of the long run; long_marks: shares of it at which acceptance is measured.
        more_answers, more_gsm8k: further answers to each training prompt for the long run, drawn at
            `more_temperature`: to those of Arena-Hard and the project's own, and to those of GSM8K.
    """

    gsm8k_train: int = 5000
    gsm8k_kept: int = 300
    arena_kept: int = 100
    general_kept: int = 51
    dev_kept: int = 128
    max_prompt_tokens: int = 256
    max_new_tokens: int = 256
    batch: int = 1024
    row_tokens: int = 4096
    rows_captured_at_once: int = 4
    block_divisor: int = 1
    anchor_divisor: int = 1
    num_layers: int = 5
    head_chunk_positions: int = 8192
    mask_token_id: int = 16  # <empty_output>: no text of this model holds it
    window_tokens: int = 128
    rates: tuple[float, ...] = (6e-4, 1.5e-3, 3e-3)
    main_s: float = 40.0
    ablation_s: float = 10.0
    tune_s: float = 5.0
    marks: tuple[float, ...] = (0.2, 0.5, 1.0)
    budget: int = 64
    curve_budgets: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    curve_prompts: int = 128
    decode_prompts: int = 64
    other_prompts: int = 32
    mark_prompts: int = 48
    peer_samples: int = 8
    peer_anchors: int = 64
    peer_tokens: int = 512
    long_s: float = 200.0
    long_marks: tuple[float, ...] = (0.125, 0.25, 0.5, 1.0)
    more_answers: int = 6
    more_gsm8k: int = 1
    more_temperature: float = 0.8

    def as_figures(self) -> dict[str, Any]:
        """JSON-able."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}


TINY = Settings(
    gsm8k_train=12,
    gsm8k_kept=3,
    arena_kept=6,
    general_kept=2,
    dev_kept=2,
    max_prompt_tokens=200,
    max_new_tokens=12,
    batch=8,
    row_tokens=256,
    rows_captured_at_once=2,
    block_divisor=4,
    anchor_divisor=64,
    num_layers=2,
    head_chunk_positions=256,
    window_tokens=16,
    rates=(1e-3, 3e-3),
    main_s=2.0,
    ablation_s=0.5,
    tune_s=0.5,
    marks=(0.5, 1.0),
    budget=16,
    curve_budgets=(16, 64),
    curve_prompts=2,
    decode_prompts=2,
    other_prompts=1,
    mark_prompts=1,
    peer_samples=2,
    peer_anchors=4,
    peer_tokens=212,
    long_s=1.0,
    long_marks=(0.5, 1.0),
    more_answers=2,
)
