"""Suite and answers: what is asked, and what a model is known to say. Both are data."""

from __future__ import annotations

import re
import unicodedata
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from forge_core.errors import UsageError
from forge_core.model import Frozen
from forge_validate import data
from forge_validate.offers import Offer
from forge_validate.serving import Pattern

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]

Endpoint = Literal["models", "model-info", "server-info", "tokenize", "completion", "chat"]

GENERATES = ("completion", "chat")
"""Endpoints at which a model speaks."""


class Case(Frozen):
    """One thing asked of a server. What it asks is here and in the answers; how it is judged is named in `checks`."""

    name: Name
    endpoint: Endpoint
    question: Name | None = None
    """Names a question of the answers; none for the endpoints that describe the server."""
    thinking: bool | None = None
    """`chat_template_kwargs.enable_thinking`; none: not sent, the template's own default."""
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    """Token budget of the reply, thinking included."""
    stream: bool = False
    logprobs: Annotated[int, Field(ge=1, le=20)] | None = None
    """Alternatives per token to ask for; none: no logprobs."""
    model: str | None = None
    """Asked for instead of the served name."""
    same_as: Name | None = None
    """An earlier case whose reply this one's must equal (check `same`)."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for the whole exchange."""
    checks: Annotated[tuple[Name, ...], Field(min_length=1)]

    @property
    def needs(self) -> tuple[Offer, ...]:
        """What a server must offer for this case to say anything."""
        found: list[Offer] = []
        if self.endpoint in ("model-info", "server-info"):
            found.append("native")
        if self.endpoint == "completion":
            found.append("completions")
        if self.endpoint == "tokenize":
            found.append("tokenize")
        if self.logprobs is not None:
            found.append("logprobs")
        if "tool-call" in self.checks:
            found.append("tools")
        if self.thinking:
            found.append("reasoning")
        return tuple(found)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.endpoint in GENERATES:
            if self.question is None or self.max_tokens is None:
                raise ValueError(f"{self.name}: `{self.endpoint}` needs `question` and `max_tokens`")
        elif self.endpoint == "tokenize":
            if self.question is None:
                raise ValueError(f"{self.name}: `tokenize` needs `question`")
        elif self.question is not None:
            raise ValueError(f"{self.name}: `{self.endpoint}` asks no question")
        if ("same" in self.checks) != (self.same_as is not None):
            raise ValueError(f"{self.name}: `same_as` and the check `same` go together")
        return self


class Suite(Frozen):
    """A set of cases, in the order they are asked."""

    schema_version: Literal[1] = Field(alias="schema")
    suite: Name
    seed: int
    """Sent with every question."""
    cases: Annotated[tuple[Case, ...], Field(min_length=1)]
    families: dict[Name, dict[str, Any]] = Field(default_factory=dict)
    """What is asked after the cases, in this order, with the settings of each (see `families`)."""

    @model_validator(mode="after")
    def _names(self) -> Self:
        seen: set[str] = set()
        for case in self.cases:
            if case.name in seen:
                raise ValueError(f"two cases are named {case.name}")
            if case.same_as is not None and case.same_as not in seen:
                raise ValueError(f"{case.name}: same_as: no earlier case {case.same_as!r}")
            seen.add(case.name)
        return self


class Expected(Frozen):
    """What a text must be: one of `exactly` after normalising, or a full match of `pattern` on the normalised text."""

    exactly: tuple[str, ...] = ()
    pattern: Pattern | None = None

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.exactly and self.pattern is None:
            raise ValueError("`exactly` or `pattern` must be given")
        return self

    def met_by(self, text: str) -> bool:
        """Whether `text`, as a whole, is what is expected."""
        found = normalised(text)
        if found in {normalised(text) for text in self.exactly}:
            return True
        return self.pattern is not None and re.fullmatch(self.pattern, found) is not None

    def __str__(self) -> str:
        ways = [repr(text) for text in self.exactly] + ([f"/{self.pattern}/"] if self.pattern else [])
        return " or ".join(ways)


class Call(Frozen):
    """One call of a tool: its name, and its arguments as JSON values."""

    name: str
    arguments: dict[str, Any]


class Question(Frozen):
    """One question and what the model is known to say to it."""

    prompt: str | None = None
    """For the completion endpoint."""
    messages: tuple[dict[str, Any], ...] = ()
    """For the chat endpoint."""
    tools: tuple[dict[str, Any], ...] = ()
    """The functions the model may call."""
    tool_choice: str | dict[str, Any] | None = None
    """None: not sent, the server's own default."""
    tokens: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """The prompt's token ids, as the model's own tokenizer gives them."""
    prompt_tokens: Annotated[int, Field(gt=0)] | None = None
    """Length of the whole prompt after the model's own chat template, in tokens."""
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    """This model's budget, where it needs another than the case gives."""
    content: Expected | None = None
    """What the content must be, where there is content."""
    reasoning: Expected | None = None
    """What the reasoning must be when the content is empty; none: the content must not be empty."""
    call: Call | None = None
    """The one call the model makes."""
    repeats: bool = False
    """The answer repeats itself because it is asked to."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("exactly one of `prompt` and `messages` must be given")
        if self.tools and not self.messages:
            raise ValueError("`tools` belong to `messages`")
        return self

    def is_known(self, content: str) -> bool:
        """Whether this content is a known answer word for word. A pattern does not count: it may leave the end open."""
        known = self.content.exactly if self.content else ()
        return normalised(content) in {normalised(text) for text in known}


class Answers(Frozen):
    """What one model is known to say at temperature 0."""

    schema_version: Literal[1] = Field(alias="schema")
    model: str
    seen: str
    """When, and with which server, these answers were seen."""
    questions: dict[Name, Question]
    golden: str | None = None
    """Names the golden file; none: it has the model's own name."""

    @property
    def golden_of(self) -> str:
        """The name of the golden file."""
        return self.golden or self.model


def normalised(text: str) -> str:
    """NFC, white space collapsed and stripped, one closing full stop dropped; case and all else kept."""
    return " ".join(unicodedata.normalize("NFC", text).split()).removesuffix(".")


def load(suite: str, model: str) -> tuple[Suite, Answers]:
    """A suite and the answers of a model; raises UsageError when a case asks what the answers do not hold."""
    found, answers = data.load("suites", suite, Suite), data.load("answers", model, Answers)
    missing = tuple(
        f"case {case.name} asks {case.question!r}"
        for case in found.cases
        if case.question is not None and case.question not in answers.questions
    )
    if missing:
        raise UsageError(f"answers/{model}.yaml lacks what suites/{suite}.yaml asks", details=missing)
    return found, answers
