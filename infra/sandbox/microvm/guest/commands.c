/* Commands, sessions and jobs: processes of the box's user, what they print, and their time limits.
 *
 * A session is a shell that reads lines from a pipe; after each command it writes the exit code to a
 * second pipe. Output kept is a head and a tail (a job keeps only a tail), so floods cost nothing. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent.h"
#include "capture.h"

#define GRACE_SECONDS 0.5
#define JOB_BYTES (1 << 20)
#define MAX_PROCESSES 128
#define STATUS_FD 9 /* where a session's shell tells exit codes; commands do not have it */
#define MAX_VARIABLES 256

typedef enum { COMMAND, SESSION, JOB } Kind;

typedef struct {
    Kind kind;
    int64_t number;
    pid_t process;
    int out, err, in, status;     /* our ends; -1: closed */
    Buffer input;                 /* not written yet */
    Capture output, errors;
    int64_t waiting_id;           /* request that gets the result; 0: none */
    double started, deadline;     /* deadline 0: none */
    int64_t offset, length;       /* of the log, for who waits for a job */
    int kills, timed_out, ended, exit_code, separate;
    double cpu_seconds;
} Process;

static Process *processes[MAX_PROCESSES];

static int64_t count_oom_kills(void) {
    char text[8192];
    int file = open("/proc/vmstat", O_RDONLY | O_CLOEXEC);
    ssize_t length = file < 0 ? -1 : read(file, text, sizeof text - 1);
    if (file >= 0) close(file);
    if (length < 0) return 0;
    text[length] = 0;
    const char *found = strstr(text, "\noom_kill ");
    return found ? strtoll(found + 10, NULL, 10) : 0;
}

static void close_end(int *descriptor) {
    if (*descriptor >= 0) close(*descriptor);
    *descriptor = -1;
}

static void drain(int *descriptor, Capture *capture) {
    char chunk[1 << 14];
    ssize_t got;
    for (int rounds = 0; *descriptor >= 0 && rounds < 256; rounds++) {
        got = read(*descriptor, chunk, sizeof chunk);
        if (got < 0) return;
        if (!got) close_end(descriptor);
        else capture_add(capture, chunk, (size_t)got);
    }
}

static void feed(Process *process) {
    while (process->in >= 0 && process->input.length) {
        ssize_t written = write(process->in, process->input.data, process->input.length);
        if (written < 0 && errno == EAGAIN) return;
        if (written < 0) {
            close_end(&process->in);
            return;
        }
        memmove(process->input.data, process->input.data + written,
                process->input.length - (size_t)written);
        process->input.length -= (size_t)written;
    }
    if (process->kind != SESSION) close_end(&process->in);
}

static Process *find(const Request *request, const char *field, Kind kind, Fault *fault) {
    int64_t number = json_integer(request->header, field, 0);
    for (size_t i = 0; i < MAX_PROCESSES; i++)
        if (processes[i] && processes[i]->kind == kind && processes[i]->number == number)
            return processes[i];
    fail(fault, "not_found", "no %s %lld", field, (long long)number);
    return NULL;
}

static void forget(Process *process) {
    for (size_t i = 0; i < MAX_PROCESSES; i++)
        if (processes[i] == process) processes[i] = NULL;
    close_end(&process->out);
    close_end(&process->err);
    close_end(&process->in);
    close_end(&process->status);
    capture_reset(&process->output, 0, 0);
    capture_reset(&process->errors, 0, 0);
    buffer_free(&process->input);
    free(process);
}

/* A free place; an ended job gives up its own when there is none. */
static Process **find_place(void) {
    Process **oldest = NULL;
    for (size_t i = 0; i < MAX_PROCESSES; i++) {
        if (!processes[i]) return &processes[i];
        if (processes[i]->kind == JOB && processes[i]->ended &&
            (!oldest || processes[i]->started < (*oldest)->started))
            oldest = &processes[i];
    }
    if (oldest) forget(*oldest);
    return oldest;
}

static void set_variable(char **list, size_t *count, const char *text, size_t length) {
    char *copy = strndup(text, length);
    const char *equals = copy ? strchr(copy, '=') : NULL;
    if (!equals) {
        free(copy);
        return;
    }
    size_t key = (size_t)(equals - copy) + 1;
    for (size_t i = 0; i < *count; i++)
        if (!strncmp(list[i], copy, key)) {
            free(list[i]);
            list[i] = copy;
            return;
        }
    if (*count < MAX_VARIABLES - 1) list[(*count)++] = copy;
    else free(copy);
}

/* What every process gets, what the box was opened with, and the request's own NAME=value blobs. */
static char **make_environment(const Blob *variables, size_t num_variables) {
    static const char *const basic[] = {"PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
                                        "HOME=/tmp"};
    char **list = calloc(MAX_VARIABLES, sizeof *list);
    if (!list) abort();
    size_t count = 0;
    for (size_t i = 0; i < sizeof basic / sizeof *basic; i++)
        set_variable(list, &count, basic[i], strlen(basic[i]));
    const Json *own = box_environment();
    for (const Json *item = own ? own->first : NULL; item; item = item->next)
        if (item->kind == JSON_TEXT) set_variable(list, &count, item->text, item->text_bytes);
    for (size_t i = 0; i < num_variables; i++)
        set_variable(list, &count, variables[i].data, variables[i].length);
    return list;
}

static char **copy_texts(const Blob *blobs, size_t count) {
    char **texts = calloc(count + 1, sizeof *texts);
    if (!texts) abort();
    for (size_t i = 0; i < count; i++) texts[i] = strndup(blobs[i].data, blobs[i].length);
    return texts;
}

static void free_texts(char **texts) {
    for (char **text = texts; *text; text++) free(*text);
    free(texts);
}

/* In the child, which shares our memory until it is another program: system calls only. */
static void become(const Process *process, const int ends[4], const char *directory,
                   char **arguments, char **environment) {
    sigset_t none;
    sigemptyset(&none);
    setsid();
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    for (int i = 0; i < 3; i++)
        if (dup2(ends[i], i) < 0) _exit(126);
    if (process->kind == SESSION && dup2(ends[3], STATUS_FD) < 0) _exit(126);
    box_limit_process();
    if (setgroups(0, NULL) || setgid(BOX_USER) || setuid(BOX_USER) || chdir(directory)) _exit(126);
    execvpe(arguments[0], arguments, environment);
    const char *why = strerror(errno);
    for (const char *text = arguments[0]; text; text = text == why ? NULL : why)
        if (write(2, text, strlen(text)) < 0 || write(2, text == why ? "\n" : ": ", 2 - (text == why)) < 0)
            break;
    _exit(127);
}

/* Apart from `start`, whose variables a vfork might spoil. */
static __attribute__((noinline)) pid_t spawn(const Process *process, const int ends[4],
                                             const char *directory, char **arguments,
                                             char **environment) {
    pid_t child = vfork();
    if (!child) become(process, ends, directory, arguments, environment);
    return child;
}

static int make_pipe(int ends[2], int ours) {
    if (pipe2(ends, O_CLOEXEC)) return -1;
    return fcntl(ends[ours], F_SETFL, O_NONBLOCK);
}

/* Moves a descriptor out of the way of those that `become` fills. */
static int lift(int descriptor) {
    int high = fcntl(descriptor, F_DUPFD_CLOEXEC, 32);
    close(descriptor);
    return high;
}

typedef struct {
    int in[2], out[2], err[2], status[2];
} Pipes;

static int open_pipes(Pipes *pipes, const Process *process) {
    *pipes = (Pipes){{-1, -1}, {-1, -1}, {-1, -1}, {-1, -1}};
    if (make_pipe(pipes->in, 1) || make_pipe(pipes->out, 0)) return -1;
    if (process->separate && make_pipe(pipes->err, 0)) return -1;
    if (process->kind == SESSION && make_pipe(pipes->status, 0)) return -1;
    pipes->in[0] = lift(pipes->in[0]);
    pipes->out[1] = lift(pipes->out[1]);
    if (process->separate) pipes->err[1] = lift(pipes->err[1]);
    if (process->kind == SESSION) pipes->status[1] = lift(pipes->status[1]);
    return 0;
}

static Outcome check_folder(const char *folder, char directory[PATH_MAX], Fault *fault) {
    struct stat status;
    if (files_resolve(folder, directory, fault) == FAILED) return FAILED;
    if (stat(directory, &status)) {
        fail_errno(fault, folder);
        return fail(fault, "invalid", "%.200s: no such folder", folder);
    }
    if (S_ISDIR(status.st_mode)) return ANSWERED;
    return fail(fault, "invalid", "%.200s is not a folder", folder);
}

/* Starts `arguments` in the folder that is the request's first blob. */
static Outcome start(const Request *request, Kind kind, char **arguments, const Blob *variables,
                     size_t num_variables, Process **made, Fault *fault) {
    char directory[PATH_MAX], folder[PATH_MAX];
    Pipes pipes;
    snprintf(folder, sizeof folder, "%.*s", (int)request->blobs[0].length, request->blobs[0].data);
    if (check_folder(folder, directory, fault) == FAILED) return FAILED;
    Process **place = find_place();
    if (!place) return fail(fault, "busy", "%d commands run already", MAX_PROCESSES);
    Process *process = calloc(1, sizeof *process);
    if (!process) abort();
    process->kind = kind;
    process->separate = json_integer(request->header, "separate", 0) != 0;
    if (open_pipes(&pipes, process)) {
        free(process);
        return fail_errno(fault, "make a pipe");
    }
    const int ends[4] = {pipes.in[0], pipes.out[1],
                         process->separate ? pipes.err[1] : pipes.out[1], pipes.status[1]};
    char **environment = make_environment(variables, num_variables);
    process->started = monotonic_seconds();
    process->process = spawn(process, ends, directory, arguments, environment);
    free_texts(environment);
    for (int i = 0; i < 4; i++)
        if (i != 2 || process->separate)
            if (ends[i] >= 0) close(ends[i]);
    process->in = pipes.in[1];
    process->out = pipes.out[0];
    process->err = pipes.err[0];
    process->status = pipes.status[0];
    process->number = process->process;
    *place = *made = process;
    if (process->process > 0) return ANSWERED;
    forget(process);
    return fail_errno(fault, "start a process");
}

/* Blobs: folder, stdin, arguments, then NAME=value pairs, as many as the header says. */
static Outcome start_command(const Request *request, Kind kind, Process **made, Fault *fault) {
    int64_t arguments = json_integer(request->header, "arguments", 0);
    int64_t variables = json_integer(request->header, "variables", 0);
    if (arguments < 1 || variables < 0 || (uint64_t)(2 + arguments + variables) != request->num_blobs)
        return fail(fault, "invalid", "%zu blobs for %lld arguments and %lld variables",
                    request->num_blobs, (long long)arguments, (long long)variables);
    char **texts = copy_texts(request->blobs + 2, (size_t)arguments);
    Outcome outcome = start(request, kind, texts, request->blobs + 2 + arguments,
                            (size_t)variables, made, fault);
    free_texts(texts);
    if (outcome == FAILED) return FAILED;
    buffer_add(&(*made)->input, request->blobs[1].data, request->blobs[1].length);
    feed(*made);
    return ANSWERED;
}

static void limit_command(Process *process, const Request *request) {
    int64_t cap_bytes = json_integer(request->header, "output_cap_bytes", 16384);
    size_t half = cap_bytes > 0 ? (size_t)cap_bytes / 2 : 0;
    capture_reset(&process->output, half, half);
    capture_reset(&process->errors, half, half);
    process->waiting_id = request->id;
    process->started = monotonic_seconds();
    process->deadline = process->started + json_number(request->header, "timeout_seconds", 60);
    process->timed_out = process->kills = 0;
}

static void answer_command(Process *process, int exit_code) {
    Reply reply = {0};
    Buffer output = {0}, errors = {0};
    drain(&process->out, &process->output);
    drain(&process->err, &process->errors);
    int truncated = capture_text(&process->output, &output);
    truncated |= capture_text(&process->errors, &errors);
    buffer_format(&reply.fields,
                  ", \"exit_code\": %d, \"truncated\": %s, \"timed_out\": %s, "
                  "\"memory_kills\": %lld, \"wall_seconds\": %.6f, \"cpu_seconds\": %.6f",
                  exit_code, truncated ? "true" : "false", process->timed_out ? "true" : "false",
                  exit_code ? (long long)count_oom_kills() : -1LL,
                  monotonic_seconds() - process->started, process->cpu_seconds);
    reply_blob(&reply, output.data, output.length);
    if (process->separate) reply_blob(&reply, errors.data, errors.length);
    if (process->waiting_id > 0) reply_send(process->waiting_id, &reply);
    buffer_free(&output);
    buffer_free(&errors);
    process->waiting_id = 0;
    process->deadline = 0;
}

Outcome commands_exec(const Request *request, Reply *reply, Fault *fault) {
    (void)reply;
    Process *process;
    if (start_command(request, COMMAND, &process, fault) == FAILED) return FAILED;
    limit_command(process, request);
    return LATER;
}

Outcome commands_session_open(const Request *request, Reply *reply, Fault *fault) {
    Process *process;
    char *bash[] = {"bash", "--noprofile", "--norc", NULL}, *plain[] = {"sh", NULL};
    if (!request->num_blobs) return fail(fault, "invalid", "session_open without a folder");
    if (start(request, SESSION, access("/bin/bash", X_OK) ? plain : bash, request->blobs + 1,
              request->num_blobs - 1, &process, fault) == FAILED)
        return FAILED;
    /* A trap for INT keeps the shell alive when a command is interrupted; commands get the default. */
    buffer_format(&process->input, "trap : INT\n");
    feed(process);
    buffer_format(&reply->fields, ", \"session\": %lld", (long long)process->number);
    return ANSWERED;
}

Outcome commands_session_run(const Request *request, Reply *reply, Fault *fault) {
    (void)reply;
    Process *process = find(request, "session", SESSION, fault);
    if (!process) return FAILED;
    if (process->waiting_id) return fail(fault, "busy", "the session runs another command");
    drain(&process->out, &process->output);
    limit_command(process, request);
    buffer_format(&process->input, "command eval '");
    for (size_t i = 0; request->num_blobs && i < request->blobs[0].length; i++) {
        const char *at = request->blobs[0].data + i;
        if (*at == '\'') buffer_add(&process->input, "'\\''", 4);
        else buffer_add(&process->input, at, 1);
    }
    buffer_format(&process->input, "' </dev/null %d>&-; echo $? >&%d\n", STATUS_FD, STATUS_FD);
    feed(process);
    return LATER;
}

Outcome commands_session_signal(const Request *request, Reply *reply, Fault *fault) {
    (void)reply;
    Process *process = find(request, "session", SESSION, fault);
    if (!process) return FAILED;
    kill(-process->process, (int)json_integer(request->header, "signal", SIGINT));
    return ANSWERED;
}

Outcome commands_session_close(const Request *request, Reply *reply, Fault *fault) {
    (void)reply;
    Process *process = find(request, "session", SESSION, fault);
    if (!process) return FAILED;
    kill(-process->process, SIGKILL);
    return ANSWERED;
}

Outcome commands_job_start(const Request *request, Reply *reply, Fault *fault) {
    Process *process;
    if (start_command(request, JOB, &process, fault) == FAILED) return FAILED;
    capture_reset(&process->output, 0, JOB_BYTES);
    buffer_format(&reply->fields, ", \"job\": %lld", (long long)process->number);
    return ANSWERED;
}

static void add_logs(Process *job, int64_t offset, int64_t max_bytes, Reply *reply) {
    drain(&job->out, &job->output);
    capture_trim(&job->output, 0);
    int64_t first = (int64_t)(job->output.total - job->output.tail.length);
    int64_t end = (int64_t)job->output.total;
    if (offset < first) offset = first;
    if (offset > end) offset = end;
    int64_t length = end - offset < max_bytes ? end - offset : max_bytes > 0 ? max_bytes : 0;
    buffer_format(&reply->fields, ", \"offset\": %lld, \"exit_code\": ", (long long)offset);
    if (job->ended) buffer_format(&reply->fields, "%d", job->exit_code);
    else buffer_format(&reply->fields, "null");
    reply_blob(reply, length ? job->output.tail.data + (offset - first) : "", (size_t)length);
}

Outcome commands_job_logs(const Request *request, Reply *reply, Fault *fault) {
    Process *job = find(request, "job", JOB, fault);
    if (!job) return FAILED;
    add_logs(job, json_integer(request->header, "offset", 0),
             json_integer(request->header, "length", 65536), reply);
    return ANSWERED;
}

Outcome commands_job_wait(const Request *request, Reply *reply, Fault *fault) {
    Process *job = find(request, "job", JOB, fault);
    if (!job) return FAILED;
    if (job->ended) return commands_job_logs(request, reply, fault);
    if (job->waiting_id) return fail(fault, "busy", "the job is waited for already");
    job->waiting_id = request->id;
    job->offset = json_integer(request->header, "offset", 0);
    job->length = json_integer(request->header, "length", JOB_BYTES);
    job->deadline = monotonic_seconds() + json_number(request->header, "timeout_seconds", 60);
    return LATER;
}

Outcome commands_job_kill(const Request *request, Reply *reply, Fault *fault) {
    (void)reply;
    Process *job = find(request, "job", JOB, fault);
    if (!job) return FAILED;
    if (!job->ended) kill(-job->process, (int)json_integer(request->header, "signal", SIGKILL));
    return ANSWERED;
}

void commands_forget_requests(void) {
    for (size_t i = 0; i < MAX_PROCESSES; i++)
        if (processes[i] && processes[i]->waiting_id) {
            processes[i]->waiting_id = processes[i]->kind == JOB ? 0 : -1;
            if (processes[i]->kind == JOB) processes[i]->deadline = 0;
        }
}

size_t commands_watch(struct pollfd *polled, size_t room) {
    size_t count = 0;
    for (size_t i = 0; i < MAX_PROCESSES && count + 4 <= room; i++) {
        Process *process = processes[i];
        if (!process) continue;
        const int readable[] = {process->out, process->err, process->status};
        for (size_t j = 0; j < 3; j++)
            if (readable[j] >= 0) polled[count++] = (struct pollfd){readable[j], POLLIN, 0};
        if (process->in >= 0 && process->input.length)
            polled[count++] = (struct pollfd){process->in, POLLOUT, 0};
    }
    return count;
}

/* A session's shell says how its command ended. */
static void take_status(Process *process) {
    char text[32];
    ssize_t got = read(process->status, text, sizeof text - 1);
    if (!got) close_end(&process->status);
    if (got <= 0) return;
    text[got] = 0;
    if (process->waiting_id) answer_command(process, atoi(text));
}

void commands_take(const struct pollfd *polled, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!polled[i].revents) continue;
        for (size_t j = 0; j < MAX_PROCESSES; j++) {
            Process *process = processes[j];
            if (!process) continue;
            int descriptor = polled[i].fd;
            if (descriptor == process->out) drain(&process->out, &process->output);
            else if (descriptor == process->err) drain(&process->err, &process->errors);
            else if (descriptor == process->in) feed(process);
            else if (descriptor == process->status) take_status(process);
            else continue;
            break;
        }
    }
}

static void end(Process *process, int exit_code, double cpu_seconds) {
    process->ended = 1;
    process->exit_code = exit_code;
    process->cpu_seconds = cpu_seconds;
    drain(&process->out, &process->output);
    drain(&process->err, &process->errors);
    kill(-process->process, SIGKILL);
    close_end(&process->in);
    if (process->kind == JOB) {
        close_end(&process->out);
        if (process->waiting_id) {
            Reply reply = {0};
            add_logs(process, process->offset, process->length, &reply);
            reply_send(process->waiting_id, &reply);
        }
        process->waiting_id = 0;
        process->deadline = 0;
        return;
    }
    if (process->waiting_id) answer_command(process, exit_code);
    forget(process);
}

void commands_reap(void) {
    int status;
    struct rusage used;
    pid_t pid;
    while ((pid = wait4(-1, &status, WNOHANG, &used)) > 0) {
        int exit_code = WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
        double cpu = (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
                     1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
        for (size_t i = 0; i < MAX_PROCESSES; i++)
            if (processes[i] && processes[i]->process == pid && !processes[i]->ended) {
                end(processes[i], exit_code, cpu);
                break;
            }
    }
}

static void pass_deadline(Process *process, double now) {
    if (process->kind == JOB) {
        Fault fault = {0};
        fail(&fault, "timeout", "job %lld still runs", (long long)process->number);
        reply_fault(process->waiting_id, &fault);
        process->waiting_id = 0;
        process->deadline = 0;
        return;
    }
    int first = process->kind == SESSION ? SIGINT : SIGTERM;
    process->timed_out = 1;
    kill(-process->process, process->kills++ ? SIGKILL : first);
    process->deadline = now + GRACE_SECONDS;
}

double commands_check_time(void) {
    double now = monotonic_seconds(), next = -1;
    for (size_t i = 0; i < MAX_PROCESSES; i++) {
        Process *process = processes[i];
        if (!process || !process->deadline) continue;
        if (process->deadline <= now) pass_deadline(process, now);
        if (!process->deadline) continue;
        double left = process->deadline - now;
        if (next < 0 || left < next) next = left;
    }
    return next < 0 ? next : next > 0 ? next : 0;
}
