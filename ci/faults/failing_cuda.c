// A driver in front of the driver: passes every call on, counts it, and lets one fail.
//
// Compiled to `libcuda.so` and found first through LD_LIBRARY_PATH. Environment:
//   FAILING_CUDA_OVER    the driver to pass calls on to; `libcuda.so.1` if not set
//   FAILING_CUDA_AT      number of the call that fails, from 1; none if not set
//   FAILING_CUDA_CODE    what it returns (2, out of memory, if not set)
//   FAILING_CUDA_STICKY  if set, all later calls fail, too, as after a fault of a kernel
//   FAILING_CUDA_REPORT  a file that receives at the end: the number of calls, the name of the one
//                        that failed or `-`, and how many things were made and not given back
//
// All arguments are words that fit registers, so one signature serves all functions.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

typedef unsigned long Word;
typedef int (*Function)(Word, Word, Word, Word, Word, Word);

static void *driver;
static const char *failed = "-";
static atomic_long calls, live, at, code, sticky;

static long number(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

__attribute__((constructor)) static void start(void) {
    const char *over = getenv("FAILING_CUDA_OVER");
    driver = dlopen(over ? over : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) fprintf(stderr, "failing_cuda: %s\n", dlerror());
    at = number("FAILING_CUDA_AT", 0);
    code = number("FAILING_CUDA_CODE", 2);
    sticky = number("FAILING_CUDA_STICKY", 0);
}

__attribute__((destructor)) static void report(void) {
    const char *path = getenv("FAILING_CUDA_REPORT");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld %s %ld\n", (long)calls, failed, (long)live);
    fclose(file);
}

// `balance` is 1 for what makes a thing, and -1 for what gives one back, even if that fails.
static int pass(const char *name, int balance, Function *function, Word a, Word b, Word c, Word d, Word e, Word f) {
    const long call = ++calls;
    const int fails = at && (call == at || (sticky && call > at));
    if (call == at) failed = name;
    if (balance < 0) live--;
    if (fails) return (int)code;
    if (!*function && driver) *function = (Function)dlsym(driver, name);
    if (!*function) return 999;
    const int result = (*function)(a, b, c, d, e, f);
    if (balance > 0 && result == 0) live++;
    return result;
}

#define CALL(name, balance)                                        \
    int name(Word a, Word b, Word c, Word d, Word e, Word f) {     \
        static Function function;                                  \
        return pass(#name, balance, &function, a, b, c, d, e, f);  \
    }

CALL(cuInit, 0)
CALL(cuDriverGetVersion, 0)
CALL(cuGetErrorName, 0)
CALL(cuGetErrorString, 0)
CALL(cuDeviceGetCount, 0)
CALL(cuDeviceGet, 0)
CALL(cuDeviceGetName, 0)
CALL(cuDeviceGetUuid_v2, 0)
CALL(cuDeviceGetAttribute, 0)
CALL(cuDevicePrimaryCtxRetain, 1)
CALL(cuDevicePrimaryCtxRelease_v2, -1)
CALL(cuCtxSetCurrent, 0)
CALL(cuMemGetInfo_v2, 0)
CALL(cuMemAlloc_v2, 1)
CALL(cuMemFree_v2, -1)
CALL(cuMemHostAlloc, 1)
CALL(cuMemHostGetDevicePointer_v2, 0)
CALL(cuMemFreeHost, -1)
CALL(cuMemcpyHtoDAsync_v2, 0)
CALL(cuMemcpyDtoHAsync_v2, 0)
CALL(cuMemcpyDtoDAsync_v2, 0)
CALL(cuMemsetD8Async, 0)
CALL(cuStreamCreate, 1)
CALL(cuStreamDestroy_v2, -1)
CALL(cuStreamSynchronize, 0)
CALL(cuStreamQuery, 0)
CALL(cuEventCreate, 1)
CALL(cuEventRecord, 0)
CALL(cuEventElapsedTime, 0)
CALL(cuEventDestroy_v2, -1)
CALL(cuModuleLoadData, 1)
CALL(cuModuleUnload, -1)
CALL(cuModuleGetFunction, 0)
CALL(cuFuncGetAttribute, 0)
CALL(cuFuncSetAttribute, 0)
CALL(cuLaunchKernelEx, 0)
CALL(cuStreamBeginCapture_v2, 0)
CALL(cuStreamEndCapture, 1)
CALL(cuGraphDestroy, -1)
CALL(cuGraphInstantiateWithFlags, 1)
CALL(cuGraphUpload, 0)
CALL(cuGraphLaunch, 0)
CALL(cuGraphExecDestroy, -1)
