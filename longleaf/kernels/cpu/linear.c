/* y = x w^T + bias for few rows of x, as in decode steps: float32 arithmetic, weights of 32 or 16 bits.

   With so few rows the time is that of reading the weights from memory. Matrix libraries divide them into tiles for
   many rows, and read one row's weights with half of the bandwidth. This kernel reads them in the order of their
   addresses, once for all rows.

   Shapes: w [out, in], x [rows, in] and y [rows, out], contiguous; bias [out] or NULL. */

#include <string.h>

#include "vectors.h"

#define MAX_OUTS 4
/* accumulators, limited by the number of registers */
#define SUMS WIDTH
/* how far ahead weights are fetched, in bytes */
#define AHEAD 4096
/* outputs of a task: enough to amortize taking it, few enough to balance threads */
#define TASK 64

/* Type of the weights, as numbered in longleaf/kernels/cpu/linear.py. */
enum kind { FLOAT32, BFLOAT16 };

INLINE wide load(const void *numbers, long i, const enum kind kind)
{
    halves half;
    if (kind == FLOAT32)
        return *(const vec *)((const float *)numbers + i);
    memcpy(&half, (const unsigned short *)numbers + i, sizeof half);
    return from_bfloat16(half);
}

/* The last `count` numbers of a row, fewer than WIDTH, followed by zeros. */
INLINE wide load_rest(const void *numbers, long i, long count, const enum kind kind)
{
    float rest[WIDTH] = {0.0f};
    unsigned short half[WIDTH] = {0};
    if (kind == FLOAT32)
        memcpy(rest, (const float *)numbers + i, sizeof(float) * count);
    else
        memcpy(half, (const unsigned short *)numbers + i, sizeof(short) * count);
    return kind == FLOAT32 ? load(rest, 0, kind) : load(half, 0, kind);
}

/* Products of `num_outs` rows of weights with `num_rows` rows of x, at [row * num_outs + out]. Several rows of weights
   share the loads of x, which need not fit the L1 cache. Each product is summed in the same order for all numbers
   of rows: the bits of a row do not depend on the rows beside it. */
INLINE void multiply(const char *w, const float *x, long in, float sum[], const enum kind kind, const int num_rows,
                     const int num_outs)
{
    const int bytes = kind == FLOAT32 ? 4 : 2;
    const long ahead = num_outs == 1 ? AHEAD : num_outs * in * bytes; /* the next rows */
    wide total[SUMS] = {{0}};
    long i = 0;
    for (; i + WIDTH <= in; i += WIDTH) {
        wide weights[MAX_OUTS];
#pragma GCC unroll 4
        for (int o = 0; o < num_outs; o++) {
            __builtin_prefetch(w + (o * in + i) * bytes + ahead);
            weights[o] = load(w + o * in * bytes, i, kind);
        }
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
            for (int o = 0; o < num_outs; o++)
                total[r * num_outs + o] += weights[o] * *(const vec *)(x + r * in + i);
    }
    if (i < in)
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
            for (int o = 0; o < num_outs; o++)
                total[r * num_outs + o] += load_rest(w + o * in * bytes, i, in - i, kind)
                                           * load_rest(x + r * in, i, in - i, FLOAT32);
#pragma GCC unroll 16
    for (int k = 0; k < num_rows * num_outs; k++)
        sum[k] = add_up(total[k]);
}

struct job {
    const void *w;
    const float *x, *bias;
    float *y;
    long out, in;
    int num_rows;
    enum kind kind;
    long num_tasks; /* begun so far */
};

#define CASE(ROWS, OUTS) \
    case ROWS: \
        for (; o + OUTS <= end; o += OUTS) { \
            multiply(w + o * row_bytes, job->x, job->in, sum, kind, ROWS, OUTS); \
            put(job, o, OUTS, sum); \
        } \
        for (; o < end; o++) { \
            multiply(w + o * row_bytes, job->x, job->in, sum, kind, ROWS, 1); \
            put(job, o, 1, sum); \
        } \
        break;

INLINE void put(const struct job *job, long o, int num_outs, const float sum[])
{
    for (int k = 0; k < job->num_rows * num_outs; k++) {
        const long place = o + k % num_outs;
        job->y[k / num_outs * job->out + place] = sum[k] + (job->bias ? job->bias[place] : 0.0f);
    }
}

INLINE void compute(const struct job *job, long o, long end, const enum kind kind)
{
    const char *w = job->w;
    const long row_bytes = job->in * (kind == FLOAT32 ? 4 : 2);
    float sum[SUMS];
    switch (job->num_rows) {
        CASE(1, 1)
        CASE(2, 1)
#ifdef __AVX512F__
        CASE(3, 4)
        CASE(4, 4)
        CASE(5, 2)
        CASE(6, 2)
        CASE(7, 2)
        CASE(8, 2)
#else
        CASE(3, 2)
        CASE(4, 2)
        CASE(5, 1)
        CASE(6, 1)
        CASE(7, 1)
        CASE(8, 1)
#endif
    }
}

static void work(void *begun)
{
    struct job *job = begun;
    for (;;) {
        const long first = TASK * __atomic_fetch_add(&job->num_tasks, 1, __ATOMIC_RELAXED);
        const long end = first + TASK < job->out ? first + TASK : job->out;
        if (first >= job->out)
            return;
        if (job->kind == FLOAT32)
            compute(job, first, end, FLOAT32);
        else
            compute(job, first, end, BFLOAT16);
    }
}

/* At most 8 rows. `start` is needed for more than one thread. */
void longleaf_linear(const void *w, const float *x, const float *bias, float *y, long num_rows, long out, long in,
                     long kind, parallel *start, long threads)
{
    struct job job = {.w = w, .x = x, .bias = bias, .y = y, .out = out, .in = in, .num_rows = num_rows, .kind = kind};
    if (threads > 1)
        start(work, &job, threads, 0);
    else
        work(&job);
}
