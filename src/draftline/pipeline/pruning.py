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
from draftline.drafter.spec import check_target
from draftline.errors import UserError
from draftline.target.facts import target_facts
from draftline.target.load import load_tokenizer, tokenizer_stop_ids
from draftline.target.remote.lender import load_lender


def prune_spec(spec: DrafterSpec, size: int, data: Path, *, text_ends: Iterable[int] = ()) -> tuple[DrafterSpec, int]:
    """The spec with the `size` tokens that answers in a prepared folder use most; tokens that end text are always kept.

    Args:
        text_ends: of the target, see `target_ends`; a drafter of others often names none.

    Returns:
        (spec, how many of the kept tokens the data use or end text): the others fill it up, lowest ids first.

    Raises:
        UserError: a size that prunes nothing, data of another vocabulary, or a drafter that cannot be pruned.
    """
    where = "--draft-vocab-size"
    if spec.dflash2 is not None:
        raise UserError("a DFlash2 drafter drafts from the whole vocabulary", where=where, mend="leave it out")
    ends = spec.eos_token_id if isinstance(spec.eos_token_id, list) else [spec.eos_token_id]
    always = {token for token in ends if token is not None} | set(text_ends)
    outside = sorted(token for token in always if not 0 <= token < spec.vocab_size)
    if outside:
        what = f"the end-of-text token {outside[0]} is outside the drafter's vocabulary of {spec.vocab_size}"
        raise UserError(what, where=where, mend="repair eos_token_id")
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
    kept, used = common_tokens(dataset, size, spec.vocab_size, always=always)
    return spec.model_copy(update={"draft_vocabulary": kept}), used


def common_tokens(
    dataset: TokenDataset, size: int, vocab_size: int, *, always: Iterable[int]
) -> tuple[tuple[int, ...], int]:
    """The most frequent supervised tokens, rising (of equally frequent ones the lower ids); how many occur or end text.

    Raises:
        UserError: a sample holds a token outside the vocabulary.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for index in range(len(dataset)):
        sample = dataset.sample(index)
        ids = sample.input_ids[sample.loss_mask]
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            what = f"sample {index} holds token {ids.max()}, the drafter knows {vocab_size}"
            raise UserError(what, where="--vocab-data", mend="give data of this drafter's target")
        counts += np.bincount(ids, minlength=vocab_size)
    counts[list(always)] = np.iinfo(np.int64).max
    kept = np.sort(np.argsort(-counts, kind="stable")[:size])
    return tuple(kept.tolist()), int((counts[kept] > 0).sum())


def target_ends(target: TargetConfig) -> frozenset[int]:
    """Tokens that end an answer, of the target's configuration, tokenizer and chat template.

    Raises:
        UserError: they cannot be read.
    """
    return frozenset((*target_facts(target).eos_token_ids, *tokenizer_stop_ids(load_tokenizer(target))))


def head_rows(spec: DrafterSpec, target: TargetConfig) -> torch.Tensor:
    """The target's head for the tokens of a pruned spec, [D, H], in fp32; read without the target's layers.

    Raises:
        UserError: the target cannot be read, is not the drafter's, or its head has a bias, for which the format has no
            place.
    """
    where = f"target {target.model}"
    check_target(spec, target_facts(target), where=where)
    head = load_lender(target, torch.device("cpu")).head
    if head.bias_V is not None:
        raise UserError("the target's head has a bias, which a pruned head cannot hold", where=where)
    return head.weight_VH[torch.tensor(spec.draft_vocabulary)]


def data_of_run(source: Path) -> Path:
    """The data that a run was trained on.

    Raises:
        UserError: not a run.
    """
    file = Path(source).expanduser() / "config.yaml"
    if not file.is_file():
        raise UserError("is no run, so its data are not known", where=str(source), mend="give them with --vocab-data")
    return load_config([file], []).data.path
