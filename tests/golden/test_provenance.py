"""Attribution of rows, results with hidden positions, and scores of tokens: compared with dense attention in float64.

The context's path uses only a part of its first segment, as after a fork.
"""

import itertools

import pytest
import torch
from msgspec.structs import replace

from longleaf.rank_protocol.step import NUM_OTHER_SHARES, Decode, Spans
from longleaf.runs import ceil_div
from tests.support.golden.attended import Dense, expected, unpack_attention
from tests.support.golden.drafted import SAMPLINGS, Drafting, guess, never
from tests.support.golden.epochs import Service
from tests.support.golden.plain import LOGIT_TOLERANCE, draw_ids
from tests.support.golden.states import Logits
from tests.support.thinned import thinned
from tests.support.threads import config_for

CUT, START, SIZE, STEPS = 610, 960, 32, 3
"""Where the second segment branches off the first one, where the question begins, tokens of a span and of an answer."""
NUM_LEAD = 45
"""Ends inside a block."""
TOLERANCE = 2e-5
"""Of a share: the model itself is float32."""
FAMILIES = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "llama4", "gemma3", "qwen2", "cohere2", "olmo2")
"""Grouped heads, soft caps, sinks, latents, sections, windows."""
HIDDEN = ((3, 70), (300, 301), (596, 640), (930, START))
"""Over the ends of blocks, spans and segments."""
COVER = [(family, 1 + i % 4) for i, family in enumerate(FAMILIES)]
EVERY = [*COVER, *(pair for pair in itertools.product(FAMILIES, (1, 2, 3, 4)) if pair not in COVER)]
WINDOWED = [("mistral", 2), ("gemma3", 2), ("llama4", 1), ("gpt_oss", 3)]
HIDING = [*((*pair, "replicated") for pair in WINDOWED), *((*pair, "sharded") for pair in (*WINDOWED, *COVER))]


def service_of(golden, world_size, **settings):
    settings = {"block_size": 2 * SIZE, "merge": "gather", "kv_bytes": 8 << 20, **settings}
    service = Service(config_for(golden.folder, world_size=world_size, **settings))
    is_replicated = settings.get("window_keys") == "replicated"
    wrong = () if is_replicated else draw_ids(90, seed=8)
    service.ingest(0, (), golden.prompt[:CUT] + wrong, 0, 192)
    service.ingest(1, (0,), golden.prompt[CUT:START], CUT, 128)
    return service


def dense_of(golden, service):
    return Dense(golden.folder, full_layers(service))


def full_layers(service):
    return service.members[0]._ready.full_layers


def steps(service, rows, count=STEPS):
    """Results of the steps in which rows are answered, and all logits of their first row."""
    logits, rank, results = Logits(), service.epoch.ranks[0], []
    logits.watch(0, rank)
    for _ in range(count):
        results.append(service.epoch.execute(Decode(tuple(rows))))
        rows = [service.next_row(row) for row in rows if row.token_index >= 0]
    return results, logits.first(count)


def check(attention, wanted):
    found = unpack_attention(attention)
    assert abs(float(found.means.double().sum()) - 1) <= 1e-5
    assert (found.means - wanted.means).abs().max() <= TOLERANCE
    assert (found.largest - wanted.largest).abs().max() <= 10 * TOLERANCE
    ties = found.heads != wanted.heads
    assert ties.sum() <= 1  # where two heads have as much


def check_only(attention, wanted):
    [found] = attention
    check(found, wanted)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_lead", [0, NUM_LEAD])
@pytest.mark.parametrize(("family", "world_size"), thinned(EVERY, len(COVER)))
def test_shares_are_those_of_dense_attention(goldens, family, world_size, num_lead):
    golden = goldens(family)
    service = service_of(golden, world_size)
    question = golden.prompt[START:]
    spans = Spans(SIZE, 2, len(golden.prompt), num_lead=num_lead)
    one_layer = replace(spans, layers=full_layers(service)[-1:])
    last_ids = golden.prompt[START - 8 : START]
    rows = [
        service.begin((0, 1), question, START, 0, spans=spans),
        service.begin((0, 1), question, START, 0),
        service.begin((0, 1), question, START, 0, spans=one_layer),
        service.begin((0, 1), last_ids, START - 8, -1, spans=replace(spans, num_rows=5)),
    ]
    first, plain, other, before = (row.sequence for row in rows)
    results, _ = steps(service, rows)
    answer = [token.id for result in results for token in result.tokens[first]]
    assert answer == [token.id for result in results for token in result.tokens[plain]] == [*golden.tokens[:STEPS]]
    _, weights = dense_of(golden, service)((*golden.prompt, *answer[:-1]))
    for i, result in enumerate(results):
        assert result.attention.keys() == ({first, other, before} if i == 0 else {first, other})
        last = len(golden.prompt) - 1 + i
        check_only(result.attention[first], expected(weights, [last], (0, CUT), START, spans))
        check_only(result.attention[other], expected(weights, [last], (0, CUT), START, one_layer))
    rows_before = range(START - 5, START)
    check_only(results[0].attention[before], expected(weights, rows_before, (0, CUT), START - 8, spans))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("family", "world_size"), [("llama", 1), ("gpt_oss", 3), ("gemma2", 2)])
def test_compiled_kernels_leave_no_key_to_look_at_again(goldens, monkeypatch, family, world_size, kv_dtype):
    def never(*_):
        raise AssertionError("keys are looked at again")

    monkeypatch.setattr("workers.step.attention_attribution.AttributionAccumulator._of_layer", never)
    golden = goldens(family)
    service = service_of(golden, world_size, kv_dtype=kv_dtype)
    spans = Spans(SIZE, 2, len(golden.prompt), num_lead=NUM_LEAD)
    asking = [
        service.begin((0, 1), golden.prompt[START:], START, 0, spans=spans, hidden=hidden) for hidden in ((), HIDDEN)
    ]
    results, _ = steps(service, [*asking, service.begin((0,), golden.prompt[:9], CUT, 0)])
    assert all(len(result.attention) == len(asking) for result in results)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("world_size", [1, 3])
def test_keys_are_looked_at_in_tiles_of_any_size(goldens, monkeypatch, world_size):
    golden, found = goldens("llama"), []
    for tile in (4096, SIZE * 3 - 1):
        monkeypatch.setattr("workers.step.attention_attribution.TILE_KEYS", tile)
        service = service_of(golden, world_size, kernels="torch")
        spans = Spans(SIZE, 2, len(golden.prompt), num_rows=len(golden.prompt) - START, num_lead=NUM_LEAD)
        row = service.begin((0, 1), golden.prompt[START:], START, 0, spans=spans)
        [result], _ = steps(service, [row], 1)
        [attention] = result.attention[row.sequence]
        found.append(unpack_attention(attention))
    whole, tiled = found
    torch.testing.assert_close(tiled.means, whole.means, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(tiled.largest, whole.largest, atol=1e-6, rtol=1e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [{}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}, {"kernels": "torch"}])
@pytest.mark.parametrize(("family", "world_size"), [("llama", 1), ("gemma3", 3), ("gpt_oss", 2)])
def test_shares_add_up_to_one_and_to_ask_changes_no_bit(goldens, family, world_size, settings):
    golden = goldens(family)
    found = []
    for spans in (None, Spans(SIZE, 2, len(golden.prompt), num_lead=NUM_LEAD)):
        service = service_of(golden, world_size, **settings)
        row = service.begin((0, 1), golden.prompt[START:], START, 0, spans=spans)
        results, logits = steps(service, [row, service.begin((0,), golden.prompt[:9], CUT, 0)])
        found.append(([result.tokens for result in results], logits))
        for result in results:
            assert len(result.attention) == (spans is not None)
            for [attention] in result.attention.values():
                means = unpack_attention(attention).means
                assert len(means) == ceil_div(CUT, SIZE) + ceil_div(START - CUT, SIZE) + NUM_OTHER_SHARES
                assert abs(float(means.double().sum()) - 1) <= 1e-5
    (tokens, logits), (attributed_tokens, attributed_logits) = found
    assert tokens == attributed_tokens
    assert torch.equal(logits, attributed_logits)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "world_size", "window_keys"), thinned(dict.fromkeys(HIDING), 11))
def test_what_is_hidden_is_read_by_no_layer(goldens, family, world_size, window_keys):
    """Of rows that hide different things, in a batch."""
    golden = goldens(family)
    service = service_of(golden, world_size, window_keys=window_keys)
    question, end = golden.prompt[START:], len(golden.prompt)
    hidden = [HIDDEN, (), HIDDEN[1:3], ((0, START),)]
    spans = Spans(SIZE, 2, end, num_lead=NUM_LEAD)
    rows = [service.begin((0, 1), question, START, 0, hidden=ranges, spans=spans) for ranges in hidden]
    scored = [service.begin((0, 1), question, START, num_scored=9, hidden=ranges) for ranges in hidden]
    logits, rank = [], service.epoch.ranks[0]
    start = rank.sampler.start
    rank.sampler.start = lambda rows, logits_RV: logits.append(logits_RV.double()) or start(rows, logits_RV)
    result = service.epoch.execute(Decode((*rows, *scored)))
    dense = dense_of(golden, service)
    for i, (ranges, row, other) in enumerate(zip(hidden, rows, scored, strict=True)):
        wanted, weights = dense(golden.prompt, ranges, START)
        assert (logits[0][i] - wanted[-1]).abs().max() <= LOGIT_TOLERANCE * wanted.std()
        logprobs = torch.log_softmax(wanted[-10:-1], dim=-1).gather(1, torch.tensor(question[-9:])[:, None])[:, 0]
        scores = torch.tensor(result.scores[other.sequence], dtype=torch.float64)
        assert (scores - logprobs).abs().max() <= 2 * LOGIT_TOLERANCE * wanted.std()
        assert other.sequence not in result.tokens
        if weights:
            check_only(result.attention[row.sequence], expected(weights, [-1], (0, CUT), START, spans))
    if family != "mistral":
        [attention] = result.attention[rows[-1].sequence]
        means = unpack_attention(attention).means
        assert means[:-NUM_OTHER_SHARES].abs().max() == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["queries", "keys"])
@pytest.mark.parametrize(("family", "world_size", "window_keys"), thinned(dict.fromkeys(HIDING), 9))
def test_what_is_hidden_from_a_chunk_is_read_by_no_layer(goldens, family, world_size, window_keys, way):
    golden = goldens(family)
    service = service_of(golden, world_size, window_keys=window_keys, prefill=way)
    prompt = (*golden.prompt, *draw_ids(200, seed=9))
    service.ingest(2, (0, 1), prompt[START:-1], START, 128, HIDDEN)
    row = service.begin((0, 1, 2), prompt[-1:], len(prompt) - 1, 0, hidden=HIDDEN)
    _, logits = steps(service, [row], 1)
    wanted, _ = dense_of(golden, service)(prompt, HIDDEN, START)
    assert (logits[0] - wanted[-1]).abs().max() <= LOGIT_TOLERANCE * wanted.std()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("share", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("settings", [{}, {"kernels": "torch"}])
@pytest.mark.parametrize(("family", "world_size"), [("llama", 1), ("gemma3", 3), ("gpt_oss", 2), ("deepseek_v3", 2)])
def test_drafted_tokens_have_the_shares_that_they_have_without_drafts(goldens, family, world_size, settings, share):
    golden = goldens(family)
    _, wanted, answers = drafted(golden, world_size, never, **settings)
    _, found, drafted_answers = drafted(golden, world_size, guess(answers, 5, share), **settings)
    assert drafted_answers == answers
    assert found.num_refused or share == 1.0
    assert found.num_steps < wanted.num_steps or share == 0.0
    for sequence in wanted.sequences[:2]:
        pairs = zip(reported(found, sequence), reported(wanted, sequence), strict=True)
        for mine, theirs in pairs:
            assert (mine.means - theirs.means).abs().max() <= TOLERANCE
            assert (mine.largest - theirs.largest).abs().max() <= 10 * TOLERANCE
    assert not reported(found, found.sequences[2])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("share", [1.0, 0.7, 0.0])
@pytest.mark.parametrize(("family", "world_size"), [("llama", 1), ("gemma3", 3), ("gpt_oss", 2)])
def test_in_8_bits_drafts_do_not_raise_the_error_of_shares(goldens, family, world_size, share):
    """The error against dense attention, beside that of rows without drafts over the same stored keys. The scales of a
    block of keys depend on all rows of a step, so shares of two answers differ by that error."""
    golden, settings = goldens(family), {"kv_dtype": "int8"}
    *_, answers = drafted(golden, world_size, never, **settings)
    service, found, _ = drafted(golden, world_size, guess(answers, 5, share), **settings)
    dense, last = dense_of(golden, service), len(golden.prompt) - 1
    for number, sequence in enumerate(found.sequences[:2]):
        _, weights = dense((*golden.prompt, *(token.id for token in found.outputs[number][:-1])))
        mine = reported(found, sequence)
        alone = map(unpack_attention, found.attention_alone(number, golden.prompt[START:], START, spans_of(golden)))
        wanted = [expected(weights, [last + i], (0, CUT), START, spans_of(golden)) for i in range(len(mine))]
        error, allowed = (
            sum(torch.linalg.vector_norm(each.means - true.means) for each, true in zip(shares, wanted, strict=True))
            for shares in (mine, alone)
        )
        assert 0 < error <= 1.1 * allowed
    assert not reported(found, found.sequences[2])


def spans_of(golden):
    return Spans(SIZE, 2, len(golden.prompt), num_lead=NUM_LEAD)


def drafted(golden, world_size, draft, **settings):
    """Two answers with attention and one without."""
    service, question = service_of(golden, world_size, **settings), golden.prompt[START:]
    drafting = Drafting(service, draft)
    rows = [drafting.ask((0, 1), question, START, each, spans=spans_of(golden)) for each in SAMPLINGS[:2]]
    rows.append(drafting.ask((0, 1), question, START, SAMPLINGS[0]))
    return service, drafting, drafting.answer(rows, 24)


def reported(drafting, sequence):
    """The attention of each token of an answer."""
    parts = [(result.tokens.get(sequence, ()), result.attention.get(sequence, ())) for result in drafting.results]
    assert all(len(tokens) == len(attention) for tokens, attention in parts if attention)
    return [unpack_attention(attention) for _, found in parts for attention in found]
