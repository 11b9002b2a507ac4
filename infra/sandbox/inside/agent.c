/* Process 1 of a box, as a static program: answers the requests of file_server.py except open, diff
 * and reset, in a tenth of its start time and memory.
 *
 * One thread and poll(2). Frames are those of wire.py; all text travels in blobs, so the header is
 * read by looking for numbers by name (the host is trusted, the box is not: it cannot write here).
 */
#include "agent_files.h"
#include "agent_processes.h"

/* ---- operations ---- */

/* Answers of a batch: a kind for each, with the content or the message. */
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

static int do_read(const Request *request, int index, Bytes *content) {
    char *path = copy_text(blob(request, index));
    int failed = read_part(path, item(request, "offsets", index), item(request, "lengths", index), content);
    free(path);
    return failed;
}

static int do_write(const Request *request, int index, Bytes *content) {
    (void)content;
    char *path = copy_text(blob(request, 3 * index)), *expected = copy_text(blob(request, 3 * index + 2));
    int failed = write_whole(path, blob(request, 3 * index + 1), expected, item(request, "executable", index));
    free(path);
    free(expected);
    return failed;
}

static int do_remove(const Request *request, int index, Bytes *content) {
    (void)content;
    char *path = copy_text(blob(request, index));
    int failed = remove_path(path);
    free(path);
    return failed;
}

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

static int do_stat(const Request *request) {
    Reply reply = {0};
    for (int index = 0; index < request->num_blobs; index++) {
        char *path = copy_text(blob(request, index));
        Bytes packed = {0};
        int failed = status_of(path, &packed);
        free(path);
        if (failed) return -1;
        give(&reply, packed.data, packed.size);
        release(&packed);
    }
    send_reply(request->id, &reply);
    return 0;
}

static void set_limit(int which, double value) {
    struct rlimit limit = {value, value};
    if (value > 0) setrlimit(which, &limit);
}

static int do_hello(const Request *request) {
    Reply reply = {0};
    set_limit(RLIMIT_AS, number(request, "process_memory_bytes"));
    set_limit(RLIMIT_NPROC, number(request, "processes"));
    print(&reply.header, ", \"server\": \"static\"");
    send_reply(request->id, &reply);
    return 0;
}

static int do_exec(const Request *request) {
    Process *process = start_command(request, COMMAND);
    if (!process) return -1;
    process->request = request->id;
    process->deadline = process->started + number(request, "timeout_seconds");
    return 0;
}

static int do_job_start(const Request *request) {
    Process *oldest = NULL;
    int count = 0;
    for (Process *process = processes; process; process = process->next)
        if (process->kind == JOB) { count++; if (process->has_ended) oldest = process; }
    if (count >= MAX_JOBS && oldest) forget(oldest);
    Process *job = start_command(request, JOB);
    if (!job) return -1;
    Reply reply = {0};
    print(&reply.header, ", \"job\": %d", job->id);
    send_reply(request->id, &reply);
    return 0;
}

static int do_job_logs(const Request *request) {
    Process *job = find_process(request, JOB, "job");
    if (!job) return -1;
    report_job(request->id, job, number(request, "offset"), number(request, "length"));
    return 0;
}

static int do_job_wait(const Request *request) {
    Process *job = find_process(request, JOB, "job");
    if (!job) return -1;
    if (job->has_ended) { report_job(request->id, job, 0, LOG_BYTES); return 0; }
    Waiter *waiter = calloc(1, sizeof *waiter);
    if (!waiter) _exit(70);
    *waiter = (Waiter){waiters, request->id, job->id, now() + number(request, "timeout_seconds")};
    waiters = waiter;
    return 0;
}

static int do_signal(const Request *request, enum Kind kind, const char *name, int signal_number) {
    Process *process = find_process(request, kind, name);
    if (!process) return -1;
    if (!process->has_ended) signal_group(process->id, signal_number);
    Reply reply = {0};
    send_reply(request->id, &reply);
    return 0;
}

static int do_session_open(const Request *request) {
    Process *session = open_session(request);
    if (!session) return -1;
    Reply reply = {0};
    print(&reply.header, ", \"session\": %d", session->id);
    send_reply(request->id, &reply);
    return 0;
}

static int do_everyone(const Request *request, int signal_number) {
    kill(-1, signal_number);
    Reply reply = {0};
    send_reply(request->id, &reply);
    return 0;
}

static void answer(const Request *request) {
    char name[32] = "";
    const char *found = find(request, "operation");
    if (found) sscanf(found, " \"%31[a-z_]\"", name);
    int signal_number = number(request, "signal"), failed;
    error_kind[0] = 0;
    if (!strcmp(name, "exec")) failed = do_exec(request);
    else if (!strcmp(name, "read")) { answer_each(request, 1, do_read); failed = 0; }
    else if (!strcmp(name, "write")) { answer_each(request, 3, do_write); failed = 0; }
    else if (!strcmp(name, "remove")) { answer_each(request, 1, do_remove); failed = 0; }
    else if (!strcmp(name, "list")) failed = do_list(request);
    else if (!strcmp(name, "stat")) failed = do_stat(request);
    else if (!strcmp(name, "session_open")) failed = do_session_open(request);
    else if (!strcmp(name, "session_run")) failed = run_in_session(request);
    else if (!strcmp(name, "session_signal")) failed = do_signal(request, SESSION, "session", signal_number);
    else if (!strcmp(name, "session_close")) failed = do_signal(request, SESSION, "session", SIGKILL);
    else if (!strcmp(name, "job_start")) failed = do_job_start(request);
    else if (!strcmp(name, "job_logs")) failed = do_job_logs(request);
    else if (!strcmp(name, "job_wait")) failed = do_job_wait(request);
    else if (!strcmp(name, "job_kill")) failed = do_signal(request, JOB, "job", signal_number);
    else if (!strcmp(name, "pause")) failed = do_everyone(request, SIGSTOP);
    else if (!strcmp(name, "resume")) failed = do_everyone(request, SIGCONT);
    else if (!strcmp(name, "hello")) failed = do_hello(request);
    else failed = fail("invalid", "no operation %s", name);
    if (failed) send_error(request->id);
}

/* ---- the loop ---- */

static uint32_t big_endian(const char *data) {
    const unsigned char *bytes = (const unsigned char *)data;
    return (uint32_t)bytes[0] << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3];
}

/* One whole frame out of what was received; 0 when there is none yet. */
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

static void finish(Process *process, int status, const struct rusage *usage) {
    process->has_ended = 1;
    process->exit_code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    process->cpu = usage->ru_utime.tv_sec + usage->ru_stime.tv_sec +
                   (usage->ru_utime.tv_usec + usage->ru_stime.tv_usec) / 1e6;
    for (int index = 0; index < process->num_outputs; index++) {
        drain(&process->outputs[index]);
        if (process->outputs[index].pipe >= 0) close(process->outputs[index].pipe);
        process->outputs[index].pipe = -1;
    }
    signal_group(process->id, SIGKILL);
    if (process->kind == JOB) {
        for (Waiter **place = &waiters; *place;) {
            Waiter *waiter = *place;
            if (waiter->job != process->id) { place = &waiter->next; continue; }
            report_job(waiter->request, process, 0, LOG_BYTES);
            *place = waiter->next;
            free(waiter);
        }
        return;
    }
    if (process->request) report(process->request, process);
    forget(process);
}

static void reap(void) {
    struct rusage usage;
    int status;
    pid_t id;
    while ((id = wait4(-1, &status, WNOHANG, &usage)) > 0) {
        Process *process = processes;
        while (process && (process->id != id || process->has_ended)) process = process->next;
        if (process) finish(process, status, &usage);
    }
}

/* Those over their time: a command gets TERM, a session INT, and then both KILL. */
static void press_late_ones(void) {
    double time = now();
    for (Process *process = processes; process; process = process->next) {
        if (!process->deadline || process->deadline > time || process->has_ended) continue;
        int gentle = process->kind == SESSION ? SIGINT : SIGTERM;
        signal_group(process->id, process->timed_out ? SIGKILL : gentle);
        process->timed_out = 1;
        process->deadline = time + GRACE_SECONDS;
    }
    for (Waiter **place = &waiters; *place;) {
        Waiter *waiter = *place;
        if (waiter->deadline > time) { place = &waiter->next; continue; }
        fail("timeout", "job %ld still runs", waiter->job);
        send_error(waiter->request);
        *place = waiter->next;
        free(waiter);
    }
}

static int wait_milliseconds(void) {
    double nearest = 0, time = now();
    for (Process *process = processes; process; process = process->next)
        if (process->deadline && !process->has_ended && (!nearest || process->deadline < nearest))
            nearest = process->deadline;
    for (Waiter *waiter = waiters; waiter; waiter = waiter->next)
        if (!nearest || waiter->deadline < nearest) nearest = waiter->deadline;
    if (!nearest) return -1;
    return nearest <= time ? 0 : (int)((nearest - time) * 1000) + 1;
}

static int wake;

static void on_child(int number) {
    (void)number;
    int saved = errno;
    if (write(wake, "", 1) < 0) {}
    errno = saved;
}

static void serve(int wake_read) {
    Bytes received = {0};
    struct pollfd *polled = NULL;
    Process **owners = NULL;
    for (;;) {
        int count = 2, room = 2;
        for (Process *process = processes; process; process = process->next) room += 3;
        polled = realloc(polled, room * sizeof *polled);
        owners = realloc(owners, room * sizeof *owners);
        if (!polled || !owners) _exit(70);
        polled[0] = (struct pollfd){control, POLLIN, 0};
        polled[1] = (struct pollfd){wake_read, POLLIN, 0};
        for (Process *process = processes; process; process = process->next)
            for (int index = 0; index < 3; index++) {
                int pipe = index < 2 ? process->outputs[index].pipe
                           : process->has_ended ? -1 : process->status;
                if (pipe < 0) continue;
                owners[count] = process;
                polled[count++] = (struct pollfd){pipe, POLLIN, 0};
            }
        if (poll(polled, count, wait_milliseconds()) < 0 && errno != EINTR) _exit(72);
        /* Pipes first: a request may forget their owner. */
        for (int index = 2; index < count; index++) {
            if (!(polled[index].revents & (POLLIN | POLLHUP))) continue;
            if (owners[index]->kind == SESSION) hear_session(owners[index]);
            else for (int output = 0; output < 2; output++)
                if (owners[index]->outputs[output].pipe == polled[index].fd) drain(&owners[index]->outputs[output]);
        }
        if (polled[1].revents) {
            char data[256];
            while (read(wake_read, data, sizeof data) > 0) {}
        }
        reap();
        if (polled[0].revents) {
            static char data[1 << 18];
            ssize_t size = read(control, data, sizeof data);
            if (size == 0 || (size < 0 && errno != EINTR && errno != EAGAIN)) return;
            if (size > 0) add(&received, data, size);
            while (take_frame(&received)) {}
        }
        press_late_ones();
    }
}

int main(int count, char **arguments) {
    int ends[2];
    if (count != 2) return 64;
    control = atoi(arguments[1]);
    fcntl(control, F_SETFD, FD_CLOEXEC);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    signal(SIGPIPE, SIG_IGN);
    if (pipe2(ends, O_CLOEXEC | O_NONBLOCK)) return 71;
    wake = ends[1];
    struct sigaction action = {.sa_handler = on_child, .sa_flags = SA_NOCLDSTOP | SA_RESTART};
    sigaction(SIGCHLD, &action, NULL);
    serve(ends[0]);
    return 0;
}
