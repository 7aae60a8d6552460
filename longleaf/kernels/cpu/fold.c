/* Merges packed partials in rank order, each row in one pass over its numbers.

   Shapes: packed [num_partials, rows, dim + 1], where the last column is the natural-log lse; out [rows, dim], lse
   [rows]; float32, contiguous. Empty partials have lse -inf. A row that is empty in all partials has out 0, lse -inf.
   */

#include <math.h>
#include <string.h>

void longleaf_fold(const float *restrict packed, float *restrict out, float *restrict lse, long num_partials, long rows,
                   long dim)
{
    for (long row = 0; row < rows; row++, out += dim) {
        const float *first = packed + row * (dim + 1);
        const long next = rows * (dim + 1);
        float top = -INFINITY, mass = 0.0f;
        for (long n = 0; n < num_partials; n++)
            top = first[n * next + dim] > top ? first[n * next + dim] : top;
        /* -inf minus -inf would be NaN: any finite shift gives exp(-inf) = 0 instead */
        const float shift = top == -INFINITY ? 0.0f : top;
        memset(out, 0, sizeof(float) * dim);
        for (long n = 0; n < num_partials; n++) {
            const float *values = first + n * next, weight = expf(values[dim] - shift);
            mass += weight;
            for (long d = 0; d < dim; d++)
                out[d] += weight * values[d];
        }
        const float share = mass == 0.0f ? 0.0f : 1.0f / mass;
        for (long d = 0; d < dim; d++)
            out[d] *= share;
        lse[row] = shift + logf(mass);
    }
}
