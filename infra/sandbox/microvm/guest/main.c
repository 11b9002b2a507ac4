/* Process 1 of a virtual machine: serves frames on the virtio port until the machine ends.
 *
 * The frame layout is that of infra/sandbox/inside/wire.py. One thread, one poll: several commands
 * run at once. Nothing here survives a fault of its own; the host then sees a lost sandbox. */
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <time.h>
#include <unistd.h>

#include "agent.h"

#define MAX_FRAME_BYTES (128u << 20)
#define MAX_WATCHED 512
#define PREFIX_BYTES 8

static int port;
static int is_held; /* nothing but the port is looked at until the next request */

/* Stops sending, so that a copy of this machine begins between two frames. */
static Outcome hold(const Request *request, Reply *reply, Fault *fault) {
    (void)request, (void)reply, (void)fault;
    is_held = 1;
    return ANSWERED;
}

static const struct {
    const char *name;
    Outcome (*handle)(const Request *, Reply *, Fault *);
} OPERATIONS[] = {
    {"hold", hold},
    {"hello", box_hello},
    {"refresh", box_refresh},
    {"put", box_put},
    {"open", box_open},
    {"changes", changes_read},
    {"stats", box_stats},
    {"read", files_read},
    {"write", files_write},
    {"list", files_list},
    {"stat", files_stat},
    {"remove", files_remove},
    {"exec", commands_exec},
    {"session_open", commands_session_open},
    {"session_run", commands_session_run},
    {"session_signal", commands_session_signal},
    {"session_close", commands_session_close},
    {"job_start", commands_job_start},
    {"job_logs", commands_job_logs},
    {"job_wait", commands_job_wait},
    {"job_kill", commands_job_kill},
};

double monotonic_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

Outcome fail(Fault *fault, const char *type, const char *format, ...) {
    va_list arguments;
    fault->type = type;
    va_start(arguments, format);
    vsnprintf(fault->text, sizeof fault->text, format, arguments);
    va_end(arguments);
    return FAILED;
}

Outcome fail_errno(Fault *fault, const char *what) {
    int code = errno;
    fault->code = code;
    return fail(fault, code == ENOENT ? "not_found" : "invalid", "%.300s: %s", what, strerror(code));
}

static void send_all(const char *data, size_t length) {
    while (length) {
        ssize_t sent = write(port, data, length);
        if (sent < 0 && errno == EAGAIN) {
            struct pollfd ready = {port, POLLOUT, 0};
            poll(&ready, 1, 1000);
        } else if (sent < 0 && errno != EINTR) {
            return; /* nobody listens; the host has given this machine up */
        } else if (sent > 0) {
            data += sent;
            length -= (size_t)sent;
        }
    }
}

void reply_blob(Reply *reply, const void *data, size_t length) {
    buffer_format(&reply->sizes, "%s%zu", reply->sizes.length ? ", " : "", length);
    buffer_add(&reply->blobs, data, length);
}

static void put_number(unsigned char *at, size_t value) {
    for (int i = 0; i < 4; i++) at[i] = (unsigned char)(value >> (24 - 8 * i));
}

void reply_send(int64_t id, Reply *reply) {
    Buffer frame = {0};
    buffer_add(&frame, "\0\0\0\0\0\0\0", PREFIX_BYTES);
    buffer_format(&frame, "{\"header\": {\"id\": %lld", (long long)id);
    buffer_add(&frame, reply->fields.data, reply->fields.length);
    buffer_format(&frame, "}, \"blob_bytes\": [");
    buffer_add(&frame, reply->sizes.data, reply->sizes.length);
    buffer_format(&frame, "]}");
    put_number((unsigned char *)frame.data, frame.length - PREFIX_BYTES);
    put_number((unsigned char *)frame.data + 4, reply->blobs.length);
    buffer_add(&frame, reply->blobs.data, reply->blobs.length);
    send_all(frame.data, frame.length);
    buffer_free(&frame);
    buffer_free(&reply->fields);
    buffer_free(&reply->sizes);
    buffer_free(&reply->blobs);
}

void reply_fault(int64_t id, const Fault *fault) {
    Reply reply = {0};
    buffer_format(&reply.fields, ", \"kind\": \"%s\", \"error\": ", fault->type);
    buffer_add_quoted(&reply.fields, fault->text);
    reply_send(id, &reply);
}

static void answer(const Request *request) {
    const char *name = json_text(request->header, "operation", "");
    is_held = 0;
    Reply reply = {0};
    Fault fault = {0};
    Outcome outcome = fail(&fault, "invalid", "no operation %s", name);
    for (size_t i = 0; i < sizeof OPERATIONS / sizeof *OPERATIONS; i++)
        if (!strcmp(OPERATIONS[i].name, name))
            outcome = OPERATIONS[i].handle(request, &reply, &fault);
    if (outcome == ANSWERED) {
        reply_send(request->id, &reply);
        return;
    }
    buffer_free(&reply.fields);
    buffer_free(&reply.sizes);
    buffer_free(&reply.blobs);
    if (outcome == FAILED) reply_fault(request->id, &fault);
}

static void handle_frame(const char *text, size_t text_bytes, size_t blobs_bytes) {
    Json *content = json_parse(text, text_bytes);
    const Json *header = json_get(content, "header"), *sizes = json_get(content, "blob_bytes");
    const char *at = text + text_bytes, *end = at + blobs_bytes;
    size_t count = 0;
    for (const Json *size = sizes ? sizes->first : NULL; size; size = size->next) count++;
    Blob *blobs = calloc(count + 1, sizeof *blobs);
    Request request = {json_integer(header, "id", 0), header, blobs, count};
    count = 0;
    for (const Json *size = sizes ? sizes->first : NULL; size; size = size->next, count++) {
        size_t length = size->integer < 0 || size->integer > end - at ? (size_t)(end - at)
                                                                       : (size_t)size->integer;
        blobs[count] = (Blob){at, length};
        at += length;
    }
    if (header) answer(&request);
    free(blobs);
    json_free(content);
}

static size_t get_number(const char *at) {
    const unsigned char *bytes = (const unsigned char *)at;
    return (size_t)bytes[0] << 24 | (size_t)bytes[1] << 16 | (size_t)bytes[2] << 8 | bytes[3];
}

/* Takes what the port holds and answers the whole frames in it. */
static void serve_port(Buffer *input) {
    static char chunk[1 << 16];
    ssize_t got;
    while ((got = read(port, chunk, sizeof chunk)) > 0) {
        buffer_add(input, chunk, (size_t)got);
        if ((size_t)got < sizeof chunk) break;
    }
    size_t used = 0;
    while (input->length - used >= PREFIX_BYTES) {
        size_t text_bytes = get_number(input->data + used);
        size_t blobs_bytes = get_number(input->data + used + 4);
        if (text_bytes + blobs_bytes > MAX_FRAME_BYTES) abort();
        if (input->length - used - PREFIX_BYTES < text_bytes + blobs_bytes) break;
        handle_frame(input->data + used + PREFIX_BYTES, text_bytes, blobs_bytes);
        used += PREFIX_BYTES + text_bytes + blobs_bytes;
    }
    if (!used) return;
    memmove(input->data, input->data + used, input->length - used);
    input->length -= used;
    if (!input->length && input->capacity > 1 << 20) buffer_free(input);
}

int main(void) {
    box_boot();
    sigset_t blocked;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGCHLD);
    sigprocmask(SIG_BLOCK, &blocked, NULL);
    signal(SIGPIPE, SIG_IGN);
    int ended_children = signalfd(-1, &blocked, SFD_NONBLOCK | SFD_CLOEXEC);
    port = box_open_port();
    Buffer input = {0};
    for (;;) {
        struct pollfd polled[MAX_WATCHED] = {{port, POLLIN, 0}, {ended_children, POLLIN, 0}};
        size_t count = is_held ? 0 : commands_watch(polled + 2, MAX_WATCHED - 2);
        double seconds = is_held ? -1 : commands_check_time();
        int milliseconds = seconds < 0 ? -1 : seconds > 60 ? 60000 : (int)(1000 * seconds) + 1;
        if (is_held) polled[1].fd = -1;
        if (poll(polled, count + 2, milliseconds) < 0) continue;
        commands_take(polled + 2, count);
        if (polled[1].revents) {
            struct signalfd_siginfo ignored;
            while (read(ended_children, &ignored, sizeof ignored) > 0) {}
            commands_reap();
        }
        if (polled[0].revents & POLLIN) serve_port(&input);
        else if (polled[0].revents) usleep(10000); /* no host on the port yet */
    }
}
