/* Attention of the query rows of a decode step over one rank's keys, of 32, 16 or 8 bits: all reads of a layer in one
   call, online softmax. All arithmetic is float32, and so are queries and results.

   Torch's flash kernel splits this into thousands of tiny matrix products, whose overhead costs more than reading the
   keys, and each read costs a call and a merge. Here a block of keys and values is brought into the first-level cache
   once and used by all rows of its read, and what a row has seen goes on from read to read.

   Shapes: q [tokens, kv_heads * group, dim] with strides between tokens and heads; keys and values
   [kv_heads, slots, dim] with a stride between heads; out [tokens, kv_heads * group, dim] and
   lse [tokens, kv_heads * group] contiguous. dim is a multiple of LANES. `scratch` has longleaf_scratch_size() floats.
   Scores s become cap * tanh(s / cap), unless cap is 0. lse is the natural log of the sum of exponentials; a row that
   sees nothing gives out 0, lse -inf.

   Of reads of which it is asked, the kernel also tells what each block of BLOCK slots gave to each row: the share of a
   block in what the row attends to is sum * exp(peak - lse). Bits are the same whether it is asked or not: blocks always
   end at multiples of BLOCK slots, there is ONE_COPY of what computes, and what is told is written down behind it.

   What is not finite shows: a row of which a score is NaN or infinite gives NaN, and so does one that reads a value that
   is, even where a mask hides it. fast-math takes all numbers for finite, so the scores of a row are added up and the bits
   of the sum are looked at: that costs 0 to 2 % in one call, and to have the compiler mind NaN itself costs 2 to 9 %. */

#include <float.h>
#include <math.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

/* keys and values of a block stay in half of the first-level cache, so that the next ones can arrive meanwhile */
#define BLOCK 32
/* bytes of a block's keys that fewer rows than a vector read: with so little to compute, memory is what takes time, and
   it is fastest when keys and values come by turns, a page of each */
#define PAGE 4096
#define LANES 8
/* numbers that fewer rows than a vector take at once, and how many of these rows take them together */
#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH LANES
#endif
#define FEW 4
/* rows that are computed together, one per lane of two vectors; fewer than one vector are computed one by one */
#define TILE (2 * LANES)
/* products that are added one after the other: in long sums each rounds off more */
#define CHUNK 32
/* columns from which on keys are wide */
#define WIDE 128
/* bytes that memory brings at once */
#define LINE 64
/* Weights below exp(-60), 1e-26, are raised to it: a billion of them change no bit of a float32 sum that holds a one.
   Left alone they would become denormal numbers, a hundred times slower than others. */
#define NEGLIGIBLE -60.0f
/* fast-math knows no infinities: a finite score below all others */
#define HIDDEN -1e38f

/* Copies that a compiler makes of a function for some of its callers may round otherwise. */
#ifdef __clang__
#define ONE_COPY __attribute__((noinline))
#else
#define ONE_COPY __attribute__((noinline, noclone))
#endif
#define INLINE static inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi" /* on vectors that functions hand on: these are all inlined */
/* left alone, gcc loads a vector again for each use, and there are more loads then than the processor can do; processors
   without AVX have no register that holds a vector */
#ifdef __AVX__
#define IN_REGISTERS(a, b) __asm__("" : "+x"(a), "+x"(b))
#else
#define IN_REGISTERS(a, b)
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float wide __attribute__((vector_size(4 * WIDTH)));
typedef int ints __attribute__((vector_size(4 * WIDTH)));
typedef unsigned words __attribute__((vector_size(4 * WIDTH)));
typedef unsigned short halves __attribute__((vector_size(2 * WIDTH)));

/* What a number is kept as; longleaf/kernels/cpu/decode.py names the first three. */
enum kind { FLOAT32, BFLOAT16, FLOAT16, INT8 };
static const long BYTES[] = {4, 2, 2, 1};

/* Rows [first_row, end_row) of tokens against keys in slots [first_slot, end_slot); query i sees key j iff
   0 <= offset + i - j < window. */
struct read {
    long first_row, end_row, first_slot, end_slot, offset, window;
};

/* What is told of a read: of rows [first_row, end_row), a token's group of heads after the other, `num_entries` entries
   each, from the entry `start * group` on. Slots from `edge` on count apart from those before it: the block in which
   it lies has two entries. A read of which nothing is told has no rows. */
struct told_read {
    long start, first_row, end_row, edge, num_entries;
};

/* An entry: the highest score of the row until then, and the sum of exp(score - that). */
struct entry {
    float peak, sum;
};

/* The keys and values of one key head. int8 has an exponent per block of slots and column of the keys and a scale per
   slot of the values, as longleaf/kernels/int8.py writes them. */
struct store {
    const char *keys, *values;    /* [slots, dim] */
    const signed char *exponents; /* [slots / block_size, dim] */
    const float *scales;          /* [slots] */
    float *room;                  /* a block of keys, one of values, and the steps of the columns */
    long block_size, dim;
    enum kind kind;
};

/* The rows of one key head, a token and a head of its group each, and what they have seen so far. */
struct rows {
    float *q;          /* [num_rows, dim], times the scale */
    float *q_by_dim;   /* [dim, stride], the same transposed */
    float *out;        /* [num_rows, dim], not yet divided by `sum` */
    float *peak, *sum; /* [num_rows] */
    float *witness;    /* [num_rows], the sum of all scores: no finite number if one of them is none */
    float *total;      /* [num_rows], the sums of the weights of the block that was added last */
    float *weights;    /* those of up to TILE rows: of fewer than LANES [row, BLOCK], else [BLOCK, TILE] */
    long dim, stride, group;
    float cap;
};

/* A block of a read's keys and values, and the rows it is added to. */
struct block {
    const struct read *read;
    const void *keys, *values;            /* of this kind: float32, or of 16 bits for fewer rows than a vector */
    enum kind kind;
    long key, num_keys;                   /* the first key, counted from the read's first, and their number */
    long row, num_rows;                   /* the first row, counted from the read's first, and their number */
    const char *next_keys, *next_values;  /* what comes next in memory, NULL if it need not be asked for */
    long key_bytes;                       /* there */
    int is_masked;
};

/* e to the x for x from NEGLIGIBLE to 0: two to the nearest whole number, times the Taylor polynomial of two to the rest,
   right to one part in a million. Inlined, for a call of the library would empty the registers of the loops around. Of
   what is no number it makes any number: see `witness`. */
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
    bits += (unsigned)whole << 23; /* to the exponent */
    memcpy(&power, &bits, sizeof bits);
    return power;
}

INLINE int sees(const struct read *read, long group, long row, long key)
{
    const long distance = read->offset + row / group - key;
    return 0 <= distance && distance < read->window;
}

INLINE wide from_bfloat16(halves half)
{
#ifdef __AVX512F__ /* gcc makes four instructions of the other way, here two */
    return (wide)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#else
    return (wide)(__builtin_convertvector(half, words) << 16);
#endif
}

/* Where no instruction does it, on integers: fast-math knows no infinities, and what is small there is a denormal. */
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

/* Numbers from the i-th on as float32, which holds them exactly: WIDTH of them, or LANES and then zeros. */
INLINE wide load(const void *numbers, long i, const enum kind kind, const int count)
{
    wide found = {0};
    halves half = {0};
    if (kind == FLOAT32) {
        memcpy(&found, (const float *)numbers + i, sizeof(float) * count);
        return found;
    }
    memcpy(&half, (const unsigned short *)numbers + i, sizeof(short) * count);
    return kind == BFLOAT16 ? from_bfloat16(half) : from_float16(half);
}

/* of a part of one key with the same part of some queries */
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

/* out times fade, plus the values by their weights, for some rows and `num_parts` times `count` columns. What a block
   gives is added up first: one key after the other, each would round what came of all keys before it. */
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

/* all values of a block, by their weights, to at most FEW rows */
INLINE void value_few(const void *values, long num_keys, const float *weight, const float *fade, float *out, long dim,
                      const enum kind kind, const int num_rows)
{
    const int most = num_rows == 1 ? 8 : num_rows == 2 ? 4 : 2; /* as many as there are registers for */
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

/* a call for each FEW rows, with their number known to the compiler */
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

/* Adds a block to fewer rows than LANES. */
INLINE void add_few(const struct block *block, const float *restrict q, float *restrict out, float *restrict peak,
                    float *restrict sum, float *restrict witness, float *restrict totals,
                    float (*restrict score)[BLOCK], long group, float cap, long dim, const enum kind kind)
{
    const long num_rows = block->num_rows, num_keys = block->num_keys;
    float fade[LANES];
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
        case FLOAT32: /* short loops of known length stay in registers */
            if (dim == 32)
                ADD(32, FLOAT32);
            else if (dim == 64)
                ADD(64, FLOAT32);
            else
                ADD(dim, FLOAT32);
            break;
        case BFLOAT16: ADD(dim, BFLOAT16); break;
        case FLOAT16: ADD(dim, FLOAT16); break;
        case INT8: break; /* brought to float32 before */
    }
}

/* scores of `vecs` times LANES rows against some keys */
INLINE void score_tile(const float *q_by_dim, long stride, const float *keys, float score[][TILE], long dim,
                       const int num_keys, const int vecs)
{
    vec total[LANES] = {{0}};
    for (long first = 0; first < dim; first += CHUNK) {
        vec sum[LANES] = {{0}};
        for (long d = first; d < (first + CHUNK < dim ? first + CHUNK : dim); d++) {
            const vec *q = (const vec *)(q_by_dim + d * stride);
            vec part[2] = {q[0], q[vecs - 1]};
            IN_REGISTERS(part[0], part[1]);
#pragma GCC unroll 8
            for (int j = 0; j < num_keys; j++)
#pragma GCC unroll 2
                for (int i = 0; i < vecs; i++)
                    sum[j * vecs + i] += keys[j * dim + d] * part[i];
        }
#pragma GCC unroll 8
        for (int i = 0; i < num_keys * vecs; i++)
            total[i] += sum[i];
    }
#pragma GCC unroll 8
    for (int j = 0; j < num_keys; j++)
#pragma GCC unroll 2
        for (int i = 0; i < vecs; i++)
            *(vec *)(score[j] + i * LANES) = total[j * vecs + i];
}

/* As many keys at once as there are registers for. Meanwhile the next block is asked for, a little at a time: the order
   in which it will be read is none that the processor foresees. */
INLINE void score_many(const struct block *block, const float *q_by_dim, long stride, float score[BLOCK][TILE],
                       long dim, const int vecs)
{
    const int step = LANES / vecs;
    const float *keys = block->keys;
    const long bytes = block->key_bytes;
    long j = 0;
    for (; j + step <= block->num_keys; j += step) {
        for (long i = j * bytes; block->next_keys && i < (j + step) * bytes; i += LINE) {
            __builtin_prefetch(block->next_keys + i, 0, 2);
            __builtin_prefetch(block->next_values + i, 0, 2);
        }
        score_tile(q_by_dim, stride, keys + j * dim, score + j, dim, step, vecs);
    }
    for (; j < block->num_keys; j++)
        score_tile(q_by_dim, stride, keys + j * dim, score + j, dim, 1, vecs);
}

static void hide(const struct block *block, long group, float score[BLOCK][TILE], float value)
{
    for (long j = 0; j < block->num_keys; j++)
        for (long r = 0; r < block->num_rows; r++)
            if (!sees(block->read, group, block->row + r, block->key + j))
                score[j][r] = value;
}

/* Scores become weights; gives the highest score so far and the sums of scores and of weights by row. */
INLINE void weigh(const struct block *block, long group, float cap, float score[BLOCK][TILE], float *top, float *total,
                  float *seen, const int width)
{
    for (long j = 0; j < block->num_keys; j++)
        for (int r = 0; r < width; r++)
            seen[r] += score[j][r];
    if (cap > 0.0f)
        for (long j = 0; j < block->num_keys; j++)
            for (int r = 0; r < width; r++)
                score[j][r] = cap * tanhf(score[j][r] / cap);
    if (block->is_masked)
        hide(block, group, score, HIDDEN);
    for (long j = 0; j < block->num_keys; j++)
        for (int r = 0; r < width; r++)
            top[r] = score[j][r] > top[r] ? score[j][r] : top[r];
    for (long j = 0; j < block->num_keys; j++)
        for (int r = 0; r < width; r++) {
            const float below = score[j][r] - top[r];
            score[j][r] = exp_below(below < NEGLIGIBLE ? NEGLIGIBLE : below);
        }
    if (block->is_masked)
        hide(block, group, score, 0.0f);
    for (long j = 0; j < block->num_keys; j++)
        for (int r = 0; r < width; r++)
            total[r] += score[j][r];
}

/* out times fade, plus the values by their weights, for some rows and `vecs` times LANES columns */
INLINE void value_tile(float weight[BLOCK][TILE], long row, const float *fade, const float *values, float *out,
                       long dim, long num_keys, const int num_rows, const int vecs)
{
    vec total[LANES];
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < vecs; i++)
            total[r * vecs + i] = (vec){0};
    for (long j = 0; j < num_keys; j++) {
        const vec *v = (const vec *)(values + j * dim);
        vec part[2] = {v[0], v[vecs - 1]};
        IN_REGISTERS(part[0], part[1]);
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 2
            for (int i = 0; i < vecs; i++)
                total[r * vecs + i] += weight[j][row + r] * part[i];
    }
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 2
        for (int i = 0; i < vecs; i++)
            *(vec *)(out + (row + r) * dim + i * LANES) =
                fade[row + r] * *(vec *)(out + (row + r) * dim + i * LANES) + total[r * vecs + i];
}

INLINE void add_values(float weight[BLOCK][TILE], long row, const float *fade, const float *values, float *out,
                       long dim, long num_keys, const int num_rows)
{
    long d = 0;
    for (; d + 2 * LANES <= dim; d += 2 * LANES)
        value_tile(weight, row, fade, values + d, out + d, dim, num_keys, num_rows, 2);
    if (d < dim)
        value_tile(weight, row, fade, values + d, out + d, dim, num_keys, num_rows, 1);
}

/* Adds a block to at least LANES and at most TILE rows. */
static ONE_COPY void add_many(const struct rows *rows, const struct block *block)
{
    const long row = block->read->first_row * rows->group + block->row, num_rows = block->num_rows, dim = rows->dim;
    float(*score)[TILE] = (float(*)[TILE])rows->weights, top[TILE] = {0}, total[TILE] = {0}, seen[TILE] = {0}, fade[TILE];
    memcpy(top, rows->peak + row, sizeof(float) * num_rows);
    if (num_rows > LANES) {
        score_many(block, rows->q_by_dim + row, rows->stride, score, dim, 2);
        weigh(block, rows->group, rows->cap, score, top, total, seen, 2 * LANES);
    } else {
        score_many(block, rows->q_by_dim + row, rows->stride, score, dim, 1);
        weigh(block, rows->group, rows->cap, score, top, total, seen, LANES);
    }
    for (long r = 0; r < num_rows; r++) {
        fade[r] = expf(rows->peak[row + r] - top[r]);
        rows->sum[row + r] = rows->sum[row + r] * fade[r] + total[r];
        rows->peak[row + r] = top[r];
        rows->witness[row + r] += seen[r];
        rows->total[row + r] = total[r];
    }
    long r = 0;
    for (; r + 4 <= num_rows; r += 4)
        add_values(score, r, fade, block->values, rows->out + row * dim, dim, block->num_keys, 4);
    for (; r < num_rows; r++)
        add_values(score, r, fade, block->values, rows->out + row * dim, dim, block->num_keys, 1);
}

/* Brings some int8 keys and values of one block of slots to float32: n of a key stands for (n + 1/2) 2^exponent. */
static void expand(const struct store *store, long slot, struct block *block)
{
    const long dim = store->dim;
    const signed char *exponents = store->exponents + slot / store->block_size * dim;
    const signed char *small_keys = block->keys, *small_values = block->values;
    float *restrict keys = store->room, *restrict values = keys + BLOCK * dim, *restrict steps = values + BLOCK * dim;
    for (long d = 0; d < dim; d++) {
        const int bits = (exponents[d] + 127) << 23; /* of a float32: no sign, the exponent, no fraction */
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

/* Brings some keys and values of 16 bits to float32. */
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

/* The keys and values of a block whose first key lies in `slot`, where and as they are read: few rows read 16 bits as
   they are, and values of wide keys are asked for while scores are computed; the processor foresees the narrow ones. */
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

/* Several blocks of few keys may make up one of BLOCK slots: the sums of those before fade as the peak rises. */
INLINE void note(struct entry *entry, int begins, float peak, float sum)
{
    if (!begins) /* a peak rises seldom */
        sum += entry->sum * (entry->peak == peak ? 1.0f : expf(entry->peak - peak));
    *entry = (struct entry){peak, sum};
}

/* The first keys of a block count into one entry, the others into the next. */
static void note_parts(const struct rows *rows, const struct block *block, long tile_row, long num_before, int begins,
                       struct entry *entry)
{
    const int are_few = block->num_rows < LANES;
    const float *weights = rows->weights + tile_row * (are_few ? BLOCK : 1);
    const float peak = rows->peak[block->read->first_row * rows->group + block->row + tile_row];
    float sums[2] = {0.0f, 0.0f};
    for (long j = 0; j < block->num_keys; j++)
        sums[j >= num_before] += weights[j * (are_few ? 1 : TILE)];
    note(entry, begins, peak, sums[0]);
    note(entry + 1, 1, peak, sums[1]);
}

/* Tells what a block, whose first key lies in `slot`, gave to its rows; `told` has the entries of this key head. */
static void tell(const struct rows *rows, const struct block *block, unsigned long slot, const struct told_read *read,
                 struct entry *told)
{
    const long group = rows->group, told_row = read->first_row * group, told_end = read->end_row * group;
    const long block_row = block->read->first_row * group + block->row, block_end = block_row + block->num_rows;
    const long first = told_row > block_row ? told_row : block_row, end = told_end < block_end ? told_end : block_end;
    const unsigned long edge = read->edge, first_slot = block->read->first_slot;
    const int begins = block->key == 0 || slot % BLOCK == 0 || slot == edge;
    struct entry *entry = told + read->start * group + (first - told_row) * read->num_entries;
    entry += slot / BLOCK - first_slot / BLOCK + (slot >= edge);
    const int is_cut = slot < edge && edge < slot + block->num_keys;
    for (long row = first; row < end; row++, entry += read->num_entries)
        if (is_cut)
            note_parts(rows, block, row - block_row, edge - slot, begins, entry);
        else
            note(entry, begins, rows->peak[row], rows->total[row]);
}

static void add_read(const struct rows *rows, const struct read *read, const struct store *store,
                     const struct told_read *told_read, struct entry *told)
{
    const long num_keys = read->end_slot - read->first_slot, group = rows->group;
    const long num_rows = (read->end_row - read->first_row) * group;
    struct block block = {.read = read, .key_bytes = rows->dim * BYTES[store->kind]};
    const long bytes = store->kind == INT8 ? rows->dim * BYTES[FLOAT32] : block.key_bytes; /* where they are read */
    const long page = (PAGE + bytes - 1) / bytes;
    const long most = num_rows < LANES && page < BLOCK ? page : BLOCK;
    for (long key = 0; key < num_keys; key += block.num_keys) {
        const long slot = read->first_slot + key, rest = num_keys - key, room = BLOCK - slot % BLOCK;
        block.key = key;
        block.num_keys = rest < most ? rest : most;
        block.num_keys = block.num_keys < room ? block.num_keys : room;
        if (store->kind == INT8) {
            const long same_scales = store->block_size - slot % store->block_size;
            block.num_keys = block.num_keys < same_scales ? block.num_keys : same_scales;
        }
        fetch(store, slot, num_rows < LANES, &block);
        block.is_masked = !sees(read, group, 0, key + block.num_keys - 1) || !sees(read, group, num_rows - 1, key);
        for (block.row = 0; block.row < num_rows; block.row += TILE) {
            const int has_next = store->kind != INT8 && block.row == 0 && rest >= 2 * BLOCK;
            block.num_rows = num_rows - block.row < TILE ? num_rows - block.row : TILE;
            block.next_keys = has_next ? store->keys + (slot + BLOCK) * block.key_bytes : NULL;
            block.next_values = has_next ? store->values + (slot + BLOCK) * block.key_bytes : NULL;
            if (block.num_rows < LANES)
                add_few_of_kind(rows, &block);
            else
                add_many(rows, &block);
            if (told_read)
                tell(rows, &block, slot, told_read, told);
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
                rows->q[row * rows->dim + d] = rows->q_by_dim[d * rows->stride + row] = number;
            }
            rows->peak[row] = -FLT_MAX;
            rows->sum[row] = rows->witness[row] = 0.0f;
        }
    memset(rows->out, 0, sizeof(float) * tokens * rows->group * rows->dim);
}

/* `number`, or NaN if the witness is no finite number. */
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

/* Tiles look, but do not write, beyond the last row. */
long longleaf_scratch_size(long num_rows, long dim)
{
    return 2 * num_rows * dim + (num_rows + TILE) * dim + 4 * num_rows + BLOCK * TILE + (2 * BLOCK + 1) * dim;
}

static void go_to_next_head(struct store *store, long stride)
{
    store->keys += stride * BYTES[store->kind];
    store->values += stride * BYTES[store->kind];
    if (store->kind == INT8) {
        store->exponents += stride / store->block_size;
        store->scales += stride / store->dim;
    }
}

static void decode(const float *q, struct store store, float *out, float *lse, float *scratch, const struct read *reads,
                   long num_reads, long tokens, long heads, long group, long q_token_stride, long q_head_stride,
                   long kv_head_stride, float scale, float cap, const struct told_read *told_reads, struct entry *told,
                   long told_stride)
{
    const long num_rows = tokens * group, dim = store.dim;
    struct rows rows = {.q = scratch, .dim = dim, .stride = num_rows + TILE, .group = group, .cap = cap};
    rows.q_by_dim = rows.q + num_rows * dim;
    rows.out = rows.q_by_dim + rows.stride * dim;
    rows.peak = rows.out + num_rows * dim;
    rows.sum = rows.peak + num_rows;
    rows.witness = rows.sum + num_rows;
    rows.total = rows.witness + num_rows;
    rows.weights = rows.total + num_rows;
    store.room = rows.weights + BLOCK * TILE;
    memset(rows.q_by_dim, 0, sizeof(float) * rows.stride * dim);
    for (long h = 0; h < heads; h++) {
        begin(&rows, q + h * group * q_head_stride, tokens, q_token_stride, q_head_stride, scale);
        for (long i = 0; i < num_reads; i++)
            add_read(&rows, reads + i, &store, told_reads ? told_reads + i : NULL, told);
        finish(&rows, out + h * group * dim, lse + h * group, tokens, heads);
        go_to_next_head(&store, kv_head_stride);
        told += told_stride;
    }
}

/* Keys and values are float32, bfloat16 or float16, as `kind` says. `told_reads` has a row for each read, or is NULL;
   `told` [kv_heads, entries * group], with a stride between heads, takes what is told. */
void longleaf_decode(const float *q, const char *keys, const char *values, float *out, float *lse, float *scratch,
                     const struct read *reads, long num_reads, long tokens, long heads, long group, long dim,
                     long q_token_stride, long q_head_stride, long kv_head_stride, long kind, float scale, float cap,
                     const struct told_read *told_reads, struct entry *told, long told_stride)
{
    const struct store store = {.keys = keys, .values = values, .dim = dim, .kind = kind};
    decode(q, store, out, lse, scratch, reads, num_reads, tokens, heads, group, q_token_stride, q_head_stride,
           kv_head_stride, scale, cap, told_reads, told, told_stride);
}

void longleaf_decode_int8(const float *q, const char *keys, const char *values, const signed char *exponents,
                          const float *scales, float *out, float *lse, float *scratch, const struct read *reads,
                          long num_reads, long tokens, long heads, long group, long dim, long q_token_stride,
                          long q_head_stride, long kv_head_stride, long block_size, float scale, float cap,
                          const struct told_read *told_reads, struct entry *told, long told_stride)
{
    const struct store store = {.keys = keys, .values = values, .exponents = exponents, .scales = scales,
                                .block_size = block_size, .dim = dim, .kind = INT8};
    decode(q, store, out, lse, scratch, reads, num_reads, tokens, heads, group, q_token_stride, q_head_stride,
           kv_head_stride, scale, cap, told_reads, told, told_stride);
}
