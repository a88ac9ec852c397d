/* Fails chosen calls of the C library that touch files below one folder: the n-th read, write, fsync or rename of
   the process since it was armed, or the n-th write to its terminal. Loaded by LD_PRELOAD; does nothing until armed.
   Calls that the C library makes within itself (fwrite) and memory maps are not seen.
   Each call that fails is written to the file `paths`, as its kind and path; with kind ALL, where none fails, every one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { NONE, READ, WRITE, FSYNC, RENAME, PRINT, ALL };
static int chosen = NONE, error_number, lasting; /* error_number 0: half of the bytes are written */
static int paths = -1;
static long wanted;
static atomic_long calls, failed;
static char folder[4096], pattern[4096];

/* Only calls about files whose path matches the pattern count. */
void io_errors_arm(int kind, long number, int error, int stays, const char *below, const char *like, int paths_fd) {
    snprintf(folder, sizeof folder, "%s/", below);
    snprintf(pattern, sizeof pattern, "%s", like);
    wanted = number, error_number = error, lasting = stays, paths = paths_fd;
    atomic_store(&calls, 0), atomic_store(&failed, 0);
    chosen = kind;
}
long io_errors_failed(void) { return atomic_load(&failed); }

/* 1: fail this call. 2: shorten it. */
static int now(int kind, const char *path) {
    if ((kind != chosen && chosen != ALL) || fnmatch(pattern, path, 0)) return 0;
    long number = atomic_fetch_add(&calls, 1) + 1;
    int hit = number == wanted || (lasting && wanted && number > wanted);
    if (hit && lasting) strcpy(pattern, "*"); /* from here on all files fail */
    if (hit || chosen == ALL) dprintf(paths, "%d %s\n", kind, path);
    if (!hit) return 0;
    atomic_fetch_add(&failed, 1);
    if (!error_number) return 2;
    errno = error_number;
    return 1;
}

static int inside(int fd, char *path, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, size - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return !strncmp(path, folder, strlen(folder));
}

static int of_fd(int kind, int fd) {
    if (chosen == NONE) return 0;
    char path[4096];
    int saved = errno, hit = 0;
    if (kind == WRITE && (fd == 1 || fd == 2)) hit = now(PRINT, "terminal");
    else if ((chosen == kind || chosen == ALL) && inside(fd, path, sizeof path)) hit = now(kind, path);
    if (hit != 1) errno = saved;
    return hit;
}

static int of_path(const char *path) {
    if (chosen != RENAME && chosen != ALL) return 0;
    return (path[0] != '/' || !strncmp(path, folder, strlen(folder))) ? now(RENAME, path) : 0;
}

#define NEXT(type, name, ...)                                                                  \
    static type (*next)(__VA_ARGS__);                                                          \
    if (!next) next = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
#define HALF(count) (hit == 2 && (count) > 1 ? (count) / 2 : (count))

ssize_t read(int fd, void *data, size_t count) {
    NEXT(ssize_t, "read", int, void *, size_t);
    return of_fd(READ, fd) == 1 ? -1 : next(fd, data, count);
}
ssize_t pread(int fd, void *data, size_t count, off_t at) {
    NEXT(ssize_t, "pread", int, void *, size_t, off_t);
    return of_fd(READ, fd) == 1 ? -1 : next(fd, data, count, at);
}
ssize_t pread64(int fd, void *data, size_t count, off64_t at) {
    NEXT(ssize_t, "pread64", int, void *, size_t, off64_t);
    return of_fd(READ, fd) == 1 ? -1 : next(fd, data, count, at);
}
ssize_t write(int fd, const void *data, size_t count) {
    NEXT(ssize_t, "write", int, const void *, size_t);
    int hit = of_fd(WRITE, fd);
    return hit == 1 ? -1 : next(fd, data, HALF(count));
}
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) {
    NEXT(ssize_t, "pwrite", int, const void *, size_t, off_t);
    int hit = of_fd(WRITE, fd);
    return hit == 1 ? -1 : next(fd, data, HALF(count), at);
}
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) {
    NEXT(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    int hit = of_fd(WRITE, fd);
    return hit == 1 ? -1 : next(fd, data, HALF(count), at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    NEXT(ssize_t, "writev", int, const struct iovec *, int);
    int hit = of_fd(WRITE, fd);
    return hit == 1 ? -1 : next(fd, parts, HALF(count));
}
ssize_t sendfile(int out, int in, off_t *at, size_t count) {
    NEXT(ssize_t, "sendfile", int, int, off_t *, size_t);
    int hit = of_fd(WRITE, out);
    return hit == 1 || of_fd(READ, in) == 1 ? -1 : next(out, in, at, HALF(count));
}
ssize_t sendfile64(int out, int in, off64_t *at, size_t count) {
    NEXT(ssize_t, "sendfile64", int, int, off64_t *, size_t);
    int hit = of_fd(WRITE, out);
    return hit == 1 || of_fd(READ, in) == 1 ? -1 : next(out, in, at, HALF(count));
}
int ftruncate(int fd, off_t length) {
    NEXT(int, "ftruncate", int, off_t);
    return of_fd(WRITE, fd) == 1 ? -1 : next(fd, length);
}
int ftruncate64(int fd, off64_t length) {
    NEXT(int, "ftruncate64", int, off64_t);
    return of_fd(WRITE, fd) == 1 ? -1 : next(fd, length);
}
int fsync(int fd) {
    NEXT(int, "fsync", int);
    return of_fd(FSYNC, fd) == 1 ? -1 : next(fd);
}
int fdatasync(int fd) {
    NEXT(int, "fdatasync", int);
    return of_fd(FSYNC, fd) == 1 ? -1 : next(fd);
}
int rename(const char *from, const char *to) {
    NEXT(int, "rename", const char *, const char *);
    return of_path(to) == 1 ? -1 : next(from, to);
}
int renameat(int from_in, const char *from, int to_in, const char *to) {
    NEXT(int, "renameat", int, const char *, int, const char *);
    return of_path(to) == 1 ? -1 : next(from_in, from, to_in, to);
}
int renameat2(int from_in, const char *from, int to_in, const char *to, unsigned flags) {
    NEXT(int, "renameat2", int, const char *, int, const char *, unsigned);
    return of_path(to) == 1 ? -1 : next(from_in, from, to_in, to, flags);
}
