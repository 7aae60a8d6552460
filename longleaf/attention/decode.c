/* Attention of a few query rows over one stretch of float32 keys, one pass, online softmax.

   Torch's flash kernel splits this into thousands of tiny matrix products, whose overhead costs more than reading the
   keys. Here every block of keys and values is read once into the first-level cache and used by all rows.

   Shapes: q [heads, rows, dim], out the same, lse [heads, rows], all contiguous; keys and values [heads, num_keys, dim]
   with `head_stride` floats between heads. num_keys >= 1, rows <= MAX_ROWS. Scores s become cap * tanh(s / cap), unless
   cap is 0. lse is the natural log of the sum of exponentials. */

#include <float.h>
#include <math.h>
#include <string.h>

/* keys and values of a block stay in half of the first-level cache, so that the next ones can arrive meanwhile */
#define BLOCK 32
#define MAX_ROWS 8
/* Weights below exp(-60), 1e-26, are raised to it: a billion of them change no bit of a float32 sum that holds a one.
   Left alone they would reach the exponential's slow path, and denormal numbers, a hundred times slower than others. */
#define NEGLIGIBLE -60.0f

static inline __attribute__((always_inline)) void head(
    const float *restrict q, const float *restrict keys, const float *restrict values, float *restrict out,
    float *restrict lse, long rows, long dim, long num_keys, float scale, float cap)
{
    float score[MAX_ROWS][BLOCK], peak[MAX_ROWS], sum[MAX_ROWS];
    for (long r = 0; r < rows; r++) {
        peak[r] = -FLT_MAX;
        sum[r] = 0.0f;
    }
    memset(out, 0, sizeof(float) * rows * dim);
    for (long first = 0; first < num_keys; first += BLOCK) {
        const long count = num_keys - first < BLOCK ? num_keys - first : BLOCK;
        const float *k = keys + first * dim, *v = values + first * dim;
        for (long j = 0; j < count; j++)
            for (long r = 0; r < rows; r++) {
                float dot = 0.0f;
                for (long d = 0; d < dim; d++)
                    dot += q[r * dim + d] * k[j * dim + d];
                score[r][j] = dot * scale;
            }
        if (cap > 0.0f)
            for (long r = 0; r < rows; r++)
                for (long j = 0; j < count; j++)
                    score[r][j] = cap * tanhf(score[r][j] / cap);
        for (long r = 0; r < rows; r++) {
            float top = peak[r], total = 0.0f;
            for (long j = 0; j < count; j++)
                top = score[r][j] > top ? score[r][j] : top;
            const float fade = expf(peak[r] - top);
            for (long j = 0; j < count; j++) {
                const float below = score[r][j] - top;
                score[r][j] = expf(below < NEGLIGIBLE ? NEGLIGIBLE : below);
                total += score[r][j];
            }
            sum[r] = sum[r] * fade + total;
            peak[r] = top;
            float *o = out + r * dim;
            for (long d = 0; d < dim; d++)
                o[d] *= fade;
        }
        for (long r = 0; r < rows; r++) {
            float *o = out + r * dim;
            for (long j = 0; j < count; j++)
                for (long d = 0; d < dim; d++)
                    o[d] += score[r][j] * v[j * dim + d];
        }
    }
    for (long r = 0; r < rows; r++) {
        for (long d = 0; d < dim; d++)
            out[r * dim + d] /= sum[r];
        lse[r] = peak[r] + logf(sum[r]);
    }
}

/* dims that models use get loops of known length, which the compiler unrolls into registers */
#define CASE(DIM) \
    case DIM: head(q, keys, values, out, lse, rows, DIM, num_keys, scale, cap); break

void longleaf_decode(const float *q, const float *keys, const float *values, float *out, float *lse, long heads,
                     long rows, long dim, long num_keys, long head_stride, float scale, float cap)
{
    for (long h = 0; h < heads; h++) {
        switch (dim) {
            CASE(32);
            CASE(64);
            CASE(96);
            CASE(128);
            default: head(q, keys, values, out, lse, rows, dim, num_keys, scale, cap);
        }
        q += rows * dim;
        out += rows * dim;
        lse += rows;
        keys += head_stride;
        values += head_stride;
    }
}
