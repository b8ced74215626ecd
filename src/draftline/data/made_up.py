"""A data set of random tokens behind the interface of prepared data: for measurements, where no real one is needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from draftline.data.manifest import DatasetManifest
from draftline.data.shards import Sample, TokenDataset

PROMPT_SHARE = 0.25


class MadeUpDataset(TokenDataset):
    """Samples of equal length; the first quarter of each is a prompt, the rest is supervised. Needs no file.

    Args:
        n_samples: how many.
        sample_tokens: tokens of each, at least 2.
        vocab_size: ids are below it.
        unused: an id that never occurs (the drafter's mask token).
        seed: of the ids; a sample depends on the seed and its index alone.
    """

    def __init__(self, *, n_samples: int, sample_tokens: int, vocab_size: int, unused: int, seed: int = 0) -> None:
        self._vocab_size, self._unused, self._seed = vocab_size, unused, seed
        self._prompt = max(1, round(sample_tokens * PROMPT_SHARE))
        super().__init__(Path("made-up"), _manifest(n_samples, sample_tokens, self._prompt, vocab_size, seed), [])
        self.lengths = np.full(n_samples, sample_tokens, np.int32)
        self.supervised = np.full(n_samples, sample_tokens - self._prompt, np.int32)

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> Sample:
        """Sample `index`: ids int32 [T], mask bool [T]; always the same. Raises IndexError beyond the end."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        n_tokens = int(self.lengths[index])
        ids = np.random.default_rng((self._seed, index)).integers(0, self._vocab_size, n_tokens, dtype=np.int32)
        ids[ids == self._unused] = (self._unused + 1) % self._vocab_size
        return Sample(f"made-up-{index}", ids, np.arange(n_tokens) >= self._prompt)

    def count_token(self, token_id: int) -> int:
        """How often a token stands in the data; goes through all samples."""
        return sum(int(np.count_nonzero(self.sample(i).input_ids == token_id)) for i in range(len(self)))


def _manifest(n_samples: int, sample_tokens: int, prompt: int, vocab_size: int, seed: int) -> DatasetManifest:
    return DatasetManifest(
        tokenizer_fingerprint=f"made up {n_samples} x {sample_tokens}, seed {seed}",
        template_hash="made up",
        vocab_size=vocab_size,
        max_tokens=sample_tokens,
        n_samples=n_samples,
        n_tokens=n_samples * sample_tokens,
        n_supervised=n_samples * (sample_tokens - prompt),
        shards=(),
    )
