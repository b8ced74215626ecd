"""Prompts, their split, the target's answers to them, and the samples that these become."""

from __future__ import annotations

import gzip
import json
import shutil
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftline.config.schema import TargetConfig
from draftline.data.chat import ChatEncoder
from draftline.data.conversations import Tally, read_conversations
from draftline.data.marking import RejectedError
from draftline.data.prepare import load_template
from draftline.data.prompts import builtin_prompts, split_prompts
from draftline.data.regenerate import RegenerateReport, regenerate
from draftline.data.shards import Sample
from draftline.errors import UserError
from settings import Settings

Record = dict[str, Any]


@dataclass(frozen=True)
class PromptFiles:
    """Sources, and where what is made of them is kept.

    Attributes:
        gsm8k, arena: JSON lines of `id` and `messages`.
        folder: for prompts and answers.
        kept_answers: the answers, compressed, to be kept for another call.
    """

    gsm8k: Path
    arena: Path
    folder: Path
    kept_answers: Path

    @property
    def answers(self) -> Path:
        """JSON lines as `draftline regenerate` writes them."""
        return self.folder / "answers.jsonl"

    @property
    def more_answers(self) -> Path:
        """Likewise, the drawn ones of the long run."""
        return self.folder / "more-answers.jsonl"


def split_all(files: PromptFiles, settings: Settings) -> dict[str, list[Record]]:
    """Prompts by role: `train`, `dev`, and the kept sets. GSM8K keeps its last ones, the others what a hash chooses."""
    gsm8k = _read(files.gsm8k)
    kept_from = len(gsm8k) - settings.gsm8k_kept
    dev_from = kept_from - settings.dev_kept
    if dev_from < 1:
        raise UserError(f"{len(gsm8k)} prompts are too few", where=str(files.gsm8k), mend="give the whole file")
    train_arena, arena = split_prompts(files.arena, held_out=settings.arena_kept)
    train_general, general = split_prompts(builtin_prompts(), held_out=settings.general_kept)
    most = settings.gsm8k_train
    return {
        "train": [*gsm8k[: min(dev_from, most)], *train_arena[: most // 2], *train_general[: most // 2]],
        "dev": gsm8k[dev_from:kept_from],
        "gsm8k": gsm8k[kept_from:],
        "arena": arena,
        "general": general,
    }


def answer_all(files: PromptFiles, settings: Settings, target: TargetConfig, device: str) -> Record:
    """Lets the target answer all prompts (or takes the kept answers), and keeps them compressed."""
    if files.kept_answers.is_file() and not files.answers.is_file():
        _unpack(files.kept_answers, files.answers)
        return {"from": "kept answers", "answers": sum(1 for _ in files.answers.open("rb"))}
    prompts = files.folder / "prompts.jsonl"
    _write_prompts(prompts, split_all(files, settings))
    report = _answer(prompts, files.answers, settings, target, device)
    temporary = files.kept_answers.with_suffix(".tmp")
    with files.answers.open("rb") as plain, gzip.open(temporary, "wb", compresslevel=6) as packed:
        shutil.copyfileobj(plain, packed)
    temporary.rename(files.kept_answers)
    return {
        "from": "the target",
        "answers": report.out_rows,
        "rejected": report.rejected_by_reason,
        "cut": report.n_answer_cut,
        "new_tokens": report.new_tokens,
        "kept_bytes": files.kept_answers.stat().st_size,
    }


def _unpack(archive: Path, path: Path) -> None:
    """All of the archive or nothing: gzip tells at its end whether it was whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    try:
        with gzip.open(archive, "rb") as packed, temporary.open("wb") as plain:
            shutil.copyfileobj(packed, plain)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what, mend = f"is no whole archive: {error}", "put a whole one back, or delete it to answer again"
    except OSError as error:
        what, mend = f"cannot be unpacked: {error}", f"make room and see who may write to {path.parent}"
    else:
        temporary.rename(path)
        return
    temporary.unlink(missing_ok=True)
    raise UserError(what, where=str(archive), mend=mend)


def answer_more(files: PromptFiles, settings: Settings, target: TargetConfig, device: str) -> None:
    """Draws further answers to the training prompts, for a training that would see the greedy ones too often."""
    of_gsm8k, rows = {row["id"] for row in _read(files.gsm8k)}, []
    for row in split_all(files, settings)["train"]:
        count = settings.more_gsm8k if row["id"] in of_gsm8k else settings.more_answers
        rows += [row | {"id": f"{row['id']}#{number}"} for number in range(count)]
    prompts = files.folder / "more-prompts.jsonl"
    _write_prompts(prompts, {"train": rows})
    _answer(prompts, files.more_answers, settings, target, device, settings.more_temperature)


def _answer(
    prompts: Path, output: Path, settings: Settings, target: TargetConfig, device: str, temperature: float = 0.0
) -> RegenerateReport:
    return regenerate(
        str(prompts),
        output,
        target=target,
        device=device,
        max_new_tokens=settings.max_new_tokens,
        batch_size=settings.batch,
        temperature=temperature,
        max_prompt_tokens=settings.max_prompt_tokens,
        progress=False,
    )


def load_samples(files: PromptFiles, settings: Settings, target: TargetConfig) -> dict[str, list[Sample]]:
    """Answered prompts as samples, by role, in the order of their ids."""
    role_of = {row["id"]: role for role, rows in split_all(files, settings).items() for row in rows}
    return _samples_of(files.answers, role_of, settings, target)


def load_more(files: PromptFiles, settings: Settings, target: TargetConfig) -> list[Sample]:
    """The drawn answers as samples."""
    role_of = {row["id"]: "train" for row in _read(files.more_answers)}
    return _samples_of(files.more_answers, role_of, settings, target)["train"]


def _samples_of(
    answers: Path, role_of: dict[str, str], settings: Settings, target: TargetConfig
) -> dict[str, list[Sample]]:
    encoder = ChatEncoder(
        load_template(target), max_tokens=settings.max_prompt_tokens + settings.max_new_tokens, turns="last"
    )
    found: dict[str, list[Sample]] = {role: [] for role in ("train", "dev", "gsm8k", "arena", "general")}
    rejected: Counter[str] = Counter()
    for row in read_conversations([str(answers)], Tally(skip_bad_rows=False)):
        if row.id not in role_of or row.answer_token_ids is None:
            continue
        try:
            sample = encoder.encode_generated(row.messages, None, row.answer_token_ids, prompt_hash=row.prompt_hash)
        except RejectedError as error:
            rejected[error.reason] += 1
            continue
        ids, mask = np.array(sample.input_ids, np.int32), np.array(sample.loss_mask, np.bool_)
        found[role_of[row.id]].append(Sample(row.id, ids, mask, answer_cut=row.answer_cut))
    if rejected:
        print(f"answers that give no sample: {dict(rejected)}", flush=True)
    return {role: sorted(samples, key=lambda s: s.sample_id) for role, samples in found.items()}


def describe(samples: dict[str, list[Sample]]) -> Record:
    """Samples, tokens and supervised tokens by role."""
    return {
        role: {
            "samples": len(members),
            "tokens": sum(len(s.input_ids) for s in members),
            "supervised_tokens": sum(int(s.loss_mask.sum()) for s in members),
            "cut": sum(s.answer_cut for s in members),
        }
        for role, members in samples.items()
    }


def _read(path: Path) -> list[Record]:
    return [{"id": row.id, "messages": row.messages} for row in read_conversations([str(path)], Tally(False))]


def _write_prompts(path: Path, parts: dict[str, list[Record]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for role, rows in parts.items():
            for row in rows:
                file.write(json.dumps(row | {"category": role}, ensure_ascii=False) + "\n")
