/* The server in a box, a static program that runs commands and handles files for the host (host/tools.py).
 *
 *     agent DESCRIPTOR
 *
 * It answers frames (inside/wire.py) on one stream, given as an open, blocking descriptor: a socket,
 * a virtio-serial port or a vsock connection. It ends when the stream ends. It uses one thread and poll(2).
 * All text is sent in blobs, so a header is read by searching for numbers by name. That is safe because the
 * host, which is trusted, writes the headers.
 *
 * The agent does not depend on bubblewrap and needs no privileges: it works on /repo, /tmp and /dev/shm with
 * the user, environment and limits that it was started with. As process 1 of a pid namespace it also reaps
 * orphaned processes. In a virtual machine, the guest's init mounts file systems, opens the port, drops
 * privileges and calls it. A guest with more operations includes this file, after frames.h and its functions:
 *
 *     #include "frames.h"
 *     static int do_refresh(const Request *request) { ... send_reply(request->id, &reply); return 0; }
 *     #define MORE_OPERATIONS {"refresh", do_refresh},
 *     #define AGENT_MAIN agent_main    // instead of main; the guest's own main calls it
 *     #include "agent.c"
 *
 * An operation sends its reply (and returns 0), or returns fail("kind", "message").
 */
#include "files.h"
#include "processes.h"

/* ---- operations ---- */

/* Replies to a batch of paths with an error kind (empty: none) and the content or message for each. */
static void answer_each(const Request *request, int step, int (*action)(const Request *, int, Bytes *)) {
    Reply reply = {0};
    Bytes kinds = {0};
    for (int index = 0; index * step < request->num_blobs; index++) {
        Bytes content = {0};
        error_kind[0] = 0;
        action(request, index, &content);
        print(&kinds, "%s\"%s\"", index ? ", " : "", error_kind);
        if (error_kind[0]) give(&reply, error_text, strlen(error_text));
        else give(&reply, content.data, content.size);
        release(&content);
    }
    print(&reply.header, ", \"kinds\": [");
    add(&reply.header, kinds.data, kinds.size);
    print(&reply.header, "]");
    release(&kinds);
    send_reply(request->id, &reply);
}

static int read_one(const Request *request, int index, Bytes *content) {
    char *path = copy_text(blob(request, index));
    int failed = read_whole(path, content);
    free(path);
    return failed;
}

/* Blobs: path and content alternate; a nonzero item of `removed` says that the path is removed instead. */
static int write_one(const Request *request, int index, Bytes *content) {
    (void)content;
    char *path = copy_text(blob(request, 2 * index));
    int failed = item(request, "removed", index) ? remove_path(path)
                                                 : write_whole(path, blob(request, 2 * index + 1));
    free(path);
    return failed;
}

static int do_read(const Request *request) { answer_each(request, 1, read_one); return 0; }

static int do_write(const Request *request) { answer_each(request, 2, write_one); return 0; }

static int do_list(const Request *request) {
    char *path = copy_text(blob(request, 0));
    int folder = open_below(path, O_DIRECTORY | O_RDONLY), count = 0;
    free(path);
    if (folder < 0) return -1;
    Bytes packed = {0};
    int failed = list_below(folder, "", number(request, "max_depth"), &packed, &count);
    Reply reply = {0};
    if (!failed) { give(&reply, packed.data, packed.size); send_reply(request->id, &reply); }
    release(&packed);
    return failed;
}

static void set_limit(int which, double value) {
    struct rlimit limit = {value, value};
    if (value > 0) setrlimit(which, &limit);
}

static int send_nothing(const Request *request) {
    Reply reply = {0};
    send_reply(request->id, &reply);
    return 0;
}

/* The first request: sets limits for this process and all that it starts. */
static int do_hello(const Request *request) {
    set_limit(RLIMIT_AS, number(request, "process_memory_bytes"));
    set_limit(RLIMIT_NPROC, number(request, "processes"));
    return send_nothing(request);
}

static int do_pause(const Request *request) { kill(-1, SIGSTOP); return send_nothing(request); }

static int do_resume(const Request *request) { kill(-1, SIGCONT); return send_nothing(request); }

static const struct { const char *name; int (*action)(const Request *); } operations[] = {
    {"hello", do_hello}, {"exec", start_command}, {"read", do_read}, {"write", do_write},
    {"list", do_list}, {"pause", do_pause}, {"resume", do_resume},
#ifdef MORE_OPERATIONS
    MORE_OPERATIONS
#endif
};

static void answer(const Request *request) {
    char name[32] = "";
    const char *found = find(request, "operation");
    if (found) sscanf(found, " \"%31[a-z_]\"", name);
    error_kind[0] = 0;
    int failed = fail("invalid", "no operation %s", name);
    for (size_t index = 0; index < sizeof operations / sizeof *operations; index++)
        if (!strcmp(name, operations[index].name)) {
            error_kind[0] = 0;
            failed = operations[index].action(request);
            break;
        }
    if (failed) send_error(request->id);
}

/* ---- the loop ---- */

static uint32_t big_endian(const char *data) {
    const unsigned char *bytes = (const unsigned char *)data;
    return (uint32_t)bytes[0] << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
}

/* Answers and removes one whole received frame. 0: there is none yet. */
static int take_frame(Bytes *received) {
    if (received->size < 8) return 0;
    uint64_t text = big_endian(received->data), blobs = big_endian(received->data + 4);
    if (8 + text + blobs > MAX_FRAME_BYTES) _exit(71);
    if (received->size < 8 + text + blobs) return 0;
    Request request = {0};
    request.header = copy_text((Blob){received->data + 8, text});
    request.id = number(&request, "id");
    const char *sizes = find(&request, "blob_bytes"), *place = received->data + 8 + text;
    for (const char *next = sizes ? sizes + 2 : "]"; *next && *next != ']';) {
        char *end;
        size_t size = strtoull(next, &end, 10);
        request.blobs = realloc(request.blobs, (request.num_blobs + 1) * sizeof *request.blobs);
        if (!request.blobs) _exit(70);
        request.blobs[request.num_blobs++] = (Blob){place, size};
        place += size;
        next = *end == ',' ? end + 1 : end;
    }
    answer(&request);
    free(request.header);
    free(request.blobs);
    drop_front(received, 8 + text + blobs);
    return 1;
}

static int wakeup;

static void on_child(int number) {
    (void)number;
    int saved = errno;
    if (write(wakeup, "", 1) < 0) {}
    errno = saved;
}

/* Lists the descriptors to wait for: the stream, the wake-up pipe, and every open output with its owner. */
static int list_polled(struct pollfd **polled, Output ***owners, int wakeup_read) {
    int count = 2, capacity = 2;
    for (Process *process = processes; process; process = process->next) capacity++;
    *polled = realloc(*polled, capacity * sizeof **polled);
    *owners = realloc(*owners, capacity * sizeof **owners);
    if (!*polled || !*owners) _exit(70);
    (*polled)[0] = (struct pollfd){control, POLLIN, 0};
    (*polled)[1] = (struct pollfd){wakeup_read, POLLIN, 0};
    for (Process *process = processes; process; process = process->next) {
        if (process->output.pipe < 0) continue;
        (*owners)[count] = &process->output;
        (*polled)[count++] = (struct pollfd){process->output.pipe, POLLIN, 0};
    }
    return count;
}

static void serve(int wakeup_read) {
    Bytes received = {0};
    struct pollfd *polled = NULL;
    Output **owners = NULL;
    for (;;) {
        int count = list_polled(&polled, &owners, wakeup_read);
        if (poll(polled, count, wait_milliseconds()) < 0 && errno != EINTR) _exit(72);
        /* Outputs first, because the steps below may free their owners. */
        for (int index = 2; index < count; index++)
            if (polled[index].revents & (POLLIN | POLLHUP)) drain(owners[index]);
        if (polled[1].revents) {
            char data[256];
            while (read(wakeup_read, data, sizeof data) > 0) {}
        }
        reap();
        if (polled[0].revents) {
            static char data[1 << 18];
            ssize_t size = read(control, data, sizeof data);
            if (size == 0 || (size < 0 && errno != EINTR && errno != EAGAIN)) return;
            if (size > 0) add(&received, data, size);
            while (take_frame(&received)) {}
        }
        signal_expired_commands();
    }
}

#ifndef AGENT_MAIN
#define AGENT_MAIN main
#endif

int AGENT_MAIN(int count, char **arguments) {
    int ends[2];
    if (count != 2) return 64;
    control = atoi(arguments[1]);
    fcntl(control, F_SETFD, FD_CLOEXEC);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    signal(SIGPIPE, SIG_IGN);
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK)) return 71;
    wakeup = ends[1];
    struct sigaction action = {.sa_handler = on_child, .sa_flags = SA_NOCLDSTOP | SA_RESTART};
    sigaction(SIGCHLD, &action, NULL);
    serve(ends[0]);
    return 0;
}
