/* Attention of rows by column, for one layer, from the per-block output of the decode kernel: sum * exp(peak - lse),
   with the logsumexp of all keys that the row sees.

   A row's peak rises rarely, and the factor is constant in between, so few exponentials are computed. */

#include <math.h>
#include <string.h>

/* As in decode.c: the highest score of the row up to this block, and the sum of exp(score - peak). */
struct entry {
    float peak, sum;
};

/* Entries [first, end) of a row, which has `num_entries` entries from `start` for one query per key head. They add to
   the columns from `column`, `per_column` entries to each; `before` entries of the first column precede them. */
struct run {
    long row, start, num_entries, first, end, column, before, per_column;
};

/* Rows that are averaged together, [first_row, end_row), and their runs. */
struct average {
    long first_row, end_row, first_run, end_run;
};

static void add_run(const struct run *run, const struct entry *entries, float lse, float *columns)
{
    float *column = columns + run->column, peak = 0.0f, factor = 0.0f;
    long left = run->per_column - run->before;
    for (long i = run->first; i < run->end; i++) {
        if (i == run->first || entries[i].peak != peak) {
            peak = entries[i].peak;
            factor = expf(peak - lse);
        }
        *column += entries[i].sum * factor;
        if (--left == 0) {
            column++;
            left = run->per_column;
        }
    }
}

/* `entries` is [kv_heads, entries * group] with a stride between heads; lse [rows, kv_heads * group]; sinks [kv_heads *
   group], or NULL if they are counted elsewhere; means, largest and heads [averages, columns], where head numbers of
   this layer start at `first_head`; columns [num_columns] is scratch space. Means are summed over heads; the largest is
   the maximum over the heads of all layers. */
void longleaf_add_shares(const struct entry *entries, const float *lse, const float *sinks,
                         const struct run *runs, const struct average *averages, float *means, float *largest,
                         int *heads,
                         float *columns, long head_stride, long num_averages, long num_kv_heads, long group,
                         long num_columns, long sink_column, long first_head)
{
    const long num_heads = num_kv_heads * group;
    for (long a = 0; a < num_averages; a++) {
        const struct average *average = averages + a;
        const float weight = 1.0f / (float)(average->end_row - average->first_row);
        float *mean = means + a * num_columns, *most = largest + a * num_columns;
        int *head = heads + a * num_columns;
        for (long h = 0; h < num_heads; h++) {
            const long k = h / group, g = h % group;
            memset(columns, 0, sizeof(float) * num_columns);
            for (const struct run *run = runs + average->first_run; run < runs + average->end_run; run++) {
                const long place = k * head_stride + run->start * group + g * run->num_entries;
                add_run(run, entries + place, lse[run->row * num_heads + h], columns);
            }
            for (long row = average->first_row; sinks && row < average->end_row; row++)
                columns[sink_column] += expf(sinks[h] - lse[row * num_heads + h]);
            for (long n = 0; n < num_columns; n++) {
                const float share = columns[n] * weight;
                mean[n] += share;
                head[n] = share > most[n] ? (int)(first_head + h) : head[n];
                most[n] = share > most[n] ? share : most[n];
            }
        }
    }
}
