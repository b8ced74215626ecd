"""A tokenizer together with its chat template: the one place where conversations become text and ids.

`regenerate`, `prepare` and the evaluation all render through it, so what the drafter is trained on is what the target
is served.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime, time
from functools import cached_property
from typing import Any

from draftline.data.messages import Message
from draftline.data.token_bytes import TokenBytes
from draftline.errors import UserError

FINGERPRINT_PREFIX = "ids:"
# Texts whose ids tell tokenizers apart that have the same tokens: case, marks, digits, blanks, code, scripts, signs.
_PROBES = (
    "The quick brown fox, it's 12345.678 and 9/10; HELLO WORLD hello world",
    "  two  blanks\ttab\n\n\nlines \r\n end  ",
    "def f(x):\n    return {'a': [x ** 2, x != 0]}  # \u00fcber na\u00efve",
    "e\u0301 \u00e9 \ufb01 \uff21 \u4f60\u597d\u4e16\u754c \u043f\u0440\u0438\u0432\u0435\u0442",
    "\u0645\u0631\u062d\u0628\u0627 \u0928\u092e\u0938\u094d\u0924\u0947 \U0001f600\U0001f468\u200d\U0001f469",
)

_DATE = "strftime_now"
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


class TemplateRefusedError(ValueError):
    """The chat template cannot render this conversation."""


class ChatTemplate:
    """Rendering and tokenizing with one tokenizer.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        template_kwargs: passed to the template at top level, for example `{"enable_thinking": False}`.
        stop_token_ids: ids that end an answer, besides the tokenizer's end token.

    Attributes:
        day: what templates that ask for the date are told; the day on which this was made, see `on`.

    Raises:
        UserError: no chat template, a broken one, or a tokenizer that cannot tell which characters a token covers.
    """

    def __init__(
        self, tokenizer: Any, *, template_kwargs: Mapping[str, Any] | None = None, stop_token_ids: Sequence[int] = ()
    ) -> None:
        name = str(getattr(tokenizer, "name_or_path", "") or "the tokenizer")
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the tokenizer has no chat template", where=name, mend="give an instruction-tuned target that has one"
            )
        if not getattr(tokenizer, "is_fast", False):
            raise UserError("a fast tokenizer is needed", where=name, mend="convert it to tokenizer.json")
        self.tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._stops = frozenset(stop_token_ids)
        self.day = datetime.now().date()
        self._refuse_broken_template(name)

    def on(self, day: date) -> ChatTemplate:
        """The same, on another day."""
        other = copy.copy(self)
        other.day = day
        return other

    @cached_property
    def reads_date(self) -> bool:
        """Whether the template asks for the date, so that the same conversation differs from day to day."""
        return _DATE in self._template or _DATE in self._template_with_tools

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Text of every special token, and its id."""
        tokens = {str(token): i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        named = self.tokenizer.all_special_tokens
        return tokens | dict(zip(named, self.tokenizer.convert_tokens_to_ids(named), strict=True))

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer, as far as known here."""
        end = self.tokenizer.eos_token_id
        return self._stops if end is None else self._stops | {end}

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches one special token; longer ones first."""
        texts = sorted(filter(None, self.special_ids), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def has_generation_tags(self, tools: Sequence[Mapping[str, Any]] | None) -> bool:
        """Whether the template marks what the assistant generates."""
        return bool(_GENERATION_TAG.search(self.tokenizer.get_chat_template(None, tools)))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, *, ask: bool = False
    ) -> str:
        """The conversation as text; with `ask`, up to where the assistant begins to write.

        Raises:
            TemplateRefusedError: the template raised.
        """
        if not self._renders_plainly:
            return str(self._apply(messages, tools, tokenize=False, add_generation_prompt=ask))
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusals():
            result: Any = render_jinja_template(  # (texts, masks); transformers annotates it as a text
                conversations=[list(messages)],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=self._template_with_tools if tools else self._template,
                add_generation_prompt=ask,
                **(self._render_kwargs | self._date),
            )
        return str(result[0][0])

    def generation_mask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[bool]:
        """The mask that `{% generation %}` tags give, one entry a token of the rendered text."""
        encoded = self._apply(messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        return [bool(flag) for flag in encoded["assistant_masks"]]

    def tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of rendered text, and the characters each token covers; the template writes all special tokens itself."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, truncation=False)
        return list(encoded["input_ids"]), list(encoded["offset_mapping"])

    def tokenize_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of rendered texts, as `tokenize` gives them; made in one call."""
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        # Not encode_batch_fast, which takes longer for long texts (tokenizers 0.23).
        return [encoding.ids for encoding in backend.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included and nothing tidied."""
        return str(self.tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False))

    @cached_property
    def fingerprint(self) -> str:
        """See `tokenizer_fingerprint`."""
        return tokenizer_fingerprint(self.tokenizer)

    @cached_property
    def template_hash(self) -> str:
        """Changes with the chat template or the arguments it is given."""
        content = json.dumps([self.tokenizer.chat_template, self._kwargs], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def token_bytes(self) -> TokenBytes | None:
        """What each token spells, where the tokenizer works on bytes and a token therefore spells the same anywhere."""
        return TokenBytes.of(self.tokenizer)

    @cached_property
    def _renders_plainly(self) -> bool:
        """Whether the tokenizer renders as all do, so that the bookkeeping around it may be done once for all rows."""
        from transformers import PreTrainedTokenizerBase

        return type(self.tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template

    @cached_property
    def _render_kwargs(self) -> dict[str, Any]:
        return {**self.tokenizer.special_tokens_map, **self._kwargs}

    @cached_property
    def _template(self) -> str:
        return str(self.tokenizer.get_chat_template(None, None))

    @cached_property
    def _template_with_tools(self) -> str:
        return str(self.tokenizer.get_chat_template(None, [{}]))

    def _refuse_broken_template(self, name: str) -> None:
        from jinja2 import TemplateSyntaxError

        try:
            self.render([{"role": "user", "content": "a"}], None)
        except TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is broken (line {error.lineno}: {error.message})",
                where=name,
                mend="mend chat_template.jinja, or `chat_template` in tokenizer_config.json, there",
            ) from None
        except TemplateRefusedError:  # it may want another conversation than this one
            return

    @property
    def _date(self) -> dict[str, Any]:
        return {"strftime_now": datetime.combine(self.day, time()).strftime} if self.reads_date else {}

    def _apply(self, messages: Sequence[Message], tools: Any, **options: Any) -> Any:
        tools = list(tools) if tools else None
        with _refusals():
            return self.tokenizer.apply_chat_template(
                list(messages), tools=tools, **options, **(self._kwargs | self._date)
            )


@contextmanager
def _refusals() -> Iterator[None]:
    """Whatever a template's own code trips over becomes TemplateRefusedError."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        yield
    except TemplateSyntaxError:  # broken for every conversation, which is for the user to know and not one row's fault
        raise
    except (
        TemplateError,
        TypeError,
        ValueError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:
        detail = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TemplateRefusedError(f"the chat template refuses the conversation ({detail})") from None


def tokenizer_fingerprint(tokenizer: Any, n_tokens: int | None = None) -> str:
    """Hash of the vocabulary and of the ids that some texts get, as hex behind `FINGERPRINT_PREFIX`.

    It is what matters to ids, and the same under each version of the libraries; not how a tokenizer is stored, nor the
    template, nor what it would put around a text.

    Args:
        n_tokens: tokens that count, from id 0 on: later ones may have been appended since. None: all.
    """
    n_tokens = len(tokenizer) if n_tokens is None else n_tokens
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index < n_tokens)
    spelled = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in _PROBES]
    content = json.dumps([vocabulary, spelled], ensure_ascii=True)
    return FINGERPRINT_PREFIX + hashlib.sha256(content.encode()).hexdigest()
