"""The append-only file of answers, which a killed run picks up again.

`answers.jsonl` holds one answer a line, `answers.rejected.jsonl` the prompts that gave none and why,
`answers.manifest.json` the settings. A batch is in the file as a whole, or up to a torn last line that the next run
cuts off; each prompt id stands in exactly one of the two files once the run is through.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from draftline.data.storage import disk_errors, sync_file, write_text_atomic
from draftline.errors import UserError

_FORMAT = "draftline-answers"
SCHEMA_VERSION = 1


class AnswerLog:
    """Answers on disk. Use as a context manager; only one process at a time may hold one.

    Args:
        output: the `.jsonl` file.
        retry_rejected: forget what earlier runs rejected, so that it is asked again.

    Raises:
        UserError: another process holds it, it was not written by `regenerate`, or it is damaged before its last line.

    Attributes:
        answered: ids that have an answer, and whether that was cut.
        rejected: ids that have none, and why.
        new_answers, new_cut: answers of this run, and how many of them were cut.
        new_rejected: rejects of this run, by reason.
    """

    def __init__(self, output: Path, *, retry_rejected: bool = False) -> None:
        if output.suffix != ".jsonl":
            raise UserError("the output must be a .jsonl file", where=str(output), mend="name it answers.jsonl")
        self.output = output
        self.rejected_path = output.with_name(f"{output.stem}.rejected.jsonl")
        self.manifest_path = output.with_name(f"{output.stem}.manifest.json")
        self.answered: dict[str, bool] = {}
        self.rejected: dict[str, str] = {}
        self.new_answers = 0
        self.new_cut = 0
        self.new_rejected: Counter[str] = Counter()
        self._held: list[tuple[str, str]] = []
        self._retry_rejected = retry_rejected
        self._answers: BinaryIO | None = None
        self._rejects: BinaryIO | None = None

    def __enter__(self) -> Self:
        with disk_errors(self.output):
            self.output.parent.mkdir(parents=True, exist_ok=True)
            self._answers = self.output.open("a+b")
            self._rejects = self.rejected_path.open("a+b")
        try:
            fcntl.flock(self._answers, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._recover()
        except BlockingIOError:
            self._close()
            raise UserError("another process is writing to it", where=str(self.output)) from None
        except UserError:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not isinstance(error, UserError):  # such as a full disk
                self.append([], [])
        finally:
            for path in (self.rejected_path, self.output):
                if path.is_file() and path.stat().st_size == 0:
                    path.unlink()
            with disk_errors(self.output):
                self._close()

    def _close(self) -> None:
        for file in (self._answers, self._rejects):
            if file is not None:
                file.close()

    def settle(self, settings: Mapping[str, Any]) -> None:
        """Record the settings of a new run; refuse to go on with other ones.

        Settings whose value is None are compared only once they are known.

        Raises:
            UserError: naming the setting, the old and the new value.
        """
        before = self._manifest().get("settings", {})
        for name, value in settings.items():
            old = before.get(name)
            if old is not None and value is not None and old != value:
                raise UserError(
                    f"this file was begun with {name} {old}, now it is {value}",
                    where=str(self.output),
                    mend="use the same settings, or write to another file",
                )
        if self._retry_rejected and self._rejects is not None:
            self._rejects.truncate(0)
            self._retry_rejected = False
        known = {name: value for name, value in settings.items() if value is not None}
        self._write_manifest(before | known, self._manifest().get("result"))

    def describe(self, told: Mapping[str, Any]) -> None:
        """Record what may differ from run to run, such as the servers asked."""
        content = self._manifest()
        self._write_manifest(content.get("settings", {}), content.get("result"), told)

    def hold_reject(self, name: str, reason: str) -> None:
        """Reject a prompt that was never asked; it is written with the next batch."""
        self._held.append((name, reason))

    def close_with(self, result: Mapping[str, Any]) -> None:
        """Record the outcome of the run beside its settings."""
        self._write_manifest(self._manifest().get("settings", {}), result)

    def append(self, answers: Sequence[Mapping[str, Any]], rejects: Sequence[tuple[str, str]]) -> None:
        """Write one batch and wait until it is on the disk.

        Args:
            answers: records with `id` and `answer_cut`.
            rejects: (id, reason).

        Raises:
            UserError: the disk is full, or a file was removed meanwhile.
        """
        assert self._answers is not None and self._rejects is not None
        rejects, self._held = [*self._held, *rejects], []
        self._write(self._rejects, [{"id": name, "reason": reason} for name, reason in rejects])
        self._write(self._answers, answers)
        self.rejected.update(rejects)
        self.new_rejected.update(reason for _, reason in rejects)
        self.answered.update((record["id"], record["answer_cut"]) for record in answers)
        self.new_answers += len(answers)
        self.new_cut += sum(record["answer_cut"] for record in answers)

    def _write(self, file: BinaryIO, records: Sequence[Mapping[str, Any]]) -> None:
        if not records:
            return
        if not os.fstat(file.fileno()).st_nlink:
            raise UserError("was removed while it was written", where=str(file.name), mend="start again")
        with disk_errors(self.output):
            file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode())
            file.flush()
            os.fsync(file.fileno())

    def _recover(self) -> None:
        assert self._answers is not None and self._rejects is not None
        known = self.manifest_path.is_file()
        if not known and self.output.stat().st_size:
            raise UserError("was not written by `regenerate`", where=str(self.output), mend="choose another file")
        for line in _whole_lines(self._answers, self.output):
            self.answered[line["id"]] = line.get("answer_cut") is True
        if not self.answered:  # the answers were deleted or never begun: nothing of an earlier run counts
            self._rejects.truncate(0)
            self.manifest_path.unlink(missing_ok=True)
        for line in _whole_lines(self._rejects, self.rejected_path):
            self.rejected[line["id"]] = str(line.get("reason"))
        if self._retry_rejected:
            self.rejected.clear()
        sync_file(self.output.parent)

    def _manifest(self) -> dict[str, Any]:
        if not self.manifest_path.is_file():
            return {}
        try:
            content = json.loads(self.manifest_path.read_bytes())
        except (ValueError, RecursionError):
            content = None
        is_ours = isinstance(content, dict) and content.get("format") == _FORMAT
        if not is_ours or not isinstance(content.get("settings", {}), dict):
            raise UserError("not the manifest of `regenerate`", where=str(self.manifest_path), mend="use another file")
        if content.get("schema_version") != SCHEMA_VERSION:
            raise UserError(
                f"schema version {content.get('schema_version')}, this draftline reads {SCHEMA_VERSION}",
                where=str(self.manifest_path),
                mend="write to another file",
            )
        return content

    def _write_manifest(self, settings: Mapping[str, Any], result: Any, told: Mapping[str, Any] | None = None) -> None:
        told = self._manifest().get("told") if told is None else told
        content = {"format": _FORMAT, "schema_version": SCHEMA_VERSION, "settings": settings, "result": result}
        content |= {"told": told} if told else {}
        write_text_atomic(self.manifest_path, json.dumps(content, indent=2) + "\n")


def _whole_lines(file: BinaryIO, path: Path) -> list[dict[str, Any]]:
    """The records of a file; a torn last line is cut off, so that what is appended next begins a line of its own."""
    file.seek(0)
    records, end = [], 0
    for number, line in enumerate(file, start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = json.loads(line)
            records.append({"id": str(record["id"]), **{k: record[k] for k in ("answer_cut", "reason") if k in record}})
        except (ValueError, TypeError, KeyError, RecursionError):
            raise UserError("damaged line", where=f"{path}:{number}", mend="write to another file") from None
        end += len(line)
    file.truncate(end)
    return records
