/* Vectors of float32 numbers, as wide as a register of the processor, and threads. */

#ifndef LONGLEAF_VECTORS_H
#define LONGLEAF_VECTORS_H

#ifdef __AVX__
#include <immintrin.h>
#endif

/* numbers in a vector */
#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif
/* bytes of a cache line */
#define LINE 64

#define INLINE static inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi" /* about vectors as parameters: these functions are all inlined */

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias)); /* at any address */
typedef float wide __attribute__((vector_size(4 * WIDTH)));
typedef int ints __attribute__((vector_size(4 * WIDTH)));
typedef unsigned words __attribute__((vector_size(4 * WIDTH)));
typedef long long longs __attribute__((vector_size(4 * WIDTH)));
typedef unsigned short halves __attribute__((vector_size(2 * WIDTH)));
typedef signed char chars __attribute__((vector_size(WIDTH)));
typedef unsigned char bytes __attribute__((vector_size(WIDTH)));

/* Numbers of one or of two vectors, by their places. */
#ifdef __clang__
#define MOVE(vector, ...) __builtin_shufflevector(vector, vector, __VA_ARGS__)
#define PICK(low, high, ...) __builtin_shufflevector(low, high, __VA_ARGS__)
#else
#define MOVE(vector, ...) __builtin_shuffle(vector, (ints){__VA_ARGS__})
#define PICK(low, high, ...) __builtin_shuffle(low, high, (ints){__VA_ARGS__})
#endif

/* Keeps a vector in a register, and hides its origin. Otherwise gcc reloads a number for each use, and the loads become
   the bottleneck; and fast-math may reorder sums differently for other numbers of rows. Processors without AVX have no
   register for a whole vector. */
#if defined(__AVX512F__)
#define KEEP(vector) __asm__("" : "+v"(vector))
#elif defined(__AVX__)
#define KEEP(vector) __asm__("" : "+x"(vector))
#else
#define KEEP(vector)
#endif

INLINE wide from_bfloat16(halves half)
{
#ifdef __AVX512F__ /* two instructions; gcc compiles the generic form to four */
    return (wide)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)half), 16);
#else
    return (wide)(__builtin_convertvector(half, words) << 16);
#endif
}

/* The sum of all numbers, in an order that does not depend on the code around it. */
INLINE float add_up(wide all)
{
#ifdef __AVX512F__
    all += MOVE(all, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    all += MOVE(all, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    all += MOVE(all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
#else
    all += MOVE(all, 4, 5, 6, 7, 0, 1, 2, 3);
    all += MOVE(all, 2, 3, 0, 1, 6, 7, 4, 5);
#endif
    return all[0] + all[1];
}

/* Starts work(job) on several threads, one of them the caller, and waits for all: the entry of libgomp, and of other
   OpenMP libraries, which compilers call for `#pragma omp parallel`. Called by its address, it is the one that torch
   uses, hence its threads. */
typedef void parallel(void (*work)(void *), void *job, unsigned num_threads, unsigned flags);

#endif
