// Lets one call on a file fail. For LD_PRELOAD; only paths with FAILING_FILES_IN in them count.
//   FAILING_FILES_AT      number of the call that fails, from 1; none if not set
//   FAILING_FILES_ERRNO   what it fails with; 0 makes every transfer stop after 1 to 4096 bytes
//   FAILING_FILES_REPORT  a file that receives at the end: the number of calls, the name of the one
//                         that failed or `-`, and its path
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *part, *failed = "-";
static char failed_path[PATH_MAX] = "-";
static atomic_long calls;
static long at, code;

static long number(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : -1;
}

__attribute__((constructor)) static void start(void) {
    at = number("FAILING_FILES_AT");
    code = number("FAILING_FILES_ERRNO");
    part = getenv("FAILING_FILES_IN");
}

__attribute__((destructor)) static void report(void) {
    const char *path = getenv("FAILING_FILES_REPORT");
    part = NULL;
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file) return;
    fprintf(file, "%ld %s %s\n", (long)calls, failed, failed_path);
    fclose(file);
}

static int fails(const char *name, const char *path) {
    if (!part || !strstr(path, part)) return 0;
    if (++calls != at || code <= 0) return 0;
    failed = name;
    snprintf(failed_path, sizeof failed_path, "%s", path);
    errno = (int)code;
    return 1;
}

static int known(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    return part && strstr(path, part) != NULL;
}

static int fd_fails(const char *name, int fd) {
    char path[PATH_MAX];
    return known(fd, path) && fails(name, path);
}

static size_t cut(int fd, size_t bytes) {
    char path[PATH_MAX];
    const size_t most = (size_t)(calls * 7919 % 4096) + 1;
    return code == 0 && known(fd, path) && bytes > most ? most : bytes;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                \
    int name(const char *path, int flags, ...) {                  \
        va_list rest;                                             \
        va_start(rest, flags);                                    \
        const mode_t mode = va_arg(rest, mode_t);                 \
        va_end(rest);                                             \
        return fails("open", path) ? -1 : REAL(name)(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

ssize_t read(int fd, void *to, size_t bytes) {
    return fd_fails("read", fd) ? -1 : REAL(read)(fd, to, cut(fd, bytes));
}
ssize_t write(int fd, const void *from, size_t bytes) {
    return fd_fails("write", fd) ? -1 : REAL(write)(fd, from, cut(fd, bytes));
}
ssize_t pread64(int fd, void *to, size_t bytes, off64_t place) {
    return fd_fails("pread", fd) ? -1 : REAL(pread64)(fd, to, cut(fd, bytes), place);
}
ssize_t pwrite64(int fd, const void *from, size_t bytes, off64_t place) {
    return fd_fails("pwrite", fd) ? -1 : REAL(pwrite64)(fd, from, cut(fd, bytes), place);
}
int fsync(int fd) { return fd_fails("fsync", fd) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return fd_fails("fdatasync", fd) ? -1 : REAL(fdatasync)(fd); }
int ftruncate64(int fd, off64_t length) {
    return fd_fails("ftruncate", fd) ? -1 : REAL(ftruncate64)(fd, length);
}
int rename(const char *from, const char *to) { return fails("rename", to) ? -1 : REAL(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { return fails("mkdir", path) ? -1 : REAL(mkdir)(path, mode); }
void *mmap64(void *where, size_t bytes, int access, int flags, int fd, off64_t place) {
    return fd >= 0 && fd_fails("mmap", fd) ? MAP_FAILED : REAL(mmap64)(where, bytes, access, flags, fd, place);
}
void *mmap(void *where, size_t bytes, int access, int flags, int fd, off_t place) {
    return fd >= 0 && fd_fails("mmap", fd) ? MAP_FAILED : REAL(mmap)(where, bytes, access, flags, fd, place);
}
