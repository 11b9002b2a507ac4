/* The machine and the folders of the box: boot, the layers under /repo, clock and randomness.
 *
 * /repo is an overlay: the pristine repository below, a size-limited tmpfs above, so what changed is
 * what lies above. Everything written is in guest memory, hence in every memory snapshot. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

static Json *settings; /* the header of `open`, kept */

static void must(int result, const char *what) {
    if (result >= 0) return;
    fprintf(stderr, "agent: %s: %s\n", what, strerror(errno));
    abort();
}

static void write_text(const char *path, const char *text) {
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (file < 0) return;
    if (write(file, text, strlen(text)) < 0) fprintf(stderr, "agent: cannot write %s\n", path);
    close(file);
}

static void load_modules(void) {
    static const char *const names[] = {"virtio_ring", "virtio",     "virtio_mmio",
                                        "virtio_console", "overlay", "virtio_blk",
                                        "libcrc32c",      "erofs"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[64];
        snprintf(path, sizeof path, "/modules/%s.ko", names[i]);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) continue; /* built in, or not wanted in this image */
        if (syscall(SYS_finit_module, file, "", 0)) fprintf(stderr, "agent: module %s\n", path);
        close(file);
    }
}

static void mount_system(void) {
    mkdir("/proc", 0755);
    mkdir("/sys", 0755);
    mkdir("/dev", 0755);
    must(mount("proc", "/proc", "proc", 0, "hidepid=noaccess"), "mount /proc");
    must(mount("sysfs", "/sys", "sysfs", MS_RDONLY, ""), "mount /sys");
    if (mount("devtmpfs", "/dev", "devtmpfs", 0, "mode=0755") && errno != EBUSY)
        must(-1, "mount /dev");
    mkdir("/dev/shm", 01777);
    must(chmod("/", 0755), "close the root folder");
}

static void bring_up_loopback(void) {
    struct ifreq request = {0};
    strcpy(request.ifr_name, "lo");
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (any < 0 || ioctl(any, SIOCSIFFLAGS, &request)) fprintf(stderr, "agent: no loopback\n");
    if (any >= 0) close(any);
}

/* When the image has a disk, its file system becomes the root; writes to it stay in memory. */
static void enter_disk(void) {
    struct stat status;
    for (int tries = 0; tries < 200 && stat("/dev/vda", &status); tries++) {
        if (access("/modules/erofs.ko", F_OK)) return;
        usleep(10000);
    }
    if (stat("/dev/vda", &status)) return;
    mkdir("/disk", 0755);
    mkdir("/root_layer", 0755);
    mkdir("/new_root", 0755);
    must(mount("/dev/vda", "/disk", "erofs", MS_RDONLY, ""), "mount /disk");
    must(mount("tmpfs", "/root_layer", "tmpfs", 0, "size=64m,mode=0755"), "mount /root_layer");
    mkdir("/root_layer/upper", 0755);
    mkdir("/root_layer/work", 0755);
    must(mount("overlay", "/new_root", "overlay", 0,
               "lowerdir=/disk,upperdir=/root_layer/upper,workdir=/root_layer/work"), "new root");
    static const char *const moved[] = {"/proc", "/sys", "/dev"};
    for (size_t i = 0; i < 3; i++) {
        char target[32];
        snprintf(target, sizeof target, "/new_root%s", moved[i]);
        mkdir(target, 0755);
        must(mount(moved[i], target, NULL, MS_MOVE, NULL), "move mount");
    }
    must(chdir("/new_root"), "enter new root");
    must(mount(".", "/", NULL, MS_MOVE, NULL), "move root");
    must(chroot("."), "change root");
    must(chdir("/"), "enter root");
}

void box_boot(void) {
    mount_system();
    write_text("/proc/self/oom_score_adj", "-1000");
    load_modules();
    enter_disk();
    mkdir(REPOSITORY, 0755);
    mkdir("/lower", 0700);
    mkdir("/layer", 0700);
    must(mount("tmpfs", "/lower", "tmpfs", 0, "size=75%,mode=0700"), "mount the pristine layer");
    must(mkdir(PRISTINE, 0755), "make the pristine layer");
    must(chown(PRISTINE, BOX_USER, BOX_USER), "chown the pristine layer");
    write_text("/proc/sys/user/max_user_namespaces", "0");
    write_text("/proc/sys/kernel/sched_rt_runtime_us", "-1"); /* see changes.c */
    bring_up_loopback();
}

/* The port's name counts the devices before it: with a disk it is another one. -1: not there yet. */
static int find_port(void) {
    char path[300];
    unsigned device;
    int port = -1;
    DIR *folder = opendir("/dev");
    struct dirent *entry;
    while (folder && port < 0 && (entry = readdir(folder))) {
        if (sscanf(entry->d_name, "vport%up1", &device) != 1) continue;
        snprintf(path, sizeof path, "/dev/%s", entry->d_name);
        port = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC);
    }
    if (folder) closedir(folder);
    return port;
}

int box_open_port(void) {
    for (int tries = 0; tries < 2000; tries++) {
        int port = find_port();
        if (port >= 0) return port;
        usleep(5000);
    }
    must(-1, "open the port");
    return -1;
}

/* The kernel settles on its clock a second or two after its start. A machine that was frozen before would settle
 * in each of its copies, whenever the host lets it. */
static void wait_for_clock(void) {
    for (int tries = 0; tries < 200; tries++) {
        char name[16] = "";
        int file = open("/sys/devices/system/clocksource/clocksource0/current_clocksource", O_RDONLY | O_CLOEXEC);
        if (file < 0) return;
        ssize_t length = read(file, name, sizeof name - 1);
        close(file);
        if (length <= 0 || strncmp(name, "tsc-early", 9)) return;
        usleep(50000);
    }
}

/* Answers, so that the host knows that it can. */
Outcome box_hello(const Request *request, Reply *reply, Fault *fault) {
    (void)request, (void)fault;
    wait_for_clock();
    buffer_format(&reply->fields, ", \"server\": \"static\"");
    return ANSWERED;
}

/* A fork has its parent's clock, random pool and name; here it gets its own. */
Outcome box_refresh(const Request *request, Reply *reply, Fault *fault) {
    (void)reply;
    if (json_integer(request->header, "is_copy", 0)) commands_forget_requests();
    int64_t wall_ns = json_integer(request->header, "wall_ns", 0);
    struct timespec now = {wall_ns / 1000000000, wall_ns % 1000000000};
    if (wall_ns && clock_settime(CLOCK_REALTIME, &now)) return fail_errno(fault, "set the clock");
    if (request->num_blobs) {
        struct {
            struct rand_pool_info info;
            char bytes[64];
        } pool = {0};
        size_t length = request->blobs[0].length < 64 ? request->blobs[0].length : 64;
        pool.info.entropy_count = (int)(8 * length);
        pool.info.buf_size = (int)length;
        memcpy(pool.info.buf, request->blobs[0].data, length);
        int random = open("/dev/urandom", O_RDWR | O_CLOEXEC);
        if (random < 0 || ioctl(random, RNDADDENTROPY, &pool) || ioctl(random, RNDRESEEDCRNG, 0))
            return fail_errno(fault, "reseed the random pool");
        close(random);
    }
    const char *name = json_text(request->header, "host_name", NULL);
    if (name && sethostname(name, strlen(name))) return fail_errno(fault, "set the host name");
    const char *machine = json_text(request->header, "machine_id", NULL);
    if (machine) write_text("/etc/machine-id", machine);
    return ANSWERED;
}

/* Joins and checks a relative path; the box runs nothing yet, so there are no links to race. */
static Outcome place(const char *root, const char *path, char *full, Fault *fault) {
    size_t length = strlen(path);
    if (!length || *path == '/' || !strncmp(path, "../", 3) || strstr(path, "/../") ||
        (length >= 2 && !strcmp(path + length - 2, "..")))
        return fail(fault, "invalid", "path is %s, wanted one below the repository", path);
    if (snprintf(full, PATH_MAX, "%s/%s", root, path) >= PATH_MAX)
        return fail(fault, "invalid", "path of %zu bytes is too long", length);
    return ANSWERED;
}

static int make_parents(char *full, size_t root_length) {
    for (char *slash = strchr(full + root_length + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (!mkdir(full, 0755)) {
            if (lchown(full, BOX_USER, BOX_USER)) return -1;
        } else if (errno != EEXIST) {
            return -1;
        }
        *slash = '/';
    }
    return 0;
}

static int remove_tree(const char *path) {
    struct stat status;
    if (lstat(path, &status)) return errno == ENOENT ? 0 : -1;
    if (!S_ISDIR(status.st_mode)) return unlink(path);
    DIR *folder = opendir(path);
    if (!folder) return -1;
    struct dirent *entry;
    while ((entry = readdir(folder))) {
        char child[PATH_MAX];
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (snprintf(child, sizeof child, "%s/%s", path, entry->d_name) < (int)sizeof child)
            remove_tree(child);
    }
    closedir(folder);
    return rmdir(path);
}

static int put_file(const char *full, const Blob *blob, mode_t mode) {
    int file = open(full, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0) return -1;
    size_t done = 0;
    while (done < blob->length) {
        ssize_t written = write(file, blob->data + done, blob->length - done);
        if (written < 0) {
            close(file);
            return -1;
        }
        done += (size_t)written;
    }
    int result = fchown(file, BOX_USER, BOX_USER) || fchmod(file, mode);
    return close(file) || result ? -1 : 0;
}

static int put_entry(const Json *entry, const char *full, const Blob *blob, mode_t mode) {
    const char *kind = json_text(entry, "kind", "file");
    struct stat status;
    if (!strcmp(kind, "folder")) {
        if (!lstat(full, &status) && !S_ISDIR(status.st_mode) && unlink(full)) return -1;
        if (mkdir(full, mode) && errno != EEXIST) return -1;
        return chmod(full, mode) || lchown(full, BOX_USER, BOX_USER) ? -1 : 0;
    }
    if (remove_tree(full)) return -1;
    if (!strcmp(kind, "link")) {
        const char *target = json_text(entry, "target", "");
        return symlink(target, full) || lchown(full, BOX_USER, BOX_USER) ? -1 : 0;
    }
    return put_file(full, blob, mode);
}

/* Folders, files (their contents are the blobs) and links laid into the repository; before `open`
 * into the pristine one, later over it. `removed` goes first. */
Outcome box_put(const Request *request, Reply *reply, Fault *fault) {
    (void)reply;
    const char *root = settings ? REPOSITORY : PRISTINE;
    const Json *removed = json_get(request->header, "removed");
    const Json *entries = json_get(request->header, "entries");
    char full[PATH_MAX];
    size_t blob = 0;
    for (const Json *path = removed ? removed->first : NULL; path; path = path->next) {
        if (place(root, path->text ? path->text : "", full, fault) == FAILED) return FAILED;
        if (remove_tree(full)) return fail_errno(fault, path->text);
    }
    for (const Json *entry = entries ? entries->first : NULL; entry; entry = entry->next) {
        const char *path = json_text(entry, "path", "");
        int is_file = !strcmp(json_text(entry, "kind", "file"), "file");
        if (place(root, path, full, fault) == FAILED) return FAILED;
        if (is_file && blob >= request->num_blobs)
            return fail(fault, "invalid", "%s comes without its content", path);
        mode_t mode = (mode_t)json_integer(entry, "mode", 0644) & 07777;
        if (make_parents(full, strlen(root)) ||
            put_entry(entry, full, is_file ? &request->blobs[blob] : NULL, mode))
            return fail_errno(fault, path);
        blob += (size_t)is_file;
    }
    return ANSWERED;
}

static Json *copy_header(const Json *header) {
    Json *copy = calloc(1, sizeof *copy);
    if (!copy) abort();
    *copy = *header;
    copy->next = NULL;
    copy->key = header->key ? strdup(header->key) : NULL;
    if (header->text) {
        copy->text = malloc(header->text_bytes + 1);
        if (!copy->text) abort();
        memcpy(copy->text, header->text, header->text_bytes + 1);
    }
    Json **tail = &copy->first;
    for (const Json *child = header->first; child; child = child->next) {
        *tail = copy_header(child);
        tail = &(*tail)->next;
    }
    return copy;
}

/* Closes the pristine layer and mounts /repo over it, with the box's own limits. */
Outcome box_open(const Request *request, Reply *reply, Fault *fault) {
    (void)reply;
    if (settings) return fail(fault, "invalid", "the box is open already");
    char options[96];
    const Json *limits = json_get(request->header, "limits");
    long long bytes = json_integer(limits, "writable_bytes", 64 << 20);
    snprintf(options, sizeof options, "size=%lld,mode=0700", bytes);
    if (mount("tmpfs", "/layer", "tmpfs", MS_NODEV | MS_NOSUID, options) ||
        mkdir(UPPER, 0755) || mkdir("/layer/work", 0755) || chown(UPPER, BOX_USER, BOX_USER))
        return fail_errno(fault, "make the upper layer");
    if (mount("overlay", REPOSITORY, "overlay", MS_NODEV | MS_NOSUID,
              "lowerdir=" PRISTINE ",upperdir=" UPPER ",workdir=/layer/work"))
        return fail_errno(fault, "mount " REPOSITORY);
    snprintf(options, sizeof options, "size=%lld,mode=1777", bytes);
    mkdir("/tmp", 01777);
    if (mount("tmpfs", "/tmp", "tmpfs", MS_NODEV | MS_NOSUID, options) ||
        mount("tmpfs", "/dev/shm", "tmpfs", MS_NODEV | MS_NOSUID, options))
        return fail_errno(fault, "mount /tmp");
    settings = copy_header(request->header);
    return ANSWERED;
}

/* NAME=value texts. */
const Json *box_environment(void) { return json_get(settings, "environment"); }

static void limit(int resource, int64_t value) {
    struct rlimit limits = {(rlim_t)value, (rlim_t)value};
    setrlimit((__rlimit_resource_t)resource, &limits);
}

void box_limit_process(void) {
    const Json *limits = json_get(settings, "limits");
    limit(RLIMIT_AS, json_integer(limits, "process_memory_bytes", 1 << 30));
    limit(RLIMIT_NPROC, json_integer(limits, "processes", 128));
    limit(RLIMIT_FSIZE, json_integer(limits, "file_bytes", 64 << 20));
    limit(RLIMIT_CORE, 0);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) _exit(126);
    int file = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (file >= 0) {
        if (write(file, "500", 3) < 0) _exit(126);
        close(file);
    }
}

Outcome box_stats(const Request *request, Reply *reply, Fault *fault) {
    (void)request;
    struct sysinfo system;
    struct statfs layer;
    if (sysinfo(&system) || statfs("/layer", &layer)) return fail_errno(fault, "statistics");
    FILE *file = fopen("/proc/uptime", "r");
    double up = 0, idle_seconds = 0;
    if (file) {
        if (fscanf(file, "%lf %lf", &up, &idle_seconds) != 2) up = idle_seconds = 0;
        fclose(file);
    }
    int count = 0;
    DIR *folder = opendir("/proc");
    struct dirent *entry;
    while (folder && (entry = readdir(folder))) {
        struct stat status;
        char path[300];
        snprintf(path, sizeof path, "/proc/%s", entry->d_name);
        if (*entry->d_name > '0' && *entry->d_name <= '9' && !stat(path, &status))
            count += status.st_uid == BOX_USER;
    }
    if (folder) closedir(folder);
    buffer_format(&reply->fields,
                  ", \"memory_bytes\": %llu, \"cpu_seconds\": %.3f, \"num_processes\": %d, "
                  "\"written_bytes\": %llu",
                  (unsigned long long)(system.totalram - system.freeram) * system.mem_unit,
                  up > idle_seconds ? up - idle_seconds : 0.0, count,
                  (unsigned long long)(layer.f_blocks - layer.f_bfree) *
                      (unsigned long long)layer.f_bsize);
    return ANSWERED;
}
