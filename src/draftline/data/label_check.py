"""How often the label is the target's own first choice: whether the answers are the target's words at all.

A drafter learns what the target would say. Answers that the target generated greedily agree nearly everywhere; sampled
ones less, and someone else's words clearly less. Imports torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from draftline.data.choice import chosen_samples
from draftline.data.manifest import LOW_LABEL_SHARE, MANIFEST_NAME, DatasetManifest, LabelCheck
from draftline.data.shards import Sample, TokenDataset
from draftline.data.storage import write_text_atomic
from draftline.errors import UserError
from draftline.target.selftest import head_logits
from draftline.target.shape_plans import no_shape_plans

if TYPE_CHECKING:
    from draftline.target.load import LoadedTarget

POSITIONS_AT_ONCE = 512


def check_labels(path: Path, target: LoadedTarget, *, n_samples: int, seed: int = 0) -> LabelCheck:
    """Look at some samples of the prepared folder `path`, and write the result into its manifest.

    Args:
        n_samples: how many, chosen by a seeded order; all if there are fewer.

    Raises:
        UserError: no such data, or ids that the target does not know.
    """
    if n_samples < 1:
        raise UserError(f"{n_samples} samples to check labels on", mend="give at least 1")
    data = TokenDataset.open(path)
    if data.manifest.vocab_size > target.vocab_size:
        raise UserError(
            f"prepared with a tokenizer of {data.manifest.vocab_size} tokens, the target knows {target.vocab_size}",
            where=str(path),
            mend="name the target that the data was prepared for",
        )
    chosen = chosen_samples(len(data), n_samples, seed)
    counts = [own_labels(target, data.sample(i)) for i in chosen]
    own, total = (sum(column) for column in zip(*counts, strict=True))
    if total == 0:
        raise UserError("no label stands behind another token", where=str(path), mend="prepare other data")
    check = LabelCheck(target=target.fingerprint, n_samples=len(chosen), n_labels=total, n_own=own, seed=seed)
    store_label_check(path, data.manifest, check)
    return check


@torch.inference_mode()
@no_shape_plans()
def own_labels(target: LoadedTarget, sample: Sample) -> tuple[int, int]:
    """Labels that are the argmax of the target's logits one position before, and all labels of the sample."""
    ids_T = torch.from_numpy(sample.input_ids.astype(np.int64)).to(target.device)
    hidden_TH = target.decoder(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
    labels = torch.from_numpy(np.flatnonzero(sample.loss_mask[1:])).to(target.device)
    own = 0
    for places in labels.split(POSITIONS_AT_ONCE):
        best = head_logits(target.head, hidden_TH[places]).argmax(dim=-1)
        own += int((best == ids_T[places + 1]).sum())
    return own, len(labels)


def store_label_check(path: Path, manifest: DatasetManifest, check: LabelCheck) -> None:
    """Write the manifest anew with this result; the data and its fingerprint stay."""
    changed = manifest.model_copy(update={"label_check": check})
    write_text_atomic(path / MANIFEST_NAME, changed.model_dump_json(indent=2) + "\n")


def label_lines(check: LabelCheck) -> list[str]:
    """The result in words, with a warning where the labels are hardly the target's."""
    line = (
        f"labels that are the target's own first choice: {check.share:.1%} "
        f"of {check.n_labels} in {check.n_samples} samples"
    )
    if check.share >= LOW_LABEL_SHARE:
        return [line]
    return [
        line,
        f"  warning: below {LOW_LABEL_SHARE:.0%}; let the target answer the prompts itself (`draftline regenerate`)",
    ]
