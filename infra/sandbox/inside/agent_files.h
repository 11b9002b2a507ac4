/* Files of agent.c, below /repo, /tmp and /dev/shm whatever links say: as files.py does it. */
#include "agent_frames.h"

/* ---- files ---- */

/* The absolute path without `.` and `..`; relative ones begin at the repository. */
static void resolve(const char *path, char *full, size_t room) {
    char joined[8192];
    snprintf(joined, sizeof joined, "%s%s", path[0] == '/' ? "" : ROOT "/", path);
    size_t size = 0;
    char *rest = joined;
    for (char *part = strtok_r(rest, "/", &rest); part; part = strtok_r(NULL, "/", &rest)) {
        if (!strcmp(part, ".")) continue;
        if (!strcmp(part, "..")) {
            while (size && full[--size] != '/') {}
            continue;
        }
        size_t length = strlen(part);
        if (size + length + 2 > room) break;
        full[size++] = '/';
        memcpy(full + size, part, length);
        size += length;
    }
    if (!size) full[size++] = '/';
    full[size] = 0;
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

/* The check is on the opened file, so nobody can swap a link in between. */
static int open_below(const char *path, int flags) {
    char full[4096], link[64], real[4096];
    resolve(path, full, sizeof full);
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

static int read_part(const char *path, long long offset, long long length, Bytes *content) {
    int file = open_below(path, O_RDONLY);
    if (file < 0) return -1;
    struct stat status;
    fstat(file, &status);
    if (!S_ISREG(status.st_mode)) {
        close(file);
        return S_ISDIR(status.st_mode) ? fail("invalid", "%s is a folder, wanted a file", path)
                                       : fail("invalid", "%s is not a regular file", path);
    }
    long long wanted = length < 0 ? status.st_size - offset : length;
    if (wanted > MAX_READ_BYTES) {
        close(file);
        return fail("output_limit", "%s: %lld bytes, at most %lld", path, wanted, MAX_READ_BYTES);
    }
    static char data[65536];
    while (wanted > 0) {
        size_t part = wanted < (long long)sizeof data ? (size_t)wanted : sizeof data;
        ssize_t size = pread(file, data, part, offset);
        if (size <= 0) break;
        add(content, data, size);
        offset += size;
        wanted -= size;
    }
    close(file);
    return 0;
}

static uint32_t turn(uint32_t value, int bits) { return value >> bits | value << (32 - bits); }

static void hash_block(uint32_t state[8], const unsigned char *block) {
    static uint32_t constants[64];
    if (!constants[0]) { /* fractional parts of the cube roots of the first 64 primes */
        int count = 0;
        for (uint64_t prime = 2; count < 64; prime++) {
            int is_prime = 1;
            for (uint64_t part = 2; part * part <= prime; part++) if (prime % part == 0) is_prime = 0;
            if (!is_prime) continue;
            unsigned __int128 low = 0, high = (unsigned __int128)8 << 32;
            while (high - low > 1) { /* the largest r with r^3 <= prime * 2^96 */
                unsigned __int128 middle = (low + high) / 2;
                unsigned __int128 cube = middle * middle * middle;
                if (cube <= (unsigned __int128)prime << 96) low = middle; else high = middle;
            }
            constants[count++] = (uint32_t)low;
        }
    }
    uint32_t words[64], work[8];
    for (int index = 0; index < 16; index++)
        words[index] = (uint32_t)block[4 * index] << 24 | block[4 * index + 1] << 16 |
                       block[4 * index + 2] << 8 | block[4 * index + 3];
    for (int index = 16; index < 64; index++) {
        uint32_t early = words[index - 15], late = words[index - 2];
        words[index] = words[index - 16] + words[index - 7] +
                       (turn(early, 7) ^ turn(early, 18) ^ early >> 3) +
                       (turn(late, 17) ^ turn(late, 19) ^ late >> 10);
    }
    memcpy(work, state, sizeof work);
    for (int index = 0; index < 64; index++) {
        uint32_t a = work[0], e = work[4];
        uint32_t first = work[7] + (turn(e, 6) ^ turn(e, 11) ^ turn(e, 25)) +
                         ((e & work[5]) ^ (~e & work[6])) + constants[index] + words[index];
        uint32_t second = (turn(a, 2) ^ turn(a, 13) ^ turn(a, 22)) +
                          ((a & work[1]) ^ (a & work[2]) ^ (work[1] & work[2]));
        memmove(work + 1, work, 7 * sizeof *work);
        work[4] += first;
        work[0] = first + second;
    }
    for (int index = 0; index < 8; index++) state[index] += work[index];
}

static void hash(const Bytes *content, char text[65]) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    size_t place = 0;
    for (; place + 64 <= content->size; place += 64)
        hash_block(state, (unsigned char *)content->data + place);
    unsigned char last[128] = {0};
    size_t left = content->size - place, size = left < 56 ? 64 : 128;
    if (left) memcpy(last, content->data + place, left);
    last[left] = 0x80;
    uint64_t bits = (uint64_t)content->size * 8;
    for (int index = 0; index < 8; index++) last[size - 1 - index] = bits >> (8 * index);
    for (size_t block = 0; block < size; block += 64) hash_block(state, last + block);
    for (int index = 0; index < 8; index++) snprintf(text + 8 * index, 9, "%08x", state[index]);
}

static int check_expected(const char *path, const char *expected) {
    if (!strcmp(expected, "*")) return 0;
    Bytes content = {0};
    int missing = read_part(path, 0, -1, &content);
    if (missing && strcmp(error_kind, "not_found")) return -1;
    char seen[65] = "no file";
    if (!missing) hash(&content, seen);
    release(&content);
    error_kind[0] = 0;
    if (!strcmp(expected, "-"))
        return missing ? 0 : fail("precondition", "%s exists, wanted no such file", path);
    if (!strcmp(seen, expected)) return 0;
    return fail("precondition", "%s has content %s, wanted %s", path, seen, expected);
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

static int write_whole(const char *path, Blob content, const char *expected, int is_executable) {
    char full[4096], partial[300];
    resolve(path, full, sizeof full);
    if (is_root(full)) return fail("invalid", "%s is a folder, wanted a file", path);
    if (!is_below(full)) return fail_outside(path);
    make_folders(full);
    int folder = open_parent(full);
    if (folder < 0) return -1;
    if (check_expected(path, expected)) { close(folder); return -1; }
    const char *name = strrchr(full, '/') + 1;
    snprintf(partial, sizeof partial, ".%.200s.partial", name);
    unlinkat(folder, partial, 0);
    struct stat status;
    if (!fstatat(folder, name, &status, AT_SYMLINK_NOFOLLOW) && S_ISREG(status.st_mode))
        is_executable |= (status.st_mode & 0100) != 0;
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
    unsigned char head[22];
    head[0] = S_ISREG(status->st_mode) ? 'f' : S_ISDIR(status->st_mode) ? 'd'
              : S_ISLNK(status->st_mode) ? 'l' : 'o';
    head[1] = (status->st_mode & 0100) != 0;
    uint64_t size = status->st_size, length = strlen(path);
    uint64_t modified = status->st_mtim.tv_sec * 1000000000ull + status->st_mtim.tv_nsec;
    for (int index = 0; index < 8; index++) {
        head[2 + index] = size >> (56 - 8 * index);
        head[10 + index] = modified >> (56 - 8 * index);
    }
    for (int index = 0; index < 4; index++) head[18 + index] = length >> (24 - 8 * index);
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
    resolve(path, full, sizeof full);
    if (!is_below(full)) return fail_outside(path);
    if (is_root(full)) return fail("invalid", "%s itself is not removed, only what is in it", path);
    int folder = open_parent(full);
    if (folder < 0) return -1;
    int failed = remove_below(folder, strrchr(full, '/') + 1);
    if (failed) fail_system(full);
    close(folder);
    return failed;
}

static int status_of(const char *path, Bytes *packed) {
    char full[4096];
    struct stat status;
    resolve(path, full, sizeof full);
    if (!is_below(full)) return fail_outside(path);
    if (!is_root(full)) {
        int folder = open_parent(full);
        if (folder < 0) {
            if (!strcmp(error_kind, "not_found")) error_kind[0] = 0;
            return error_kind[0] ? -1 : 0;
        }
        close(folder);
    }
    if (lstat(full, &status) == 0) pack(packed, path, &status);
    return 0;
}
