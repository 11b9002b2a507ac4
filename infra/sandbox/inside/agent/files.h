/* Files of agent.c. No operation leaves /repo, /tmp and /dev/shm, not even through links. */
#pragma once
#include "frames.h"

/* The absolute path without `.` and `..`; relative ones begin at the repository. */
static int resolve(const char *path, char full[4096]) {
    char joined[4096];
    if (snprintf(joined, sizeof joined, "%s%s", path[0] == '/' ? "" : ROOT "/", path) >=
        (int)sizeof joined)
        return fail("invalid", "a path of %zu bytes, at most 4,000", strlen(path));
    size_t size = 0;
    char *rest = joined;
    for (char *part = strtok_r(rest, "/", &rest); part; part = strtok_r(NULL, "/", &rest)) {
        if (!strcmp(part, ".")) continue;
        if (!strcmp(part, "..")) {
            while (size && full[--size] != '/') {}
            continue;
        }
        size_t length = strlen(part);
        full[size++] = '/';
        memcpy(full + size, part, length);
        size += length;
    }
    if (!size) full[size++] = '/';
    full[size] = 0;
    return 0;
}

static int is_root(const char *path) {
    return !strcmp(path, ROOT) || !strcmp(path, "/tmp") || !strcmp(path, "/dev/shm");
}

static int is_below(const char *path) {
    static const char *roots[] = {ROOT "/", "/tmp/", "/dev/shm/"};
    for (int index = 0; index < 3; index++)
        if (!strncmp(path, roots[index], strlen(roots[index]))) return 1;
    return is_root(path);
}

static int fail_outside(const char *path) {
    return fail("invalid", "%s is outside the repository and /tmp", path);
}

/* The path is checked after the open, so that a link cannot be swapped in between. */
static int open_below(const char *path, int flags) {
    char full[4096], link[64], real[4096];
    if (resolve(path, full)) return -1;
    int file = open(full, flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (file < 0) return fail_system(full);
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, real, sizeof real - 1);
    if (size < 0) size = 0;
    real[size] = 0;
    if (is_below(real)) return file;
    close(file);
    return fail_outside(path);
}

static int open_parent(const char *full) {
    char folder[4096];
    snprintf(folder, sizeof folder, "%s", full);
    char *slash = strrchr(folder, '/');
    if (slash == folder) return fail_outside(full);
    *slash = 0;
    return open_below(folder, O_DIRECTORY | O_RDONLY);
}

static int read_whole(const char *path, Bytes *content) {
    int file = open_below(path, O_RDONLY);
    if (file < 0) return -1;
    struct stat status;
    fstat(file, &status);
    int failed = 0;
    if (S_ISDIR(status.st_mode)) failed = fail("invalid", "%s is a folder, wanted a file", path);
    else if (!S_ISREG(status.st_mode)) failed = fail("invalid", "%s is not a regular file", path);
    else if (status.st_size > MAX_READ_BYTES)
        failed = fail("output_limit", "%s: %lld bytes, at most %lld", path,
                      (long long)status.st_size, MAX_READ_BYTES);
    static char data[65536];
    ssize_t size;
    while (!failed && content->size < (size_t)status.st_size && (size = read(file, data, sizeof data)) > 0)
        add(content, data, size);
    close(file);
    return failed;
}

static void make_folders(const char *full) {
    char folder[4096];
    snprintf(folder, sizeof folder, "%s", full);
    for (char *slash = strchr(folder + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(folder, 0755);
        *slash = '/';
    }
}

static int write_whole(const char *path, Blob content) {
    char full[4096], partial[300];
    int is_executable = 0;
    if (resolve(path, full)) return -1;
    if (is_root(full)) return fail("invalid", "%s is a folder, wanted a file", path);
    if (!is_below(full)) return fail_outside(path);
    make_folders(full);
    int folder = open_parent(full);
    if (folder < 0) return -1;
    const char *name = strrchr(full, '/') + 1;
    snprintf(partial, sizeof partial, ".%.200s.partial", name);
    unlinkat(folder, partial, 0);
    struct stat status;
    if (!fstatat(folder, name, &status, AT_SYMLINK_NOFOLLOW) && S_ISREG(status.st_mode))
        is_executable = (status.st_mode & 0100) != 0;
    int mode = is_executable ? 0755 : 0644;
    int file = openat(folder, partial, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    if (file < 0) { fail_system(full); close(folder); return -1; }
    int failed = 0;
    for (size_t place = 0; place < content.size && !failed;) {
        ssize_t done = write(file, content.data + place, content.size - place);
        if (done < 0) failed = 1; else place += done;
    }
    if (!failed) failed = fchmod(file, mode) || renameat(folder, partial, folder, name);
    if (failed) { fail_system(full); unlinkat(folder, partial, 0); }
    close(file);
    close(folder);
    return failed ? -1 : 0;
}

static void pack(Bytes *packed, const char *path, const struct stat *status) {
    unsigned char head[13];
    uint64_t size = status->st_size, length = strlen(path);
    head[0] = S_ISREG(status->st_mode) ? 'f' : S_ISDIR(status->st_mode) ? 'd'
              : S_ISLNK(status->st_mode) ? 'l' : 'o';
    for (int index = 0; index < 8; index++) head[1 + index] = size >> (56 - 8 * index);
    for (int index = 0; index < 4; index++) head[9 + index] = length >> (24 - 8 * index);
    add(packed, head, sizeof head);
    add(packed, path, length);
}

static int list_below(int folder, const char *prefix, int depth, Bytes *packed, int *count) {
    DIR *entries = fdopendir(folder);
    if (!entries) { close(folder); return fail_system(prefix); }
    struct dirent *entry;
    int failed = 0;
    while (!failed && (entry = readdir(entries))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        struct stat status;
        char path[4096];
        if (fstatat(dirfd(entries), entry->d_name, &status, AT_SYMLINK_NOFOLLOW)) continue;
        if (++*count > MAX_ENTRIES) failed = fail("output_limit", "more than %d entries", MAX_ENTRIES);
        int size = snprintf(path, sizeof path, "%s%s", prefix, entry->d_name);
        if (size + 2 > (int)sizeof path) continue;
        pack(packed, path, &status);
        if (failed || depth < 2 || !S_ISDIR(status.st_mode)) continue;
        int inner = openat(dirfd(entries), entry->d_name, O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (inner < 0) continue;
        strcat(path, "/");
        failed = list_below(inner, path, depth - 1, packed, count);
    }
    closedir(entries);
    return failed;
}

static int remove_below(int folder, const char *name) {
    if (unlinkat(folder, name, 0) == 0) return 0;
    if (errno != EISDIR && errno != EPERM && errno != EACCES) return -1;
    struct stat status;
    if (fstatat(folder, name, &status, AT_SYMLINK_NOFOLLOW)) return -1;
    if (!S_ISDIR(status.st_mode)) return unlinkat(folder, name, 0);
    fchmodat(folder, name, 0755, 0);
    int inner = openat(folder, name, O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *entries = inner < 0 ? NULL : fdopendir(inner);
    if (!entries) { if (inner >= 0) close(inner); return -1; }
    struct dirent *entry;
    int failed = 0;
    while (!failed && (entry = readdir(entries)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            failed = remove_below(dirfd(entries), entry->d_name);
    closedir(entries);
    return failed ? failed : unlinkat(folder, name, AT_REMOVEDIR);
}

static int remove_path(const char *path) {
    char full[4096];
    if (resolve(path, full)) return -1;
    if (!is_below(full)) return fail_outside(path);
    if (is_root(full)) return fail("invalid", "%s itself is not removed, only what is in it", path);
    int folder = open_parent(full);
    if (folder < 0) return -1;
    int failed = remove_below(folder, strrchr(full, '/') + 1);
    if (failed) fail_system(full);
    close(folder);
    return failed;
}
