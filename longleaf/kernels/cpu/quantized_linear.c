/* y = x w^T + bias for few rows of x and weights of 8 or 4 bits, which are dequantized in registers: float32 arithmetic.

   As in linear.c, the time is that of reading the weights from memory, in the order of their addresses. Weights of 4
   bits are looked up in a table of 16 numbers, which is multiplied by the scale once per group.

   Shapes: numbers of 8 bits [out, in]; of 4 bits [out, in / 32] units of 16 bytes, in the order of
   longleaf/kernels/quantized_matrix.py; scales and zero points [scale rows, groups of inputs]; scale_rows [out] has the
   row of the scales of each output. x [rows, in] and y [rows, out] are contiguous; bias [out] or NULL. */

#include <string.h>

#include "vectors.h"

/* rows of x that are multiplied at once, limited by the number of registers */
#ifdef __AVX512F__
#define MAX_ROWS 4
#else
#define MAX_ROWS 2
#endif
/* vectors of 16 numbers */
#define VECTORS (16 / WIDTH)
/* outputs that are computed at once: they share the loads of x, which need not fit the L1 cache */
#define OUTS 2
/* accumulators of a product, which hide the latency of additions */
#define SUMS 2
/* inputs of a block of 4-bit numbers */
#define BLOCK 128
#define MAX_GROUPS 4096
/* as in linear.c */
#define AHEAD 4096
#define TASK 64

/* Types of numbers and of scales, as numbered in longleaf/kernels/cpu/quantized_linear.py. FLOAT8 is E4M3, FLOAT4 is
   E2M1, and POWER8 is E8M0. */
enum kind { FLOAT8, INT8, INT4, FLOAT4 };
enum scale_kind { FLOAT32, BFLOAT16, FLOAT16, SCALE8, POWER8 };

struct matrix {
    const void *numbers, *scales;
    const signed char *zeros; /* or NULL */
    const int *scale_rows;
    long out, in, group;
    long kind, scale_kind;
    float factor; /* of all scales */
};

static const float CODES[2][16] = {
    {-8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f},
    {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, 0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f},
};

INLINE float of_bits(unsigned bits)
{
    float found;
    memcpy(&found, &bits, sizeof found);
    return found;
}

/* Scales in float32. Exponents of smaller types are corrected by a product, which is exact. */
INLINE void read_scales(const struct matrix *matrix, long row, long count, float found[])
{
    const float factor = matrix->factor;
    const float *wide_scales = (const float *)matrix->scales + row * count;
    const unsigned short *halves = (const unsigned short *)matrix->scales + row * count;
    const unsigned char *small = (const unsigned char *)matrix->scales + row * count;
    switch ((enum scale_kind)matrix->scale_kind) {
    case FLOAT32:
        for (long g = 0; g < count; g++)
            found[g] = wide_scales[g] * factor;
        break;
    case BFLOAT16:
        for (long g = 0; g < count; g++)
            found[g] = of_bits((unsigned)halves[g] << 16) * factor;
        break;
    case FLOAT16:
        for (long g = 0; g < count; g++)
            found[g] = of_bits((halves[g] & 0x8000u) << 16 | (halves[g] & 0x7fffu) << 13) * 0x1p112f * factor;
        break;
    case SCALE8:
        for (long g = 0; g < count; g++)
            found[g] = of_bits((small[g] & 0x80u) << 24 | (small[g] & 0x7fu) << 20) * 0x1p120f * factor;
        break;
    case POWER8:
        for (long g = 0; g < count; g++)
            found[g] = of_bits(small[g] ? (unsigned)small[g] << 23 : 1u << 22) * factor;
        break;
    }
}

/* Numbers of 8 bits. The exponents of E4M3 become those of 16-bit or 32-bit floats by a shift and a factor: of 256 for
   16 bits, which belongs to the scale (FLOAT8_FACTOR). Small numbers without an implicit one are converted as well. */
#if defined(__F16C__) && defined(__AVX2__)
#define FLOAT8_FACTOR 256.0f
#else
#define FLOAT8_FACTOR 1.0f
#endif

INLINE wide load8(const unsigned char *numbers, const enum kind kind)
{
    chars found;
    memcpy(&found, numbers, sizeof found);
#if defined(__AVX512F__)
    if (kind == INT8)
        return (wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)found));
    const __m256i halves = _mm256_cvtepi8_epi16((__m128i)found);
    return (wide)_mm512_cvtph_ps(_mm256_and_si256(_mm256_slli_epi16(halves, 7), _mm256_set1_epi16((short)0xbf80)));
#elif defined(__F16C__) && defined(__AVX2__)
    if (kind == INT8)
        return (wide)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)&found)));
    const __m128i halves = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)&found));
    return (wide)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(halves, 7), _mm_set1_epi16((short)0xbf80)));
#else
    if (kind == INT8)
        return __builtin_convertvector(__builtin_convertvector(found, ints), wide);
    return (wide)((__builtin_convertvector(found, ints) << 20) & (int)0x87f00000) * 0x1p120f;
#endif
}

/* The weights of a group by their 4 bits. Where a table does not fit into one vector, it has the scale and the zero point
   of integers instead. */
INLINE void make_table(wide table[VECTORS], const enum kind kind, float scale, float zero)
{
    if (VECTORS == 2 && kind == INT4) {
        table[0] = scale - (wide){0};
        table[VECTORS - 1] = zero + 8.0f - (wide){0};
        return;
    }
    for (int v = 0; v < VECTORS; v++)
        table[v] = (*(const vec *)(CODES[kind == FLOAT4] + v * WIDTH) - zero) * scale;
}

/* The weights with the low 4 bits of each word. */
INLINE wide look_up(const wide table[VECTORS], words codes, const enum kind kind)
{
    if (VECTORS == 2 && kind == INT4) {
        wide weights = (__builtin_convertvector((ints)(codes & 15), wide) - table[VECTORS - 1]) * table[0];
        KEEP(weights);
        return weights;
    }
#if defined(__AVX512F__)
    return (wide)_mm512_permutexvar_ps((__m512i)codes, (__m512)table[0]);
#elif defined(__AVX2__)
    const __m256i places = (__m256i)codes;
    const __m256 low = _mm256_permutevar8x32_ps((__m256)table[0], places);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)table[1], places);
    return (wide)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(places, 28)));
#else
    wide found;
    for (int i = 0; i < WIDTH; i++)
        found[i] = ((const float *)table)[codes[i] & 15];
    return found;
#endif
}

struct job {
    const struct matrix *matrix;
    const char *x; /* of float32, or of bfloat16 in the order of the weights */
    const float *bias;
    float *y;
    long num_rows;
    int is_half;
    long num_tasks; /* begun so far */
};

/* Scales and zero points of the outputs that are computed at once. */
struct scales {
    const float *scales[OUTS];
    const signed char *zeros[OUTS]; /* or NULL */
};

INLINE float zero_of(const struct scales *scales, int o, long g)
{
    return scales->zeros[o] ? scales->zeros[o][g] : 0.0f;
}

/* Products of `num_outs` outputs with `num_rows` rows of x, at [row * num_outs + output]. Each is summed in the same
   order for all numbers of rows: the bits of a row do not depend on the rows beside it. */
INLINE void multiply8(const struct matrix *matrix, long out, const struct scales *scales, const float *x, float sum[],
                      const enum kind kind, const int num_rows, const int num_outs)
{
    const long in = matrix->in, group = matrix->group, ahead = num_outs == 1 ? AHEAD : OUTS * in; /* the next outputs */
    const unsigned char *numbers = (const unsigned char *)matrix->numbers + out * in;
    wide total[MAX_ROWS * OUTS] = {{0}};
    for (long g = 0, i = 0; i < in; g++) {
        const long end = i + group < in ? i + group : in;
        wide part[MAX_ROWS * OUTS][SUMS] = {{{0}}};
        for (; i + 4 * WIDTH <= end; i += 4 * WIDTH)
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                wide weights[OUTS];
#pragma GCC unroll 2
                for (int o = 0; o < num_outs; o++) {
                    if (k * WIDTH % 64 == 0)
                        __builtin_prefetch(numbers + o * in + i + ahead);
                    weights[o] = load8(numbers + o * in + i + k * WIDTH, kind);
                    if (kind == INT8)
                        weights[o] -= zero_of(scales, o, g);
                }
#pragma GCC unroll 4
                for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 2
                    for (int o = 0; o < num_outs; o++) {
                        wide *accumulator = &part[r * num_outs + o][k % SUMS];
                        *accumulator += weights[o] * *(const vec *)(x + r * in + i + k * WIDTH);
                        KEEP(*accumulator);
                    }
            }
        for (; i < end; i += WIDTH) {
            const long count = end - i < WIDTH ? end - i : WIDTH;
#pragma GCC unroll 2
            for (int o = 0; o < num_outs; o++) {
                unsigned char rest[WIDTH] = {0};
                memcpy(rest, numbers + o * in + i, count);
                wide weights = load8(rest, kind);
                if (kind == INT8)
                    weights -= zero_of(scales, o, g);
#pragma GCC unroll 4
                for (int r = 0; r < num_rows; r++) {
                    float inputs[WIDTH] = {0.0f};
                    memcpy(inputs, x + r * in + i, sizeof(float) * count);
                    part[r * num_outs + o][0] += weights * *(const vec *)inputs;
                    KEEP(part[r * num_outs + o][0]);
                }
            }
        }
        i = end;
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 2
            for (int o = 0; o < num_outs; o++) {
                wide joined = part[r * num_outs + o][0] + part[r * num_outs + o][1];
                KEEP(joined);
                total[r * num_outs + o] += joined * (scales->scales[o][g] * (kind == FLOAT8 ? FLOAT8_FACTOR : 1.0f));
                KEEP(total[r * num_outs + o]);
            }
    }
#pragma GCC unroll 8
    for (int k = 0; k < num_rows * num_outs; k++)
        sum[k] = add_up(total[k]);
}

/* The same for numbers of 4 bits. `per_table`: 16-number units of a block that share a table, or 8 for all of it. */
INLINE void multiply4(const struct matrix *matrix, long out, const struct scales *scales, const float *x, float sum[],
                      const enum kind kind, const int num_rows, const int num_outs, const int per_table)
{
    const long in = matrix->in, group = matrix->group, bytes_per_out = in / 2, ahead = num_outs == 1 ? AHEAD : OUTS * bytes_per_out;
    const unsigned char *numbers = (const unsigned char *)matrix->numbers + out * bytes_per_out;
    wide part[MAX_ROWS * OUTS][SUMS] = {{{0}}}, table[OUTS][VECTORS] = {{{0}}};
    long g = 0, i = 0;
    for (; i + BLOCK <= in; i += BLOCK) {
        words codes[OUTS][VECTORS];
#pragma GCC unroll 2
        for (int o = 0; o < num_outs; o++) {
            memcpy(codes[o], numbers + o * bytes_per_out + i / 2, sizeof codes[o]);
            __builtin_prefetch(numbers + o * bytes_per_out + i / 2 + ahead);
        }
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            if (k % per_table == 0 && (per_table < 8 || i % group == 0)) {
#pragma GCC unroll 2
                for (int o = 0; o < num_outs; o++)
                    make_table(table[o], kind, scales->scales[o][g], zero_of(scales, o, g));
                g++;
            }
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) {
                wide weights[OUTS];
#pragma GCC unroll 2
                for (int o = 0; o < num_outs; o++)
                    weights[o] = look_up(table[o], codes[o][v] >> (4 * k), kind);
#pragma GCC unroll 4
                for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 2
                    for (int o = 0; o < num_outs; o++) {
                        wide *accumulator = &part[r * num_outs + o][(k * VECTORS + v) % SUMS];
                        *accumulator += weights[o] * *(const vec *)(x + r * in + i + 16 * k + WIDTH * v);
                        KEEP(*accumulator);
                    }
            }
        }
    }
    for (; i < in; i += 32) /* units of 16 bytes, the first 16 numbers in the low bits */
        for (int k = 0; k < 2; k++) {
            const long first = i + 16 * k;
            const int is_next = first % group == 0;
#pragma GCC unroll 2
            for (int o = 0; o < num_outs; o++) {
                if (is_next)
                    make_table(table[o], kind, scales->scales[o][g], zero_of(scales, o, g));
#pragma GCC unroll 2
                for (int v = 0; v < VECTORS; v++) {
                    bytes unit;
                    memcpy(&unit, numbers + o * bytes_per_out + i / 2 + WIDTH * v, sizeof unit);
                    const wide weights = look_up(table[o], __builtin_convertvector(unit, words) >> (4 * k), kind);
#pragma GCC unroll 4
                    for (int r = 0; r < num_rows; r++) {
                        wide *accumulator = &part[r * num_outs + o][v];
                        *accumulator += weights * *(const vec *)(x + r * in + first + WIDTH * v);
                        KEEP(*accumulator);
                    }
                }
            }
            g += is_next;
        }
#pragma GCC unroll 8
    for (int k = 0; k < num_rows * num_outs; k++)
        sum[k] = add_up(part[k][0] + part[k][1]);
}

/* Products with inputs in bfloat16, which are not converted: an instruction multiplies 32 pairs, exactly, and adds them
   to 16 sums in float32. All numbers of 8 and 4 bits are exact in bfloat16, and scales are factors of the sums of their
   groups. Inputs are in the order of the weights, into which `arrange` brings them. */
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define HAS_PAIRS 1

/* The low and the high bytes of numbers as bfloat16: of FLOAT8 without the sign, INT4 and FLOAT4. */
static const unsigned char LOW8[128] = {
    0x00, 0x00, 0x80, 0xc0, 0x00, 0x20, 0x40, 0x60, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0,
    0x00, 0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xa0, 0xb0, 0xc0, 0xd0, 0xe0, 0xf0};
static const unsigned char HIGH8[128] = {
    0x00, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c, 0x3c,
    0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d, 0x3d,
    0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e, 0x3e,
    0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f, 0x3f,
    0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40,
    0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41, 0x41,
    0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42, 0x42,
    0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43, 0x43};
static const unsigned char LOW4[2][16] = {
    {0x00, 0xe0, 0xc0, 0xa0, 0x80, 0x40, 0x00, 0x80, 0x00, 0x80, 0x00, 0x40, 0x80, 0xa0, 0xc0, 0xe0},
    {0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0, 0x00, 0x00, 0x80, 0xc0, 0x00, 0x40, 0x80, 0xc0},
};
static const unsigned char HIGH4[2][16] = {
    {0xc1, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xc0, 0xbf, 0x00, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x40, 0x40},
    {0x00, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0},
};
/* Bytes of a quarter of a register: first those of the lowest bits of 4 words. */
static const unsigned char BY_PLACE[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

INLINE __m512i in_quarters(const void *bytes)
{
    return _mm512_broadcast_i32x4(_mm_loadu_si128(bytes));
}

/* The weights of a block of 64 numbers of FLOAT8, or of BLOCK numbers of 4 bits: two or four registers. */
INLINE void load_pairs(__m512i found[4], const unsigned char *numbers, const enum kind kind)
{
    __m512i codes = _mm512_loadu_si512(numbers);
    if (kind == FLOAT8) {
        const __m512i low = _mm512_permutex2var_epi8(_mm512_loadu_si512(LOW8), codes, _mm512_loadu_si512(LOW8 + 64));
        __m512i high = _mm512_permutex2var_epi8(_mm512_loadu_si512(HIGH8), codes, _mm512_loadu_si512(HIGH8 + 64));
        high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xf8); /* high | codes & 0x80 */
        found[0] = _mm512_unpacklo_epi8(low, high);
        found[1] = _mm512_unpackhi_epi8(low, high);
        return;
    }
    codes = _mm512_shuffle_epi8(codes, in_quarters(BY_PLACE));
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
        const __m512i places = _mm512_and_si512(k ? _mm512_srli_epi16(codes, 4) : codes, _mm512_set1_epi8(15));
        const __m512i low = _mm512_shuffle_epi8(in_quarters(LOW4[kind == FLOAT4]), places);
        const __m512i high = _mm512_shuffle_epi8(in_quarters(HIGH4[kind == FLOAT4]), places);
        found[k] = _mm512_unpacklo_epi8(low, high);
        found[2 + k] = _mm512_unpackhi_epi8(low, high);
    }
}

/* The input of each number of a block, by its place in the registers. */
INLINE int input_at(int place, const enum kind kind)
{
    const int vector = place / 32, quarter = place % 32 / 8, word = place % 8;
    if (kind == FLOAT8)
        return 16 * quarter + 8 * vector + word;
    return 32 * (vector / 2 * 2 + word / 4) + 16 * (vector % 2) + 4 * quarter + word % 4;
}

INLINE wide add_pairs(wide sum, __m512i weights, const unsigned short *x)
{
    return (wide)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_loadu_si512(x));
}

/* The scales of the sums of a block of 4-bit numbers: its first or its second half has groups of 32 or 64 inputs. */
INLINE wide scales_of_half(const float *scales, const int half, const int group)
{
    if (group == 64)
        return scales[half] - (wide){0};
    const __m512 four = _mm512_broadcast_f32x4(_mm_loadu_ps(scales));
    return half ? (wide)_mm512_permute_ps(four, 0xfa) : (wide)_mm512_permute_ps(four, 0x50);
}

/* As multiply8 and multiply4. `group` is 32 or 64, or 0 for at least a block. */
INLINE void multiply_pairs(const struct matrix *matrix, long out, const struct scales *scales, const unsigned short *x,
                           float sum[], const enum kind kind, const int num_rows, const int num_outs, const int group)
{
    const int size = kind == FLOAT8 ? 64 : BLOCK, vectors = size / 32;
    const long in = matrix->in, bytes_per_out = kind == FLOAT8 ? in : in / 2;
    const long ahead = num_outs == 1 ? AHEAD : OUTS * bytes_per_out;
    const unsigned char *numbers = (const unsigned char *)matrix->numbers + out * bytes_per_out;
    wide total[MAX_ROWS * OUTS] = {{0}};
    for (long g = 0, i = 0; i < in; g++) {
        const long end = group ? i + size : i + matrix->group < in ? i + matrix->group : in;
        wide part[MAX_ROWS * OUTS][SUMS] = {{{0}}};
        do {
#pragma GCC unroll 2
            for (int o = 0; o < num_outs; o++) {
                __m512i weights[4];
                const unsigned char *place = numbers + o * bytes_per_out + (kind == FLOAT8 ? i : i / 2);
                __builtin_prefetch(place + ahead);
                load_pairs(weights, place, kind);
#pragma GCC unroll 4
                for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
                    for (int k = 0; k < vectors; k++) {
                        wide *accumulator = &part[r * num_outs + o][k * SUMS / vectors];
                        *accumulator = add_pairs(*accumulator, weights[k], x + r * in + i + 32 * k);
                    }
            }
            i += size;
        } while (i < end);
#pragma GCC unroll 2
        for (int o = 0; o < num_outs; o++)
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++) {
                wide *all = &total[r * num_outs + o], *sums = part[r * num_outs + o];
                const float *of_group = scales->scales[o] + (group ? g * (size / group) : g);
                if (group) {
                    *all += sums[0] * scales_of_half(of_group, 0, group);
                    KEEP(*all);
                    *all += sums[1] * scales_of_half(of_group, 1, group);
                } else {
                    wide joined = sums[0] + sums[1];
                    KEEP(joined);
                    *all += joined * *of_group;
                }
                KEEP(*all);
            }
    }
#pragma GCC unroll 8
    for (int k = 0; k < num_rows * num_outs; k++)
        sum[k] = add_up(total[k]);
}
#else
#define HAS_PAIRS 0
INLINE int input_at(int place, const enum kind kind)
{
    return place;
}

INLINE void multiply_pairs(const struct matrix *matrix, long out, const struct scales *scales, const unsigned short *x,
                           float sum[], const enum kind kind, const int num_rows, const int num_outs, const int group)
{
}
#endif

/* Whether inputs may be bfloat16: inputs are whole blocks, and a block has whole groups or belongs to one. */
int longleaf_takes_bfloat16(const struct matrix *matrix)
{
    const long group = matrix->group < matrix->in ? matrix->group : matrix->in;
    const int is_small = matrix->kind == FLOAT4 ? group == 32 : matrix->kind == INT4 && (group == 32 || group == 64);
    const int size = matrix->kind == FLOAT8 ? 64 : BLOCK;
    return HAS_PAIRS && matrix->kind != INT8 && !matrix->zeros && matrix->in % size == 0
           && (is_small || (matrix->kind != FLOAT4 && group % size == 0));
}

/* Brings the inputs of each block into the order of the weights. */
static void arrange(const struct matrix *matrix, unsigned short *x, long num_rows)
{
    const enum kind kind = matrix->kind;
    const int size = kind == FLOAT8 ? 64 : BLOCK;
    for (unsigned short *block = x; block < x + num_rows * matrix->in; block += size) {
        unsigned short before[BLOCK];
        memcpy(before, block, size * sizeof *block);
        for (int place = 0; place < size; place++)
            block[place] = before[input_at(place, kind)];
    }
}

INLINE void multiply(const struct matrix *matrix, long out, const struct scales *scales, const void *x, float sum[],
                     const enum kind kind, const int num_rows, const int num_outs, const int is_half)
{
    if (is_half && kind != FLOAT8 && matrix->group == 32)
        multiply_pairs(matrix, out, scales, x, sum, kind, num_rows, num_outs, 32);
    else if (is_half && kind == INT4 && matrix->group == 64)
        multiply_pairs(matrix, out, scales, x, sum, kind, num_rows, num_outs, 64);
    else if (is_half)
        multiply_pairs(matrix, out, scales, x, sum, kind, num_rows, num_outs, 0);
    else if (kind == FLOAT8 || kind == INT8)
        multiply8(matrix, out, scales, x, sum, kind, num_rows, num_outs);
    else if (matrix->group == 32)
        multiply4(matrix, out, scales, x, sum, kind, num_rows, num_outs, 2);
    else if (kind == FLOAT4) /* groups of 16 */
        multiply4(matrix, out, scales, x, sum, kind, num_rows, num_outs, 1);
    else if (matrix->group == 64)
        multiply4(matrix, out, scales, x, sum, kind, num_rows, num_outs, 4);
    else /* a multiple of BLOCK, or all inputs */
        multiply4(matrix, out, scales, x, sum, kind, num_rows, num_outs, 8);
}

INLINE void put(const struct job *job, long row, long out, int num_rows, int num_outs, const float sum[])
{
    for (int k = 0; k < num_rows * num_outs; k++) {
        const long place = out + k % num_outs;
        job->y[(row + k / num_outs) * job->matrix->out + place] = sum[k] + (job->bias ? job->bias[place] : 0.0f);
    }
}

#define CASE(ROWS) \
    case ROWS: \
        multiply(matrix, out, &scales, x, sum, kind, ROWS, OUTS, is_half); \
        put(job, row, out, ROWS, OUTS, sum); \
        break;

/* Outputs [first, end). One row reads the weights in the order of their addresses, which is fastest; more rows read
   those of several outputs, and share the loads of x. */
INLINE void compute(const struct job *job, long first, long end, const enum kind kind, const int is_half)
{
    const struct matrix *matrix = job->matrix;
    const long num_groups = (matrix->in + matrix->group - 1) / matrix->group;
    const int most = job->num_rows == 1 ? 1 : OUTS;
    float buffers[OUTS][MAX_GROUPS], sum[MAX_ROWS * OUTS];
    long held[OUTS] = {-1, -1}; /* the rows of scales in the buffers */
    for (long out = first; out < end; out += most) {
        const int num_outs = end - out < most ? end - out : most;
        struct scales scales = {{NULL}, {NULL}};
        for (int o = 0; o < num_outs; o++) {
            const long row = matrix->scale_rows[out + o];
            if (row != held[o])
                read_scales(matrix, row, num_groups, buffers[o]);
            held[o] = row;
            scales.scales[o] = buffers[o];
            scales.zeros[o] = matrix->zeros ? matrix->zeros + row * num_groups : NULL;
        }
        for (long row = 0, count; row < job->num_rows; row += count) {
            const char *x = job->x + row * matrix->in * (is_half ? sizeof(short) : sizeof(float));
            if (num_outs < OUTS) {
                count = 1;
                multiply(matrix, out, &scales, x, sum, kind, 1, 1, is_half);
                put(job, row, out, 1, 1, sum);
                continue;
            }
            for (count = MAX_ROWS; count > job->num_rows - row;)
                count /= 2;
            switch (count) {
                CASE(1)
                CASE(2)
#if MAX_ROWS > 2
                CASE(4)
#endif
            }
        }
    }
}

static void work(void *begun)
{
    struct job *job = begun;
    const struct matrix *matrix = job->matrix;
    for (;;) {
        const long first = TASK * __atomic_fetch_add(&job->num_tasks, 1, __ATOMIC_RELAXED);
        const long end = first + TASK < matrix->out ? first + TASK : matrix->out;
        if (first >= matrix->out)
            return;
        switch ((enum kind)matrix->kind) {
        case FLOAT8:
            if (HAS_PAIRS && job->is_half)
                compute(job, first, end, FLOAT8, 1);
            else
                compute(job, first, end, FLOAT8, 0);
            break;
        case INT8:
            compute(job, first, end, INT8, 0);
            break;
        case INT4:
            if (HAS_PAIRS && job->is_half)
                compute(job, first, end, INT4, 1);
            else
                compute(job, first, end, INT4, 0);
            break;
        case FLOAT4:
            if (HAS_PAIRS && job->is_half)
                compute(job, first, end, FLOAT4, 1);
            else
                compute(job, first, end, FLOAT4, 0);
            break;
        }
    }
}

/* The weights of an output, as float32 numbers. */
INLINE void dequantize8(const struct matrix *matrix, long out, const float scales[], const signed char *zeros,
                        float *found, const enum kind kind)
{
    const long in = matrix->in, group = matrix->group;
    const unsigned char *numbers = (const unsigned char *)matrix->numbers + out * in;
    for (long g = 0, i = 0; i < in; g++) {
        const long end = i + group < in ? i + group : in;
        const float scale = kind == FLOAT8 ? scales[g] * FLOAT8_FACTOR : scales[g], zero = zeros ? zeros[g] : 0.0f;
        for (; i + WIDTH <= end; i += WIDTH)
            *(vec *)(found + i) = (kind == INT8 ? load8(numbers + i, kind) - zero : load8(numbers + i, kind)) * scale;
        if (i < end) {
            unsigned char rest[WIDTH] = {0};
            float all[WIDTH];
            memcpy(rest, numbers + i, end - i);
            *(vec *)all = (kind == INT8 ? load8(rest, kind) - zero : load8(rest, kind)) * scale;
            memcpy(found + i, all, sizeof(float) * (end - i));
        }
        i = end;
    }
}

INLINE void dequantize4(const struct matrix *matrix, long out, const float scales[], const signed char *zeros,
                        float *found, const enum kind kind)
{
    const long in = matrix->in, group = matrix->group;
    const unsigned char *numbers = (const unsigned char *)matrix->numbers + out * in / 2;
    wide table[VECTORS] = {{0}};
    for (long i = 0, g = 0; i < in; i += 16) {
        const long start = i / BLOCK * BLOCK, is_block = start + BLOCK <= in;
        const int shift = is_block ? i % BLOCK / 16 * 4 : i / 16 % 2 * 4;
        if (i % group == 0) {
            make_table(table, kind, scales[g], zeros ? zeros[g] : 0.0f);
            g++;
        }
        for (int v = 0; v < VECTORS; v++) {
            words codes;
            bytes rest;
            if (is_block)
                memcpy(&codes, numbers + start / 2 + sizeof codes * v, sizeof codes);
            else {
                memcpy(&rest, numbers + i / 32 * 16 + WIDTH * v, sizeof rest);
                codes = __builtin_convertvector(rest, words);
            }
            *(vec *)(found + i + WIDTH * v) = look_up(table, codes >> shift, kind);
        }
    }
}

/* Writes the weights of outputs [first, end) to `found` [end - first, in]. */
void longleaf_dequantize(const struct matrix *matrix, long first, long end, float *found)
{
    const long num_groups = (matrix->in + matrix->group - 1) / matrix->group;
    float scales[MAX_GROUPS];
    for (long out = first; out < end; out++, found += matrix->in) {
        const long row = matrix->scale_rows[out];
        const signed char *zeros = matrix->zeros ? matrix->zeros + row * num_groups : NULL;
        if (out == first || row != matrix->scale_rows[out - 1])
            read_scales(matrix, row, num_groups, scales);
        switch ((enum kind)matrix->kind) {
        case FLOAT8:
            dequantize8(matrix, out, scales, zeros, found, FLOAT8);
            break;
        case INT8:
            dequantize8(matrix, out, scales, zeros, found, INT8);
            break;
        case INT4:
            dequantize4(matrix, out, scales, zeros, found, INT4);
            break;
        case FLOAT4:
            dequantize4(matrix, out, scales, zeros, found, FLOAT4);
            break;
        }
    }
}

/* Inputs are float32, or bfloat16, if `is_half`, for matrices of longleaf_takes_bfloat16; those are overwritten. `start`
   is needed for more than one thread. */
void longleaf_quantized_linear(const struct matrix *matrix, void *x, const float *bias, float *y, long num_rows,
                               long is_half, parallel *start, long threads)
{
    struct job job = {.matrix = matrix, .x = x, .bias = bias, .y = y, .num_rows = num_rows, .is_half = is_half};
    if (is_half)
        arrange(matrix, x, num_rows);
    if (threads > 1)
        start(work, &job, threads, 0);
    else
        work(&job);
}
