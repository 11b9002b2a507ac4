/* Files of the box, reached as its user: below /repo, /tmp and /dev/shm, whatever links say.
 *
 * Paths are checked twice: as written, and as the kernel resolved them (/proc/self/fd), so a link
 * that changes in between gains nothing. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/stat.h>
#include <unistd.h>

#include "agent.h"

#define MAX_READ_BYTES (8 << 20)
#define MAX_LISTED 20000

static const char *const ROOTS[] = {REPOSITORY, "/tmp", "/dev/shm"};

static void become_user(void) {
    setfsgid(BOX_USER);
    setfsuid(BOX_USER);
}

static void become_root(void) {
    setfsuid(0);
    setfsgid(0);
}

static int is_inside(const char *path) {
    for (size_t i = 0; i < sizeof ROOTS / sizeof *ROOTS; i++) {
        size_t length = strlen(ROOTS[i]);
        if (!strncmp(path, ROOTS[i], length) && (!path[length] || path[length] == '/')) return 1;
    }
    return 0;
}

static Outcome outside(Fault *fault, const char *path) {
    return fail(fault, "invalid", "%.200s is outside the repository, /tmp and /dev/shm",
                path);
}

/* An absolute path without `.` and `..`; relative ones begin at the repository. */
Outcome files_resolve(const char *path, char *resolved, Fault *fault) {
    char joined[PATH_MAX];
    size_t used = 0;
    if (snprintf(joined, sizeof joined, "%s%s", *path == '/' ? "" : REPOSITORY "/", path) >=
        (int)sizeof joined)
        return fail(fault, "invalid", "path of %zu bytes is too long", strlen(path));
    for (char *save, *part = strtok_r(joined, "/", &save); part; part = strtok_r(NULL, "/", &save)) {
        if (!strcmp(part, ".")) continue;
        if (!strcmp(part, "..")) {
            while (used && resolved[--used] != '/') {}
            continue;
        }
        resolved[used++] = '/';
        memcpy(resolved + used, part, strlen(part));
        used += strlen(part);
    }
    resolved[used] = 0;
    return is_inside(resolved) ? ANSWERED : outside(fault, path);
}

static Outcome check_opened(int file, const char *path, Fault *fault) {
    char link[64], real[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, real, sizeof real - 1);
    if (length < 0) return fail_errno(fault, path);
    real[length] = 0;
    return is_inside(real) ? ANSWERED : outside(fault, path);
}

/* A path out of a blob; the caller frees it. NULL: see fault. */
static char *get_path(const Blob *blob, Fault *fault) {
    char *path = malloc(blob->length + 1);
    if (!path) abort();
    memcpy(path, blob->data, blob->length);
    path[blob->length] = 0;
    if (blob->length && strlen(path) == blob->length) return path;
    free(path);
    fail(fault, "invalid", "a path is empty or holds a zero byte");
    return NULL;
}

/* Opens the folder that holds `path` (made when wanted); `name` is its last part. -1: see fault. */
static int open_parent(const char *path, int make, char name[NAME_MAX + 1], Fault *fault) {
    char resolved[PATH_MAX];
    if (files_resolve(path, resolved, fault) == FAILED) return -1;
    for (size_t i = 0; i < sizeof ROOTS / sizeof *ROOTS; i++)
        if (!strcmp(resolved, ROOTS[i]))
            return (int)fail(fault, "invalid", "%.200s is a folder of the box itself", path),
                   -1;
    char *slash = strrchr(resolved, '/');
    if (strlen(slash + 1) > NAME_MAX)
        return fail(fault, "invalid", "a name in %.200s is too long", path), -1;
    strcpy(name, slash + 1);
    *slash = 0;
    for (char *at = strchr(resolved + 1, '/'); make && at; at = strchr(at + 1, '/')) {
        *at = 0;
        mkdir(resolved, 0755);
        *at = '/';
    }
    if (make) mkdir(resolved, 0755);
    int folder = open(resolved, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) return fail_errno(fault, path), -1;
    if (check_opened(folder, path, fault) == ANSWERED) return folder;
    close(folder);
    return -1;
}

static Outcome read_one(const char *path, int64_t offset, int64_t wanted, Buffer *out,
                        Fault *fault) {
    char resolved[PATH_MAX];
    struct stat status;
    if (files_resolve(path, resolved, fault) == FAILED) return FAILED;
    int file = open(resolved, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (file < 0) return fail_errno(fault, path);
    Outcome outcome = check_opened(file, path, fault);
    if (outcome == ANSWERED && fstat(file, &status)) outcome = fail_errno(fault, path);
    if (outcome == ANSWERED && !S_ISREG(status.st_mode))
        outcome = fail(fault, "invalid", "%.200s is %s, wanted a regular file", path,
                       S_ISDIR(status.st_mode) ? "a folder" : "something else");
    if (outcome == ANSWERED && wanted < 0) wanted = status.st_size - offset;
    if (outcome == ANSWERED && wanted > MAX_READ_BYTES)
        outcome = fail(fault, "output_limit", "%.200s: %lld bytes, at most %d", path,
                       (long long)wanted, MAX_READ_BYTES);
    while (outcome == ANSWERED && wanted > 0) {
        char chunk[1 << 14];
        size_t length = wanted < (int64_t)sizeof chunk ? (size_t)wanted : sizeof chunk;
        ssize_t got = pread(file, chunk, length, offset);
        if (got < 0) outcome = fail_errno(fault, path);
        if (got <= 0) break;
        buffer_add(out, chunk, (size_t)got);
        offset += got;
        wanted -= got;
    }
    close(file);
    return outcome;
}

/* `expected`: hex SHA-256 of what must be there now, - for nothing, * for anything. */
static Outcome check_expected(const char *path, const Blob *expected, Fault *fault) {
    Buffer content = {0};
    char hex[65] = "no file";
    if (expected->length == 1 && *expected->data == '*') return ANSWERED;
    if (read_one(path, 0, -1, &content, fault) == ANSWERED)
        sha256_hex(content.data, content.length, hex);
    else if (strcmp(fault->type, "not_found"))
        return FAILED;
    buffer_free(&content);
    if (expected->length == 1 && *expected->data == '-' && !strcmp(hex, "no file")) return ANSWERED;
    if (strlen(hex) == expected->length && !memcmp(hex, expected->data, expected->length))
        return ANSWERED;
    return fail(fault, "precondition", "%.200s has content %s, wanted %.*s", path, hex,
                (int)(expected->length < 64 ? expected->length : 64), expected->data);
}

static int write_partial(int folder, const char *partial, const Blob *content, mode_t mode) {
    int file = openat(folder, partial, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    size_t done = 0;
    while (file >= 0 && done < content->length) {
        ssize_t written = write(file, content->data + done, content->length - done);
        if (written < 0) {
            close(file);
            return -1;
        }
        done += (size_t)written;
    }
    return file < 0 || fchmod(file, mode) || close(file) ? -1 : 0;
}

static Outcome write_one(const char *path, const Blob *content, const Blob *expected,
                         int executable, Fault *fault) {
    char name[NAME_MAX + 1], partial[64];
    struct stat status;
    int folder = open_parent(path, 1, name, fault);
    if (folder < 0) return FAILED;
    Outcome outcome = check_expected(path, expected, fault);
    int exists = !fstatat(folder, name, &status, AT_SYMLINK_NOFOLLOW);
    if (outcome == ANSWERED && exists && S_ISDIR(status.st_mode))
        outcome = fail(fault, "invalid", "%.200s is a folder, wanted a file", path);
    if (outcome == ANSWERED) {
        int was_executable = exists && S_ISREG(status.st_mode) && status.st_mode & 0100;
        snprintf(partial, sizeof partial, ".%d.partial", getpid());
        unlinkat(folder, partial, 0);
        if (write_partial(folder, partial, content, executable || was_executable ? 0755 : 0644) ||
            renameat(folder, partial, folder, name)) {
            outcome = fail_errno(fault, path);
            unlinkat(folder, partial, 0);
        }
    }
    close(folder);
    return outcome;
}

static int remove_at(int folder, const char *name) {
    if (!unlinkat(folder, name, 0)) return 0;
    if (errno != EISDIR && errno != EPERM) return -1;
    int child = openat(folder, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *entries = child < 0 ? NULL : fdopendir(child);
    if (!entries) return -1;
    struct dirent *entry;
    while ((entry = readdir(entries)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, "..")) remove_at(child, entry->d_name);
    closedir(entries);
    return unlinkat(folder, name, AT_REMOVEDIR);
}

static Outcome remove_one(const char *path, Fault *fault) {
    char name[NAME_MAX + 1];
    int folder = open_parent(path, 0, name, fault);
    if (folder < 0) return FAILED;
    Outcome outcome = remove_at(folder, name) ? fail_errno(fault, path) : ANSWERED;
    close(folder);
    return outcome;
}

static void add_number(Buffer *out, uint64_t value, int bytes) {
    unsigned char text[8];
    for (int i = 0; i < bytes; i++) text[i] = (unsigned char)(value >> 8 * (bytes - 1 - i));
    buffer_add(out, text, (size_t)bytes);
}

/* Kind, executable, bytes, modified, path: the layout of STATUS in inside/files.py. */
static void add_status(Buffer *out, const char *path, const struct stat *status) {
    const char *kind = S_ISREG(status->st_mode)   ? "f"
                       : S_ISDIR(status->st_mode) ? "d"
                       : S_ISLNK(status->st_mode) ? "l"
                                                  : "o";
    buffer_add(out, kind, 1);
    add_number(out, status->st_mode & 0100 ? 1 : 0, 1);
    add_number(out, (uint64_t)status->st_size, 8);
    add_number(out, (uint64_t)status->st_mtim.tv_sec * 1000000000 + (uint64_t)status->st_mtim.tv_nsec, 8);
    add_number(out, strlen(path), 4);
    buffer_add(out, path, strlen(path));
}

/* Nothing is added when nothing is there. */
static Outcome stat_one(const char *path, Buffer *out, Fault *fault) {
    char name[NAME_MAX + 1], resolved[PATH_MAX];
    struct stat status;
    if (files_resolve(path, resolved, fault) == FAILED) return FAILED;
    for (size_t i = 0; i < sizeof ROOTS / sizeof *ROOTS; i++)
        if (!strcmp(resolved, ROOTS[i]) && !lstat(resolved, &status)) {
            add_status(out, path, &status);
            return ANSWERED;
        }
    int folder = open_parent(path, 0, name, fault);
    if (folder < 0) return fault->code == ENOENT || fault->code == ENOTDIR ? ANSWERED : FAILED;
    if (!fstatat(folder, name, &status, AT_SYMLINK_NOFOLLOW)) add_status(out, path, &status);
    close(folder);
    return ANSWERED;
}

static int compare_names(const void *one, const void *two) {
    return strcmp(*(char *const *)one, *(char *const *)two);
}

/* Adds what is below an open folder, which it closes. -1: too many. */
static int list_folder(int folder, const char *path, int depth, Buffer *out, int *count) {
    DIR *entries = fdopendir(folder);
    char **names = NULL;
    size_t num_names = 0, room = 0;
    struct dirent *entry;
    if (!entries) {
        close(folder);
        return 0;
    }
    while ((entry = readdir(entries))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (num_names == room) {
            room = room ? 2 * room : 64;
            names = realloc(names, room * sizeof *names);
            if (!names) abort();
        }
        names[num_names++] = strdup(entry->d_name);
        if (num_names > MAX_LISTED) break;
    }
    if (num_names) qsort(names, num_names, sizeof *names, compare_names);
    for (size_t i = 0; i < num_names; i++) {
        struct stat status;
        char child[PATH_MAX];
        int fits = snprintf(child, sizeof child, "%s%s%s", path, *path ? "/" : "", names[i]) <
                   (int)sizeof child;
        if (fits && *count <= MAX_LISTED && !fstatat(folder, names[i], &status, AT_SYMLINK_NOFOLLOW)) {
            (*count)++;
            add_status(out, child, &status);
            int below = depth > 1 && S_ISDIR(status.st_mode)
                            ? openat(folder, names[i], O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
                            : -1;
            if (below >= 0) list_folder(below, child, depth - 1, out, count);
        }
        free(names[i]);
    }
    free(names);
    closedir(entries);
    return *count > MAX_LISTED ? -1 : 0;
}

static int64_t list_number(const Json **item, int64_t fallback) {
    if (!*item) return fallback;
    int64_t value = (*item)->integer;
    *item = (*item)->next;
    return value;
}

static const Json *list_start(const Request *request, const char *name) {
    const Json *list = json_get(request->header, name);
    return list ? list->first : NULL;
}

/* The result of one item: its kind of fault (empty: none), and its content or a message. */
static void add_result(Reply *reply, Buffer *kinds, Outcome outcome, Buffer *content,
                       const Fault *fault) {
    if (kinds->length) buffer_add(kinds, ", ", 2);
    buffer_add_quoted(kinds, outcome == FAILED ? fault->type : "");
    if (outcome == FAILED) reply_blob(reply, fault->text, strlen(fault->text));
    else reply_blob(reply, content->data, content->length);
    buffer_free(content);
}

static Outcome finish_results(Reply *reply, Buffer *kinds) {
    become_root();
    buffer_format(&reply->fields, ", \"kinds\": [");
    buffer_add(&reply->fields, kinds->data, kinds->length);
    buffer_add(&reply->fields, "]", 1);
    buffer_free(kinds);
    return ANSWERED;
}

Outcome files_read(const Request *request, Reply *reply, Fault *unused) {
    (void)unused;
    const Json *offset = list_start(request, "offsets"), *length = list_start(request, "lengths");
    Buffer kinds = {0};
    become_user();
    for (size_t i = 0; i < request->num_blobs; i++) {
        Fault fault = {0};
        Buffer content = {0};
        char *path = get_path(&request->blobs[i], &fault);
        int64_t from = list_number(&offset, 0), wanted = list_number(&length, -1);
        Outcome outcome = path ? read_one(path, from, wanted, &content, &fault) : FAILED;
        add_result(reply, &kinds, outcome, &content, &fault);
        free(path);
    }
    return finish_results(reply, &kinds);
}

Outcome files_write(const Request *request, Reply *reply, Fault *unused) {
    (void)unused;
    const Json *executable = list_start(request, "executable");
    Buffer kinds = {0};
    become_user();
    for (size_t i = 0; i + 2 < request->num_blobs; i += 3) {
        Fault fault = {0};
        Buffer nothing = {0};
        char *path = get_path(&request->blobs[i], &fault);
        int is_executable = list_number(&executable, 0) != 0;
        Outcome outcome = path ? write_one(path, &request->blobs[i + 1], &request->blobs[i + 2],
                                           is_executable, &fault)
                               : FAILED;
        add_result(reply, &kinds, outcome, &nothing, &fault);
        free(path);
    }
    return finish_results(reply, &kinds);
}

Outcome files_remove(const Request *request, Reply *reply, Fault *unused) {
    (void)unused;
    Buffer kinds = {0};
    become_user();
    for (size_t i = 0; i < request->num_blobs; i++) {
        Fault fault = {0};
        Buffer nothing = {0};
        char *path = get_path(&request->blobs[i], &fault);
        add_result(reply, &kinds, path ? remove_one(path, &fault) : FAILED, &nothing, &fault);
        free(path);
    }
    return finish_results(reply, &kinds);
}

Outcome files_stat(const Request *request, Reply *reply, Fault *fault) {
    Outcome outcome = ANSWERED;
    become_user();
    for (size_t i = 0; outcome == ANSWERED && i < request->num_blobs; i++) {
        Buffer status = {0};
        char *path = get_path(&request->blobs[i], fault);
        outcome = path ? stat_one(path, &status, fault) : FAILED;
        reply_blob(reply, status.data, status.length);
        buffer_free(&status);
        free(path);
    }
    become_root();
    return outcome;
}

Outcome files_list(const Request *request, Reply *reply, Fault *fault) {
    int depth = (int)json_integer(request->header, "max_depth", 1), count = 0;
    char resolved[PATH_MAX];
    char *path = request->num_blobs ? get_path(&request->blobs[0], fault) : NULL;
    if (!path || files_resolve(path, resolved, fault) == FAILED) {
        free(path);
        return FAILED;
    }
    Buffer packed = {0};
    become_user();
    int folder = open(resolved, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    Outcome outcome = folder < 0 ? fail_errno(fault, path) : check_opened(folder, path, fault);
    if (outcome == FAILED && folder >= 0) close(folder);
    if (outcome == ANSWERED && list_folder(folder, "", depth < 32 ? depth : 32, &packed, &count) < 0)
        outcome = fail(fault, "output_limit", "%.200s holds more than %d entries", path, MAX_LISTED);
    become_root();
    if (outcome == ANSWERED) reply_blob(reply, packed.data, packed.length);
    buffer_free(&packed);
    free(path);
    return outcome;
}
