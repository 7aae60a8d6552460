/* Exchange between the ranks of one machine through shared memory: a segment with two boards, and one rendezvous per
   step.

   In step s every rank writes its message on board s % 2 and arrives. The last rank to arrive ends the step: it sets
   the generation to s + 1 and notifies the others, and all ranks read the board.

   Why one rendezvous per step suffices. A rank writes on board s % 2 again in step s + 2, after the rendezvous of step
   s + 1 and therefore after every rank has arrived in step s + 1. A rank arrives there after it has finished reading
   the board of step s. So no rank writes to a board that another rank still reads.

   Why readers see the writes. Each arrival is an atomic addition with release and acquire. The last rank to arrive
   reads the result of all earlier additions, so all writes before any arrival happen before it. It then stores the
   generation with release, and a rank that loads the generation with acquire sees those writes.

   Why 32 bits suffice. In step s the generation is s before the rendezvous and s + 1 after it, and it cannot advance
   further without this rank. Comparisons test only equality, so the number may wrap around.

   No function blocks for longer than a slice, so that the caller can check signals, dead ranks and timeouts. */

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
/* iterations of spinning between two reads of the clock */
#define LOOKS 32

/* Result of waiting; shared_memory.py has the same numbers. */
enum status { WAITING, MET, UNEQUAL };

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "atomics between processes need no lock");

/* At the start of the segment. A new file is zero, and step numbers start at zero. */
struct meeting {
    _Alignas(LINE) _Atomic uint32_t generation;
    /* the rank that ended the group, plus one; the first value set is final */
    _Atomic uint32_t lost;
    _Alignas(LINE) _Atomic uint32_t arrivals;
    /* [2][num_ranks]: the operation of each rank, and in the low 16 bits the number of the step, from 1 */
    _Alignas(LINE) _Atomic uint64_t said[];
};

/* The state of one rank; shared_memory.py declares the same fields. */
struct place {
    struct meeting *meeting;
    char *boards;
    int64_t capacity;
    int64_t spin_ns;
    int64_t slice_ns;
    int32_t rank;
    int32_t num_ranks;
    uint32_t step;
    /* exchanges started by this rank; another thread of the rank may read it */
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

/* The first rank whose operation differed from this rank's in the step that ended, and that operation; -1 if there is
   none. */
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

/* Waits for the end of the step, at most for a slice. */
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
    /* returns at once if the generation differs from the step; a signal or a spurious return costs one more call */
    if (!is_over(place))
        syscall(SYS_futex, &place->meeting->generation, FUTEX_WAIT, place->step, &slice, NULL, 0);
    return is_over(place) ? ended(place) : WAITING;
}

/* Writes `num_parts` parts of `length` bytes on this step's board, then arrives and waits at most for a slice.

   Part p is copied from message + p * stride to (p * num_ranks + rank) * length on the board, so that the messages to
   one rank are contiguous, in rank order. `deed` is the operation that must be equal on all ranks: size and kind of the
   whole message, in 48 bits. */
int longleaf_meet_exchange(struct place *place, const char *message, int64_t num_parts, int64_t stride, int64_t length,
                           int64_t deed)
{
    struct meeting *meeting = place->meeting;
    place->num_exchanges++;
    /* cannot change before this rank arrives, and was loaded with acquire when the previous step ended */
    place->step = atomic_load_explicit(&meeting->generation, memory_order_relaxed);
    char *board = place->boards + (place->step & 1) * place->num_ranks * place->capacity;
    for (int64_t part = 0; part < num_parts; part++)
        memcpy(board + (part * place->num_ranks + place->rank) * length, message + part * stride, length);
    atomic_store_explicit(said(place, place->rank), (uint64_t)deed << 16 | number(place), memory_order_relaxed);
    const uint32_t others = atomic_fetch_add_explicit(&meeting->arrivals, 1, memory_order_acq_rel);
    if (others + 1 != (uint32_t)place->num_ranks)
        return longleaf_meet_wait(place);
    /* a rank that arrives in the next step has loaded the generation, and with it this zero */
    atomic_store_explicit(&meeting->arrivals, 0, memory_order_relaxed);
    atomic_store_explicit(&meeting->generation, place->step + 1, memory_order_release);
    syscall(SYS_futex, &meeting->generation, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    return ended(place);
}

/* The first rank that has not arrived in this step; -1 if all have. For diagnostics: the rank may arrive concurrently.
   */
int longleaf_meet_missing(const struct place *place)
{
    for (int rank = 0; rank < place->num_ranks; rank++) {
        const uint64_t theirs = atomic_load_explicit(said(place, rank), memory_order_relaxed);
        /* otherwise the entry is two steps old */
        if ((theirs & 0xffff) != number(place))
            return rank;
    }
    return -1;
}

/* Records `rank` as the cause of the end of the group, unless another rank is already recorded; returns the recorded
   rank. */
int longleaf_meet_blame(struct place *place, int rank)
{
    uint32_t blamed = 0;
    if (atomic_compare_exchange_strong_explicit(&place->meeting->lost, &blamed, (uint32_t)rank + 1, memory_order_relaxed,
                                                memory_order_relaxed))
        return rank;
    return (int)blamed - 1;
}

/* Each live rank holds a lock on its own byte of the segment. The lock belongs to the process (F_SETLK), not to the
   open file description (F_OFD_SETLK): a forked child shares the file and the memory, but not the locks of its parent.
   The kernel releases the lock at any end of the process, before the process is reaped and in any namespace. As usual
   for these locks, closing any descriptor of the file in this process also releases it. */
static int lock(int file, int command, int type, int64_t rank, struct flock *found)
{
    *found = (struct flock){.l_type = (short)type, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
    return fcntl(file, command, found) == 0 ? 0 : -errno;
}

/* Acquires this rank's lock; 0, or the negative error number. */
int longleaf_meet_enter(int file, int64_t rank)
{
    struct flock found;
    return lock(file, F_SETLK, F_WRLCK, rank, &found);
}

/* Releases this rank's lock, so that the others need not wait until the memory map releases the file. */
int longleaf_meet_leave(int file, int64_t rank)
{
    struct flock found;
    return lock(file, F_SETLK, F_UNLCK, rank, &found);
}

/* Whether another rank, in another process, holds its lock: 1 or 0, or the negative error number. */
int longleaf_meet_is_there(int file, int64_t rank)
{
    struct flock found;
    const int error = lock(file, F_GETLK, F_WRLCK, rank, &found);
    return error ? error : found.l_type != F_UNLCK;
}
