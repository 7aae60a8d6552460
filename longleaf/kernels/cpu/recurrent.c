/* Layers with a recurrent state: a short causal convolution, and the gated delta rule or the scan of Mamba-2, for rows
   of many sequences in one call. States are read from slots of a pool and written to others. float32.

   Rows are computed in order, with a few operations per number of the state; a block of the state stays in the L1 cache
   for all rows of a part. That costs no more than the chunked forms with matrix products. The bits of a row depend on
   the state before it only, not on the number of rows.

   Shapes: x [rows, channels] before the convolution; weights [kernel, channels]; bias [channels] or NULL; out [rows,
   heads, value_dim]; pools [slots, channels, kernel], and [slots, heads, key_dim, value_dim] for the delta rule or
   [slots, heads, value_dim, key_dim] for the scan. key_dim, value_dim and channels are multiples of LANES. The inputs of
   convolutions may be stored in bfloat16; x then has such numbers. */

#include <math.h>
#include <string.h>

#include "vectors.h"

/* see longleaf/kernels/cpu/recurrent.py */
#define LANES 16
#define MAX_KERNEL 8
/* vectors of values that are computed together */
#define VECTORS 2
#define COLUMNS (VECTORS * WIDTH)
/* values that a scan computes together, which share the loads of keys and queries */
#define VALUES 4
/* rows whose factors are prepared at once, and channels of a task */
#define TILE 32
#define CHANNELS 64
#define EPSILON 1e-6f

/* Compilers specialize functions for some callers, and such copies may round differently. */
#ifdef __clang__
#define ONE_COPY __attribute__((noinline))
#else
#define ONE_COPY __attribute__((noinline, noclone))
#endif

/* Adjacent rows of a sequence. They continue from the state in slot `source`, or begin if that is negative; the state
   after them goes to slot `target` unless that is negative. */
struct part {
    long first_row, end_row, source, target;
};

/* The factors of a number of the key, for one row: the first two multiply the state before the row. */
struct factor {
    float key_decay, query_decay, decay, key;
};

struct job {
    const float *x, *weights, *bias;
    void *conv_pool;
    float *pool;
    const struct part *parts;
    const float *decays, *steps, *skips;
    float *out, *mixed, *scratch;
    long num_parts, channels, kernel, key_heads, heads, key_dim, value_dim, decay_dim, scratch_size;
    int is_bfloat16; /* whether the inputs of convolutions are */
    long num_tasks, num_threads; /* begun so far */
};

INLINE wide pick(ints is_first, wide first, wide second)
{
    return (wide)((is_first & (ints)first) | (~is_first & (ints)second));
}

/* exp(x) with a relative error of one in ten million, for x from -87 to 87; larger and smaller numbers count as these.
   NaN remains NaN. */
INLINE wide exp_of(wide x)
{
    const wide most = (wide){0} + 87.0f;
    x = pick(x > most, most, x);
    x = pick(x < -most, -most, x);
    const wide turned = x * 1.44269504f;
    const wide half = pick(turned < 0.0f, (wide){0} - 0.5f, (wide){0} + 0.5f);
    const ints whole = __builtin_convertvector(turned + half, ints); /* rounds towards zero */
    const wide count = __builtin_convertvector(whole, wide);
    const wide rest = (x - count * 0.693359375f) + count * 2.12194440e-4f;
    wide power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    return power * (wide)((whole + 127) << 23);
}

INLINE wide silu(wide x)
{
    return x / (1.0f + exp_of(-x));
}

INLINE float load_input(const void *pool, long i, int is_bfloat16)
{
    if (!is_bfloat16)
        return ((const float *)pool)[i];
    const unsigned bits = (unsigned)((const unsigned short *)pool)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE void store_input(void *pool, long i, float value, int is_bfloat16)
{
    unsigned bits;
    memcpy(&bits, &value, sizeof bits);
    if (is_bfloat16)
        ((unsigned short *)pool)[i] = (unsigned short)(bits >> 16);
    else
        ((float *)pool)[i] = value;
}

/* The convolution of WIDTH channels from `channel` on, for the rows of a part; SiLU follows. The last `kernel` inputs,
   the current one included, are in `inputs`. */
INLINE void convolve(const struct job *job, const struct part *part, long channel, const int kernel)
{
    wide inputs[MAX_KERNEL], weights[MAX_KERNEL];
    wide bias = {0};
    if (job->bias)
        bias = *(const vec *)(job->bias + channel);
    for (int j = 0; j < kernel; j++) {
        weights[j] = *(const vec *)(job->weights + j * job->channels + channel);
        inputs[j] = (wide){0};
    }
    if (part->source >= 0) {
        const long from = (part->source * job->channels + channel) * kernel;
        for (int c = 0; c < WIDTH; c++)
            for (int j = 0; j < kernel; j++)
                inputs[j][c] = load_input(job->conv_pool, from + c * kernel + j, job->is_bfloat16);
    }
    for (long row = part->first_row; row < part->end_row; row++) {
        for (int j = 0; j + 1 < kernel; j++)
            inputs[j] = inputs[j + 1];
        inputs[kernel - 1] = *(const vec *)(job->x + row * job->channels + channel);
        wide sum = bias;
        for (int j = 0; j < kernel; j++)
            sum += weights[j] * inputs[j];
        *(vec *)(job->mixed + row * job->channels + channel) = silu(sum);
    }
    if (part->target >= 0) {
        const long to = (part->target * job->channels + channel) * kernel;
        for (int c = 0; c < WIDTH; c++)
            for (int j = 0; j < kernel; j++)
                store_input(job->conv_pool, to + c * kernel + j, inputs[j][c], job->is_bfloat16);
    }
}

ONE_COPY static void convolve_3(const struct job *job, const struct part *part, long channel)
{
    convolve(job, part, channel, 3);
}

ONE_COPY static void convolve_4(const struct job *job, const struct part *part, long channel)
{
    convolve(job, part, channel, 4);
}

ONE_COPY static void convolve_any(const struct job *job, const struct part *part, long channel)
{
    convolve(job, part, channel, (int)job->kernel);
}

static void convolve_parts(void *begun)
{
    struct job *job = begun;
    for (;;) {
        const long first = CHANNELS * __atomic_fetch_add(&job->num_tasks, 1, __ATOMIC_RELAXED);
        const long end = first + CHANNELS < job->channels ? first + CHANNELS : job->channels;
        if (first >= job->channels)
            return;
        for (const struct part *part = job->parts; part < job->parts + job->num_parts; part++)
            for (long channel = first; channel < end; channel += WIDTH)
                if (job->kernel == 4)
                    convolve_4(job, part, channel);
                else if (job->kernel == 3)
                    convolve_3(job, part, channel);
                else
                    convolve_any(job, part, channel);
    }
}

/* The sum of the products of two rows of `dim` numbers. */
ONE_COPY static float multiply(const float *one, const float *other, long dim)
{
    wide sum = {0};
    for (long i = 0; i < dim; i += WIDTH)
        sum += *(const vec *)(one + i) * *(const vec *)(other + i);
    return add_up(sum);
}

/* The factors of a row's key. Keys and queries are normalized, and queries divided by the root of key_dim. Returns the
   product of query and key. */
ONE_COPY static float prepare(const struct job *job, long row, long head, struct factor *factors)
{
    const long dim = job->key_dim, group = job->heads / job->key_heads;
    const float *query = job->mixed + row * job->channels + head / group * dim, *key = query + job->key_heads * dim;
    const float *decay = job->decays + (row * job->heads + head) * job->decay_dim;
    const float key_norm = 1.0f / sqrtf(multiply(key, key, dim) + EPSILON);
    const float query_norm = 1.0f / sqrtf(multiply(query, query, dim) + EPSILON) / sqrtf((float)dim);
    for (long k = 0; k < dim; k++) {
        const float one = job->decay_dim == 1 ? *decay : decay[k];
        factors[k].decay = one;
        factors[k].key = key[k] * key_norm;
        factors[k].key_decay = factors[k].key * one;
        factors[k].query_decay = query[k] * query_norm * one;
    }
    return multiply(query, key, dim) * query_norm * key_norm;
}

/* The state after a row from the one before it, and the row's result: `num_vectors` columns of values. */
INLINE void advance(const float *from, long from_stride, float *to, long to_stride, const struct factor *factors,
                    const float *value, float beta, float product, float *out, long key_dim, const int num_vectors)
{
    wide by_key[VECTORS] = {{0}}, by_query[VECTORS] = {{0}}, change[VECTORS];
    for (long k = 0; k < key_dim; k++)
#pragma GCC unroll 2
        for (int i = 0; i < num_vectors; i++) {
            const wide state = *(const vec *)(from + k * from_stride + i * WIDTH);
            by_key[i] += factors[k].key_decay * state;
            by_query[i] += factors[k].query_decay * state;
        }
#pragma GCC unroll 2
    for (int i = 0; i < num_vectors; i++) {
        change[i] = (*(const vec *)(value + i * WIDTH) - by_key[i]) * beta;
        *(vec *)(out + i * WIDTH) = by_query[i] + product * change[i];
    }
    for (long k = 0; k < key_dim; k++)
#pragma GCC unroll 2
        for (int i = 0; i < num_vectors; i++) {
            const wide state = *(const vec *)(from + k * from_stride + i * WIDTH);
            *(vec *)(to + k * to_stride + i * WIDTH) = state * factors[k].decay + factors[k].key * change[i];
        }
}

ONE_COPY static void advance_one(const float *from, long from_stride, float *to, long to_stride,
                                 const struct factor *factors, const float *value, float beta, float product,
                                 float *out, long key_dim)
{
    advance(from, from_stride, to, to_stride, factors, value, beta, product, out, key_dim, 1);
}

ONE_COPY static void advance_two(const float *from, long from_stride, float *to, long to_stride,
                                 const struct factor *factors, const float *value, float beta, float product,
                                 float *out, long key_dim)
{
    advance(from, from_stride, to, to_stride, factors, value, beta, product, out, key_dim, 2);
}

/* Copies a block of columns between a state, with a stride, and memory without gaps. */
static void copy(const float *from, long from_stride, float *to, long to_stride, long key_dim, long width)
{
    for (long k = 0; k < key_dim; k++)
        memcpy(to + k * to_stride, from + k * from_stride, sizeof(float) * width);
}

/* The delta rule for the rows of a part and one head. `room` has the columns of a state block by block, without gaps,
   followed by the factors of TILE rows and the products of their queries and keys. Several rows are computed there: in
   a pool, the rows of a block have the same place in the L1 cache. */
static void follow_rule(const struct job *job, const struct part *part, long head, float *room)
{
    const long key_dim = job->key_dim, value_dim = job->value_dim, size = key_dim * value_dim;
    struct factor *factors = (struct factor *)(room + size);
    float *products = (float *)(factors + TILE * key_dim);
    const float *source = part->source < 0 ? NULL : job->pool + (part->source * job->heads + head) * size;
    float *target = part->target < 0 ? NULL : job->pool + (part->target * job->heads + head) * size;
    const int is_direct = part->end_row - part->first_row == 1 && source && target;
    if (!source)
        memset(room, 0, sizeof(float) * size);
    for (long first = part->first_row; first < part->end_row; first += TILE) {
        const long end = first + TILE < part->end_row ? first + TILE : part->end_row;
        for (long row = first; row < end; row++)
            products[row - first] = prepare(job, row, head, factors + (row - first) * key_dim);
        for (long column = 0; column < value_dim; column += COLUMNS) {
            const int is_wide = column + COLUMNS <= value_dim;
            const long width = is_wide ? COLUMNS : WIDTH;
            float *block = room + column * key_dim;
            if (source && !is_direct && first == part->first_row)
                copy(source + column, value_dim, block, width, key_dim, width);
            for (long row = first; row < end; row++) {
                const float *value = job->mixed + row * job->channels + 2 * job->key_heads * key_dim
                                     + head * value_dim + column;
                float *out = job->out + (row * job->heads + head) * value_dim + column;
                (is_wide ? advance_two : advance_one)(
                    is_direct ? source + column : block, is_direct ? value_dim : width,
                    is_direct ? target + column : block, is_direct ? value_dim : width,
                    factors + (row - first) * key_dim, value, job->steps[row * job->heads + head],
                    products[row - first], out, key_dim);
            }
            if (target && !is_direct && end == part->end_row)
                copy(block, width, target + column, value_dim, key_dim, width);
        }
    }
}

typedef void compute_part(const struct job *job, const struct part *part, long head, float *scratch);

/* Takes heads until none are left, and computes all parts of each, with scratch memory of this thread. */
INLINE void take_heads(struct job *job, compute_part *compute)
{
    float *scratch = job->scratch + job->scratch_size * __atomic_fetch_add(&job->num_threads, 1, __ATOMIC_RELAXED);
    for (;;) {
        const long head = __atomic_fetch_add(&job->num_tasks, 1, __ATOMIC_RELAXED);
        if (head >= job->heads)
            return;
        for (long i = 0; i < job->num_parts; i++)
            compute(job, job->parts + i, head, scratch);
    }
}

static void follow_rule_in_parts(void *begun)
{
    take_heads(begun, follow_rule);
}

/* As `advance`, for the scan: the state of `num_values` values, `key_dim` numbers each. */
INLINE void scan(const float *from, float *to, const float *key, const float *query, const float *value, float decay,
                 float step, float skip, float *out, long key_dim, const int num_values)
{
    wide sums[VALUES] = {{0}};
    float changes[VALUES];
    for (int i = 0; i < num_values; i++)
        changes[i] = value[i] * step;
    for (long k = 0; k < key_dim; k += WIDTH) {
        const wide keys = *(const vec *)(key + k), queries = *(const vec *)(query + k);
#pragma GCC unroll 4
        for (int i = 0; i < num_values; i++) {
            const wide state = *(const vec *)(from + i * key_dim + k) * decay + keys * changes[i];
            *(vec *)(to + i * key_dim + k) = state;
            sums[i] += state * queries;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < num_values; i++)
        out[i] = add_up(sums[i]) + value[i] * skip;
}

ONE_COPY static void scan_one(const float *from, float *to, const float *key, const float *query, const float *value,
                              float decay, float step, float skip, float *out, long key_dim)
{
    scan(from, to, key, query, value, decay, step, skip, out, key_dim, 1);
}

ONE_COPY static void scan_several(const float *from, float *to, const float *key, const float *query,
                                  const float *value, float decay, float step, float skip, float *out, long key_dim)
{
    scan(from, to, key, query, value, decay, step, skip, out, key_dim, VALUES);
}

/* The scan of the rows of a part and one head. `room` has the state of VALUES values. */
static void scan_part(const struct job *job, const struct part *part, long head, float *room)
{
    const long key_dim = job->key_dim, value_dim = job->value_dim, size = key_dim * value_dim;
    const long group = head / (job->heads / job->key_heads), keys = job->heads * value_dim;
    const float *source = part->source < 0 ? NULL : job->pool + (part->source * job->heads + head) * size;
    float *target = part->target < 0 ? NULL : job->pool + (part->target * job->heads + head) * size;
    for (long v = 0; v < value_dim;) {
        const int num_values = v + VALUES <= value_dim ? VALUES : 1;
        const float *from = source ? source + v * key_dim : room;
        float *to = target ? target + v * key_dim : room;
        if (!source)
            memset(room, 0, sizeof(float) * num_values * key_dim);
        for (long row = part->first_row; row < part->end_row; row++) {
            const float *mixed = job->mixed + row * job->channels, *key = mixed + keys + group * key_dim;
            const long place = row * job->heads + head;
            (num_values == VALUES ? scan_several : scan_one)(
                from, to, key, key + job->key_heads * key_dim, mixed + head * value_dim + v, job->decays[place],
                job->steps[place], job->skips[head], job->out + place * value_dim + v, key_dim);
            from = to;
        }
        v += num_values;
    }
}

static void scan_parts(void *begun)
{
    take_heads(begun, scan_part);
}

static void run(void (*work)(void *), struct job *job, parallel *start, long threads)
{
    job->num_tasks = job->num_threads = 0;
    if (threads > 1)
        start(work, job, threads, 0);
    else
        work(job);
}

/* Numbers of scratch memory of each thread. */
long longleaf_recurrent_scratch(long key_dim, long value_dim)
{
    return key_dim * value_dim + TILE * key_dim * (long)(sizeof(struct factor) / sizeof(float)) + TILE;
}

/* The gated delta rule. Channels are queries, keys and values; decays [rows, heads, decay_dim], where decay_dim is 1 or
   key_dim; steps [rows, heads], the part of the error that is corrected; mixed [rows, channels] is scratch memory, as
   are `scratch_size` numbers of `scratch` for each thread. `start` is needed for more than one thread. */
void longleaf_delta_rule(const float *x, const float *weights, const float *bias, void *conv_pool, float *pool,
                         const struct part *parts, const float *decays, const float *steps, float *out, float *mixed,
                         float *scratch, long num_parts, long channels, long kernel, long key_heads, long heads,
                         long key_dim, long value_dim, long decay_dim, long scratch_size, long is_bfloat16,
                         parallel *start, long threads)
{
    struct job job = {.x = x, .weights = weights, .bias = bias, .conv_pool = conv_pool, .pool = pool, .parts = parts,
                      .decays = decays, .steps = steps, .out = out, .mixed = mixed, .scratch = scratch,
                      .num_parts = num_parts, .channels = channels, .kernel = kernel, .key_heads = key_heads,
                      .heads = heads, .key_dim = key_dim, .value_dim = value_dim, .decay_dim = decay_dim,
                      .scratch_size = scratch_size, .is_bfloat16 = (int)is_bfloat16};
    run(convolve_parts, &job, start, threads);
    run(follow_rule_in_parts, &job, start, threads);
}

/* The scan of Mamba-2. Channels are values, keys (B) and queries (C), of key_heads groups; decays [rows, heads], the
   factor of the state; steps [rows, heads]; skips [heads] (D). */
void longleaf_scan(const float *x, const float *weights, const float *bias, void *conv_pool, float *pool,
                   const struct part *parts, const float *decays, const float *steps, const float *skips, float *out,
                   float *mixed, float *scratch, long num_parts, long channels, long kernel, long key_heads,
                   long heads, long key_dim, long value_dim, long scratch_size, long is_bfloat16, parallel *start,
                   long threads)
{
    struct job job = {.x = x, .weights = weights, .bias = bias, .conv_pool = conv_pool, .pool = pool, .parts = parts,
                      .decays = decays, .steps = steps, .skips = skips, .out = out, .mixed = mixed,
                      .scratch = scratch, .num_parts = num_parts, .channels = channels, .kernel = kernel,
                      .key_heads = key_heads, .heads = heads, .key_dim = key_dim, .value_dim = value_dim,
                      .scratch_size = scratch_size, .is_bfloat16 = (int)is_bfloat16};
    run(convolve_parts, &job, start, threads);
    run(scan_parts, &job, start, threads);
}
