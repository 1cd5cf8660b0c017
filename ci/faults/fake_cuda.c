// A driver without a GPU, for tests of what happens around kernels: memory is the host's, streams
// run at once, graphs are lists of launches, and kernels do nothing, except that `sample` draws
// the tokens 1000, 1001, … and after FAKE_CUDA_TOKENS of them (12 if not set) a stop token.
// FAKE_CUDA_MEMORY is the size of its memory in bytes, 1 GiB if not set.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_FOUND = 500,
    CAPTURE_UNSUPPORTED = 900,
};
// Of `gemma4_format::plan`.
enum { POSITION = 1, STOPPED = 2, STEP = 3, LIMIT = 9 };

typedef struct {
    char name[128];
} Function;

// The arguments of `sample` in words, or no function at all.
typedef struct {
    const Function *function;
    uint64_t words[9];
} Launch;

typedef struct {
    size_t count;
    Launch *launches;
} Graph;

typedef struct {
    Graph *recording;
} Stream;

// Only what is read here: its place in CUlaunchConfig.
typedef struct {
    unsigned sizes[7];
    Stream *stream;
} Config;

// In front of every piece of memory; 256 bytes, as addresses are multiples of that.
typedef union {
    size_t bytes;
    char room[256];
} Head;

static size_t taken;

static size_t number(const char *name, size_t otherwise) {
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static size_t memory(void) { return number("FAKE_CUDA_MEMORY", (size_t)1 << 30); }

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
int cuDriverGetVersion(int *version) { return *version = 12080, SUCCESS; }
int cuGetErrorName(unsigned code, const char **name) {
    return *name = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_A_TEST", SUCCESS;
}
int cuGetErrorString(unsigned code, const char **text) {
    return *text = code == OUT_OF_MEMORY ? "out of memory" : "a fault of a test", SUCCESS;
}

int cuDeviceGetCount(int *count) { return *count = 1, SUCCESS; }
int cuDeviceGet(int *device, int index) { return *device = index, index ? INVALID_VALUE : SUCCESS; }
int cuDeviceGetName(char *name, int length, int device) {
    return snprintf(name, (size_t)length, "Fake %d", device), SUCCESS;
}
int cuDeviceGetUuid_v2(char *uuid, int device) { return memset(uuid, device, 16), SUCCESS; }
int cuDeviceGetAttribute(int *value, unsigned attribute, int device) {
    (void)device;
    switch (attribute) {
        case 16: return *value = 132, SUCCESS;    // multiprocessors
        case 75: return *value = 9, SUCCESS;      // compute capability, major
        case 76: return *value = 0, SUCCESS;      // and minor
        case 97: return *value = 232448, SUCCESS; // shared memory of a block
        default: return INVALID_VALUE;
    }
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    (void)device;
    return *context = &taken, SUCCESS;
}
int cuDevicePrimaryCtxRelease_v2(int device) { return device ? INVALID_VALUE : SUCCESS; }
int cuCtxSetCurrent(void *context) { return context == &taken ? SUCCESS : INVALID_VALUE; }

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    return *total = memory(), *free = *total - taken, SUCCESS;
}
int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    if (bytes > memory() - taken) return OUT_OF_MEMORY;
    // Zeros that nobody touches cost nothing.
    Head *head = NULL;
    if (posix_memalign((void **)&head, sizeof(Head), sizeof(Head) + bytes)) return OUT_OF_MEMORY;
    head->bytes = bytes;
    taken += bytes;
    return *address = (uint64_t)(head + 1), SUCCESS;
}
int cuMemFree_v2(uint64_t address) {
    Head *head = (Head *)address - 1;
    taken -= head->bytes;
    return free(head), SUCCESS;
}
int cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    (void)flags;
    return (*pointer = malloc(bytes)) ? SUCCESS : OUT_OF_MEMORY;
}
int cuMemHostGetDevicePointer_v2(uint64_t *address, void *pointer, unsigned flags) {
    (void)flags;
    return *address = (uint64_t)pointer, SUCCESS;
}
int cuMemFreeHost(void *pointer) { return free(pointer), SUCCESS; }

static int copy(void *to, const void *from, size_t bytes, Stream *stream) {
    if (stream->recording) return CAPTURE_UNSUPPORTED;
    return memmove(to, from, bytes), SUCCESS;
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, Stream *stream) {
    return copy((void *)to, from, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, Stream *stream) {
    return copy(to, (const void *)from, bytes, stream);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, Stream *stream) {
    return copy((void *)to, (const void *)from, bytes, stream);
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, Stream *stream) {
    if (stream->recording) return CAPTURE_UNSUPPORTED;
    return memset((void *)to, value, bytes), SUCCESS;
}

int cuStreamCreate(Stream **stream, unsigned flags) {
    (void)flags;
    return (*stream = calloc(1, sizeof(Stream))) ? SUCCESS : OUT_OF_MEMORY;
}
int cuGraphDestroy(Graph *graph) {
    if (graph) free(graph->launches);
    return free(graph), SUCCESS;
}
int cuStreamDestroy_v2(Stream *stream) {
    cuGraphDestroy(stream->recording);
    return free(stream), SUCCESS;
}
int cuStreamSynchronize(Stream *stream) { return stream->recording ? CAPTURE_UNSUPPORTED : SUCCESS; }
int cuStreamQuery(Stream *stream) { return cuStreamSynchronize(stream); }

int cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    return (*event = malloc(1)) ? SUCCESS : OUT_OF_MEMORY;
}
int cuEventRecord(void *event, Stream *stream) { return event && stream ? SUCCESS : INVALID_VALUE; }
int cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    return *milliseconds = 1, start && end ? SUCCESS : INVALID_VALUE;
}
int cuEventDestroy_v2(void *event) { return free(event), SUCCESS; }

// Functions live as long as the process: there are few.
int cuModuleLoadData(void **module, const void *image) {
    return (*module = malloc(1)) && image ? SUCCESS : OUT_OF_MEMORY;
}
int cuModuleUnload(void *module) { return free(module), SUCCESS; }
int cuModuleGetFunction(Function **function, void *module, const char *name) {
    if (!module || strlen(name) >= sizeof(Function)) return NOT_FOUND;
    if (!(*function = calloc(1, sizeof(Function)))) return OUT_OF_MEMORY;
    return strcpy((*function)->name, name), SUCCESS;
}
int cuFuncGetAttribute(int *value, unsigned attribute, Function *function) {
    (void)function;
    return *value = attribute == 0 ? 1024 : 0, SUCCESS; // 0: most threads of a block
}
int cuFuncSetAttribute(Function *function, unsigned attribute, int value) {
    (void)attribute;
    return function && value >= 0 ? SUCCESS : INVALID_VALUE;
}

// As `sample` of kernels/cu/sample.cu, but for where the token comes from.
static void run(const Launch *launch) {
    if (strcmp(launch->function->name, "sample")) return;
    const uint64_t *words = launch->words, *table = (const uint64_t *)words[2];
    uint32_t *state = (uint32_t *)table[(uint32_t)words[3]];
    uint64_t *ring = (uint64_t *)table[(uint32_t)words[4]];
    const uint32_t slots = (uint32_t)words[5], *stops = (const uint32_t *)words[6];
    if (state[STOPPED]) return;
    const uint32_t step = state[STEP], last = step + 1 == number("FAKE_CUDA_TOKENS", 12);
    const uint32_t token = last ? stops[0] : 1000 + step;
    state[0] = token;
    state[POSITION] += (uint32_t)words[8];
    state[STEP] = step + 1;
    state[STOPPED] = last ? 1 : state[POSITION] >= state[LIMIT] ? 2 : 0;
    ring[step % slots] = (uint64_t)(step + 1) << 32 | token;
}

int cuLaunchKernelEx(const Config *config, Function *function, void **arguments, void **extra) {
    (void)extra;
    Launch launch = {.function = function};
    for (int i = 0; i < 9 && arguments[i]; i++) launch.words[i] = *(const uint64_t *)arguments[i];
    Graph *graph = config->stream->recording;
    if (!graph) return run(&launch), SUCCESS;
    Launch *launches = realloc(graph->launches, (graph->count + 1) * sizeof(Launch));
    if (!launches) return OUT_OF_MEMORY;
    graph->launches = launches;
    launches[graph->count++] = launch;
    return SUCCESS;
}

int cuStreamBeginCapture_v2(Stream *stream, unsigned mode) {
    (void)mode;
    return (stream->recording = calloc(1, sizeof(Graph))) ? SUCCESS : OUT_OF_MEMORY;
}
int cuStreamEndCapture(Stream *stream, Graph **graph) {
    *graph = stream->recording;
    stream->recording = NULL;
    return SUCCESS;
}
int cuGraphInstantiateWithFlags(Graph **executable, const Graph *graph, uint64_t flags) {
    (void)flags;
    const size_t bytes = graph->count * sizeof(Launch);
    if (!(*executable = malloc(sizeof(Graph)))) return OUT_OF_MEMORY;
    **executable = (Graph){graph->count, malloc(bytes + 1)};
    return memcpy((*executable)->launches, graph->launches, bytes), SUCCESS;
}
int cuGraphUpload(Graph *executable, Stream *stream) { return executable && stream ? SUCCESS : INVALID_VALUE; }
int cuGraphLaunch(const Graph *executable, Stream *stream) {
    if (stream->recording) return CAPTURE_UNSUPPORTED;
    for (size_t i = 0; i < executable->count; i++) run(&executable->launches[i]);
    return SUCCESS;
}
int cuGraphExecDestroy(Graph *executable) { return cuGraphDestroy(executable); }
