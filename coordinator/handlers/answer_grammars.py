"""Grammars of requests: those of their constraints, and those of their tool calls."""

import json
import re
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, cast

from msgspec.structs import replace

from coordinator.grammars.compiler import GrammarCompiler
from coordinator.text.call_grammar import UNKNOWN_FORMAT, CallTerms, call_grammar, check_format, parameters_field
from coordinator.text.tokenizer import Tokenizer
from coordinator.text.tokenizer_pool import TokenizerPool
from longleaf.errors import InvalidArgument
from longleaf.types import Constraint, Generate, lark

_PLACE = re.compile(r"^at \d+\(\d+\): ")
"""The place of an error in a grammar that the service wrote."""


def is_strict(tool: dict[str, Any]) -> bool:
    """Whether the arguments of calls of a tool must follow its schema."""
    return tool["function"].get("strict") is True


class AnswerGrammars:
    """Makes and compiles the grammars of requests."""

    def __init__(self, tokenizer: Tokenizer, compiler: GrammarCompiler, threads: TokenizerPool) -> None:
        self._tokenizer = tokenizer
        self._compiler = compiler
        self._threads = threads

    async def check(self, request: Generate) -> str:
        """The grammar of a request that does not depend on its prompt; empty without one. Raises InvalidArgument for
        options that exclude each other, and the errors of the compiler."""
        if calls_are_constrained(request):
            self._check_calls(request)
            if request.constraint is not None:  # refused here, the error names its field
                await self._compiler.compile(request.tenant, request.constraint)
            return ""
        if (constraint := request.constraint) is None:
            return ""
        self._check_ends(request, "constraint")
        return await self._compiler.compile(request.tenant, constraint)

    async def grammar_of(self, request: Generate, token_ids: Sequence[int]) -> str:
        """The grammar of a request with this prompt; empty without one. Raises as `check`."""
        if not calls_are_constrained(request):
            return await self.check(request)
        self._check_calls(request)
        wanted = request.required_tool
        indices = [i for i, tool in enumerate(request.tools) if wanted in ("", tool["function"]["name"])]
        terms = CallTerms(
            tools=[request.tools[i] for i in indices],
            is_required=request.require_tool_call or bool(wanted),
            is_single=request.single_tool_call or bool(wanted),
            is_reasoning=self._tokenizer.ends_in_reasoning(token_ids),
            answer_schema=_answer_schema(request.constraint),
        )
        compile_with = partial(self._compile, request.tenant)
        try:
            return await compile_with(terms)
        except InvalidArgument as error:
            if error.field == "constraint":  # the vocabulary has no grammars
                raise InvalidArgument(_field_of(request), error.description) from None
            refusal = error
        loose = set[int]()
        for i, index in enumerate(indices):
            alone = CallTerms(tools=[request.tools[index]], is_required=True, is_single=True)
            try:
                await compile_with(alone)
            except InvalidArgument as error:
                if is_strict(request.tools[index]):
                    raise _numbered(error, index) from None
                loose.add(i)
        return await compile_with(replace(terms, loose=frozenset(loose or _free_tools(terms, refusal))))

    async def _compile(self, tenant: str, terms: CallTerms) -> str:
        form, end_tokens = self._tokenizer.answer_format, self._tokenizer.end_tokens
        text = await self._threads.run(call_grammar, form, self._tokenizer.marker_ids, end_tokens, terms)
        constraint = lark(text)
        try:
            return await self._compiler.compile(tenant, constraint)
        except InvalidArgument as error:
            is_lark = error.field == constraint.field
            raise InvalidArgument("tools" if is_lark else error.field, _PLACE.sub("", error.description)) from None

    def _check_calls(self, request: Generate) -> None:
        """Raises InvalidArgument unless calls can be constrained."""
        field = _field_of(request)
        if request.require_tool_call or request.required_tool:
            if not request.tools:
                raise InvalidArgument(field, "needs tools")
            names = [tool["function"]["name"] for tool in request.tools]
            if request.required_tool and request.required_tool not in names:
                raise InvalidArgument(field, f"{request.required_tool} is not in tools")
            if request.constraint is not None:
                raise InvalidArgument("constraint", "cannot be set together with required tool calls")
        elif request.constraint is not None and request.constraint.kind not in ("json_schema", "json_object"):
            raise InvalidArgument("constraint", "cannot be set together with strict tools, except JSON")
        if not self._tokenizer.answer_format.call_format:
            raise InvalidArgument(field, f"is not supported: {UNKNOWN_FORMAT}")
        check_format(self._tokenizer.answer_format, self._tokenizer.marker_ids, self._tokenizer.end_tokens)
        self._check_ends(request, field)

    def _check_ends(self, request: Generate, field: str) -> None:
        if not self._tokenizer.end_tokens:
            raise InvalidArgument(field, "is not supported: the model has no end token")
        if request.sampling.ignore_end_token:
            raise InvalidArgument(field, "cannot be set together with sampling.ignore_end_token")


def calls_are_constrained(request: Generate) -> bool:
    """Whether a grammar constrains the tool calls of a request."""
    return request.require_tool_call or bool(request.required_tool) or any(map(is_strict, request.tools))


def _field_of(request: Generate) -> str:
    """The field of a request because of which its calls are constrained."""
    if request.require_tool_call or request.required_tool:
        return "required_tool" if request.required_tool else "require_tool_call"
    strict = next(i for i, tool in enumerate(request.tools) if is_strict(tool))
    return f"tools[{strict}].function.strict"


def _answer_schema(constraint: Constraint | None) -> dict[str, Any] | None:
    """The schema of an answer without calls. Raises InvalidArgument."""
    if constraint is None:
        return None
    if constraint.kind == "json_object":
        return {"type": "object"}
    try:
        found = json.loads(constraint.text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(constraint.field, f"is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidArgument(constraint.field, "is not an object")
    return cast(dict[str, Any], found)


def _free_tools(terms: CallTerms, refusal: InvalidArgument) -> Collection[int]:
    """The tools whose schemas need not be honoured, because all together are too large. Raises `refusal` if there are
    none."""
    if found := [i for i, tool in enumerate(terms.tools) if not is_strict(dict(tool))]:
        return found
    raise refusal


def _numbered(error: InvalidArgument, index: int) -> InvalidArgument:
    """The error for a separately compiled tool, with its index in the request."""
    field, alone = error.field or "", parameters_field(0)
    path = parameters_field(index) + (field[len(alone) :] if field.startswith(alone) else "")
    return InvalidArgument(path, error.description)
