"""Sampling of the next token of each row of logits: top-k, top-p, min-p, penalties and biases, without sorting a row.

A row is cut into blocks of BLOCK tokens, one program each. Its eligible tokens are those at or above a threshold: a
score, and among equal scores a token id. The threshold is found in four launches: scores of each block
(`score_blocks`), their histogram over LEVELS equal steps below the highest score (`count_levels`), the steps in which
the threshold can be (`plan_rows`), and the few tokens in these steps (`gather_candidates`), among which
`find_thresholds` searches. The search works on the row itself if the candidates exceed their buffer, which takes equal
scores or an extreme top-k.

Scores and weights are float64. Masses are integers, weights in units of 2^-61 of the row's sum, so that sums do not
depend on their order: every launch, and every number of programs, has the same sums. A token whose weight is not 0 has
a mass of at least 1.

Shape letters: R rows, V tokens, B blocks, N tokens of a tile, L levels, C candidates, J pivots, K biases, G groups of
GROUP tokens. Device code only; the host side is `workers.sampling.fused`.
"""

import triton
import triton.language as tl

SUM: tl.constexpr = tl.constexpr(2.0**61)
"""The mass of all tokens of a row."""
SPAN: tl.constexpr = tl.constexpr(48.0)
"""Scores that are lower than the highest by more are in the last level."""
SLACK: tl.constexpr = tl.constexpr(1e-9)
"""Relative tolerance of bounds of masses."""
NOT_FINITE: tl.constexpr = tl.constexpr(-1)
EXHAUSTED: tl.constexpr = tl.constexpr(-(1 << 31))
"""The key of a group without further tokens."""
LOWEST: tl.constexpr = tl.constexpr(-(1 << 63) + 2)
ALL, BUFFERED, SCANNED, DRAWN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""States of a row: no threshold; candidates are in the buffer; candidates are read from the row; the token is known."""


@triton.jit
def score_blocks(
    logits,
    scores,
    maxima,
    minima,
    sums,
    best_ids,
    is_broken,
    raw_maxima,
    raw_sums,
    group_maxima,
    temperature,
    repetition,
    presence,
    frequency,
    is_greedy,
    place,
    is_seen,
    counts,
    bias_ids,
    biases,
    before,
    row_stride,
    size,
    num_blocks,
    num_before,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_BIASES: tl.constexpr,
    IS_ADJUSTED: tl.constexpr,
    DRAWS: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
):
    """Writes for each block of a row of `logits` [R, V]: the highest and the lowest finite score, the sum of exp(score
    - highest), and the first id of the highest, [R, B], float64 and int32; and whether a logit is NaN or +inf.

    A score is a logit after bias and penalties over the temperature. For rows with a place in the histories, `is_seen`
    and `counts` [P, V], the scores are written to `scores` [R, V], float64. `before` [R, M] are drafts that count as
    generated. With HAS_LOGPROBS, the results include, for the logits, the maximum, the sum of exponentials, and the
    maxima of groups [R, G], float32.
    """
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    id_N = block * BLOCK + tl.arange(0, BLOCK)
    is_id_N = id_N < size
    at = row * num_blocks + block
    logit_N = tl.load(logits + row * row_stride + id_N, mask=is_id_N, other=float("-inf"))
    score_N = logit_N.to(tl.float64)
    tl.store(is_broken + at, tl.max(tl.where((score_N != score_N) | (score_N == float("inf")), 1, 0), 0))
    if HAS_LOGPROBS:
        group_GN = tl.reshape(logit_N.to(tl.float32), [BLOCK // GROUP, GROUP])
        group_G = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        tl.store(group_maxima + row * num_blocks * (BLOCK // GROUP) + group_G, tl.max(group_GN, 1))
        top, total = _sum_of_exps(score_N)
        tl.store(raw_maxima + at, top)
        tl.store(raw_sums + at, total)
    heat = tl.load(temperature + row)
    if IS_ADJUSTED:
        where = tl.load(place + row)
        if where != 0:
            factor, once, each = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
            seen, counted, drafts = is_seen + where * size, counts + where * size, before + row * num_before
            row_scores = scores + row * size
            score_N = _penalized(score_N, id_N, is_id_N, seen, counted, drafts, num_before, factor, once, each)
            tl.store(row_scores + id_N, score_N / heat, mask=is_id_N)
            tl.debug_barrier()
            bias_K = tl.arange(0, NUM_BIASES)
            bias_id_K = tl.load(bias_ids + where * NUM_BIASES + bias_K).to(tl.int32)
            bias_K = tl.load(biases + where * NUM_BIASES + bias_K)
            is_here_K = (bias_K != 0) & (bias_id_K >= block * BLOCK) & (bias_id_K < (block + 1) * BLOCK)
            is_here_K = is_here_K & (bias_id_K < size)
            biased_K = tl.load(logits + row * row_stride + bias_id_K, mask=is_here_K, other=0.0).to(tl.float64) + bias_K
            biased_K = _penalized(biased_K, bias_id_K, is_here_K, seen, counted, drafts, num_before, factor, once, each)
            tl.store(row_scores + bias_id_K, biased_K / heat, mask=is_here_K)
            tl.debug_barrier()
            score_N = tl.load(row_scores + id_N, mask=is_id_N, other=float("-inf"))
        else:
            score_N = score_N / heat
    else:
        score_N = score_N / heat
    highest = tl.max(score_N, 0)
    tl.store(maxima + at, highest)
    tl.store(best_ids + at, tl.min(tl.where((score_N == highest) & is_id_N, id_N, 2147483647), 0))
    if DRAWS:  # noqa: SIM102
        if tl.load(is_greedy + row) == 0:
            is_finite_N = is_id_N & (score_N > float("-inf"))
            tl.store(minima + at, tl.min(tl.where(is_finite_N, score_N, float("inf")), 0))
            top, total = _sum_of_exps(score_N)
            tl.store(sums + at, total)


@triton.jit
def count_levels(
    logits,
    scores,
    maxima,
    minima,
    level_counts,
    temperature,
    dropped_share,
    top_k,
    is_greedy,
    place,
    row_stride,
    size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_ADJUSTED: tl.constexpr,
):
    """Writes `level_counts` [R, B, L], int32: how many scores of each block are in each level. Rows that cut nothing
    are skipped."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if _is_cut(dropped_share, top_k, is_greedy, row, size):
        highest, per_level = _scale_of(maxima, minima, row, num_blocks, BLOCKS_PAD, LEVELS)
        id_N = block * BLOCK + tl.arange(0, BLOCK)
        score_N = _scores(logits, scores, temperature, place, row, row_stride, size, id_N, IS_ADJUSTED)
        level_N = _levels(score_N, highest, per_level, LEVELS)
        count_L = tl.histogram(level_N, LEVELS, mask=id_N < size)
        tl.store(level_counts + (row * num_blocks + block) * LEVELS + tl.arange(0, LEVELS), count_L)


@triton.jit
def plan_rows(
    maxima,
    minima,
    sums,
    best_ids,
    is_broken,
    level_counts,
    offsets,
    peaks,
    plans,
    ids,
    dropped_share,
    top_k,
    is_greedy,
    size,
    num_blocks,
    capacity,
    BLOCKS_PAD: tl.constexpr,
    LEVELS: tl.constexpr,
    DRAWS: tl.constexpr,
    CUTS: tl.constexpr,
    SMALL: tl.constexpr,
):
    """Writes `ids` [R] of greedy rows and of rows that are not finite, and for the others `peaks` [R, 2], float64: the
    highest score, and the mass of weight 1; and `plans` [R, 8], int64: the state, the first level of candidates and the
    level behind the last one, the number of candidates and of tokens in higher levels, and the threshold, a key and an
    id. `offsets` [R, B], int32, are the places of each block's candidates."""
    row = tl.program_id(0).to(tl.int64)
    block_B = tl.arange(0, BLOCKS_PAD)
    is_block_B = block_B < num_blocks
    at_B = row * num_blocks + block_B
    max_B = tl.load(maxima + at_B, mask=is_block_B, other=float("-inf"))
    broken = tl.max(tl.load(is_broken + at_B, mask=is_block_B, other=0), 0)
    highest = tl.max(max_B, 0)
    best_B = tl.load(best_ids + at_B, mask=is_block_B & (max_B == highest), other=2147483647)
    best = tl.min(best_B, 0).to(tl.int64)
    # a maximum of -inf or NaN
    is_lost = (broken != 0) | (not (tl.abs(highest) < float("inf")))
    state = DRAWN
    first, end, num_candidates, num_above = LEVELS, LEVELS, 0, 0
    if DRAWS:  # noqa: SIM102
        if (tl.load(is_greedy + row) == 0) & (not is_lost):
            state = ALL
            sum_B = tl.load(sums + at_B, mask=is_block_B, other=0.0)
            total = tl.sum(sum_B * tl.exp(max_B - highest), 0)
            tl.store(peaks + row * 2, highest)
            tl.store(peaks + row * 2 + 1, (1 / total) * SUM)
            if CUTS:  # noqa: SIM102
                if _is_cut(dropped_share, top_k, is_greedy, row, size):
                    _, per_level = _scale_of(maxima, minima, row, num_blocks, BLOCKS_PAD, LEVELS)
                    level_L = tl.arange(0, LEVELS)
                    part_B = tl.arange(0, 32)
                    count_L = tl.zeros([LEVELS], tl.int32)
                    for start in range(0, num_blocks, 32):
                        counts_BL = level_counts + ((row * num_blocks + start + part_B) * LEVELS)[:, None]
                        is_part_B = start + part_B < num_blocks
                        count_L += tl.sum(tl.load(counts_BL + level_L[None, :], mask=is_part_B[:, None], other=0), 0)
                    first, end = _candidate_levels(
                        count_L, total, per_level, tl.load(dropped_share + row), tl.load(top_k + row), size, LEVELS
                    )
                    up_to_end = tl.sum(tl.where(level_L < end, count_L, 0), 0)
                    first = tl.where(up_to_end <= SMALL, 0, first)
                    num_above = tl.sum(tl.where(level_L < first, count_L, 0), 0)
                    num_candidates = up_to_end - num_above
                    state = tl.where(num_candidates <= capacity, BUFFERED, SCANNED)
                    is_in_L = (level_L >= first) & (level_L < end)
                    passed = tl.zeros([], tl.int32)
                    for start in range(0, num_blocks, 32):
                        counts_BL = level_counts + ((row * num_blocks + start + part_B) * LEVELS)[:, None]
                        is_part_B = start + part_B < num_blocks
                        is_wanted_BL = is_part_B[:, None] & is_in_L[None, :]
                        in_B = tl.sum(tl.load(counts_BL + level_L[None, :], mask=is_wanted_BL, other=0), 1)
                        tl.store(
                            offsets + row * num_blocks + start + part_B,
                            passed + tl.cumsum(in_B, 0) - in_B,
                            mask=is_part_B,
                        )
                        passed += tl.sum(in_B, 0)
    plan = plans + row * 8
    tl.store(plan, state)
    tl.store(plan + 1, first)
    tl.store(plan + 2, end)
    tl.store(plan + 3, num_candidates)
    tl.store(plan + 4, num_above)
    tl.store(plan + 5, LOWEST)
    tl.store(plan + 6, 0)
    tl.store(ids + row, tl.where(is_lost, NOT_FINITE, best))


@triton.jit
def gather_candidates(
    logits,
    scores,
    maxima,
    minima,
    offsets,
    peaks,
    plans,
    above,
    found_ids,
    found_scores,
    temperature,
    place,
    row_stride,
    size,
    num_blocks,
    capacity,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_ADJUSTED: tl.constexpr,
):
    """Writes the candidates of each row in the order of their ids, `found_ids` [R, C], int32, and `found_scores` [R,
    C], float64; and `above` [R, B], int64, the mass of each block in higher levels."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    plan = plans + row * 8
    state = tl.load(plan)
    if (state == BUFFERED) | (state == SCANNED):
        first, end = tl.load(plan + 1), tl.load(plan + 2)
        highest, per_level = _scale_of(maxima, minima, row, num_blocks, BLOCKS_PAD, LEVELS)
        id_N = block * BLOCK + tl.arange(0, BLOCK)
        score_N = _scores(logits, scores, temperature, place, row, row_stride, size, id_N, IS_ADJUSTED)
        level_N = _levels(score_N, highest, per_level, LEVELS)
        mass = tl.zeros([], tl.int64)
        if first > 0:
            mass_N = _mass(score_N, highest, tl.load(peaks + row * 2 + 1))
            mass += tl.sum(tl.where(level_N < first, mass_N, 0), 0)
        tl.store(above + row * num_blocks + block, mass)
        if state == BUFFERED:
            is_found_N = (level_N >= first) & (level_N < end) & (id_N < size)
            rank_N = tl.cumsum(is_found_N.to(tl.int32), 0) - 1
            at_N = row * capacity + tl.load(offsets + row * num_blocks + block) + rank_N
            tl.store(found_ids + at_N, id_N, mask=is_found_N)
            tl.store(found_scores + at_N, score_N, mask=is_found_N)


@triton.jit
def find_thresholds(
    logits,
    scores,
    maxima,
    minima,
    peaks,
    plans,
    above,
    found_ids,
    found_scores,
    found_mass,
    ids,
    temperature,
    dropped_share,
    min_p,
    uniform,
    top_k,
    place,
    row_stride,
    size,
    num_blocks,
    capacity,
    TILE: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_ADJUSTED: tl.constexpr,
):
    """Completes `plans` with the threshold. If all eligible tokens of a row are in the buffer, it also draws the row's
    token and writes it to `ids`. `found_mass` [R, C], int64, is memory for their masses."""
    row = tl.program_id(0).to(tl.int64)
    plan = plans + row * 8
    state = tl.load(plan)
    if (state == BUFFERED) | (state == SCANNED):
        first, end, num_above = tl.load(plan + 1), tl.load(plan + 2), tl.load(plan + 4)
        highest, per_level = _scale_of(maxima, minima, row, num_blocks, BLOCKS_PAD, LEVELS)
        unit = tl.load(peaks + row * 2 + 1)
        block_B = tl.arange(0, BLOCKS_PAD)
        above_B = tl.load(above + row * num_blocks + block_B, mask=block_B < num_blocks, other=0)
        mass_above = tl.sum(above_B, 0)
        dropped, wanted = tl.load(dropped_share + row), tl.load(top_k + row)
        buffer = row * capacity
        num = tl.where(state == BUFFERED, tl.load(plan + 3).to(tl.int32), size)
        if state == BUFFERED:
            for start in range(0, num, TILE):
                at_N = start + tl.arange(0, TILE)
                score_N = tl.load(found_scores + buffer + at_N, mask=at_N < num, other=float("-inf"))
                tl.store(found_mass + buffer + at_N, _mass(score_N, highest, unit), mask=at_N < num)
            tl.debug_barrier()
        key, least_id = _threshold(
            found_ids + buffer,
            found_scores + buffer,
            found_mass + buffer,
            num,
            logits,
            scores,
            temperature,
            place,
            row,
            row_stride,
            size,
            highest,
            per_level,
            unit,
            first,
            end,
            num_above,
            mass_above,
            dropped,
            wanted,
            TILE,
            LEVELS,
            IS_ADJUSTED,
            state == SCANNED,
        )
        if state == BUFFERED:  # noqa: SIM102
            if first == 0:
                least = tl.load(min_p + row)
                total = tl.zeros([], tl.int64)
                for start in range(0, num, TILE):
                    at_N = start + tl.arange(0, TILE)
                    id_N, eligible_N = _eligible_in_buffer(
                        found_ids + buffer, found_scores + buffer, found_mass + buffer, at_N, num, highest, least,
                        key, least_id,
                    )  # fmt: skip
                    total += tl.sum(eligible_N, 0)
                target = _target(tl.load(uniform + row), total)
                passed = tl.zeros([], tl.int64)
                token = tl.full([], 2147483647, tl.int32)
                for start in range(0, num, TILE):
                    at_N = start + tl.arange(0, TILE)
                    id_N, eligible_N = _eligible_in_buffer(
                        found_ids + buffer, found_scores + buffer, found_mass + buffer, at_N, num, highest, least,
                        key, least_id,
                    )  # fmt: skip
                    up_to_N = passed + tl.cumsum(eligible_N, 0)
                    token = tl.minimum(token, tl.min(tl.where(up_to_N > target, id_N, 2147483647), 0))
                    passed += tl.sum(eligible_N, 0)
                tl.store(ids + row, token.to(tl.int64))
                tl.store(plan, DRAWN)
        tl.store(plan + 5, key)
        tl.store(plan + 6, least_id.to(tl.int64))


@triton.jit
def weigh_blocks(
    logits,
    scores,
    maxima,
    minima,
    peaks,
    plans,
    eligible_mass,
    above,
    offsets,
    found_ids,
    found_scores,
    found_mass,
    temperature,
    min_p,
    place,
    row_stride,
    size,
    num_blocks,
    capacity,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_ADJUSTED: tl.constexpr,
    CUTS: tl.constexpr,
):
    """Writes `eligible_mass` [R, B], int64: the mass of the eligible tokens of each block, for rows whose token is not
    drawn yet."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    plan, at = plans + row * 8, row * num_blocks + block
    state, mass = tl.load(plan), tl.zeros([], tl.int64)
    if state != DRAWN:
        is_known = False
        if CUTS:
            is_known = (state == BUFFERED) & (tl.load(min_p + row) <= 0)
        if is_known:
            # all tokens above the candidates are eligible, and their mass is known
            start = tl.load(offsets + at)
            is_last = block == num_blocks - 1
            end = tl.load(offsets + at + 1, mask=not is_last, other=0)
            end = tl.where(is_last, tl.load(plan + 3).to(tl.int32), end)
            buffer, highest = row * capacity, 0.0
            key, least_id = tl.load(plan + 5), tl.load(plan + 6).to(tl.int32)
            mass = tl.load(above + at)
            for low in range(start, end, 128):
                _, eligible_N = _eligible_in_buffer(
                    found_ids + buffer, found_scores + buffer, found_mass + buffer, low + tl.arange(0, 128), end,
                    highest, 0.0, key, least_id,
                )  # fmt: skip
                mass += tl.sum(eligible_N, 0)
        else:
            id_N = block * BLOCK + tl.arange(0, BLOCK)
            eligible_N = _eligible_in_row(
                logits, scores, maxima, minima, peaks, plans, temperature, min_p, place, row, row_stride, size,
                num_blocks, id_N, BLOCKS_PAD, LEVELS, IS_ADJUSTED, CUTS,
            )  # fmt: skip
            mass = tl.sum(eligible_N, 0)
        tl.store(eligible_mass + at, mass)


@triton.jit
def draw_rows(
    logits,
    scores,
    maxima,
    minima,
    peaks,
    plans,
    eligible_mass,
    ids,
    temperature,
    min_p,
    uniform,
    place,
    row_stride,
    size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    LEVELS: tl.constexpr,
    IS_ADJUSTED: tl.constexpr,
    CUTS: tl.constexpr,
):
    """Writes `ids` [R] of the rows whose token is not drawn yet: the token whose interval of the cumulative masses, in
    the order of ids, contains the number in `uniform`."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(plans + row * 8) != DRAWN:
        block_B = tl.arange(0, BLOCKS_PAD)
        mass_B = tl.load(eligible_mass + row * num_blocks + block_B, mask=block_B < num_blocks, other=0)
        up_to_B = tl.cumsum(mass_B, 0)
        target = _target(tl.load(uniform + row), tl.sum(mass_B, 0))
        block = tl.sum((up_to_B <= target).to(tl.int32), 0)
        passed = tl.sum(tl.where(block_B < block, mass_B, 0), 0)
        id_N = block * BLOCK + tl.arange(0, BLOCK)
        eligible_N = _eligible_in_row(
            logits, scores, maxima, minima, peaks, plans, temperature, min_p, place, row, row_stride, size, num_blocks,
            id_N, BLOCKS_PAD, LEVELS, IS_ADJUSTED, CUTS,
        )  # fmt: skip
        up_to_N = passed + tl.cumsum(eligible_N, 0)
        tl.store(ids + row, tl.min(tl.where(up_to_N > target, id_N, size), 0).to(tl.int64))


@triton.jit
def report_logprobs(
    logits,
    raw_maxima,
    raw_sums,
    group_maxima,
    ids,
    reported,
    row_stride,
    size,
    num_blocks,
    num_groups,
    GROUP: tl.constexpr,
    BLOCKS_PAD: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    NUM_TOP: tl.constexpr,
):
    """Writes `reported` [R, 2 + 2 NUM_TOP], float64: the id, its natural-log probability by the logits, those of the
    NUM_TOP likeliest tokens, and their ids. Of a row that is not finite, the values are those of any token."""
    row = tl.program_id(0).to(tl.int64)
    block_B = tl.arange(0, BLOCKS_PAD)
    is_block_B = block_B < num_blocks
    max_B = tl.load(raw_maxima + row * num_blocks + block_B, mask=is_block_B, other=float("-inf"))
    sum_B = tl.load(raw_sums + row * num_blocks + block_B, mask=is_block_B, other=0.0)
    highest = tl.max(max_B, 0)
    log_sum = tl.log(tl.sum(sum_B * tl.exp(max_B - highest), 0))
    out, row_logits = reported + row * (2 + 2 * NUM_TOP), logits + row * row_stride
    token = tl.load(ids + row)
    logit = tl.load(row_logits + tl.maximum(token, 0)).to(tl.float64)
    tl.store(out, token.to(tl.float64))
    tl.store(out + 1, logit - highest - log_sum)
    group_G = tl.arange(0, GROUPS_PAD)
    top_G = tl.load(group_maxima + row * num_groups + group_G, mask=group_G < num_groups, other=0.0)
    key_G = tl.where(group_G < num_groups, _key32(top_G), EXHAUSTED)
    taken_G = tl.full([GROUPS_PAD], -1, tl.int32)
    for i in range(NUM_TOP):
        # the highest key, and among equal ones the first group
        packed = tl.max((key_G.to(tl.int64) << 32) | (GROUPS_PAD - 1 - group_G).to(tl.int64), 0)
        best, group = (packed >> 32).to(tl.int32), GROUPS_PAD - 1 - (packed & 0xFFFFFFFF).to(tl.int32)
        taken = tl.max(tl.where(group_G == group, taken_G, -1), 0)
        id_N = group * GROUP + tl.arange(0, GROUP)
        logit_N = tl.load(row_logits + id_N, mask=id_N < size, other=0.0).to(tl.float32)
        key_N = tl.where(id_N < size, _key32(logit_N), EXHAUSTED)
        # equal logits are taken in the order of ids
        found = tl.min(tl.where((key_N == best) & (id_N > taken), id_N, size - 1), 0)
        is_left_N = (key_N < best) | ((key_N == best) & (id_N > found))
        following = tl.max(tl.where(is_left_N, key_N, EXHAUSTED), 0)
        taken_G = tl.where(group_G == group, tl.where(following == best, found, -1), taken_G)
        key_G = tl.where(group_G == group, following, key_G)
        tl.store(out + 2 + i, tl.load(row_logits + found).to(tl.float64) - highest - log_sum)
        tl.store(out + 2 + NUM_TOP + i, found.to(tl.float64))


@triton.jit
def _key32(logit_N):
    """An int32 with the order of float32 values; -0 and 0 are equal."""
    bits_N = (logit_N + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits_N < 0, bits_N ^ 0x7FFFFFFF, bits_N)


@triton.jit
def _key(score_N):
    """An int64 with the order of float64 values; -0 and 0 are equal."""
    bits_N = (score_N + 0.0).to(tl.int64, bitcast=True)
    return tl.where(bits_N < 0, bits_N ^ 0x7FFFFFFFFFFFFFFF, bits_N)


@triton.jit
def _is_cut(dropped_share, top_k, is_greedy, row, size):
    """Whether a row has a top-k or top-p that may cut something."""
    return (tl.load(is_greedy + row) == 0) & ((tl.load(dropped_share + row) >= 0) | (tl.load(top_k + row) < size))


@triton.jit
def _sum_of_exps(score_N):
    """The maximum and the sum of exp(score - maximum), which is 0 if all scores are -inf."""
    top = tl.max(score_N, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    return top, tl.sum(tl.exp(score_N - shift), 0)


@triton.jit
def _penalized(score_N, id_N, is_id_N, is_seen, counts, drafts, num_drafts, factor, once, each):
    """Scores after the penalties of tokens that were seen or generated, in the order of `penalties.py`."""
    seen_N = tl.load(is_seen + id_N, mask=is_id_N, other=0) != 0
    count_N = tl.load(counts + id_N, mask=is_id_N, other=0)
    for i in range(num_drafts):
        is_draft_N = id_N == tl.load(drafts + i).to(tl.int32)
        seen_N = seen_N | is_draft_N
        count_N += is_draft_N.to(tl.int32)
    score_N = tl.where(seen_N, tl.where(score_N < 0, score_N * factor, score_N / factor), score_N)
    score_N = tl.where(count_N > 0, score_N - once, score_N)
    return score_N - count_N.to(tl.float64) * each


@triton.jit
def _scores(
    logits, scores, temperature, place, row, row_stride, size, id_N, IS_ADJUSTED: tl.constexpr
):  # fmt: skip
    """Scores of some tokens of a row; -inf behind the last one."""
    is_id_N = id_N < size
    if IS_ADJUSTED:
        if tl.load(place + row) != 0:
            score_N = tl.load(scores + row * size + id_N, mask=is_id_N, other=float("-inf"))
        else:
            logit_N = tl.load(logits + row * row_stride + id_N, mask=is_id_N, other=float("-inf"))
            score_N = logit_N.to(tl.float64) / tl.load(temperature + row)
    else:
        logit_N = tl.load(logits + row * row_stride + id_N, mask=is_id_N, other=float("-inf"))
        score_N = logit_N.to(tl.float64) / tl.load(temperature + row)
    return score_N


@triton.jit
def _scale_of(maxima, minima, row, num_blocks, BLOCKS_PAD: tl.constexpr, LEVELS: tl.constexpr):
    """The highest score of a row, and levels per unit of score."""
    block_B = tl.arange(0, BLOCKS_PAD)
    is_block_B = block_B < num_blocks
    highest = tl.max(tl.load(maxima + row * num_blocks + block_B, mask=is_block_B, other=float("-inf")), 0)
    lowest = tl.min(tl.load(minima + row * num_blocks + block_B, mask=is_block_B, other=float("inf")), 0)
    span = tl.minimum(highest - lowest, SPAN)
    return highest, LEVELS / tl.where(span > 0, span, 1.0)


@triton.jit
def _levels(score_N, highest, per_level, LEVELS: tl.constexpr):
    """Levels of scores, from 0 for the highest."""
    return tl.minimum((highest - score_N) * per_level, LEVELS - 1.0).to(tl.int32)


@triton.jit
def _mass(score_N, highest, unit):
    """Masses of scores."""
    weight_N = tl.exp(score_N - highest)
    mass_N = (weight_N * unit + 0.5).to(tl.int64)
    return tl.where((weight_N > 0) & (mass_N == 0), 1, mass_N)


@triton.jit
def _target(uniform, total):
    """The number of mass units up to a drawn number in [0, 1), less than `total`."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _candidate_levels(count_L, total, per_level, dropped, wanted, size, LEVELS: tl.constexpr):
    """The levels [first, end) in which the thresholds of top-k and top-p can be, from the bounds of each level's mass;
    tokens of lower ones are eligible, those of higher ones are not."""
    level_L = tl.arange(0, LEVELS)
    most_L = count_L * tl.exp(-level_L.to(tl.float64) / per_level)
    least_L = count_L * tl.exp(-(level_L + 1).to(tl.float64) / per_level)
    least_L = tl.where(level_L == LEVELS - 1, 0.0, least_L)
    most_up_to_L, least_up_to_L = tl.cumsum(most_L, 0), tl.cumsum(least_L, 0)
    if wanted < size:
        up_to_L = tl.cumsum(count_L, 0)
        last = tl.min(tl.where(up_to_L >= wanted, level_L, LEVELS - 1), 0)
        missing = wanted - tl.sum(tl.where(level_L < last, count_L, 0), 0)
        least_mass = tl.sum(tl.where(level_L < last, least_L, 0.0), 0)
        least_mass += missing * tl.sum(tl.where(level_L == last, least_L / tl.maximum(count_L, 1), 0.0), 0)
        is_eligible_L = most_up_to_L < (1 - dropped) * least_mass * (1 - SLACK)
        first = tl.min(tl.where(is_eligible_L, LEVELS - 1, level_L), 0)
        first = tl.where(dropped < 0, last, tl.minimum(first, last))
        end = last + 1
    else:
        gone = dropped * total
        most_from_L, least_from_L = tl.cumsum(most_L, 0, reverse=True), tl.cumsum(least_L, 0, reverse=True)
        is_gone_L = (most_from_L <= gone * (1 - SLACK)) | (
            total * (1 + SLACK) - (least_up_to_L - least_L) <= gone * (1 - SLACK)
        )
        is_eligible_L = (least_from_L - least_L > gone * (1 + SLACK)) | (
            total * (1 - SLACK) - most_up_to_L > gone * (1 + SLACK)
        )
        end = tl.maximum(tl.min(tl.where(is_gone_L, level_L, LEVELS), 0), 1)
        first = tl.minimum(tl.min(tl.where(is_eligible_L, LEVELS, level_L), 0), end - 1)
    return first, end


@triton.jit
def _candidates(
    found_ids, found_scores, found_mass, num, logits, scores, temperature, place, row, row_stride, size,
    highest, per_level, unit, first, end, start, TILE: tl.constexpr, LEVELS: tl.constexpr, IS_ADJUSTED: tl.constexpr,
    scans,
):  # fmt: skip
    """Keys, masses and ids of a tile of candidates; the key is LOWEST and the mass is 0 where there is none."""
    at_N = start + tl.arange(0, TILE)
    if scans:
        id_N = at_N
        score_N = _scores(logits, scores, temperature, place, row, row_stride, size, id_N, IS_ADJUSTED)
        level_N = _levels(score_N, highest, per_level, LEVELS)
        is_there_N = (level_N >= first) & (level_N < end) & (id_N < size)
        mass_N = tl.where(is_there_N, _mass(score_N, highest, unit), 0)
    else:
        is_there_N = at_N < num
        id_N = tl.load(found_ids + at_N, mask=is_there_N, other=0)
        score_N = tl.load(found_scores + at_N, mask=is_there_N, other=0.0)
        mass_N = tl.load(found_mass + at_N, mask=is_there_N, other=0)
    return tl.where(is_there_N, _key(score_N), LOWEST), mass_N, id_N


@triton.jit
def _threshold(
    found_ids, found_scores, found_mass, num, logits, scores, temperature, place, row, row_stride, size,
    highest, per_level, unit, first, end, num_above, mass_above, dropped, wanted,
    TILE: tl.constexpr, LEVELS: tl.constexpr, IS_ADJUSTED: tl.constexpr, scans,
):  # fmt: skip
    """The threshold of a row: the lowest eligible key, and the lowest eligible id of that key."""
    low = tl.full([], 0x7FFFFFFFFFFFFFFF, tl.int64)
    high = tl.full([], LOWEST + 1, tl.int64)
    for start in range(0, num, TILE):
        key_N, mass_N, id_N = _candidates(
            found_ids, found_scores, found_mass, num, logits, scores, temperature, place, row, row_stride, size,
            highest, per_level, unit, first, end, start, TILE, LEVELS, IS_ADJUSTED, scans,
        )  # fmt: skip
        low = tl.minimum(low, tl.min(tl.where(key_N == LOWEST, 0x7FFFFFFFFFFFFFFF, key_N), 0))
        high = tl.maximum(high, tl.max(key_N, 0))
    top_key = tl.minimum(low, high)
    limit = tl.zeros([], tl.int64)
    # top-k first: the share of top-p is that of the tokens that top-k keeps
    for turn in range(2):
        by_mass = turn == 1
        is_limited = (by_mass & (dropped >= 0)) | ((turn == 0) & (wanted < size))
        if is_limited:
            limit = wanted - num_above
            if by_mass:
                top_k_mass = tl.full([], SUM, tl.float64)
                if wanted < size:
                    below = tl.zeros([], tl.int64)
                    for start in range(0, num, TILE):
                        key_N, mass_N, id_N = _candidates(
                            found_ids, found_scores, found_mass, num, logits, scores, temperature, place, row,
                            row_stride, size, highest, per_level, unit, first, end, start, TILE, LEVELS, IS_ADJUSTED,
                            scans,
                        )  # fmt: skip
                        below += tl.sum(tl.where(key_N >= top_key, mass_N, 0), 0)
                    top_k_mass = (mass_above + below).to(tl.float64)
                # a token is eligible if the mass above it is less than this
                limit = top_k_mass.to(tl.int64) - (dropped * top_k_mass).to(tl.int64) - mass_above
            limit = tl.maximum(limit, 1)
            # the smallest key in (low, upper] with candidates of larger keys below the limit; eight keys in each turn
            low = top_key - 1
            upper = tl.maximum(high, top_key)
            while upper > low + 1:
                step = tl.maximum((upper >> 3) - (low >> 3), 1)
                pivot_J = tl.minimum(low + step * (1 + tl.arange(0, 8)).to(tl.int64), upper)
                above_J = tl.zeros([8], tl.int64)
                for start in range(0, num, TILE):
                    key_N, mass_N, id_N = _candidates(
                        found_ids, found_scores, found_mass, num, logits, scores, temperature, place, row,
                        row_stride, size, highest, per_level, unit, first, end, start, TILE, LEVELS, IS_ADJUSTED,
                        scans,
                    )  # fmt: skip
                    weight_N = tl.where(by_mass, mass_N, 1)
                    above_J += tl.sum(tl.where(key_N[None, :] > pivot_J[:, None], weight_N[None, :], 0), 1)
                is_eligible_J = above_J < limit
                low = tl.maximum(low, tl.max(tl.where(is_eligible_J, low, pivot_J), 0))
                upper = tl.minimum(upper, tl.min(tl.where(is_eligible_J, pivot_J, upper), 0))
                # the threshold is the key of a candidate: skip the rest of the interval
                least, most = upper, low + 1
                for start in range(0, num, TILE):
                    key_N, mass_N, id_N = _candidates(
                        found_ids, found_scores, found_mass, num, logits, scores, temperature, place, row,
                        row_stride, size, highest, per_level, unit, first, end, start, TILE, LEVELS, IS_ADJUSTED,
                        scans,
                    )  # fmt: skip
                    is_in_N = (key_N > low) & (key_N <= upper)
                    least = tl.minimum(least, tl.min(tl.where(is_in_N, key_N, least), 0))
                    most = tl.maximum(most, tl.max(tl.where(is_in_N, key_N, most), 0))
                low, upper = least - 1, most
            top_key = upper
    least_id = tl.zeros([], tl.int32)
    if dropped >= 0:
        above = tl.zeros([], tl.int64)
        each = tl.zeros([], tl.int64)
        num_equal = tl.zeros([], tl.int64)
        for start in range(0, num, TILE):
            key_N, mass_N, id_N = _candidates(
                found_ids, found_scores, found_mass, num, logits, scores, temperature, place, row, row_stride, size,
                highest, per_level, unit, first, end, start, TILE, LEVELS, IS_ADJUSTED, scans,
            )  # fmt: skip
            above += tl.sum(tl.where(key_N > top_key, mass_N, 0), 0)
            each = tl.maximum(each, tl.max(tl.where(key_N == top_key, mass_N, 0), 0))
            num_equal += tl.sum((key_N == top_key).to(tl.int64), 0)
        # of equal scores, those of the smallest ids are dropped first
        if above + (num_equal - 1) * each >= limit:
            passed = tl.zeros([], tl.int64)
            least_id = tl.full([], 2147483647, tl.int32)
            for start in range(0, num, TILE):
                key_N, mass_N, id_N = _candidates(
                    found_ids, found_scores, found_mass, num, logits, scores, temperature, place, row, row_stride,
                    size, highest, per_level, unit, first, end, start, TILE, LEVELS, IS_ADJUSTED, scans,
                )  # fmt: skip
                is_equal_N = key_N == top_key
                up_to_N = passed + tl.cumsum(is_equal_N.to(tl.int64), 0)
                is_eligible_N = is_equal_N & (above + (num_equal - up_to_N) * each < limit)
                least_id = tl.minimum(least_id, tl.min(tl.where(is_eligible_N, id_N, 2147483647), 0))
                passed += tl.sum(is_equal_N.to(tl.int64), 0)
    return top_key, least_id


@triton.jit
def _eligible_in_buffer(found_ids, found_scores, found_mass, at_N, num, highest, least, key, least_id):
    """Ids of candidates, and their masses if they are eligible, else 0."""
    is_there_N = at_N < num
    id_N = tl.load(found_ids + at_N, mask=is_there_N, other=2147483647)
    score_N = tl.load(found_scores + at_N, mask=is_there_N, other=float("-inf"))
    mass_N = tl.load(found_mass + at_N, mask=is_there_N, other=0)
    is_eligible_N = is_there_N & _is_eligible(score_N, id_N, highest, least, key, least_id)
    return id_N, tl.where(is_eligible_N, mass_N, 0)


@triton.jit
def _is_eligible(score_N, id_N, highest, least, key, least_id):
    """Whether tokens are at or above the threshold, and likely enough for min-p."""
    key_N = _key(score_N)
    is_above_N = (key_N > key) | ((key_N == key) & (id_N >= least_id))
    return is_above_N & (tl.exp(score_N - highest) >= least)


@triton.jit
def _eligible_in_row(
    logits, scores, maxima, minima, peaks, plans, temperature, min_p, place, row, row_stride, size, num_blocks, id_N,
    BLOCKS_PAD: tl.constexpr, LEVELS: tl.constexpr, IS_ADJUSTED: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """Masses of tokens of a row if they are eligible, else 0."""
    plan = plans + row * 8
    highest, per_level = _scale_of(maxima, minima, row, num_blocks, BLOCKS_PAD, LEVELS)
    score_N = _scores(logits, scores, temperature, place, row, row_stride, size, id_N, IS_ADJUSTED)
    mass_N = _mass(score_N, highest, tl.load(peaks + row * 2 + 1))
    is_eligible_N = (id_N < size) & (tl.exp(score_N - highest) >= tl.load(min_p + row))
    if CUTS:
        level_N = _levels(score_N, highest, per_level, LEVELS)
        is_in_N = _is_eligible(score_N, id_N, highest, 0.0, tl.load(plan + 5), tl.load(plan + 6).to(tl.int32))
        is_in_N = (level_N < tl.load(plan + 1)) | ((level_N < tl.load(plan + 2)) & is_in_N)
        is_eligible_N = is_eligible_N & is_in_N
    return tl.where(is_eligible_N, mass_N, 0)
