"""A pruned draft vocabulary for an export: which tokens are kept, and their rows of the target's head.

The drafter borrows the target's frozen head, so it is trained over the whole vocabulary and pruned afterwards: among
the kept tokens its order stays as it is, and a round only loses where the target writes another token.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from draftline.config.drafter_spec import DrafterSpec
from draftline.config.load import load_config
from draftline.config.schema import TargetConfig
from draftline.data.shards import TokenDataset
from draftline.errors import UserError
from draftline.target.remote.lender import load_lender


def prune_spec(spec: DrafterSpec, size: int, data: Path) -> DrafterSpec:
    """The spec with the `size` tokens that answers in a prepared folder use most; tokens that end text are always kept.

    Raises:
        UserError: a size that prunes nothing, data of another vocabulary, or a drafter that cannot be pruned.
    """
    where = "--draft-vocab-size"
    if spec.dflash2 is not None:
        raise UserError("a DFlash2 drafter drafts from the whole vocabulary", where=where, mend="leave it out")
    ends = spec.eos_token_id if isinstance(spec.eos_token_id, list) else [spec.eos_token_id]
    always = [token for token in ends if token is not None]
    if not len(always) < size < spec.vocab_size:
        raise UserError(
            f"{size} is not between {len(always) + 1} and {spec.vocab_size - 1}",
            where=where,
            mend="give how many of the target's tokens can be drafted",
        )
    dataset = TokenDataset.open(data)
    if dataset.manifest.vocab_size > spec.vocab_size:
        raise UserError(
            f"prepared with a tokenizer of {dataset.manifest.vocab_size} tokens, the drafter knows {spec.vocab_size}",
            where=str(data),
            mend="give data of this drafter's target",
        )
    kept = common_tokens(dataset, size, spec.vocab_size, always=always)
    return spec.model_copy(update={"draft_vocabulary": kept})


def common_tokens(dataset: TokenDataset, size: int, vocab_size: int, *, always: Iterable[int]) -> tuple[int, ...]:
    """The most frequent supervised tokens, rising; of equally frequent ones the lower ids."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for index in range(len(dataset)):
        sample = dataset.sample(index)
        counts += np.bincount(sample.input_ids[sample.loss_mask], minlength=vocab_size)
    counts[list(always)] = np.iinfo(np.int64).max
    order = np.argsort(-counts, kind="stable")
    return tuple(np.sort(order[:size]).tolist())


def head_rows(target: str, ids: tuple[int, ...]) -> torch.Tensor:
    """The target's head for these tokens, [D, H], in the dtype of its files; read without the target's layers.

    Raises:
        UserError: the target cannot be read, or its head has a bias, for which the format has no place.
    """
    head = load_lender(TargetConfig(model=target), torch.device("cpu")).head
    if head.bias_V is not None:
        raise UserError("the target's head has a bias, which a pruned head cannot hold", where=target)
    return head.weight_VH[torch.tensor(ids)]


def data_of_run(source: Path) -> Path:
    """The data that a run was trained on.

    Raises:
        UserError: not a run.
    """
    file = Path(source).expanduser() / "config.yaml"
    if not file.is_file():
        raise UserError("is no run, so its data are not known", where=str(source), mend="give them with --vocab-data")
    return load_config([file], []).data.path
