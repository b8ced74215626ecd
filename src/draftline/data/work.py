"""The part of `prepare` that many processes share: raw rows in, samples and rejections out, nothing remembered.

    consumes  chunks of raw rows of one source
    produces  one outcome a row, in the same order, and the tokens of all its samples end to end

What a row becomes depends on that row alone, so any number of processes gives the same outcomes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from draftline.data.chat import ChatEncoder, Draft, EncodedArrays, RejectedError
from draftline.data.conversations import parse_raw, row_name
from draftline.data.decontaminate import REASON, Decontaminator
from draftline.data.messages import BadRowError, Message, Row, Turns, canonical_json, require_answer
from draftline.data.template import ChatTemplate
from draftline.data.word_memo import Tokenized, WordMemo

TEXTS_AT_ONCE = 128
MAX_DAYS = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """Raw rows of one source with their line numbers.

    Attributes:
        source: index of the source.
        rows: (line, bytes of a JSON line or an object).
    """

    source: int
    rows: list[tuple[int, Any]]


class Outcome(NamedTuple):
    """What became of one row.

    Attributes:
        line: of the row in its source.
        is_bad: the row is malformed, which is for the user to mend; otherwise a rejection is by rule.
        reason, detail: of the rejection; None for a sample.
        name: the row's own id or a hash of its content; empty if it could not be read.
        content: hash of the conversation, for duplicates.
        opening: hash of what comes before the first answer, for the split.
        category: the row's own label.
        n_tokens, n_prompt_tokens, n_turns, turns_left_out, is_cut: of the sample.
    """

    line: int
    is_bad: bool
    reason: str | None
    detail: str | None
    name: str = ""
    content: bytes = b""
    opening: bytes = b""
    category: str | None = None
    n_tokens: int = 0
    n_prompt_tokens: int = 0
    n_turns: int = 0
    turns_left_out: int = 0
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """Outcomes of a chunk, and the samples' tokens end to end.

    Attributes:
        source: index of the source.
        outcomes: one a row.
        ids: int32 [sum of n_tokens].
        mask: bool, alike.
    """

    source: int
    outcomes: list[Outcome]
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class WorkSpec:
    """All that decides what a row becomes.

    Attributes:
        max_prompt_tokens: samples whose first answer begins later are rejected; None: no limit of its own.
        min_supervised_tokens: samples with fewer are rejected.
        split_seed: of the hash of openings.
    """

    template: ChatTemplate
    max_tokens: int
    turns: Turns
    max_prompt_tokens: int | None = None
    min_supervised_tokens: int = 0
    split_seed: int = 0
    decontaminator: Decontaminator | None = None


@dataclass(slots=True)
class _Pending:
    """A row whose text waits to be tokenized."""

    place: int
    row: Row
    text: str
    draft: Draft | None  # None: the answer's ids were given, and `text` is what was served


class RowWorker:
    """Turns chunks into results; see the module."""

    def __init__(self, spec: WorkSpec) -> None:
        self._spec = spec
        self._encoder = ChatEncoder(spec.template, max_tokens=spec.max_tokens, turns=spec.turns)
        self._encoder_of_day: dict[date, ChatEncoder] = {}
        self._words = WordMemo(spec.template.tokenizer, spec.template.tokenize_many, spec.template.token_bytes)

    def work(self, chunk: Chunk) -> ChunkResult:
        """The outcomes of one chunk."""
        outcomes: list[Outcome] = []
        pending: list[_Pending] = []
        for line, raw in chunk.rows:
            outcome, waiting = self._read(line, raw, len(outcomes))
            outcomes.append(outcome)
            if waiting is not None:
                pending.append(waiting)
        samples: list[EncodedArrays] = []
        for start in range(0, len(pending), TEXTS_AT_ONCE):
            self._tokenize(pending[start : start + TEXTS_AT_ONCE], outcomes, samples)
        ids = np.concatenate([np.empty(0, np.int32), *(sample.ids for sample in samples)])
        mask = np.concatenate([np.empty(0, np.bool_), *(sample.mask for sample in samples)])
        return ChunkResult(chunk.source, outcomes, ids, mask)

    def _read(self, line: int, raw: Any, place: int) -> tuple[Outcome, _Pending | None]:
        try:
            row = parse_raw(raw)
        except BadRowError as error:
            return Outcome(line, True, error.reason, str(error)), None
        content = canonical_json(row.messages, row.tools)
        known = Outcome(line, False, None, None, row_name(row, content), _digest(content), category=row.category)
        try:
            require_answer(row.messages)
        except BadRowError as error:
            return known._replace(is_bad=True, reason=error.reason, detail=str(error)), None
        known = known._replace(opening=self._opening(row.messages))
        try:
            self._refuse_evaluation(row.messages)
            return known, self._draft(place, row)
        except RejectedError as error:
            return known._replace(reason=error.reason, detail=str(error)), None

    def _refuse_evaluation(self, messages: Sequence[Message]) -> None:
        words = self._spec.decontaminator.find(messages) if self._spec.decontaminator else None
        if words is not None:
            raise RejectedError(REASON, f"shares these words with an evaluation prompt: {words[:200]}")

    def _draft(self, place: int, row: Row) -> _Pending:
        encoder = self._encoder_on(row.rendered_on)
        if row.answer_token_ids is not None:
            text = encoder.draft_generated(row.messages, row.tools, row.answer_token_ids)
            return _Pending(place, row, text, None)
        turns: Turns = "last" if row.turns == "last" else encoder.turns
        draft = encoder.draft(row.messages, row.tools, turns=turns, answer_cut=row.answer_cut)
        return _Pending(place, row, draft.text, draft)

    def _encoder_on(self, day: date | None) -> ChatEncoder:
        """The encoder for a row whose template was told this day; None: it is not known, or does not matter."""
        if day is None or not self._spec.template.reads_date:
            return self._encoder
        if day not in self._encoder_of_day:
            if len(self._encoder_of_day) >= MAX_DAYS:
                self._encoder_of_day.clear()
            template = self._spec.template.on(day)
            self._encoder_of_day[day] = ChatEncoder(template, max_tokens=self._spec.max_tokens, turns=self._spec.turns)
        return self._encoder_of_day[day]

    def _tokenize(self, pending: Sequence[_Pending], outcomes: list[Outcome], samples: list[EncodedArrays]) -> None:
        """Tokens and masks of some rows; each becomes a sample or a rejection in its place."""
        tokenized = self._words.tokenize([item.text for item in pending])
        for item, tokens in zip(pending, tokenized, strict=True):
            known = outcomes[item.place]
            try:
                sample = self._settle(item, tokens)
                self._refuse_lengths(sample)
            except RejectedError as error:
                outcomes[item.place] = known._replace(reason=error.reason, detail=str(error))
                continue
            samples.append(sample)
            outcomes[item.place] = known._replace(
                n_tokens=len(sample.ids),
                n_prompt_tokens=sample.n_prompt_tokens,
                n_turns=sample.n_turns,
                turns_left_out=sample.turns_left_out,
                is_cut=item.row.answer_cut or sample.truncated,
            )

    def _settle(self, item: _Pending, tokens: Tokenized) -> EncodedArrays:
        if item.draft is not None:
            return self._encoder.settle(item.draft, tokens)
        prompt = tokens.ids.tolist()
        return self._encoder.settle_generated(prompt, item.row.answer_token_ids or (), item.row.prompt_hash)

    def _refuse_lengths(self, sample: EncodedArrays) -> None:
        limit, least = self._spec.max_prompt_tokens, self._spec.min_supervised_tokens
        if limit is not None and sample.n_prompt_tokens > limit:
            raise RejectedError("prompt too long", f"the prompt has {sample.n_prompt_tokens} tokens, at most {limit}")
        if least and int(sample.mask.sum()) < least:
            raise RejectedError("answer too short", f"fewer than {least} supervised tokens")

    def _opening(self, messages: Sequence[Message]) -> bytes:
        roles = [message["role"] for message in messages]
        opening = list(messages[: roles.index("assistant")])
        return _digest(f"split {self._spec.split_seed} ".encode() + canonical_json(opening, None))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
