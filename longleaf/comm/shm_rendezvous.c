/* Where the ranks of one machine meet: a segment of shared memory with two boards, and one meeting per step.

   In step s every rank writes its message on board s % 2 and arrives. The last one to arrive ends the step: it raises
   the generation to s + 1 and wakes the others, and all read the board.

   Why one meeting per step is enough. A rank writes on board s % 2 again in step s + 2, after the meeting of step s + 1,
   so after every rank has arrived there; and a rank arrives in step s + 1 only when it is done with what it read in
   step s. So nobody writes where somebody still reads.

   Why the readers see what was written. Each arrival is an addition with release and acquire: the last one reads the
   result of all others, so all writes before any arrival come before it. It then stores the generation with release, and
   whoever loads that with acquire sees the writes, too.

   Why 32 bits suffice. In step s the generation is s until the meeting and s + 1 after it, and it cannot go on without
   this rank: only equality is asked, and the number may wrap around.

   The functions do not block for longer than a slice, so that the caller can look after signals, dead ranks and time. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE 64
#define PAGE 4096
#define BILLION 1000000000L
/* how often the clock is looked at while spinning */
#define LOOKS 32

/* What the waiting comes to; shared_memory.py knows the same numbers. */
enum status { WAITING, MET, UNEQUAL };

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "atomics between processes need no lock");

/* At the start of the segment. A new file is zero, and so is the first step. */
struct meeting {
    _Alignas(LINE) _Atomic uint32_t generation;
    /* the rank that ended the group, plus one; the first to say so is believed by all */
    _Atomic uint32_t lost;
    _Alignas(LINE) _Atomic uint32_t arrivals;
    /* [2][num_ranks]: what each rank is about to do, and in the low 16 bits the number of the step, from 1 */
    _Alignas(LINE) _Atomic uint64_t said[];
};

/* One rank's own view; shared_memory.py declares the same fields. */
struct place {
    struct meeting *meeting;
    char *boards;
    int64_t capacity;
    int64_t spin_ns;
    int64_t slice_ns;
    int32_t rank;
    int32_t num_ranks;
    uint32_t step;
    /* that this rank has begun so far; another thread of it may look */
    int64_t num_exchanges;
};

int64_t longleaf_meet_header_bytes(int64_t num_ranks)
{
    const int64_t bytes = (int64_t)sizeof(struct meeting) + 2 * num_ranks * (int64_t)sizeof(uint64_t);
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static int is_over(const struct place *place)
{
    return atomic_load_explicit(&place->meeting->generation, memory_order_acquire) != place->step;
}

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * BILLION + time.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static _Atomic uint64_t *said(const struct place *place, int64_t rank)
{
    return &place->meeting->said[(place->step & 1) * place->num_ranks + rank];
}

static uint64_t number(const struct place *place)
{
    return (place->step + 1) & 0xffff;
}

/* The first rank that did something else than this rank in the step that ended, and what; -1 if there is none. */
int longleaf_meet_odd(const struct place *place, int64_t *deed)
{
    const uint64_t own = atomic_load_explicit(said(place, place->rank), memory_order_relaxed);
    for (int rank = 0; rank < place->num_ranks; rank++) {
        const uint64_t theirs = atomic_load_explicit(said(place, rank), memory_order_relaxed);
        if (theirs != own) {
            *deed = (int64_t)(theirs >> 16);
            return rank;
        }
    }
    return -1;
}

static int ended(const struct place *place)
{
    int64_t deed;
    return longleaf_meet_odd(place, &deed) < 0 ? MET : UNEQUAL;
}

/* Waits for the end of the step, a slice at most. */
int longleaf_meet_wait(struct place *place)
{
    if (place->spin_ns > 0) {
        const int64_t end = now_ns() + place->spin_ns;
        do {
            for (int i = 0; i < LOOKS; i++, relax())
                if (is_over(place))
                    return ended(place);
        } while (now_ns() < end);
    }
    const struct timespec slice = {place->slice_ns / BILLION, place->slice_ns % BILLION};
    /* returns at once if the generation is no longer the step; a signal or a wake-up out of nowhere costs one more call */
    if (!is_over(place))
        syscall(SYS_futex, &place->meeting->generation, FUTEX_WAIT, place->step, &slice, NULL, 0);
    return is_over(place) ? ended(place) : WAITING;
}

/* Writes `num_parts` parts of `length` bytes on this step's board, then arrives and waits a slice at most.

   Part p is taken from message + p * stride and lies on the board at (p * num_ranks + rank) * length, so that what the
   ranks send to one of them lies together, in their order. `deed` is what the ranks must agree on: size and kind of the
   whole message, in 48 bits. */
int longleaf_meet_exchange(struct place *place, const char *message, int64_t num_parts, int64_t stride, int64_t length,
                           int64_t deed)
{
    struct meeting *meeting = place->meeting;
    place->num_exchanges++;
    /* cannot change before this rank arrives, and was loaded with acquire when the step before ended */
    place->step = atomic_load_explicit(&meeting->generation, memory_order_relaxed);
    char *board = place->boards + (place->step & 1) * place->num_ranks * place->capacity;
    for (int64_t part = 0; part < num_parts; part++)
        memcpy(board + (part * place->num_ranks + place->rank) * length, message + part * stride, length);
    atomic_store_explicit(said(place, place->rank), (uint64_t)deed << 16 | number(place), memory_order_relaxed);
    const uint32_t others = atomic_fetch_add_explicit(&meeting->arrivals, 1, memory_order_acq_rel);
    if (others + 1 != (uint32_t)place->num_ranks)
        return longleaf_meet_wait(place);
    /* who arrives in the next step has seen the generation, and with it this zero */
    atomic_store_explicit(&meeting->arrivals, 0, memory_order_relaxed);
    atomic_store_explicit(&meeting->generation, place->step + 1, memory_order_release);
    syscall(SYS_futex, &meeting->generation, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return ended(place);
}

/* The first rank that has not arrived in this step; -1 if all have. For people: it may arrive right now. */
int longleaf_meet_missing(const struct place *place)
{
    for (int rank = 0; rank < place->num_ranks; rank++) {
        const uint64_t theirs = atomic_load_explicit(said(place, rank), memory_order_relaxed);
        /* what stands there otherwise is two steps old */
        if ((theirs & 0xffff) != number(place))
            return rank;
    }
    return -1;
}

/* Blames `rank` for the end of the group, unless another was blamed already; the rank to blame. */
int longleaf_meet_blame(struct place *place, int rank)
{
    uint32_t blamed = 0;
    if (atomic_compare_exchange_strong_explicit(&place->meeting->lost, &blamed, (uint32_t)rank + 1, memory_order_relaxed,
                                                memory_order_relaxed))
        return rank;
    return (int)blamed - 1;
}

/* A rank holds a lock on its own byte of the segment as long as it lives. The lock is the process's (F_SETLK), not the
   open file's (F_OFD_SETLK): a forked child has the file and the memory open too, but holds no lock of its parent's. The
   kernel gives it back when the process ends, whatever ends it, before anybody reaps it and in any namespace; and, as is
   the way of these locks, when the process closes the file, also where it was opened a second time. */
static int lock(int file, int command, int type, int64_t rank, struct flock *found)
{
    *found = (struct flock){.l_type = (short)type, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl(file, command, found) == 0 ? 0 : -errno;
}

/* Takes this rank's lock; 0, or the negative error number. */
int longleaf_meet_enter(int file, int64_t rank)
{
    struct flock found;
    return lock(file, F_SETLK, F_WRLCK, rank, &found);
}

/* Gives this rank's lock back; the others need not wait until the memory map, too, lets go of the file. */
int longleaf_meet_leave(int file, int64_t rank)
{
    struct flock found;
    return lock(file, F_SETLK, F_UNLCK, rank, &found);
}

/* Whether another rank, in a process of its own, holds its lock: 1 or 0, or the negative error number. */
int longleaf_meet_is_there(int file, int64_t rank)
{
    struct flock found;
    const int error = lock(file, F_GETLK, F_WRLCK, rank, &found);
    return error ? error : found.l_type != F_UNLCK;
}
