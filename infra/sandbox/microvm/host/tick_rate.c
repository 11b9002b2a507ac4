/* Prints the rate of the processor's time stamp counter in kHz.
 *
 * A guest under translation reads this counter, and on a loaded host it has no other clock to measure the
 * rate with. A moment is one reading of both clocks. A preemption between them shows as a wide gap, so the
 * narrowest of many readings is used. */
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

#define TRIES 2000
#define SPAN_NANOSECONDS 50000000

typedef struct {
    unsigned long long ticks, gap;
    double seconds;
} Moment;

static Moment read_moment(void) {
    Moment best = {0, ~0ULL, 0};
    for (int i = 0; i < TRIES; i++) {
        struct timespec now;
        unsigned long long before = __rdtsc();
        clock_gettime(CLOCK_MONOTONIC_RAW, &now);
        unsigned long long after = __rdtsc();
        if (after - before < best.gap)
            best = (Moment){before + (after - before) / 2, after - before,
                            (double)now.tv_sec + 1e-9 * (double)now.tv_nsec};
    }
    return best;
}

int main(void) {
    struct timespec span = {0, SPAN_NANOSECONDS};
    Moment first = read_moment();
    nanosleep(&span, NULL);
    Moment last = read_moment();
    printf("%.0f\n", 1e-3 * (double)(last.ticks - first.ticks) / (last.seconds - first.seconds));
    return 0;
}
