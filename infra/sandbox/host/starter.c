/* Starts bubblewrap: starter FOLDER BWRAP ARGUMENT...
 *
 * Bubblewrap binds the host's own device files, so a user who owns them or may write to them could change their modes
 * and times, and other boxes and the host would see that, as they would see locks. Therefore each device is created
 * anew in FOLDER, or is the host's own if that is refused (it needs root), and is bound read-only in a mount namespace
 * of the box. Bubblewrap keeps that binding, and a device can still be read and written. The starter also raises the
 * OOM score, so that the kernel kills processes of the box before processes of the host.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

static const char *const devices[] = {
    "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty",
};

static int write_file(const char *path, const char *text) {
    int file = open(path, O_WRONLY | O_CLOEXEC);
    if (file < 0) return -1;
    ssize_t written = write(file, text, strlen(text));
    close(file);
    return written < 0 ? -1 : 0;
}

/* Enters a user namespace with the same user and group ids. The kernel counts inotify watches per user of the host, who
 * is the same for all boxes. It also counts them per namespace, so that one box cannot use them all. */
static int enter_user_namespace(int others) {
    char map[64];
    uid_t user = geteuid();
    gid_t group = getegid();
    if (unshare(CLONE_NEWUSER | others)) return -1;
    snprintf(map, sizeof map, "%u %u 1", user, user);
    write_file("/proc/self/setgroups", "deny");
    if (write_file("/proc/self/uid_map", map)) return -1;
    snprintf(map, sizeof map, "%u %u 1", group, group);
    if (write_file("/proc/self/gid_map", map)) return -1;
    write_file("/proc/sys/user/max_inotify_instances", "16");
    write_file("/proc/sys/user/max_inotify_watches", "4096");
    return 0;
}

static int leave_mounts(int *is_inside) {
    *is_inside = unshare(CLONE_NEWNS) != 0; /* without the right, it works in a user namespace */
    if (*is_inside && enter_user_namespace(CLONE_NEWNS)) return -1;
    return mount(NULL, "/", NULL, MS_SLAVE | MS_REC, NULL);
}

/* Flags of a mount that must be repeated in a remount, because the user may not remove them. */
static unsigned long flags_of(const char *path) {
    struct statvfs found;
    if (statvfs(path, &found)) return 0;
    unsigned long flags = found.f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME | MS_NODIRATIME);
    return found.f_flag & ST_RELATIME ? flags | MS_RELATIME : flags;
}

/* Creates a copy of a host's device in a folder in memory. Returns whether it was created and can be opened. */
static int make_device(const char *device, const char *folder, char *made, size_t size) {
    struct stat known;
    snprintf(made, size, "%s/%s", folder, strrchr(device, '/') + 1);
    if (stat(device, &known) || mknod(made, known.st_mode, known.st_rdev) || chmod(made, known.st_mode & 0777)) return 0;
    int file = open(made, O_RDONLY | O_CLOEXEC);
    if (file >= 0) close(file);
    return file >= 0 || errno == ENXIO; /* ENXIO: /dev/tty without a terminal */
}

static int protect(const char *device, const char *folder) {
    char made[4096];
    if (access(device, F_OK)) return 0;
    const char *source = make_device(device, folder, made, sizeof made) ? made : device;
    if (mount(source, device, NULL, MS_BIND, NULL)) return -1;
    return mount(NULL, device, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | flags_of(device), NULL);
}

int main(int count, char **arguments) {
    if (count < 3) return 64;
    write_file("/proc/self/oom_score_adj", "1000");
    int is_inside;
    if (leave_mounts(&is_inside) == 0) { /* otherwise bubblewrap fails too and reports why */
        mount("devices", arguments[1], "tmpfs", MS_NOSUID | MS_NOEXEC, "mode=755,size=64k");
        for (size_t index = 0; index < sizeof devices / sizeof *devices; index++)
            if (protect(devices[index], arguments[1])) {
                fprintf(stderr, "bwrap: starter: %s read-only: %s\n", devices[index], strerror(errno));
                return 1;
            }
        if (!is_inside) enter_user_namespace(0); /* last, because root must create and bind the devices */
    }
    execv(arguments[2], arguments + 2);
    fprintf(stderr, "bwrap: starter: %s: %s\n", arguments[2], strerror(errno));
    return 1;
}
