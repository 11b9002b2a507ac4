/* Process 1 of a virtual machine: boots the guest, drops privileges and then runs the agent.
 *
 * It keeps two capabilities that requests need, for the clock and for mounts. Commands have none, because a
 * program executed by a user other than root does not inherit them.
 */
#include "frames.h"

#include <grp.h>
#include <linux/capability.h>
#include <linux/random.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/statfs.h>
#include <sys/syscall.h>

#include "processes.h"

#define BOX_USER 1000
#define KEPT_RIGHTS ((1u << CAP_SYS_ADMIN) | (1u << CAP_SYS_TIME))

static void must(int result, const char *what) {
    if (result >= 0) return;
    fprintf(stderr, "init: %s: %s\n", what, strerror(errno));
    abort();
}

static void write_text(const char *path, const char *text) {
    int file = open(path, O_WRONLY | O_CLOEXEC);
    if (file < 0) return;
    if (write(file, text, strlen(text)) < 0) fprintf(stderr, "init: cannot write %s\n", path);
    close(file);
}

/* ---- requests of machines only ---- */

/* Sends nothing until the next request, so that a copy of this machine begins between two frames. */
static int do_hold(const Request *request) {
    struct pollfd waits = {control, POLLIN, 0};
    Reply reply = {0};
    send_reply(request->id, &reply);
    while (poll(&waits, 1, -1) < 0) {}
    return 0;
}

static int reseed(Blob bytes) {
    struct {
        struct rand_pool_info info;
        char bytes[64];
    } pool = {0};
    size_t size = bytes.size < sizeof pool.bytes ? bytes.size : sizeof pool.bytes;
    pool.info.entropy_count = (int)(8 * size);
    pool.info.buf_size = (int)size;
    memcpy(pool.info.buf, bytes.data, size);
    int random = open("/dev/urandom", O_RDWR | O_CLOEXEC);
    if (random < 0) return fail_system("/dev/urandom");
    int failed = ioctl(random, RNDADDENTROPY, &pool) || ioctl(random, RNDRESEEDCRNG, 0);
    close(random);
    return failed ? fail_system("reseed the random pool") : 0;
}

/* Gives a copy its own clock, random pool and host name in place of its source's. Blobs: random bytes
 * and a host name, or none if only the time is set. */
static int do_refresh(const Request *request) {
    const char *text = find(request, "wall_ns");
    long long wall_ns = text ? strtoll(text, NULL, 10) : 0;
    struct timespec time = {wall_ns / 1000000000, wall_ns % 1000000000};
    if (clock_settime(CLOCK_REALTIME, &time)) return fail_system("set the clock");
    if (request->num_blobs) {
        Blob name = blob(request, 1);
        /* The requests of commands that still run belong to the source: their replies get no valid id. */
        for (Process *process = processes; process; process = process->next) process->request = 0;
        if (reseed(blob(request, 0))) return -1;
        if (sethostname(name.data, name.size)) return fail_system("set the host name");
    }
    Reply reply = {0};
    send_reply(request->id, &reply);
    return 0;
}

static int mount_scratch(const char *path, long long bytes) {
    char options[64];
    snprintf(options, sizeof options, "size=%lld,mode=1777", bytes);
    umount2(path, MNT_DETACH); /* the mount of this copy's source */
    return mount("tmpfs", path, "tmpfs", MS_NODEV | MS_NOSUID, options) ? fail_system(path) : 0;
}

/* Ends all commands and sets the box's limits and variables (blobs, NAME=value). The repository's present
 * content stays and does not count towards the limit. */
static int do_open(const Request *request) {
    char options[64];
    struct statfs repository;
    long long bytes = number(request, "writable_bytes");
    kill(-1, SIGKILL);
    if (statfs(ROOT, &repository)) return fail_system(ROOT);
    long long used = (long long)(repository.f_blocks - repository.f_bfree) * repository.f_bsize;
    snprintf(options, sizeof options, "size=%lld", used + bytes);
    if (mount("tmpfs", ROOT, NULL, MS_REMOUNT | MS_NODEV | MS_NOSUID, options))
        return fail_system(ROOT);
    if (mount_scratch("/tmp", bytes) || mount_scratch("/dev/shm", bytes)) return -1;
    for (int index = 0; index < request->num_blobs; index++) putenv(copy_text(blob(request, index)));
    struct rlimit file_size = {number(request, "file_bytes"), number(request, "file_bytes")};
    struct rlimit no_core = {0, 0};
    if (setrlimit(RLIMIT_FSIZE, &file_size) || setrlimit(RLIMIT_CORE, &no_core))
        return fail_system("set limits");
    Reply reply = {0};
    send_reply(request->id, &reply);
    return 0;
}

#define MORE_OPERATIONS \
    {"hold", do_hold}, {"refresh", do_refresh}, {"open", do_open},
#define AGENT_MAIN serve_host
#include "agent.c"

/* ---- boot ---- */

static void load_modules(void) {
    static const char *const names[] = {"virtio_ring", "virtio",     "virtio_mmio",
                                        "virtio_console", "overlay", "virtio_blk",
                                        "libcrc32c",      "erofs"};
    for (size_t index = 0; index < sizeof names / sizeof *names; index++) {
        char path[64];
        snprintf(path, sizeof path, "/modules/%s.ko", names[index]);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) continue; /* built into the kernel, or not part of this image */
        if (syscall(SYS_finit_module, file, "", 0)) fprintf(stderr, "init: module %s\n", path);
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
    must(chmod("/", 0755), "close the root folder");
}

static void bring_up_loopback(void) {
    struct ifreq request = {0};
    strcpy(request.ifr_name, "lo");
    request.ifr_flags = IFF_UP | IFF_RUNNING;
    int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (any < 0 || ioctl(any, SIOCSIFFLAGS, &request)) fprintf(stderr, "init: no loopback\n");
    if (any >= 0) close(any);
}

/* If the image has a disk, its read-only file system becomes the root. */
static void enter_disk(void) {
    struct stat status;
    for (int tries = 0; tries < 200 && stat("/dev/vda", &status); tries++) {
        if (access("/modules/erofs.ko", F_OK)) return;
        usleep(10000);
    }
    if (stat("/dev/vda", &status)) return;
    mkdir("/disk", 0755);
    must(mount("/dev/vda", "/disk", "erofs", MS_RDONLY, ""), "mount /disk");
    static const char *const moved[] = {"/proc", "/sys", "/dev"};
    for (size_t index = 0; index < 3; index++) {
        char target[32];
        snprintf(target, sizeof target, "/disk%s", moved[index]);
        must(mount(moved[index], target, NULL, MS_MOVE, NULL), "move mount");
    }
    must(chdir("/disk"), "enter the disk");
    must(mount(".", "/", NULL, MS_MOVE, NULL), "move root");
    must(chroot("."), "change root");
    must(chdir("/"), "enter root");
}

/* The number in the port's name depends on the other devices, such as a disk. -1: not there yet. */
static int find_port(void) {
    char path[300];
    unsigned device;
    int port = -1;
    DIR *folder = opendir("/dev");
    struct dirent *entry;
    while (folder && port < 0 && (entry = readdir(folder))) {
        if (sscanf(entry->d_name, "vport%up1", &device) != 1) continue;
        snprintf(path, sizeof path, "/dev/%s", entry->d_name);
        port = open(path, O_RDWR | O_CLOEXEC);
    }
    if (folder) closedir(folder);
    return port;
}

static int open_port(void) {
    for (int tries = 0; tries < 2000; tries++) {
        int port = find_port();
        if (port >= 0) return port;
        usleep(5000);
    }
    must(-1, "open the port");
    return -1;
}

/* The kernel chooses its clock source a second or two after its start. If a machine were frozen before that,
 * each of its copies would do it again, at an unpredictable time. */
static void wait_for_clock(void) {
    const char *path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    for (int tries = 0; tries < 200; tries++) {
        char name[16] = "";
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) return;
        ssize_t length = read(file, name, sizeof name - 1);
        close(file);
        if (length <= 0 || strncmp(name, "tsc-early", 9)) return;
        usleep(50000);
    }
}

static void drop_privileges(void) {
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct rights[2] = {{KEPT_RIGHTS, KEPT_RIGHTS, 0}, {0, 0, 0}};
    for (int right = 0; right <= CAP_LAST_CAP; right++) prctl(PR_CAPBSET_DROP, right, 0, 0, 0);
    must(prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "keep rights");
    must(setgroups(0, NULL), "leave groups");
    must(setresgid(BOX_USER, BOX_USER, BOX_USER), "change group");
    must(setresuid(BOX_USER, BOX_USER, BOX_USER), "change user");
    must(syscall(SYS_capset, &header, rights), "give up rights");
    must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "give up new rights");
}

int main(void) {
    char descriptor[16];
    mount_system();
    load_modules();
    enter_disk();
    mkdir(ROOT, 0755);
    mkdir("/tmp", 0755);
    mkdir("/dev/shm", 0755);
    must(mount("tmpfs", ROOT, "tmpfs", MS_NODEV | MS_NOSUID, "size=75%,mode=0755,uid=1000,gid=1000"),
         "mount " ROOT);
    write_text("/proc/sys/user/max_user_namespaces", "0");
    bring_up_loopback();
    int port = open_port();
    wait_for_clock();
    drop_privileges();
    setenv("PATH", "/usr/local/bin:/usr/bin:/bin", 1);
    setenv("HOME", "/tmp", 1);
    snprintf(descriptor, sizeof descriptor, "%d", port);
    char *arguments[] = {"agent", descriptor, NULL};
    for (;;) {
        struct pollfd host = {port, POLLIN, 0};
        if (poll(&host, 1, -1) > 0 && host.revents & POLLIN) serve_host(2, arguments);
        else usleep(10000); /* no host on the port yet */
    }
}
