/* What differs from the pristine repository: a walk over the upper layer of /repo.
 *
 * It only reads. What it finds is of one moment, as nobody else runs while it looks. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "agent.h"

#define MAX_LOOKS 100

/* Whole file or link target in memory; -1 on failure. */
static int load(const char *path, const struct stat *status, Buffer *out) {
    char chunk[1 << 14];
    if (S_ISLNK(status->st_mode)) {
        ssize_t got = readlink(path, chunk, sizeof chunk);
        if (got < 0) return -1;
        buffer_add(out, chunk, (size_t)got);
        return 0;
    }
    int file = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) return -1;
    ssize_t got;
    while ((got = read(file, chunk, sizeof chunk)) > 0) buffer_add(out, chunk, (size_t)got);
    close(file);
    buffer_add(out, "", 0);
    return got < 0 ? -1 : 0;
}

typedef struct {
    Reply *reply;
    Buffer entries, removed;
} Changes;

static void add_name(Buffer *list, const char *name) {
    if (list->length) buffer_add(list, ", ", 2);
    buffer_add_quoted(list, name);
}

/* Every file and link below a pristine path that is gone from /repo. */
static void add_removed(Changes *changes, const char *path) {
    char lower[PATH_MAX], merged[PATH_MAX];
    struct stat status, now;
    snprintf(lower, sizeof lower, PRISTINE "/%s", path);
    snprintf(merged, sizeof merged, REPOSITORY "/%s", path);
    if (lstat(lower, &status)) return;
    int gone = lstat(merged, &now) || (S_ISDIR(now.st_mode) && !S_ISDIR(status.st_mode));
    if (gone) add_name(&changes->removed, path);
    if (!S_ISDIR(status.st_mode)) return;
    DIR *folder = opendir(lower);
    struct dirent *entry;
    while (folder && (entry = readdir(folder))) {
        char child[PATH_MAX];
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (snprintf(child, sizeof child, "%s/%s", path, entry->d_name) < (int)sizeof child)
            add_removed(changes, child);
    }
    if (folder) closedir(folder);
}

static void add_entry(Changes *changes, const char *path, const struct stat *status,
                      const Buffer *content) {
    Buffer *out = &changes->entries;
    const char *kind = S_ISDIR(status->st_mode) ? "folder" : S_ISLNK(status->st_mode) ? "link"
                                                                                     : "file";
    if (out->length) buffer_add(out, ", ", 2);
    buffer_format(out, "{\"kind\": \"%s\", \"mode\": %u, \"path\": ", kind,
                  (unsigned)status->st_mode & 07777);
    buffer_add_quoted(out, path);
    if (S_ISLNK(status->st_mode)) {
        buffer_format(out, ", \"target\": ");
        buffer_add_quoted(out, content->data);
    }
    buffer_add(out, "}", 1);
    if (S_ISREG(status->st_mode)) reply_blob(changes->reply, content->data, content->length);
}

static void add_changed(Changes *changes, const char *path, const struct stat *status) {
    char lower[PATH_MAX], upper[PATH_MAX];
    struct stat before;
    Buffer new = {0}, old = {0};
    snprintf(lower, sizeof lower, PRISTINE "/%s", path);
    snprintf(upper, sizeof upper, UPPER "/%s", path);
    int same = !lstat(lower, &before) && before.st_mode == status->st_mode;
    if (S_ISDIR(status->st_mode)) {
        if (!same) add_entry(changes, path, status, NULL);
    } else if (!load(upper, status, &new)) {
        same = same && before.st_size == status->st_size && !load(lower, &before, &old) &&
               old.length == new.length && !memcmp(old.data, new.data, new.length);
        if (!same) add_entry(changes, path, status, &new);
    }
    buffer_free(&new);
    buffer_free(&old);
}

static void walk_upper(Changes *changes, const char *path) {
    char upper[PATH_MAX], child[PATH_MAX], opaque;
    snprintf(upper, sizeof upper, UPPER "/%s", path);
    if (*path && lgetxattr(upper, "trusted.overlay.opaque", &opaque, 1) == 1 && opaque == 'y')
        add_removed(changes, path);
    DIR *folder = opendir(upper);
    struct dirent *entry;
    while (folder && (entry = readdir(folder))) {
        struct stat status;
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (snprintf(child, sizeof child, "%s%s%s", path, *path ? "/" : "", entry->d_name) >=
            (int)sizeof child)
            continue;
        snprintf(upper, sizeof upper, UPPER "/%s", child);
        if (lstat(upper, &status)) continue;
        if (S_ISCHR(status.st_mode) && !status.st_rdev) {
            add_removed(changes, child);
            continue;
        }
        if (S_ISREG(status.st_mode) || S_ISLNK(status.st_mode) || S_ISDIR(status.st_mode))
            add_changed(changes, child, &status);
        if (S_ISDIR(status.st_mode)) walk_upper(changes, child);
    }
    if (folder) closedir(folder);
}

static long count_switches(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw + usage.ru_nivcsw;
}

/* Walks while nobody else runs: the machine has one processor, and this process keeps it for as long
 * as it need not wait. When it had to (for a lock on a folder), others ran: it walks again. 0: done. */
static int look_undisturbed(Changes *changes) {
    struct sched_param above = {.sched_priority = 1}, usual = {0};
    int is_disturbed = 1;
    if (sched_setscheduler(0, SCHED_FIFO, &above)) return -1;
    for (int looks = 0; looks < MAX_LOOKS && is_disturbed; looks++) {
        buffer_free(&changes->entries);
        buffer_free(&changes->removed);
        buffer_free(&changes->reply->sizes);
        buffer_free(&changes->reply->blobs);
        long before = count_switches();
        walk_upper(changes, "");
        is_disturbed = count_switches() != before;
    }
    if (sched_setscheduler(0, SCHED_OTHER, &usual)) return -1;
    if (is_disturbed) errno = EBUSY;
    return is_disturbed ? -1 : 0;
}

/* What differs from the pristine repository, at one moment, in the form that `put` takes. */
Outcome changes_read(const Request *request, Reply *reply, Fault *fault) {
    (void)request;
    Changes changes = {reply, {0}, {0}};
    int failed = look_undisturbed(&changes);
    if (!failed) {
        buffer_format(&reply->fields, ", \"entries\": [");
        buffer_add(&reply->fields, changes.entries.data, changes.entries.length);
        buffer_format(&reply->fields, "], \"removed\": [");
        buffer_add(&reply->fields, changes.removed.data, changes.removed.length);
        buffer_format(&reply->fields, "]");
    }
    buffer_free(&changes.entries);
    buffer_free(&changes.removed);
    return failed ? fail_errno(fault, "look at changes undisturbed") : ANSWERED;
}
