"""Attribution of answers to spans of the context: sums and ranks the attention that ranks report per token."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coordinator.engine_messages import AttributionContext, SpanLayout
from coordinator.text.text_map import TextMap
from longleaf.errors import InvalidArgument
from longleaf.rank_protocol.step import HEADS_PER_LAYER, MAX_ATTRIBUTED_SPANS, NUM_OTHER_SHARES, Attention
from longleaf.types import MIN_SPAN_TOKENS, Attribution, Provenance, Source

DEFAULT_SPAN = 64
"""Tokens of a span by default, if it divides the block size."""
MAX_SCORED = 256
"""Most tokens of an answer that are read again to confirm its sources."""

Shares = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SpanTable:
    """The spans of a context, numbered along its path. Each segment is divided from its start."""

    bounds: Sequence[tuple[int, int]]
    """[start, end) of each span, in tokens, without the tokens of the opening; empty for spans inside it."""
    cuts: SpanLayout
    context: AttributionContext
    """The context as it was when the answer began."""

    def __len__(self) -> int:
        return len(self.bounds)


def spans_of(provenance: Provenance, attribution_context: AttributionContext) -> SpanTable:
    """Raises InvalidArgument naming the setting that this context or model does not support."""
    size, block = provenance.span_tokens, attribution_context.block_size
    if not attribution_context.full_layers:
        raise InvalidArgument("provenance", "no layer of the model attends to all keys")
    if size is None:
        size = next((size for size in (DEFAULT_SPAN, MIN_SPAN_TOKENS) if block % size == 0), 0)
    if not size or block % size:
        message = f"{size:,} does" if size else f"none from {MIN_SPAN_TOKENS} on does"
        raise InvalidArgument("provenance.span_token_count", f"{message} not divide the {block:,} tokens of a block")
    for i, layer in enumerate(provenance.layers):
        if layer not in attribution_context.full_layers:
            those = ", ".join(map(str, attribution_context.full_layers))
            raise InvalidArgument(
                f"provenance.layers[{i}]", f"layer {layer} does not attend to all keys; these do: {those}"
            )
    opening = attribution_context.num_opening
    bounds = [
        (max(opening, at), max(opening, min(at + size, end)))
        for start, end in zip((0, *attribution_context.ends[:-1]), attribution_context.ends, strict=True)
        for at in range(start, end, size)
    ]
    if len(bounds) > MAX_ATTRIBUTED_SPANS:
        message = (
            f"the context would have {len(bounds):,} spans of {size:,} tokens; the limit is {MAX_ATTRIBUTED_SPANS:,}"
        )
        raise InvalidArgument("provenance.span_token_count", message)
    layers = tuple(sorted(set(provenance.layers)))
    return SpanTable(bounds, SpanLayout(size, layers, len(bounds), opening), attribution_context)


class AttentionAccumulator:
    """Sums the attention of tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._means: Shares = np.zeros(0)
        self._largest = np.zeros(0, np.float32)
        self._heads = np.zeros(0, np.int32)

    def add(self, attention: Attention) -> None:
        """Adds one token."""
        means, largest = np.frombuffer(attention.means, np.float32), np.frombuffer(attention.largest, np.float32)
        heads = np.frombuffer(attention.heads, np.int32)
        if not self.num_tokens:
            self._means, self._largest, self._heads = means.astype(np.float64), largest, heads
        else:
            self._means += means
            self._heads = np.where(largest > self._largest, heads, self._heads)
            self._largest = np.maximum(self._largest, largest)
        self.num_tokens += 1

    @property
    def shares(self) -> Shares:
        """Mean share of each span over the tokens."""
        return self._all[:-NUM_OTHER_SHARES]

    @property
    def others(self) -> tuple[float, float, float, float]:
        """Mean shares of the prompt, the answer, learned sinks and the context's opening."""
        prompt, answer, sinks, opening = self._all[-NUM_OTHER_SHARES:]
        return float(prompt), float(answer), float(sinks), float(opening)

    @property
    def _all(self) -> Shares:
        return self._means / max(1, self.num_tokens)

    def largest(self, span: int) -> tuple[float, int, int]:
        """The largest share that one head gave the span at one token, the head's layer, and its index in the layer."""
        layer, head = divmod(int(self._heads[span]), HEADS_PER_LAYER)
        return float(self._largest[span]), layer, head


class AttentionTotals:
    """The reported tokens of one answer, and their attention."""

    def __init__(self) -> None:
        self.sums = AttentionAccumulator()
        self.token_ids = array("I")
        """The first MAX_SCORED tokens."""

    def add(self, token_ids: Sequence[int], attention: Sequence[Attention | None]) -> None:
        """Adds reported tokens. Attention is None for tokens of an earlier service, which did not persist it."""
        self.token_ids.extend(token_ids[: MAX_SCORED - len(self.token_ids)])
        for each in attention:
            if each is not None:
                self.sums.add(each)


def top(values: Shares, count: int) -> list[int]:
    """The spans with the largest positive values; among equals, the first ones. Sorts only the result, because it may
    run for every token."""
    count = min(count, len(values))
    least = np.partition(values, len(values) - count)[len(values) - count] if count else 0.0
    found = np.flatnonzero((values >= least) & (values > 0))
    return [int(span) for span in found[np.argsort(-values[found], kind="stable")][:count]]


def attribution(
    sums: AttentionAccumulator,
    spans: SpanTable,
    chosen: Sequence[int],
    *,
    contrast: Shares | None = None,
    drops: Mapping[int, float] | None = None,
    text: TextMap | None = None,
) -> Attribution:
    """The result for a client, with the `chosen` spans in their order."""
    if not sums.num_tokens:
        return Attribution()
    shares, (prompt, answer, sinks, opening) = sums.shares, sums.others
    assert len(shares) == len(spans), "ranks reported other spans"
    sources = list[Source]()
    for span in chosen:
        start, end = spans.bounds[span]
        share, layer, head = sums.largest(span)
        found = text.bytes_of(start, end) if text is not None else None
        file, last_file = text.file_names(*found) if text is not None and found is not None else ("", "")
        source = Source(
            token_start=start,
            token_end=end,
            share=float(shares[span]),
            largest_share=share,
            largest_layer=layer,
            largest_head=head,
            contrast=float(contrast[span]) if contrast is not None else None,
            drop=drops.get(span) if drops is not None else None,
            bytes=found,
            file=file,
            last_file=last_file,
        )
        sources.append(source)
    return Attribution(
        sources=tuple(sources),
        context_share=float(shares.sum()),
        prompt_share=prompt,
        answer_share=answer,
        sink_share=sinks,
        opening_share=opening,
        num_tokens=sums.num_tokens,
    )
