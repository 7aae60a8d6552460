/* Attention of the query rows of a decode step over one rank's keys, of 32, 16 or 8 bits: all reads of a layer in one
   call, with online softmax. Arithmetic, queries and results are float32.

   Torch's flash kernel splits this into thousands of tiny matrix products whose overhead exceeds the cost of reading
   the keys, and each read costs a call and a merge. This kernel loads a block of keys and values into the L1 cache
   once, uses it for all rows of its read, and carries the state of a row from read to read.

   Shapes: q [tokens, kv_heads * group, dim] with strides between tokens and heads; keys and values [kv_heads, slots,
   dim] with a stride between heads; out [tokens, kv_heads * group, dim] and lse [tokens, kv_heads * group] contiguous.
   dim is a multiple of LANES. `scratch` has longleaf_scratch_size() floats. Scores s become cap * tanh(s / cap),
   unless cap is 0. lse is the natural log of the sum of exponentials; a row that sees no key gives out 0, lse -inf.

   Several threads divide the key heads among them, and where these are few, also the keys; the results of the parts of
   the keys are then merged in their order.

   On request the kernel also returns, for each read, the contribution of each block of BLOCK slots to each row: the
   share of a block in the row's attention is sum * exp(peak - lse). The bits of the result do not depend on the
   request: blocks always end at multiples of BLOCK slots, the computing functions exist in ONE_COPY, and the
   contribution is written after the computation.

   Non-finite numbers propagate: a row with a NaN or infinite score gives NaN, and so does a row that reads a non-finite
   value, even under a mask. fast-math assumes finite numbers, so the kernel sums the scores of a row and checks the
   bits of the sum. That costs 0 to 2 % per call; compiling with NaN semantics costs 2 to 9 %. */

#include <float.h>
#include <math.h>
#include <string.h>

#include "vectors.h"

/* keys and values of a block fill half of the L1 cache, so that the next ones can be prefetched */
#define BLOCK 32
/* bytes of a block's keys if fewer than MANY rows read them: with so little computation memory bandwidth dominates,
   which is highest if keys and values alternate page by page */
#define PAGE 4096
#define LANES 8
/* places of even and of odd numbers in two vectors */
#ifdef __AVX512F__
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#endif
/* rows that are computed together if there are fewer than MANY */
#define FEW 4
/* rows that are computed together, from MANY to TILE: the scores of a key fill up to two vectors; and the number of
   vector accumulators, limited by the number of registers */
#define TILE (2 * WIDTH)
#if defined(__SSE2__) && !defined(__AVX__)
#define MANY 8
#define SUMS (WIDTH / 2)
#else
#define MANY 5
#define SUMS WIDTH
#endif
/* rows of queries in a vector, two numbers of each; and vectors of values that FEW rows process together */
#define PAIRS (WIDTH / 2)
#define PARTS (SUMS / FEW)
/* products that are added sequentially: long sums have larger rounding errors */
#define CHUNK 32
/* minimum dim of wide keys */
#define WIDE 128
/* minimum number of keys in a part of several, and tasks per thread, so that a delayed thread leaves its tasks to
   others */
#define PART 256
#define SPREAD 2
/* Scores more than 60 below the peak, weights below 1e-26, are raised to this: a billion such weights do not change a
   float32 sum that contains a one. Otherwise they would become denormal numbers, which are a hundred times slower. */
#define NEGLIGIBLE -60.0f
/* fast-math has no infinities: a finite score below all others */
#define HIDDEN -1e38f

/* Compilers specialize functions for some callers, and such copies may round differently. */
#ifdef __clang__
#define ONE_COPY __attribute__((noinline))
#else
#define ONE_COPY __attribute__((noinline, noclone))
#endif

/* Data type of stored numbers; longleaf/kernels/cpu/decode.py names the first three. */
enum kind { FLOAT32, BFLOAT16, FLOAT16, INT8 };
static const long BYTES[] = {4, 2, 2, 1};

/* Rows [first_row, end_row) of tokens against keys in slots [first_slot, end_slot); query i sees key j iff
   0 <= offset + i - j < window. */
struct read {
    long first_row, end_row, first_slot, end_slot, offset, window;
};

/* The contributions to return for a read: of rows [first_row, end_row), with the heads of a token's group consecutive,
   `num_entries` entries each, starting at entry `start * group`. Slots from `edge` on are counted separately: the block
   that contains it has two entries. Without a request there are no rows. */
struct attributed_read {
    long start, first_row, end_row, edge, num_entries;
};

/* An entry: the highest score of the row up to this block, and the sum of exp(score - peak). */
struct entry {
    float peak, sum;
};

/* The keys and values of one key head. int8 has an exponent per block of slots and column of the keys, and a scale per
   slot of the values, as written by longleaf/kernels/int8.py. */
struct store {
    const char *keys, *values;    /* [slots, dim] */
    const signed char *exponents; /* [slots / block_size, dim] */
    const float *scales;          /* [slots] */
    float *room;                  /* scratch: a block of keys, one of values, and the steps of the columns */
    long block_size, dim;
    enum kind kind;
};

/* The rows of one key head, each a token and a head of its group, and their state. */
struct rows {
    float *q;          /* [num_rows, dim], multiplied by the scale */
    float *q_by_pair;  /* [dim / 2, stride, 2], the same transposed by pairs of numbers */
    float *out;        /* [num_rows, dim], before the division by `sum` */
    float *peak, *sum; /* [num_rows] */
    float *witness;    /* [num_rows], the sum of all scores: non-finite if one of them is */
    float *total;      /* [num_rows], the sums of the weights of the last block */
    float *weights;    /* weights of up to TILE rows: for fewer than MANY [row, BLOCK], else [BLOCK, TILE] */
    long dim, stride, group;
    float cap;
};

/* A block of a read's keys and values, and the rows that read it. */
struct block {
    const struct read *read;
    const void *keys, *values;            /* of this kind: float32, or 16 bits for fewer than MANY rows */
    enum kind kind;
    long key, num_keys;                   /* the first key, relative to the read's first, and their number */
    long row, num_rows;                   /* the first row, relative to the read's first, and their number */
    const char *next_keys, *next_values;  /* the addresses to prefetch; those of this block if there are none */
    long key_bytes;                       /* bytes of a key in storage */
    int is_masked;
};

/* Effect of a block on the rows of a tile: the new peak, the factor for the previous state, and the sums of scores and
   of weights. */
struct sums {
    float peak[TILE], fade[TILE], seen[TILE], total[TILE];
};

/* exp(x) for x from NEGLIGIBLE to 0: two to the nearest integer, times the Taylor polynomial of two to the rest, with a
   relative error of one in a million. Inlined, because a library call would spill the registers of the surrounding
   loops. The result for NaN is an arbitrary number: see `witness`. */
INLINE float exp_below(float x)
{
    const int whole = (int)(x * 1.44269504f - 0.5f);
    const float rest = x * 1.44269504f - whole;
    float power = 1.5403530e-4f * rest + 1.3333558e-3f;
    power = power * rest + 9.6181291e-3f;
    power = power * rest + 5.5504109e-2f;
    power = power * rest + 2.4022651e-1f;
    power = power * rest + 6.9314718e-1f;
    power = power * rest + 1.0f;
    unsigned bits;
    memcpy(&bits, &power, sizeof bits);
    bits += (unsigned)whole << 23; /* added to the exponent */
    memcpy(&power, &bits, sizeof bits);
    return power;
}

INLINE int sees(const struct read *read, long group, long row, long key)
{
    const long distance = read->offset + row / group - key;
    return 0 <= distance && distance < read->window;
}

/* Without a conversion instruction, by integer arithmetic: fast-math has no infinities, and small float16 numbers are
   denormal. */
INLINE wide from_float16(halves half)
{
#if defined(__AVX512F__)
    return (wide)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
    return (wide)_mm256_cvtph_ps((__m128i)half);
#else
    const words bits = __builtin_convertvector(half, words), rest = bits & 0x7fff;
    const wide small = __builtin_convertvector((ints)rest, wide) * 0x1p-24f;
    const words is_small = (words)(rest < 0x0400), is_finite = (words)(rest < 0x7c00);
    const words large = (rest << 13) + (is_finite & (127 - 15) << 23) + (~is_finite & (255 - 31) << 23);
    return (wide)((is_small & (words)small) | (~is_small & large) | (bits & 0x8000) << 16);
#endif
}

/* `count` numbers from index i as float32, which represents them exactly: WIDTH, or LANES followed by zeros. */
INLINE wide load(const void *numbers, long i, const enum kind kind, const int count)
{
    wide found = {0};
    halves half = {0};
    if (kind == FLOAT32 && count == WIDTH)
        return *(const vec *)((const float *)numbers + i);
    if (kind == FLOAT32) {
        memcpy(&found, (const float *)numbers + i, sizeof(float) * count);
        return found;
    }
    memcpy(&half, (const unsigned short *)numbers + i, sizeof(short) * count);
    return kind == BFLOAT16 ? from_bfloat16(half) : from_float16(half);
}

/* products of a part of one key with the same part of several queries */
INLINE void add_products(wide sum[FEW], const float *q, const void *keys, long i, long dim, const int num_rows,
                         const enum kind kind, const int count)
{
    const wide part = load(keys, i, kind, count);
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++)
        sum[r] += load(q, r * dim, FLOAT32, count) * part;
}

/* scores of at most FEW rows against all keys of a block */
INLINE void score_few(const void *keys, long num_keys, const float *q, float score[][BLOCK], long dim,
                      const enum kind kind, const int num_rows)
{
    for (long j = 0; j < num_keys; j++) {
        wide sum[FEW] = {{0}};
        long d = 0;
        for (; d + WIDTH <= dim; d += WIDTH)
            add_products(sum, q + d, keys, j * dim + d, dim, num_rows, kind, WIDTH);
        if (d < dim)
            add_products(sum, q + d, keys, j * dim + d, dim, num_rows, kind, LANES);
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            float total = 0.0f;
            for (int i = 0; i < WIDTH; i++)
                total += sum[r][i];
            score[r][j] = total;
        }
    }
}

/* out * fade + weighted values, for some rows and `num_parts` times `count` columns. The contributions of a block are
   summed first: added to `out` key by key, each addition would round the total of all previous keys. */
INLINE void add_columns(const float *weight, const float *fade, const void *values, long num_keys, float *out, long dim,
                        long d, const enum kind kind, const int num_rows, const int num_parts, const int count)
{
    wide sum[2 * FEW] = {{0}};
    for (long j = 0; j < num_keys; j++)
#pragma GCC unroll 8
        for (int i = 0; i < num_parts; i++) {
            const wide part = load(values, j * dim + d + i * WIDTH, kind, count);
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++)
                sum[r * num_parts + i] += weight[r * BLOCK + j] * part;
        }
#pragma GCC unroll 8
    for (int i = 0; i < num_rows * num_parts; i++) {
        float *place = out + i / num_parts * dim + d + i % num_parts * WIDTH;
        const wide all = fade[i / num_parts] * load(place, 0, FLOAT32, count) + sum[i];
        memcpy(place, &all, sizeof(float) * count);
    }
}

/* weighted values of a block for at most FEW rows */
INLINE void value_few(const void *values, long num_keys, const float *weight, const float *fade, float *out, long dim,
                      const enum kind kind, const int num_rows)
{
    const int most = num_rows == 1 ? 8 : num_rows == 2 ? 4 : 2; /* limited by the number of registers */
    long d = 0;
    for (; d + most * WIDTH <= dim; d += most * WIDTH)
        add_columns(weight, fade, values, num_keys, out, dim, d, kind, num_rows, most, WIDTH);
    for (; d + 2 * WIDTH <= dim; d += 2 * WIDTH)
        add_columns(weight, fade, values, num_keys, out, dim, d, kind, num_rows, 2, WIDTH);
    for (; d + WIDTH <= dim; d += WIDTH)
        add_columns(weight, fade, values, num_keys, out, dim, d, kind, num_rows, 1, WIDTH);
    if (d < dim)
        add_columns(weight, fade, values, num_keys, out, dim, d, kind, num_rows, 1, LANES);
}

/* one call per FEW rows, with their number as a compile-time constant */
#define BY_ROWS(CALL) \
    for (long r = 0; r < num_rows; r += FEW) \
        switch (num_rows - r) { \
            case 1: CALL(1); break; \
            case 2: CALL(2); break; \
            case 3: CALL(3); break; \
            default: CALL(FEW); \
        }
#define SCORE(NUM) score_few(keys, num_keys, q + r * dim, score + r, dim, kind, NUM)
#define VALUE(NUM) value_few(values, num_keys, score[r], fade + r, out + r * dim, dim, kind, NUM)

/* Processes a block for fewer than MANY rows. */
INLINE void add_few(const struct block *block, const float *restrict q, float *restrict out, float *restrict peak,
                    float *restrict sum, float *restrict witness, float *restrict totals,
                    float (*restrict score)[BLOCK], long group, float cap, long dim, const enum kind kind)
{
    const long num_rows = block->num_rows, num_keys = block->num_keys;
    float fade[MANY];
    const void *keys = block->keys, *values = block->values;
    BY_ROWS(SCORE)
    for (long r = 0; r < num_rows; r++) {
        float top = peak[r], total = 0.0f, seen = 0.0f;
        for (long j = 0; j < num_keys; j++)
            seen += score[r][j];
        witness[r] += seen;
        if (cap > 0.0f)
            for (long j = 0; j < num_keys; j++)
                score[r][j] = cap * tanhf(score[r][j] / cap);
        if (block->is_masked)
            for (long j = 0; j < num_keys; j++)
                score[r][j] = sees(block->read, group, block->row + r, block->key + j) ? score[r][j] : HIDDEN;
        for (long j = 0; j < num_keys; j++)
            top = score[r][j] > top ? score[r][j] : top;
        for (long j = 0; j < num_keys; j++) {
            const float below = score[r][j] - top;
            score[r][j] = exp_below(below < NEGLIGIBLE ? NEGLIGIBLE : below);
        }
        if (block->is_masked)
            for (long j = 0; j < num_keys; j++)
                score[r][j] = sees(block->read, group, block->row + r, block->key + j) ? score[r][j] : 0.0f;
        for (long j = 0; j < num_keys; j++)
            total += score[r][j];
        totals[r] = total;
        fade[r] = expf(peak[r] - top);
        sum[r] = sum[r] * fade[r] + total;
        peak[r] = top;
    }
    BY_ROWS(VALUE)
}

#define ADD(DIM, KIND) add_few(block, q, out, peak, sum, witness, totals, score, rows->group, rows->cap, DIM, KIND)

static ONE_COPY void add_few_of_kind(const struct rows *rows, const struct block *block)
{
    const long row = block->read->first_row * rows->group + block->row, dim = rows->dim;
    const float *q = rows->q + row * dim;
    float *out = rows->out + row * dim, *peak = rows->peak + row, *sum = rows->sum + row;
    float *witness = rows->witness + row, *totals = rows->total + row;
    float(*score)[BLOCK] = (float(*)[BLOCK])rows->weights;
    switch (block->kind) {
        case FLOAT32: /* short loops of constant length stay in registers */
            if (dim == 32)
                ADD(32, FLOAT32);
            else if (dim == 64)
                ADD(64, FLOAT32);
            else
                ADD(dim, FLOAT32);
            break;
        case BFLOAT16: ADD(dim, BFLOAT16); break;
        case FLOAT16: ADD(dim, FLOAT16); break;
        case INT8: break; /* was converted to float32 */
    }
}

/* pairwise sums of `low`, then those of `high` */
INLINE wide add_neighbours(wide low, wide high)
{
    return PICK(low, high, EVEN) + PICK(low, high, ODD);
}

/* Scores of `vecs` times PAIRS rows against some keys. A pair of a key's numbers is loaded once for all rows. The loop
   prefetches the next keys in small portions: the hardware prefetcher does not predict their order, and many prefetches
   at once stall the processor. */
INLINE void score_tile(const float *q_by_pair, long stride, const float *keys, float score[][TILE], long dim,
                       const char *next, long next_bytes, const int num_keys, const int vecs)
{
    for (long first = 0; first < dim; first += 2 * CHUNK) {
        const long end = first + 2 * CHUNK < dim ? first + 2 * CHUNK : dim;
        wide sum[WIDTH] = {{0}};
        for (long d = first; d < end; d += 2) {
            const vec *q = (const vec *)(q_by_pair + d * stride);
            wide part[4] = {q[0], q[vecs > 1], q[vecs > 2 ? 2 : 0], q[vecs > 3 ? 3 : 0]};
            KEEP(part[0]);
            KEEP(part[1]);
            KEEP(part[2]);
            KEEP(part[3]);
            __builtin_prefetch(next + d * next_bytes, 0, 3);
#pragma GCC unroll 8
            for (int j = 0; j < num_keys; j++) {
                long long numbers;
                memcpy(&numbers, keys + j * dim + d, sizeof numbers);
                wide pair = (wide)(numbers + (longs){0});
                KEEP(pair);
#pragma GCC unroll 4
                for (int i = 0; i < vecs; i++)
                    sum[j * vecs + i] += pair * part[i];
            }
        }
#pragma GCC unroll 8
        for (int j = 0; j < num_keys; j++)
#pragma GCC unroll 2
            for (int i = 0; i < vecs; i += 2) {
                wide found = add_neighbours(sum[j * vecs + i], sum[j * vecs + i + (i + 1 < vecs)]);
                vec *place = (vec *)(score[j] + i * PAIRS);
                if (first > 0)
                    found += *place;
                *place = found;
            }
    }
}

/* Processes as many keys at once as there are registers for. */
INLINE void score_block(const struct block *block, const float *q_by_pair, long stride, float score[BLOCK][TILE],
                        long dim, const int vecs)
{
    const int step = vecs > 2 ? SUMS / 4 : SUMS / 2;
    const float *keys = block->keys;
    const char *next = block->next_keys;
    const long bytes = block->key_bytes, each = bytes / dim;
    long j = 0;
    for (; j + step <= block->num_keys; j += step)
        score_tile(q_by_pair, stride, keys + j * dim, score + j, dim, next + j * bytes, each * step, step, vecs);
    for (; j < block->num_keys; j++)
        score_tile(q_by_pair, stride, keys + j * dim, score + j, dim, next + j * bytes, each, 1, vecs);
}

/* Scores of all rows of a block. This function and the following ones are not inlined, because gcc allocates registers
   better in short functions. */
static ONE_COPY void score_many(const struct block *block, const float *q_by_pair, long stride,
                                float score[BLOCK][TILE], long dim)
{
    switch ((block->num_rows + PAIRS - 1) / PAIRS) {
        case 1: score_block(block, q_by_pair, stride, score, dim, 1); break;
        case 2: score_block(block, q_by_pair, stride, score, dim, 2); break;
        case 3: score_block(block, q_by_pair, stride, score, dim, 3); break;
        default: score_block(block, q_by_pair, stride, score, dim, 4);
    }
}

static void hide(const struct block *block, long group, long row, float score[][TILE], float value)
{
    const long rest = block->num_rows - row, num_rows = rest < WIDTH ? rest : WIDTH;
    for (long j = 0; j < block->num_keys; j++)
        for (long r = 0; r < num_rows; r++)
            if (!sees(block->read, group, block->row + row + r, block->key + j))
                score[j][r] = value;
}

INLINE wide larger(wide a, wide b)
{
#if defined(__AVX512F__)
    return (wide)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (wide)_mm256_max_ps((__m256)a, (__m256)b);
#else
    const words is_larger = (words)(a > b);
    return (wide)((is_larger & (words)a) | (~is_larger & (words)b));
#endif
}

/* exp_below for each number; numbers below NEGLIGIBLE are raised to it. */
INLINE wide exp_each(wide x)
{
    x = larger(x, NEGLIGIBLE - (wide){0});
    const ints whole = __builtin_convertvector(x * 1.44269504f - 0.5f, ints);
    const wide rest = x * 1.44269504f - __builtin_convertvector(whole, wide);
    wide power = 1.5403530e-4f * rest + 1.3333558e-3f;
    power = power * rest + 9.6181291e-3f;
    power = power * rest + 5.5504109e-2f;
    power = power * rest + 2.4022651e-1f;
    power = power * rest + 6.9314718e-1f;
    power = power * rest + 1.0f;
    return (wide)((words)power + ((words)whole << 23));
}

/* Converts the scores of WIDTH rows from `row` to weights. */
static ONE_COPY void weigh(const struct block *block, long group, float cap, float score[][TILE], long row,
                           struct sums *sums)
{
    const long num_keys = block->num_keys;
    const wide before = *(vec *)(sums->peak + row);
    wide peak = before, seen = {0}, total = {0};
    for (long j = 0; j < num_keys; j++) {
        seen += *(vec *)score[j];
        peak = larger(*(vec *)score[j], peak);
    }
    if (cap > 0.0f)
        for (long j = 0; j < num_keys; j++)
            for (int r = 0; r < WIDTH; r++)
                score[j][r] = cap * tanhf(score[j][r] / cap);
    if (block->is_masked)
        hide(block, group, row, score, HIDDEN);
    if (cap > 0.0f || block->is_masked) {
        peak = before;
        for (long j = 0; j < num_keys; j++)
            peak = larger(*(vec *)score[j], peak);
    }
    for (long j = 0; j < num_keys; j++)
        *(vec *)score[j] = exp_each(*(vec *)score[j] - peak);
    if (block->is_masked)
        hide(block, group, row, score, 0.0f);
    for (long j = 0; j < num_keys; j++)
        total += *(vec *)score[j];
    *(vec *)(sums->fade + row) = exp_each(before - peak);
    *(vec *)(sums->peak + row) = peak;
    *(vec *)(sums->seen + row) = seen;
    *(vec *)(sums->total + row) = total;
}

/* out * fade + weighted values, for some rows and `vecs` vectors of columns. Prefetches the next values, `next_bytes`
   for each key. */
INLINE void value_tile(float weight[][TILE], const float *fade, const float *values, float *out, long dim,
                       const char *next, long next_bytes, long num_keys, const int num_rows, const int vecs,
                       const int count)
{
    wide sum[WIDTH] = {{0}};
    for (long j = 0; j < num_keys; j++) {
        wide part[PARTS];
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; i++)
            part[i] = load(values, j * dim + (i < vecs ? i : 0) * WIDTH, FLOAT32, count);
        KEEP(part[0]);
        KEEP(part[PARTS > 1]);
        KEEP(part[PARTS / 2]);
        KEEP(part[PARTS - 1]);
#pragma GCC unroll 2
        for (int i = 0; i < WIDTH / LANES; i++)
            __builtin_prefetch(next + j * next_bytes + i * LINE, 0, 3);
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            wide one = weight[j][r] - (wide){0};
            KEEP(one);
#pragma GCC unroll 4
            for (int i = 0; i < vecs; i++)
                sum[r * vecs + i] += one * part[i];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < num_rows * vecs; i++) {
        float *place = out + i / vecs * dim + i % vecs * WIDTH;
        const wide all = fade[i / vecs] * load(place, 0, FLOAT32, count) + sum[i];
        memcpy(place, &all, sizeof(float) * count);
    }
}

/* Weighted values of a block for some rows; returns the address after the prefetched values. */
INLINE const char *value_rows(float weight[][TILE], const float *fade, const float *values, float *out, long dim,
                              const char *next, long next_bytes, long num_keys, const int num_rows)
{
    long d = 0;
    for (; d + PARTS * WIDTH <= dim; d += PARTS * WIDTH, next += num_keys * next_bytes)
        value_tile(weight, fade, values + d, out + d, dim, next, next_bytes, num_keys, num_rows, PARTS, WIDTH);
    for (; d + 2 * WIDTH <= dim; d += 2 * WIDTH, next += num_keys * next_bytes)
        value_tile(weight, fade, values + d, out + d, dim, next, next_bytes, num_keys, num_rows, 2, WIDTH);
    for (; d + WIDTH <= dim; d += WIDTH, next += num_keys * next_bytes)
        value_tile(weight, fade, values + d, out + d, dim, next, next_bytes, num_keys, num_rows, 1, WIDTH);
    if (d < dim)
        value_tile(weight, fade, values + d, out + d, dim, next, next_bytes, num_keys, num_rows, 1, LANES);
    return next;
}

static ONE_COPY void value_many(const struct block *block, float weight[][TILE], const float *fade, float *out,
                                long dim)
{
    const long num_rows = block->num_rows, num_keys = block->num_keys;
    const long columns = dim < PARTS * WIDTH ? dim : PARTS * WIDTH;
    const long next_bytes = block->key_bytes * columns * FEW / dim / num_rows;
    const char *next = block->next_values;
    for (long r = 0; r < num_rows; r += num_rows - r < FEW ? 1 : FEW) {
        float(*weights)[TILE] = (float(*)[TILE])(weight[0] + r), *place = out + r * dim;
        if (num_rows - r < FEW)
            next = value_rows(weights, fade + r, block->values, place, dim, next, next_bytes, num_keys, 1);
        else
            next = value_rows(weights, fade + r, block->values, place, dim, next, next_bytes, num_keys, FEW);
    }
}

/* Processes a block for MANY to TILE rows. */
static ONE_COPY void add_many(const struct rows *rows, const struct block *block)
{
    const long row = block->read->first_row * rows->group + block->row, num_rows = block->num_rows, dim = rows->dim;
    float(*score)[TILE] = (float(*)[TILE])rows->weights;
    struct sums sums = {0};
    memcpy(sums.peak, rows->peak + row, sizeof(float) * num_rows);
    score_many(block, rows->q_by_pair + 2 * row, rows->stride, score, dim);
    for (long r = 0; r < num_rows; r += WIDTH)
        weigh(block, rows->group, rows->cap, (float(*)[TILE])(score[0] + r), r, &sums);
    for (long r = 0; r < num_rows; r++) {
        rows->sum[row + r] = rows->sum[row + r] * sums.fade[r] + sums.total[r];
        rows->peak[row + r] = sums.peak[r];
        rows->witness[row + r] += sums.seen[r];
        rows->total[row + r] = sums.total[r];
    }
    value_many(block, score, sums.fade, rows->out + row * dim, dim);
}

/* Converts int8 keys and values of one block of slots to float32: n in a key represents (n + 1/2) 2^exponent. */
static void expand(const struct store *store, long slot, struct block *block)
{
    const long dim = store->dim;
    const signed char *exponents = store->exponents + slot / store->block_size * dim;
    const signed char *small_keys = block->keys, *small_values = block->values;
    float *restrict keys = store->room, *restrict values = keys + BLOCK * dim, *restrict steps = values + BLOCK * dim;
    for (long d = 0; d < dim; d++) {
        const int bits = (exponents[d] + 127) << 23; /* of a float32: sign 0, the exponent, fraction 0 */
        memcpy(steps + d, &bits, sizeof bits);
    }
    for (long j = 0; j < block->num_keys; j++) {
        const float scale = store->scales[slot + j];
        for (long d = 0; d < dim; d++) {
            keys[j * dim + d] = (small_keys[j * dim + d] + 0.5f) * steps[d];
            values[j * dim + d] = small_values[j * dim + d] * scale;
        }
    }
    block->keys = keys;
    block->values = values;
    block->kind = FLOAT32;
}

INLINE void widen(const void *numbers, float *room, long size, const enum kind kind)
{
    for (long i = 0; i < size - size % WIDTH; i += WIDTH) {
        const wide part = load(numbers, i, kind, WIDTH);
        memcpy(room + i, &part, sizeof part);
    }
    if (size % WIDTH) {
        const wide part = load(numbers, size - LANES, kind, LANES);
        memcpy(room + size - LANES, &part, sizeof(float) * LANES);
    }
}

/* Converts 16-bit keys and values to float32. */
static void widen_block(const struct store *store, struct block *block)
{
    const long size = block->num_keys * store->dim;
    float *keys = store->room, *values = keys + BLOCK * store->dim;
    if (block->kind == BFLOAT16) {
        widen(block->keys, keys, size, BFLOAT16);
        widen(block->values, values, size, BFLOAT16);
    } else {
        widen(block->keys, keys, size, FLOAT16);
        widen(block->values, values, size, FLOAT16);
    }
    block->keys = keys;
    block->values = values;
    block->kind = FLOAT32;
}

/* Prepares the keys and values of a block whose first key is in `slot`. Few rows read 16-bit numbers directly. The
   values of wide keys are prefetched while scores are computed; the hardware prefetcher handles narrow ones. */
static void fetch(const struct store *store, long slot, int are_few, struct block *block)
{
    const long bytes = block->num_keys * block->key_bytes;
    const char *values = store->values + slot * block->key_bytes;
    block->kind = store->kind;
    block->keys = store->keys + slot * block->key_bytes;
    block->values = values;
    if (store->kind == INT8)
        expand(store, slot, block);
    else if (are_few) {
        for (long i = 0; store->dim >= WIDE && i < bytes; i += LINE)
            __builtin_prefetch(values + i, 0, 3);
    } else if (store->kind != FLOAT32)
        widen_block(store, block);
}

/* Several blocks of few keys may form one of BLOCK slots: the sums of earlier ones are rescaled when the peak rises. */
INLINE void note(struct entry *entry, int begins, float peak, float sum)
{
    if (!begins) /* a peak rises rarely */
        sum += entry->sum * (entry->peak == peak ? 1.0f : expf(entry->peak - peak));
    *entry = (struct entry){peak, sum};
}

/* The first keys of a block count toward one entry, the others toward the next. */
static void note_parts(const struct rows *rows, const struct block *block, long tile_row, long num_before, int begins,
                       struct entry *entry)
{
    const int are_few = block->num_rows < MANY;
    const float *weights = rows->weights + tile_row * (are_few ? BLOCK : 1);
    const float peak = rows->peak[block->read->first_row * rows->group + block->row + tile_row];
    float sums[2] = {0.0f, 0.0f};
    for (long j = 0; j < block->num_keys; j++)
        sums[j >= num_before] += weights[j * (are_few ? 1 : TILE)];
    note(entry, begins, peak, sums[0]);
    note(entry + 1, 1, peak, sums[1]);
}

/* Records the contribution of a block, whose first key is in `slot`, to its rows; `entries` has the entries of this key
   head. */
static void record(const struct rows *rows, const struct block *block, unsigned long slot,
                   const struct attributed_read *read, struct entry *entries)
{
    const long group = rows->group;
    const long first_attributed = read->first_row * group, end_attributed = read->end_row * group;
    const long block_row = block->read->first_row * group + block->row, block_end = block_row + block->num_rows;
    const long first = first_attributed > block_row ? first_attributed : block_row;
    const long end = end_attributed < block_end ? end_attributed : block_end;
    const unsigned long edge = read->edge, first_slot = block->read->first_slot;
    const int begins = block->key == 0 || slot % BLOCK == 0 || slot == edge;
    struct entry *entry = entries + read->start * group + (first - first_attributed) * read->num_entries;
    entry += slot / BLOCK - first_slot / BLOCK + (slot >= edge);
    const int is_cut = slot < edge && edge < slot + block->num_keys;
    for (long row = first; row < end; row++, entry += read->num_entries)
        if (is_cut)
            note_parts(rows, block, row - block_row, edge - slot, begins, entry);
        else
            note(entry, begins, rows->peak[row], rows->total[row]);
}

/* Adds keys [first_key, end_key) of a read, counted from its first. */
static void add_read(const struct rows *rows, const struct read *read, long first_key, long end_key,
                     const struct store *store, const struct attributed_read *attributed_read, struct entry *entries)
{
    const long group = rows->group;
    const long num_rows = (read->end_row - read->first_row) * group;
    struct block block = {.read = read, .key_bytes = rows->dim * BYTES[store->kind]};
    const long bytes = store->kind == INT8 ? rows->dim * BYTES[FLOAT32] : block.key_bytes; /* as read by the loops */
    const long page = (PAGE + bytes - 1) / bytes;
    const long most = num_rows < MANY && page < BLOCK ? page : BLOCK;
    for (long key = first_key; key < end_key; key += block.num_keys) {
        const long slot = read->first_slot + key, rest = end_key - key, room = BLOCK - slot % BLOCK;
        block.key = key;
        block.num_keys = rest < most ? rest : most;
        block.num_keys = block.num_keys < room ? block.num_keys : room;
        if (store->kind == INT8) {
            const long same_scales = store->block_size - slot % store->block_size;
            block.num_keys = block.num_keys < same_scales ? block.num_keys : same_scales;
        }
        fetch(store, slot, num_rows < MANY, &block);
        block.is_masked = !sees(read, group, 0, key + block.num_keys - 1) || !sees(read, group, num_rows - 1, key);
        for (block.row = 0; block.row < num_rows; block.row += TILE) {
            const int has_next = block.row == 0 && rest >= 2 * BLOCK;
            block.num_rows = num_rows - block.row < TILE ? num_rows - block.row : TILE;
            block.next_keys = has_next ? store->keys + (slot + BLOCK) * block.key_bytes : block.keys;
            block.next_values = has_next ? store->values + (slot + BLOCK) * block.key_bytes : block.values;
            if (block.num_rows < MANY)
                add_few_of_kind(rows, &block);
            else
                add_many(rows, &block);
            if (attributed_read)
                record(rows, &block, slot, attributed_read, entries);
        }
    }
}

static void begin(const struct rows *rows, const float *q, long tokens, long token_stride, long head_stride,
                  float scale)
{
    for (long t = 0; t < tokens; t++)
        for (long g = 0; g < rows->group; g++) {
            const long row = t * rows->group + g;
            for (long d = 0; d < rows->dim; d++) {
                const float number = q[t * token_stride + g * head_stride + d] * scale;
                rows->q[row * rows->dim + d] = rows->q_by_pair[d / 2 * 2 * rows->stride + 2 * row + d % 2] = number;
            }
            rows->peak[row] = -FLT_MAX;
            rows->sum[row] = rows->witness[row] = 0.0f;
        }
    memset(rows->out, 0, sizeof(float) * tokens * rows->group * rows->dim);
}

/* `number`, or NaN if the witness is not finite. */
static float known_by(float witness, float number)
{
    const unsigned exponent = 0xffu << 23, nan = 0x1ffu << 22;
    unsigned bits;
    memcpy(&bits, &witness, sizeof bits);
    if ((bits & exponent) == exponent)
        memcpy(&number, &nan, sizeof number);
    return number;
}

static void finish(const struct rows *rows, float *out, float *lse, long tokens, long heads)
{
    for (long t = 0; t < tokens; t++)
        for (long g = 0; g < rows->group; g++) {
            const long row = t * rows->group + g, place = t * heads * rows->group + g;
            const float sum = rows->sum[row], witness = rows->witness[row];
            const float share = known_by(witness, sum > 0.0f ? 1.0f / sum : 0.0f);
            for (long d = 0; d < rows->dim; d++)
                out[place * rows->dim + d] = rows->out[row * rows->dim + d] * share;
            lse[place] = known_by(witness, sum > 0.0f ? rows->peak[row] + logf(sum) : -HUGE_VALF);
        }
}

/* Tiles read, but do not write, beyond the last row, and their vectors are aligned to cache lines. */
static long stride_of(long num_rows)
{
    return (num_rows + WIDTH - 1) / PAIRS * PAIRS;
}

static long state_size(long num_rows, long dim)
{
    return num_rows * (dim + 3);
}

static long worker_size(long num_rows, long dim)
{
    const long blocks = BLOCK * TILE + (2 * BLOCK + 1) * dim, queries = (stride_of(num_rows) + num_rows) * dim;
    return (blocks + queries + num_rows + state_size(num_rows, dim) + WIDTH - 1) / WIDTH * WIDTH;
}

/* A call. Each task is a key head and a part of the keys, and the thread that ends the last part of a head merges
   them. */
struct job {
    const float *q;
    struct store store; /* of the first head */
    float *out, *lse;
    float *scratch; /* for each thread */
    float *states;  /* [heads, parts, state_size], if there is more than one part */
    int *num_ended; /* [heads], parts */
    const struct read *reads;
    const struct attributed_read *attributed_reads;
    struct entry *entries;
    long num_reads, tokens, heads, group, parts;
    long q_token_stride, q_head_stride, kv_head_stride, entry_stride;
    long num_workers, num_tasks; /* begun so far */
    long cost;                   /* of all keys of a head */
    float scale, cap;
};

/* Estimated cost of a key: it is read once, and computed with by each row. */
static long cost_of_key(const struct read *read, long group)
{
    return FEW + (read->end_row - read->first_row) * group;
}

static long cost_of_keys(const struct read *reads, long num_reads, long group)
{
    long cost = 0;
    for (long i = 0; i < num_reads; i++)
        cost += (reads[i].end_slot - reads[i].first_slot) * cost_of_key(reads + i, group);
    return cost;
}

/* The key of a read at which the next part begins, if that begins `cost` after the first key: at the start of a block
   of slots, or at one end of the read. */
static long cut(const struct read *read, long cost, long group)
{
    const long num_keys = read->end_slot - read->first_slot, key = cost / cost_of_key(read, group);
    const long place = (read->first_slot + key + BLOCK - 1) / BLOCK * BLOCK - read->first_slot;
    return key <= 0 ? 0 : place < num_keys ? place : num_keys;
}

static void add_part(const struct job *job, const struct rows *rows, const struct store *store, struct entry *entries,
                     long part)
{
    const long from = job->cost * part / job->parts, to = job->cost * (part + 1) / job->parts;
    long passed = 0;
    for (long i = 0; i < job->num_reads; i++) {
        const struct read *read = job->reads + i;
        const long num_keys = read->end_slot - read->first_slot;
        const long first = cut(read, from - passed, job->group);
        const long last = part == job->parts - 1 ? num_keys : cut(read, to - passed, job->group);
        add_read(rows, read, first, last, store, job->attributed_reads ? job->attributed_reads + i : NULL, entries);
        passed += num_keys * cost_of_key(read, job->group);
    }
}

static void set_state(struct rows *rows, float *state, long num_rows)
{
    rows->out = state;
    rows->peak = rows->out + num_rows * rows->dim;
    rows->sum = rows->peak + num_rows;
    rows->witness = rows->sum + num_rows;
}

/* Adds the state of a later part to `rows`. */
static void merge(const struct rows *rows, const struct rows *later, long num_rows)
{
    for (long row = 0; row < num_rows; row++) {
        const float top = rows->peak[row] > later->peak[row] ? rows->peak[row] : later->peak[row];
        const float fade = expf(rows->peak[row] - top), share = expf(later->peak[row] - top);
        float *out = rows->out + row * rows->dim;
        const float *added = later->out + row * rows->dim;
        for (long d = 0; d < rows->dim; d++)
            out[d] = out[d] * fade + added[d] * share;
        rows->sum[row] = rows->sum[row] * fade + later->sum[row] * share;
        rows->witness[row] += later->witness[row];
        rows->peak[row] = top;
    }
}

static void do_task(struct job *job, struct rows *rows, struct store *store, long head, long part)
{
    const long num_rows = job->tokens * job->group, dim = store->dim, size = state_size(num_rows, dim);
    const long offset = head * job->kv_head_stride;
    float *states = job->states + head * job->parts * size;
    store->keys = job->store.keys + offset * BYTES[store->kind];
    store->values = job->store.values + offset * BYTES[store->kind];
    if (store->kind == INT8) {
        store->exponents = job->store.exponents + offset / store->block_size;
        store->scales = job->store.scales + offset / dim;
    }
    if (job->parts > 1)
        set_state(rows, states + part * size, num_rows);
    begin(rows, job->q + head * job->group * job->q_head_stride, job->tokens, job->q_token_stride, job->q_head_stride,
          job->scale);
    add_part(job, rows, store, job->entries + head * job->entry_stride, part);
    if (job->parts > 1) {
        if (__atomic_add_fetch(job->num_ended + head, 1, __ATOMIC_ACQ_REL) < job->parts)
            return;
        struct rows later = *rows;
        set_state(rows, states, num_rows);
        for (long i = 1; i < job->parts; i++) {
            set_state(&later, states + i * size, num_rows);
            merge(rows, &later, num_rows);
        }
    }
    finish(rows, job->out + head * job->group * dim, job->lse + head * job->group, job->tokens, job->heads);
}

static void work(void *begun)
{
    struct job *job = begun;
    const long num_rows = job->tokens * job->group, dim = job->store.dim;
    const long worker = __atomic_fetch_add(&job->num_workers, 1, __ATOMIC_RELAXED);
    struct store store = job->store;
    struct rows rows = {.weights = job->scratch + worker * worker_size(num_rows, dim), .dim = dim,
                        .stride = stride_of(num_rows), .group = job->group, .cap = job->cap};
    store.room = rows.weights + BLOCK * TILE;
    rows.q_by_pair = store.room + (2 * BLOCK + 1) * dim;
    rows.q = rows.q_by_pair + rows.stride * dim;
    rows.total = rows.q + num_rows * dim;
    set_state(&rows, rows.total + num_rows, num_rows);
    memset(rows.q_by_pair, 0, sizeof(float) * rows.stride * dim);
    for (;;) {
        const long task = __atomic_fetch_add(&job->num_tasks, 1, __ATOMIC_RELAXED);
        if (task >= job->heads * job->parts)
            return;
        do_task(job, &rows, &store, task / job->parts, task % job->parts);
    }
}

/* The number of parts into which several threads divide the keys of each head: enough to keep all busy, each of at
   least PART keys; 0 if one thread is faster. */
long longleaf_num_parts(const struct read *reads, long num_reads, long heads, long threads)
{
    long num_keys = 0;
    for (long i = 0; i < num_reads; i++)
        num_keys += reads[i].end_slot - reads[i].first_slot;
    const long wanted = (threads * SPREAD + heads - 1) / heads, most = num_keys / PART;
    if (threads == 1 || heads * num_keys < 2 * PART)
        return 0;
    return most < 1 ? 1 : wanted < most ? wanted : most;
}

/* In floats. */
long longleaf_scratch_size(long num_rows, long dim, long heads, long threads, long parts)
{
    return threads * worker_size(num_rows, dim) + (parts > 1 ? heads * (parts * state_size(num_rows, dim) + 1) : 0);
}

static void decode(struct job *job, float *scratch, parallel *start, long threads)
{
    const long num_rows = job->tokens * job->group, dim = job->store.dim;
    job->scratch = scratch;
    job->states = scratch + threads * worker_size(num_rows, dim);
    if (job->parts > 1) {
        job->num_ended = (int *)(job->states + job->heads * job->parts * state_size(num_rows, dim));
        memset(job->num_ended, 0, sizeof(int) * job->heads);
        job->cost = cost_of_keys(job->reads, job->num_reads, job->group);
    }
    if (threads > 1)
        start(work, job, threads, 0);
    else
        work(job);
}

/* `kind` is float32, bfloat16 or float16, for keys and values. `attributed_reads` has an element for each read, or is
   NULL; contributions are written to `entries` [kv_heads, entries * group], with a stride between heads. `start` is
   needed for more than one thread. */
void longleaf_decode(const float *q, const char *keys, const char *values, float *out, float *lse, float *scratch,
                     const struct read *reads, long num_reads, long tokens, long heads, long group, long dim,
                     long q_token_stride, long q_head_stride, long kv_head_stride, parallel *start, long threads,
                     long parts, long kind, float scale, float cap, const struct attributed_read *attributed_reads,
                     struct entry *entries, long entry_stride)
{
    struct job job = {.q = q, .out = out, .lse = lse, .reads = reads, .num_reads = num_reads, .tokens = tokens,
                      .heads = heads, .group = group, .parts = parts, .q_token_stride = q_token_stride,
                      .q_head_stride = q_head_stride, .kv_head_stride = kv_head_stride, .scale = scale, .cap = cap,
                      .attributed_reads = attributed_reads, .entries = entries, .entry_stride = entry_stride};
    job.store = (struct store){.keys = keys, .values = values, .dim = dim, .kind = kind};
    decode(&job, scratch, start, threads);
}

void longleaf_decode_int8(const float *q, const char *keys, const char *values, const signed char *exponents,
                          const float *scales, float *out, float *lse, float *scratch, const struct read *reads,
                          long num_reads, long tokens, long heads, long group, long dim, long q_token_stride,
                          long q_head_stride, long kv_head_stride, parallel *start, long threads, long parts,
                          long block_size, float scale, float cap, const struct attributed_read *attributed_reads,
                          struct entry *entries, long entry_stride)
{
    struct job job = {.q = q, .out = out, .lse = lse, .reads = reads, .num_reads = num_reads, .tokens = tokens,
                      .heads = heads, .group = group, .parts = parts, .q_token_stride = q_token_stride,
                      .q_head_stride = q_head_stride, .kv_head_stride = kv_head_stride, .scale = scale, .cap = cap,
                      .attributed_reads = attributed_reads, .entries = entries, .entry_stride = entry_stride};
    job.store = (struct store){.keys = keys, .values = values, .exponents = exponents, .scales = scales,
                               .block_size = block_size, .dim = dim, .kind = INT8};
    decode(&job, scratch, start, threads);
}
