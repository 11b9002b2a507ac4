/* Bytes, requests and replies of agent.c in the frames of inside/wire.py, and the error of the current step. */
#pragma once
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define GRACE_SECONDS 0.5
#define MAX_READ_BYTES (8ll << 20)
#define MAX_ENTRIES 20000
#define MAX_FRAME_BYTES (128ull << 20)
#define ROOT "/repo"

extern char **environ;

/* ---- bytes ---- */

typedef struct { char *data; size_t size, capacity; } Bytes;
typedef struct { const char *data; size_t size; } Blob;

static void add(Bytes *bytes, const void *data, size_t size) {
    if (bytes->size + size > bytes->capacity) {
        bytes->capacity = (bytes->size + size) * 2 + 256;
        bytes->data = realloc(bytes->data, bytes->capacity);
        if (!bytes->data) _exit(70);
    }
    if (size) memcpy(bytes->data + bytes->size, data, size);
    bytes->size += size;
}

static void drop_front(Bytes *bytes, size_t size) {
    memmove(bytes->data, bytes->data + size, bytes->size - size);
    bytes->size -= size;
}

static void release(Bytes *bytes) { free(bytes->data); memset(bytes, 0, sizeof *bytes); }

static void print(Bytes *bytes, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    int size = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    add(bytes, text, size < (int)sizeof text ? (size_t)size : sizeof text - 1);
}

static char *copy_text(Blob blob) {
    char *text = malloc(blob.size + 1);
    if (!text) _exit(70);
    memcpy(text, blob.data, blob.size);
    text[blob.size] = 0;
    return text;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

/* ---- requests and replies ---- */

typedef struct {
    char *header;
    Blob *blobs;
    int num_blobs;
    long id;
} Request;

typedef struct { Bytes header, sizes, blobs; int num_blobs; } Reply;

static int control;

static const char *find(const Request *request, const char *name) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, "\"%s\":", name);
    const char *found = strstr(request->header, wanted);
    return found ? found + strlen(wanted) : NULL;
}

static double number(const Request *request, const char *name) {
    const char *found = find(request, name);
    return found ? strtod(found, NULL) : 0;
}

static long long item(const Request *request, const char *name, int index) {
    const char *found = find(request, name);
    if (!found) return 0;
    found = strchr(found, '[') + 1;
    for (; index > 0 && found; index--) {
        found = strchr(found, ',');
        if (found) found++;
    }
    return found ? strtoll(found, NULL, 10) : 0;
}

static Blob blob(const Request *request, int index) {
    static const Blob none = {"", 0};
    return index < request->num_blobs ? request->blobs[index] : none;
}

static void give(Reply *reply, const void *data, size_t size) {
    print(&reply->sizes, "%s%zu", reply->num_blobs++ ? ", " : "", size);
    add(&reply->blobs, data, size);
}

static void write_all(int descriptor, const char *data, size_t size) {
    while (size) {
        ssize_t done = write(descriptor, data, size);
        if (done < 0 && errno == EINTR) continue;
        if (done < 0) _exit(0); /* the host is gone, and the box ends with process 1 */
        data += done;
        size -= done;
    }
}

static void send_reply(long id, Reply *reply) {
    Bytes frame = {0};
    char prefix[8] = {0};
    add(&frame, prefix, 8);
    print(&frame, "{\"header\": {\"id\": %ld", id);
    add(&frame, reply->header.data, reply->header.size);
    print(&frame, "}, \"blob_bytes\": [");
    add(&frame, reply->sizes.data, reply->sizes.size);
    print(&frame, "]}");
    uint32_t text = frame.size - 8, blobs = reply->blobs.size;
    for (int index = 0; index < 4; index++) {
        frame.data[index] = text >> (24 - 8 * index);
        frame.data[4 + index] = blobs >> (24 - 8 * index);
    }
    add(&frame, reply->blobs.data, reply->blobs.size);
    write_all(control, frame.data, frame.size);
    release(&frame);
    release(&reply->header);
    release(&reply->sizes);
    release(&reply->blobs);
    reply->num_blobs = 0;
}

/* The error of the current step. Kind "": none. */
static char error_kind[32], error_text[400];

static int fail(const char *kind, const char *format, ...) {
    snprintf(error_kind, sizeof error_kind, "%s", kind);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error_text, sizeof error_text, format, arguments);
    va_end(arguments);
    return -1;
}

static int fail_system(const char *path) {
    return fail(errno == ENOENT ? "not_found" : "invalid", "%s: %s", strerror(errno), path);
}

static void send_error(long id) {
    Reply reply = {0};
    print(&reply.header, ", \"kind\": \"%s\", \"error\": \"", error_kind);
    for (const char *text = error_text; *text; text++) {
        char letter = *text < ' ' || *text > '~' ? '?' : *text;
        if (letter == '"' || letter == '\\') add(&reply.header, "\\", 1);
        add(&reply.header, &letter, 1);
    }
    add(&reply.header, "\"", 1);
    send_reply(id, &reply);
}
