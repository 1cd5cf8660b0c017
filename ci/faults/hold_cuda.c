// Holds all memory of the first GPU but so many MiB until stdin ends: hold_cuda MIB
// Says `held` once it does.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static void *driver;

static void *find(const char *name) {
    void *function = driver ? dlsym(driver, name) : NULL;
    if (!function) {
        fprintf(stderr, "hold_cuda: no %s\n", name);
        exit(1);
    }
    return function;
}

static void must(int code, const char *what) {
    if (!code) return;
    fprintf(stderr, "hold_cuda: %s failed with %d\n", what, code);
    exit(1);
}

int main(int count, char **words) {
    const size_t left = (count > 1 ? strtoull(words[1], NULL, 10) : 0) << 20;
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    void *context;
    size_t free, total;
    unsigned long long address;
    must(((int (*)(unsigned))find("cuInit"))(0), "cuInit");
    must(((int (*)(void **, int))find("cuDevicePrimaryCtxRetain"))(&context, 0), "cuDevicePrimaryCtxRetain");
    must(((int (*)(void *))find("cuCtxSetCurrent"))(context), "cuCtxSetCurrent");
    must(((int (*)(size_t *, size_t *))find("cuMemGetInfo_v2"))(&free, &total), "cuMemGetInfo");
    int (*allocate)(unsigned long long *, size_t) = (int (*)(unsigned long long *, size_t))find("cuMemAlloc_v2");
    // What is free need not be free in one piece.
    size_t wanted = free > left ? free - left : 0;
    for (size_t piece = wanted; piece >= 1 << 20;) {
        if (allocate(&address, piece)) piece /= 2;
        else if (piece > (wanted -= piece)) piece = wanted;
    }
    puts("held");
    fflush(stdout);
    while (getchar() != EOF) {
    }
    return 0;
}
