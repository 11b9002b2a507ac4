/* Commands of agent.c: start, output and end. */
#pragma once
#include "frames.h"

/* ---- output of commands ---- */

typedef struct {
    int pipe;             /* -1: closed */
    size_t half;          /* number of bytes kept of the beginning, and of the end */
    Bytes head, tail;
    long long dropped;
} Output;

static void keep(Output *output, const char *data, size_t size) {
    if (output->head.size < output->half) {
        size_t part = output->half - output->head.size;
        if (part > size) part = size;
        add(&output->head, data, part);
        data += part;
        size -= part;
    }
    add(&output->tail, data, size);
    if (output->tail.size > output->half) {
        size_t excess = output->tail.size - output->half;
        output->dropped += excess;
        drop_front(&output->tail, excess);
    }
}

static void close_output(Output *output) {
    if (output->pipe >= 0) close(output->pipe);
    output->pipe = -1;
}

/* Reads the pipe, at most 32 pieces at a time so that a flood cannot block the loop, and closes it at its end. */
static void drain(Output *output) {
    static char data[65536];
    for (int round = 0; round < 32 && output->pipe >= 0; round++) {
        ssize_t size = read(output->pipe, data, sizeof data);
        if (size > 0) { keep(output, data, size); continue; }
        if (size < 0 && errno == EINTR) continue;
        if (size < 0 && errno == EAGAIN) return;
        close_output(output);
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

/* ---- commands ---- */

typedef struct Process {
    struct Process *next;
    pid_t id;
    long request;
    double started, deadline;
    int timed_out;
    Output output;
} Process;

static Process *processes;

static pid_t start(const char *command, int input, int output) {
    pid_t id = fork();
    if (id < 0) fail("invalid", "no process could be started: %s", strerror(errno));
    if (id) return id;
    setsid();
    signal(SIGPIPE, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    signal(SIGCHLD, SIG_DFL);
    /* When the box runs out of memory, the kernel must kill commands before this server. */
    int file = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (file >= 0) { if (write(file, "1000", 4) < 0) {} close(file); }
    int copies[2] = {fcntl(input, F_DUPFD_CLOEXEC, 64), fcntl(output, F_DUPFD_CLOEXEC, 64)};
    dup2(copies[0], 0);
    dup2(copies[1], 1);
    dup2(copies[1], 2);
    /* The kernel limits an argument to under 128 KiB, so a longer command is read from a file. */
    int script = strlen(command) < 128 << 10 ? -1 : memfd_create("command", 0);
    char path[32];
    if (script >= 0) write_all(script, command, strlen(command));
    snprintf(path, sizeof path, "/proc/self/fd/%d", script);
    if (chdir(ROOT) == 0) {
        if (script < 0) execl("/bin/sh", "/bin/sh", "-c", command, NULL);
        else execl("/bin/sh", "/bin/sh", path, NULL);
    }
    dprintf(2, "/bin/sh in %s: %s\n", ROOT, strerror(errno));
    _exit(127);
}

/* A child that has not called setsid yet leads no group, so the signal goes to the child alone. */
static void signal_group(pid_t id, int number) {
    if (killpg(id, number)) kill(id, number);
}

static int open_input(Blob text) {
    if (!text.size) return open("/dev/null", O_RDONLY | O_CLOEXEC);
    int file = memfd_create("stdin", MFD_CLOEXEC);
    if (file < 0) return -1;
    write_all(file, text.data, text.size);
    lseek(file, 0, SEEK_SET);
    return file;
}

/* Blobs: a shell command and its stdin. The request is answered when the command has ended. */
static int start_command(const Request *request) {
    int ends[2], input = open_input(blob(request, 1));
    if (pipe2(ends, O_CLOEXEC)) return fail_system("pipe");
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    char *command = copy_text(blob(request, 0));
    pid_t id = start(command, input, ends[1]);
    free(command);
    close(input);
    close(ends[1]);
    if (id < 0) { close(ends[0]); return -1; }
    Process *process = calloc(1, sizeof *process);
    if (!process) _exit(70);
    process->id = id;
    process->request = request->id;
    process->started = now();
    process->deadline = process->started + number(request, "timeout_seconds");
    process->output.pipe = ends[0];
    process->output.half = number(request, "output_cap_bytes") / 2;
    process->next = processes;
    processes = process;
    return 0;
}

static void forget(Process *process) {
    Process **place = &processes;
    while (*place != process) place = &(*place)->next;
    *place = process->next;
    close_output(&process->output);
    release(&process->output.head);
    release(&process->output.tail);
    free(process);
}

/* Answers the request of a command that has ended, and kills the rest of its group. */
static void finish(Process *process, int status) {
    Reply reply = {0};
    int exit_code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    drain(&process->output);
    signal_group(process->id, SIGKILL);
    print(&reply.header, ", \"exit_code\": %d, \"truncated\": %s, \"timed_out\": %s", exit_code,
          process->output.dropped ? "true" : "false", process->timed_out ? "true" : "false");
    print(&reply.header, ", \"wall_seconds\": %.6f", now() - process->started);
    give_output(&reply, &process->output);
    send_reply(process->request, &reply);
    forget(process);
}

static void reap(void) {
    int status;
    pid_t id;
    while ((id = waitpid(-1, &status, WNOHANG)) > 0) {
        Process *process = processes;
        while (process && process->id != id) process = process->next;
        if (process) finish(process, status);
    }
}

/* Sends TERM to commands past their deadline, and KILL after GRACE_SECONDS. */
static void signal_expired_commands(void) {
    double time = now();
    for (Process *process = processes; process; process = process->next) {
        if (process->deadline > time) continue;
        signal_group(process->id, process->timed_out ? SIGKILL : SIGTERM);
        process->timed_out = 1;
        process->deadline = time + GRACE_SECONDS;
    }
}

/* Time until the nearest deadline. -1: there is none. */
static int wait_milliseconds(void) {
    double nearest = 0, time = now();
    for (Process *process = processes; process; process = process->next)
        if (!nearest || process->deadline < nearest) nearest = process->deadline;
    if (!nearest) return -1;
    return nearest <= time ? 0 : (int)((nearest - time) * 1000) + 1;
}
