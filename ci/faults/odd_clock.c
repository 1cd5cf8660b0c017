// Clocks that go wrong. For LD_PRELOAD; ODD_CLOCK says how:
//   stopped   none moves
//   back      each call tells a time that is a minute earlier
//   jumps     an hour forth and back in turns
//   ancient   the time of day lies before 1970
//   far       the time of day lies beyond the year 30000
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>

static void bend(time_t *seconds, long *fraction, int of_day) {
    static atomic_long calls;
    const char *how = getenv("ODD_CLOCK");
    const long call = ++calls;
    if (!how) return;
    if (!strcmp(how, "stopped")) *seconds = 1000000000, *fraction = 0;
    if (!strcmp(how, "back")) *seconds -= 60 * call;
    if (!strcmp(how, "jumps")) *seconds += call % 2 ? 3600 : -3600;
    if (!strcmp(how, "ancient") && of_day) *seconds = -86400;
    if (!strcmp(how, "far") && of_day) *seconds = 1000000000000;
}

int clock_gettime(clockid_t clock, struct timespec *to) {
    const int done = ((int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime"))(clock, to);
    bend(&to->tv_sec, &to->tv_nsec, clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE);
    return done;
}

int gettimeofday(struct timeval *restrict to, void *restrict zone) {
    const int done = ((int (*)(struct timeval *, void *))dlsym(RTLD_NEXT, "gettimeofday"))(to, zone);
    bend(&to->tv_sec, &to->tv_usec, 1);
    return done;
}
