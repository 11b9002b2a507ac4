/* What the parts of the agent share: requests in, replies out, faults, the box's own settings. */
#ifndef OSTINATO_AGENT_H
#define OSTINATO_AGENT_H

#include <poll.h>
#include <sys/types.h>

#include "text.h"

#define BOX_USER 1000
#define REPOSITORY "/repo"
#define PRISTINE "/lower/files" /* below /repo; only root reaches it, and the layer above */
#define UPPER "/layer/upper"

typedef struct {
    const char *data;
    size_t length;
} Blob;

typedef struct {
    int64_t id;
    const Json *header;
    const Blob *blobs;
    size_t num_blobs;
} Request;

/* Fields of a reply's header, each written as `, "name": value`, and its blobs. */
typedef struct {
    Buffer fields, sizes, blobs;
} Reply;

/* Why a request fails: a kind that infra/sandbox/tools.py knows, a text, errno where it has one. */
typedef struct {
    const char *type;
    int code;
    char text[512];
} Fault;

typedef enum { ANSWERED, FAILED, LATER } Outcome;

Outcome fail(Fault *fault, const char *type, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* `what` and errno, as the error that fits it. */
Outcome fail_errno(Fault *fault, const char *what);
void reply_blob(Reply *reply, const void *data, size_t length);
/* Sends and frees. */
void reply_send(int64_t id, Reply *reply);
void reply_fault(int64_t id, const Fault *fault);
double monotonic_seconds(void);

/* box.c: the machine and the folders of the box */
void box_boot(void);
int box_open_port(void);
Outcome box_refresh(const Request *request, Reply *reply, Fault *fault);
Outcome box_put(const Request *request, Reply *reply, Fault *fault);
Outcome box_hello(const Request *request, Reply *reply, Fault *fault);
Outcome box_open(const Request *request, Reply *reply, Fault *fault);
Outcome box_stats(const Request *request, Reply *reply, Fault *fault);
const Json *box_environment(void);
void box_limit_process(void); /* in a child, before it becomes the box's user */

/* changes.c: what differs from the pristine repository */
Outcome changes_read(const Request *request, Reply *reply, Fault *fault);

/* files.c: files as the box's user */
Outcome files_resolve(const char *path, char *resolved, Fault *fault);
Outcome files_read(const Request *request, Reply *reply, Fault *fault);
Outcome files_write(const Request *request, Reply *reply, Fault *fault);
Outcome files_list(const Request *request, Reply *reply, Fault *fault);
Outcome files_stat(const Request *request, Reply *reply, Fault *fault);
Outcome files_remove(const Request *request, Reply *reply, Fault *fault);

/* commands.c: commands, sessions and jobs */
Outcome commands_exec(const Request *request, Reply *reply, Fault *fault);
Outcome commands_session_open(const Request *request, Reply *reply, Fault *fault);
Outcome commands_session_run(const Request *request, Reply *reply, Fault *fault);
Outcome commands_session_signal(const Request *request, Reply *reply, Fault *fault);
Outcome commands_session_close(const Request *request, Reply *reply, Fault *fault);
Outcome commands_job_start(const Request *request, Reply *reply, Fault *fault);
Outcome commands_job_logs(const Request *request, Reply *reply, Fault *fault);
Outcome commands_job_wait(const Request *request, Reply *reply, Fault *fault);
Outcome commands_job_kill(const Request *request, Reply *reply, Fault *fault);
/* The main loop's side: descriptors to watch, their events, ended children, time limits. */
size_t commands_watch(struct pollfd *polled, size_t room);
void commands_take(const struct pollfd *polled, size_t count);
void commands_reap(void);
void commands_forget_requests(void); /* in a copy: those who asked are elsewhere */
double commands_check_time(void); /* seconds until it must be called again; negative: never */

#endif
