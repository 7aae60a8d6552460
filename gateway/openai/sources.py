"""Sources of answers: the field `sources` of requests and choices, and OpenAI's annotations."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta
from starlette.requests import Request

from gateway.callers import with_deadline
from gateway.contexts.text import text_path
from gateway.errors import HttpProblem
from longleaf.citation import Citation, cite, joined
from longleaf.client import AsyncClient
from longleaf.errors import LongleafError
from longleaf.types import ContextText, Finished, Provenance, Source

NAMES = {"provenance": "sources", "provenance.span_count": "sources.count", "provenance.ranking": "sources.ranking"}
"""HTTP names of the service's fields."""
MAX_SOURCES = 64


class SourcesRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `sources` of a request."""

    count: Annotated[int, Meta(ge=1, le=MAX_SOURCES)] = 8
    """Maximum number of spans, before adjacent ones are joined."""
    confirm: bool = False
    """Whether to measure the drop of each span."""
    ranking: Literal["contrast", "raw"] = "contrast"

    def provenance(self) -> Provenance:
        """The service's field."""
        return Provenance(num_spans=self.count, ranking=self.ranking, confirm=self.confirm)


def sources_fields(given: object) -> dict[str, Any] | None:
    """The fields of a SourcesRequest: none for true, and None for false. Raises HttpProblem that names the field."""
    if isinstance(given, bool):
        return {} if given else None
    if not isinstance(given, dict):
        raise HttpProblem(400, "sources: must be true, false or an object", param="sources", code="invalid_type")
    fields = {name: value for name, value in cast(dict[str, Any], given).items() if value is not None}
    if unknown := fields.keys() - set(SourcesRequest.__struct_fields__):
        param = f"sources.{min(unknown)[:100]}"
        raise HttpProblem(400, f"unknown parameter: {param}", param=param, code="unknown_parameter")
    return fields


class SourceReader:
    """Reads the text of the sources of one request's answers. Without a request for sources, answers have none."""

    def __init__(self, client: AsyncClient, request: Request, requested: SourcesRequest | None, context: str) -> None:
        self._client, self._requested, self._context = client, requested, context
        self._base_url = request.app.state.public_url or str(request.base_url).rstrip("/")
        self._texts = dict[tuple[int, int], ContextText | None]()
        """Samples of one prompt often have the same sources."""

    async def choice_fields(self, finished: Finished) -> dict[str, Any]:
        """The additional fields of the choice: `sources`, which is null if the service did not measure attention."""
        if self._requested is None:
            return {}
        if finished.attribution is None:
            return {"sources": None}
        return {"sources": [await self._source(source) for source in joined(finished.attribution.sources)]}

    async def _source(self, source: Source) -> dict[str, Any]:
        span = source.token_start, source.token_end
        if span not in self._texts:
            self._texts[span] = await self._text(*span)
        citation = cite(source, self._texts[span])
        return _described(citation) | {"url": self._base_url + text_path(self._context, *span)}

    async def _text(self, start: int, end: int) -> ContextText | None:
        """None if it cannot be read, because a complete answer should not be lost with it."""
        try:
            return await with_deadline(self._client.get_context_text(self._context, start, end))
        except LongleafError:
            return None


def source_reader(
    client: AsyncClient, request: Request, requested: SourcesRequest | None, context: str | None
) -> SourceReader:
    """Raises HttpProblem for sources without a context."""
    if requested is not None and context is None:
        message = 'sources: needs a context: name it as model="MODEL:CONTEXT"'
        raise HttpProblem(400, message, param="sources", code="invalid_value")
    return SourceReader(client, request, requested, context or "")


def _described(citation: Citation) -> dict[str, Any]:
    """A citation as JSON."""
    return {
        "label": citation.label,
        "file": citation.file or None,
        "last_file": citation.last_file or None,
        "line_start": citation.line_start,
        "line_end": citation.line_end,
        "share": citation.share,
        "contrast": citation.contrast,
        "drop": citation.drop,
        "tokens": citation.tokens,
        "bytes": citation.bytes,
        "text": citation.text,
    }


def annotation_fields(choice: Mapping[str, Any], num_characters: int) -> dict[str, Any]:
    """OpenAI's annotations for the sources of a choice with a text of `num_characters`: each source is measured for the
    whole text."""
    if "sources" not in choice:
        return {}
    annotations = [
        {
            "type": "url_citation",
            "url_citation": {
                "start_index": 0,
                "end_index": num_characters,
                "title": source["label"],
                "url": source["url"],
            },
        }
        for source in choice["sources"] or ()
    ]
    return {"annotations": annotations}
