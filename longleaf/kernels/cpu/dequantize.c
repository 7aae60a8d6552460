/* Weights from numbers of 4 or 8 bits: (table[code] - zero) * scale in float32, rounded once.

   Scales and zeros belong to blocks of rows and columns. Results are float32, or bfloat16 with ties to even. Row-major
   codes are [rows, columns], those of 4 bits two per byte, the first in the low bits. Codes in words are transposed:
   [columns, rows]. */

#include <stdint.h>
#include <string.h>

#define TILE 64
#define STRETCH 512
#define INLINE static inline __attribute__((always_inline))

INLINE uint16_t to_bfloat16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
}

INLINE void store(void *out, long index, float value, int is_bfloat16)
{
    if (is_bfloat16)
        ((uint16_t *)out)[index] = to_bfloat16(value);
    else
        ((float *)out)[index] = value;
}

/* Two numbers in one store, which compilers vectorize. */
INLINE void store_pair(void *out, long pair, float first, float second, int is_bfloat16)
{
    if (is_bfloat16) {
        const uint32_t both = to_bfloat16(first) | (uint32_t)to_bfloat16(second) << 16;
        memcpy((uint32_t *)out + pair, &both, sizeof both);
    } else {
        uint32_t low, high;
        memcpy(&low, &first, sizeof low);
        memcpy(&high, &second, sizeof high);
        const uint64_t both = low | (uint64_t)high << 32;
        memcpy((uint64_t *)out + pair, &both, sizeof both);
    }
}

INLINE void spread(float *restrict to, float value, long count)
{
    if (count == 8) /* as a constant, the usual size is a single instruction */
        for (long i = 0; i < 8; i++)
            to[i] = value;
    else
        for (long i = 0; i < count; i++)
            to[i] = value;
}

/* Scales and zeros are spread over a stretch of a row first, so that the loop over pairs is long. */
INLINE void pairs(const uint8_t *restrict codes, const float *restrict table, const float *restrict scales,
                  const float *restrict zeros, void *restrict out, int is_bfloat16, long rows, long columns,
                  long block_rows, long block_columns)
{
    float scale[STRETCH], zero[STRETCH] = {0};
    const long num_blocks = (columns + block_columns - 1) / block_columns, row_pairs = columns / 2;
    const long width = block_columns / 2;
    for (long row = 0; row < rows; row++) {
        const uint8_t *own = codes + row * row_pairs;
        const long first = row / block_rows * num_blocks;
        for (long start = 0; start < row_pairs; start += STRETCH) {
            const long count = row_pairs - start < STRETCH ? row_pairs - start : STRETCH;
            for (long i = 0; i < count;) {
                const long block = (start + i) / width, rest = (block + 1) * width - start;
                const long end = rest < count ? rest : count;
                spread(scale + i, scales[first + block], end - i);
                if (zeros)
                    spread(zero + i, zeros[first + block], end - i);
                i = end;
            }
            for (long i = 0; i < count; i++)
                store_pair(out, row * row_pairs + start + i, (table[own[start + i] & 15] - zero[i]) * scale[i],
                           (table[own[start + i] >> 4] - zero[i]) * scale[i], is_bfloat16);
        }
    }
}

INLINE void bytes(const uint8_t *restrict codes, const float *restrict table, const float *restrict scales,
                  const float *restrict zeros, void *restrict out, int is_bfloat16, long rows, long columns,
                  long block_rows, long block_columns)
{
    const long num_blocks = (columns + block_columns - 1) / block_columns;
    for (long row = 0; row < rows; row++)
        for (long block = 0; block < num_blocks; block++) {
            const long at = row / block_rows * num_blocks + block, start = block * block_columns;
            const long end = start + block_columns < columns ? start + block_columns : columns;
            const float scale = scales[at], zero = zeros ? zeros[at] : 0.0f;
            for (long i = row * columns + start; i < row * columns + end; i++)
                store(out, i, (table[codes[i]] - zero) * scale, is_bfloat16);
        }
}

/* `is_packed`: 4 bits. The number of columns and the size of blocks are then even. `zeros` may be null. */
void longleaf_dequantize(const uint8_t *codes, int is_packed, const float *table, const float *scales,
                         const float *zeros, void *out, int is_bfloat16, long rows, long columns, long block_rows,
                         long block_columns)
{
    if (is_packed && is_bfloat16)
        pairs(codes, table, scales, zeros, out, 1, rows, columns, block_rows, block_columns);
    else if (is_packed)
        pairs(codes, table, scales, zeros, out, 0, rows, columns, block_rows, block_columns);
    else if (is_bfloat16)
        bytes(codes, table, scales, zeros, out, 1, rows, columns, block_rows, block_columns);
    else
        bytes(codes, table, scales, zeros, out, 0, rows, columns, block_rows, block_columns);
}

/* The numbers of eight columns and a tile of rows, from words of 4-bit codes: of neighboring columns, or of neighboring
   rows, whose positions in the word are `shifts`. */
INLINE void unpack(const uint32_t *restrict words, const uint32_t *restrict shifts, long rows, long column, long start,
                   long count, float numbers[8][TILE])
{
    if (shifts == NULL) {
        const uint32_t *own = words + column / 8 * rows + start;
        for (long k = 0; k < 8; k++)
            for (long r = 0; r < count; r++)
                numbers[k][r] = own[r] >> (4 * k) & 15;
        return;
    }
    for (long k = 0; k < 8; k++) {
        const uint32_t *own = words + (column + k) * (rows / 8) + start / 8;
        for (long r = 0; r < count; r += 8)
            for (long j = 0; j < 8; j++)
                numbers[k][r + j] = own[r / 8] >> shifts[j] & 15;
    }
}

INLINE void transposed(const uint32_t *restrict words, const uint32_t *restrict shifts, const int32_t *restrict groups,
                       const float *restrict scales, const float *restrict zeros, void *restrict out, int is_bfloat16,
                       long rows, long columns)
{
    float numbers[8][TILE];
    for (long start = 0; start < rows; start += TILE) {
        const long count = rows - start < TILE ? rows - start : TILE;
        for (long column = 0; column < columns; column += 8) {
            unpack(words, shifts, rows, column, start, count, numbers);
            for (long k = 0; k < 8; k++) {
                const float *scale = scales + groups[column + k] * rows + start;
                const float *zero = zeros + groups[column + k] * rows + start;
                for (long r = 0; r < count; r++)
                    numbers[k][r] = (numbers[k][r] - zero[r]) * scale[r];
            }
            for (long r = 0; r < count; r++)
                for (long k = 0; k < 8; k++)
                    store(out, (start + r) * columns + column + k, numbers[k][r], is_bfloat16);
        }
    }
}

/* Words [columns / 8, rows] without `shifts`, or else [columns, rows / 8]. Scales and zeros [groups, rows]; `groups` has
   the group of each column. Rows and columns are multiples of 8. */
void longleaf_dequantize_words(const uint32_t *words, const uint32_t *shifts, const int32_t *groups,
                               const float *scales, const float *zeros, void *out, int is_bfloat16, long rows,
                               long columns)
{
    if (is_bfloat16)
        transposed(words, shifts, groups, scales, zeros, out, 1, rows, columns);
    else
        transposed(words, shifts, groups, scales, zeros, out, 0, rows, columns);
}

INLINE void experts(const uint8_t *restrict codes, const float *restrict table, const float *restrict scales,
                    void *restrict out, int is_bfloat16, long rows, long columns, long block)
{
    uint8_t tile[TILE / 2][TILE];
    float scale[TILE];
    for (long start = 0; start < rows; start += TILE) {
        const long count = rows - start < TILE ? rows - start : TILE;
        for (long column = 0; column < columns; column += block) {
            for (long r = 0; r < count; r++) {
                const uint8_t *own = codes + ((start + r) * columns + column) / 2;
                __builtin_prefetch(own + 128); /* there are more streams than processors predict */
                scale[r] = scales[((start + r) * columns + column) / block];
                for (long i = 0; i < block / 2; i++)
                    tile[i][r] = own[i];
            }
            for (long i = 0; i < block / 2; i++) {
                const long to = (column + 2 * i) * rows + start;
                for (long r = 0; r < count; r++)
                    store(out, to + r, table[tile[i][r] & 15] * scale[r], is_bfloat16);
                for (long r = 0; r < count; r++)
                    store(out, to + rows + r, table[tile[i][r] >> 4] * scale[r], is_bfloat16);
            }
        }
    }
}

/* Codes [rows, columns] of 4 bits with a scale per `block` columns (at most 64, a divisor of them) to [columns, rows]. */
void longleaf_dequantize_transposed(const uint8_t *codes, const float *table, const float *scales, void *out,
                                    int is_bfloat16, long rows, long columns, long block)
{
    if (is_bfloat16)
        experts(codes, table, scales, out, 1, rows, columns, block);
    else
        experts(codes, table, scales, out, 0, rows, columns, block);
}
