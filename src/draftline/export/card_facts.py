"""The facts of an export's origin, checked before they are believed: an export, or a report, may be anybody's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from draftline.errors import UserError


class _Told(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Result(_Told):
    """One acceptance number of `draftline eval`."""

    prompt_set: str
    method: str
    acceptance_length: float | None = None
    interval: list[float] | None = Field(default=None, min_length=2, max_length=2)
    n_prompts: int


class _Vocabulary(BaseModel):
    """How a draft vocabulary came about."""

    model_config = ConfigDict(strict=True)

    tokens: int
    used: int = Field(alias="used in the data")


class _Facts(_Told):
    """See `pipeline/provenance.py`, which writes them. All may be missing; others are kept as they are."""

    target: str | None = None
    target_revision: str | None = None
    target_architectures: list[str] | None = None
    target_is_recurrent: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    recipe: dict[str, Any] | None = None
    objective: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    draft_vocabulary: _Vocabulary | None = None
    committed_rows: int | None = None
    validation_acceptance: float | None = None
    evaluation: list[_Result] | None = None
    evaluation_definition: str | None = None
    mended: list[str] | None = None


def checked_facts(facts: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same facts, of the kinds that whoever tells them relies on.

    Raises:
        UserError: names the first that is not.
    """
    try:
        _Facts.model_validate(facts)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UserError(f"{field}: {first['msg']}", where=where, mend="repair or remove it") from error
    return {name: value for name, value in facts.items() if value is not None or name not in _Facts.model_fields}
