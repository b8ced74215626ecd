"""Mixing sources by weight: as many samples as can be had with exactly those shares, none twice.

The rows of all sources are prepared first, because how many of them give a sample is not known before. Then, of each
part of the split and each source, the samples with the lowest seeded hash of their id are copied on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from draftline.data.parts import Part, SampleFacts
from draftline.data.shards import TokenDataset
from draftline.errors import UserError

REASON = "left out by the mix"


def mixed_counts(available: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Samples to take of each source: the largest total that all sources can serve by their weights.

    Fractions of a sample go to the largest remainders, to the first source among equals. A weight is the decimal number
    that was written: 0.3 is 3/10, not the binary number beside it, which would cost a sample.
    """
    shares = [Fraction(str(weight)) for weight in weights]
    shares = [share / sum(shares) for share in shares]
    total = min(int(n / share) for n, share in zip(available, shares, strict=True))
    exact = [total * share for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return [min(count, n) for count, n in zip(counts, available, strict=True)]


def copy_mixed(
    staged: Path, before: Part, after: Part, *, names: Sequence[str], weights: Sequence[float], seed: int
) -> int:
    """Copy the chosen samples of a finished part in folder `staged` into the part `after`, in order.

    Args:
        before: the part that was finished.
        names: of the sources, for messages.

    Returns:
        How many were left out.

    Raises:
        UserError: a source has no sample in this part.
    """
    data = TokenDataset.open(staged, verify=False)
    sources = np.asarray(before.sources)
    available = np.bincount(sources, minlength=len(names)).tolist()
    for name, n in zip(names, available, strict=True):
        if n == 0:
            raise UserError(f"it gave no sample for the {before.name} part, so nothing can be mixed", where=name)
    counts = mixed_counts(available, weights)
    ranks = np.array([_rank(data.sample_id(i), seed) for i in range(len(data))], np.uint64)
    chosen = np.sort(np.concatenate([_lowest(ranks, sources == s, n) for s, n in enumerate(counts)]))
    for i in chosen.tolist():
        sample = data.sample(i)
        facts = SampleFacts(
            source=before.sources[i],
            n_prompt_tokens=before.prompts[i],
            n_turns=before.turns[i],
            turns_left_out=before.left_out[i],
            is_cut=sample.answer_cut,
            category=sample.category,
        )
        after.add(sample.sample_id, sample.input_ids, sample.loss_mask, facts)
    return len(data) - len(chosen)


def _lowest(ranks: npt.NDArray[np.uint64], among: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.int64]:
    places = np.flatnonzero(among)
    return places[np.argsort(ranks[places], kind="stable")[:count]]


def _rank(name: str, seed: int) -> int:
    digest = hashlib.blake2b(f"draftline mix {seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
