/* Commands, jobs and sessions of agent.c: how they start, what they print, how they are told of. */
#include "agent_frames.h"

/* ---- what processes print ---- */

typedef struct {
    int pipe;            /* -1: closed */
    size_t half;         /* 0 with is_log: keep the end; else keep both halves of a cap */
    int is_log;
    Bytes head, tail;
    long long dropped;
} Output;

static void keep(Output *output, const char *data, size_t size) {
    size_t cap = output->is_log ? LOG_BYTES : output->half;
    if (!output->is_log && output->head.size < output->half) {
        size_t part = output->half - output->head.size;
        if (part > size) part = size;
        add(&output->head, data, part);
        data += part;
        size -= part;
    }
    add(&output->tail, data, size);
    if (output->tail.size > cap) {
        size_t excess = output->tail.size - cap;
        output->dropped += excess;
        drop_front(&output->tail, excess);
    }
}

/* Takes what the pipe holds; closes it at its end. */
static void drain(Output *output) {
    static char data[65536];
    while (output->pipe >= 0) {
        ssize_t size = read(output->pipe, data, sizeof data);
        if (size > 0) { keep(output, data, size); continue; }
        if (size < 0 && errno == EINTR) continue;
        if (size < 0 && errno == EAGAIN) return;
        close(output->pipe);
        output->pipe = -1;
    }
}

static void give_output(Reply *reply, Output *output) {
    Bytes text = {0};
    add(&text, output->head.data, output->head.size);
    if (output->dropped) print(&text, "\n[... %lld bytes left out ...]\n", output->dropped);
    add(&text, output->tail.data, output->tail.size);
    give(reply, text.data, text.size);
    release(&text);
}

static void clear_output(Output *output) {
    release(&output->head);
    release(&output->tail);
    output->dropped = 0;
}

/* ---- processes ---- */

enum Kind { COMMAND, JOB, SESSION };

typedef struct Process {
    struct Process *next;
    enum Kind kind;
    pid_t id;
    long request;        /* 0: nobody waits (a job's waiters are apart) */
    double started, deadline; /* deadline 0: none */
    int timed_out, has_ended, exit_code, num_outputs;
    double cpu;
    Output outputs[2];
    int input, status;   /* of a session's shell */
} Process;

typedef struct Waiter { struct Waiter *next; long request, job; double deadline; } Waiter;

static Process *processes;
static Waiter *waiters;

static int copy_high(int descriptor) { return fcntl(descriptor, F_DUPFD_CLOEXEC, 64); }

static pid_t start(const char *folder, char **arguments, char **variables, int ends[4]) {
    struct stat status;
    if (stat(folder, &status) || !S_ISDIR(status.st_mode)) {
        fail("invalid", "no such folder: %s", folder);
        return -1;
    }
    pid_t id = fork();
    if (id < 0) fail("invalid", "no process could be started: %s", strerror(errno));
    if (id) return id;
    setsid();
    signal(SIGPIPE, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    signal(SIGCHLD, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    /* When the box is over its memory, commands go first and this server last. */
    int file = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (file >= 0) { if (write(file, "1000", 4) < 0) {} close(file); }
    static const int wanted[4] = {0, 1, 2, STATUS_DESCRIPTOR};
    int copies[4];
    for (int index = 0; index < 4; index++) copies[index] = ends[index] < 0 ? -1 : copy_high(ends[index]);
    for (int index = 0; index < 4; index++) if (copies[index] >= 0) dup2(copies[index], wanted[index]);
    for (; *variables; variables++) putenv(*variables);
    if (chdir(folder) == 0) execvp(arguments[0], arguments);
    dprintf(2, "%s: %s\n", arguments[0], strerror(errno));
    _exit(127);
}

/* A child that has not come to its setsid yet leads no group: then the child itself. */
static void signal_group(pid_t id, int number) {
    if (killpg(id, number)) kill(id, number);
}

static int open_pipe(int ends[2]) {
    if (pipe2(ends, O_CLOEXEC)) return fail_system("pipe");
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    return 0;
}

static Process *new_process(enum Kind kind) {
    Process *process = calloc(1, sizeof *process);
    if (!process) _exit(70);
    process->kind = kind;
    process->started = now();
    process->outputs[0].pipe = process->outputs[1].pipe = process->input = process->status = -1;
    process->next = processes;
    processes = process;
    return process;
}

static void forget(Process *process) {
    Process **place = &processes;
    while (*place != process) place = &(*place)->next;
    *place = process->next;
    for (int index = 0; index < 2; index++) {
        if (process->outputs[index].pipe >= 0) close(process->outputs[index].pipe);
        clear_output(&process->outputs[index]);
    }
    if (process->input >= 0) close(process->input);
    if (process->status >= 0) close(process->status);
    free(process);
}

static char **texts(const Request *request, int first, int count) {
    char **list = calloc(count + 1, sizeof *list);
    if (!list) _exit(70);
    for (int index = 0; index < count; index++) list[index] = copy_text(blob(request, first + index));
    return list;
}

static void free_texts(char **list) {
    for (char **text = list; *text; text++) free(*text);
    free(list);
}

static int open_input(Blob text) {
    if (!text.size) return open("/dev/null", O_RDONLY | O_CLOEXEC);
    int file = memfd_create("stdin", MFD_CLOEXEC);
    write_all(file, text.data, text.size);
    lseek(file, 0, SEEK_SET);
    return file;
}

static Process *start_command(const Request *request, enum Kind kind) {
    int count = number(request, "arguments"), variables = number(request, "variables");
    int outputs = kind == COMMAND && number(request, "separate") ? 2 : 1;
    int pipes[2][2] = {{-1, -1}, {-1, -1}};
    for (int index = 0; index < outputs; index++) if (open_pipe(pipes[index])) return NULL;
    int input = open_input(blob(request, 1));
    char *folder = copy_text(blob(request, 0));
    char **arguments = texts(request, 2, count), **pairs = texts(request, 2 + count, variables);
    int ends[4] = {input, pipes[0][1], pipes[outputs - 1][1], -1};
    pid_t id = start(folder, arguments, pairs, ends);
    close(input);
    free(folder);
    free_texts(arguments);
    free_texts(pairs);
    for (int index = 0; index < outputs; index++) close(pipes[index][1]);
    if (id < 0) {
        for (int index = 0; index < outputs; index++) close(pipes[index][0]);
        return NULL;
    }
    Process *process = new_process(kind);
    process->id = id;
    process->num_outputs = outputs;
    for (int index = 0; index < outputs; index++) {
        process->outputs[index].pipe = pipes[index][0];
        process->outputs[index].is_log = kind == JOB;
        process->outputs[index].half = number(request, "output_cap_bytes") / 2;
    }
    return process;
}

static Process *find_process(const Request *request, enum Kind kind, const char *name) {
    pid_t id = number(request, name);
    for (Process *process = processes; process; process = process->next)
        if (process->kind == kind && process->id == id) return process;
    fail("not_found", "no %s %d, or it has ended", name, (int)id);
    return NULL;
}

static void report(long request, Process *process) {
    Reply reply = {0};
    int truncated = process->outputs[0].dropped || process->outputs[1].dropped;
    print(&reply.header, ", \"exit_code\": %d, \"truncated\": %s, \"timed_out\": %s",
          process->exit_code, truncated ? "true" : "false", process->timed_out ? "true" : "false");
    print(&reply.header, ", \"wall_seconds\": %.6f, \"cpu_seconds\": %.6f",
          now() - process->started, process->cpu);
    for (int index = 0; index < process->num_outputs; index++)
        give_output(&reply, &process->outputs[index]);
    send_reply(request, &reply);
}

static void report_job(long request, Process *job, long long offset, size_t length) {
    Reply reply = {0};
    Output *output = &job->outputs[0];
    drain(output);
    long long end = output->dropped + (long long)output->tail.size;
    long long begin = offset > output->dropped ? offset : output->dropped;
    if (begin > end) begin = end;
    size_t size = end - begin;
    if (size > length) size = length;
    print(&reply.header, ", \"offset\": %lld", begin);
    if (job->has_ended) print(&reply.header, ", \"exit_code\": %d", job->exit_code);
    else print(&reply.header, ", \"exit_code\": null");
    give(&reply, output->tail.data + (begin - output->dropped), size);
    send_reply(request, &reply);
}

/* ---- sessions ---- */

static Process *open_session(const Request *request) {
    int output[2], status[2], input[2];
    if (open_pipe(output) || open_pipe(status) || pipe2(input, O_CLOEXEC)) return NULL;
    int has_bash = access("/bin/bash", X_OK) == 0;
    char *bash[] = {"/bin/bash", "--noprofile", "--norc", NULL}, *plain[] = {"/bin/sh", NULL};
    char *folder = copy_text(blob(request, 0));
    char **pairs = texts(request, 1, request->num_blobs - 1);
    int ends[4] = {input[0], output[1], output[1], status[1]};
    pid_t id = start(folder, has_bash ? bash : plain, pairs, ends);
    free(folder);
    free_texts(pairs);
    close(input[0]); close(output[1]); close(status[1]);
    if (id < 0) { close(input[1]); close(output[0]); close(status[0]); return NULL; }
    Process *session = new_process(SESSION);
    session->id = id;
    session->num_outputs = 1;
    session->outputs[0].pipe = output[0];
    session->input = input[1];
    session->status = status[0];
    write_all(session->input, "trap : INT\n", 11);
    return session;
}

static int run_in_session(const Request *request) {
    Process *session = find_process(request, SESSION, "session");
    if (!session) return -1;
    if (session->request) return fail("busy", "session %d runs another command", session->id);
    drain(&session->outputs[0]);
    clear_output(&session->outputs[0]);
    session->outputs[0].half = number(request, "output_cap_bytes") / 2;
    session->started = now();
    session->deadline = session->started + number(request, "timeout_seconds");
    session->timed_out = 0;
    Bytes line = {0};
    Blob command = blob(request, 0);
    print(&line, "command eval '");
    for (size_t index = 0; index < command.size; index++)
        if (command.data[index] == '\'') add(&line, "'\\''", 4);
        else add(&line, command.data + index, 1);
    print(&line, "' </dev/null %d>&-; echo $? >&%d\n", STATUS_DESCRIPTOR, STATUS_DESCRIPTOR);
    ssize_t done = write(session->input, line.data, line.size);
    release(&line);
    if (done < 0) return fail("not_found", "session %d has ended", session->id);
    session->request = request->id;
    return 0;
}

static void hear_session(Process *session) {
    char text[4096];
    drain(&session->outputs[0]);
    ssize_t size = read(session->status, text, sizeof text - 1);
    if (size <= 0 || !session->request) return;
    text[size] = 0;
    while (size && text[size - 1] == '\n') text[--size] = 0;
    char *last = strrchr(text, '\n');
    session->exit_code = atoi(last ? last + 1 : text);
    drain(&session->outputs[0]);
    report(session->request, session);
    session->request = 0;
    session->deadline = 0;
}
