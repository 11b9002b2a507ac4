/* See capture.h. */
#include "capture.h"

#include <string.h>

void capture_trim(Capture *capture, size_t slack) {
    if (capture->tail.length <= capture->tail_limit + slack) return;
    size_t excess = capture->tail.length - capture->tail_limit;
    memmove(capture->tail.data, capture->tail.data + excess, capture->tail_limit);
    capture->tail.length = capture->tail_limit;
}

void capture_add(Capture *capture, const char *data, size_t length) {
    size_t room = capture->head_limit - capture->head.length;
    size_t first = length < room ? length : room;
    capture->total += length;
    if (first) buffer_add(&capture->head, data, first);
    if (length > first) buffer_add(&capture->tail, data + first, length - first);
    capture_trim(capture, capture->tail_limit + 65536);
}

void capture_reset(Capture *capture, size_t head_limit, size_t tail_limit) {
    buffer_free(&capture->head);
    buffer_free(&capture->tail);
    *capture = (Capture){.head_limit = head_limit, .tail_limit = tail_limit};
}

int capture_text(Capture *capture, Buffer *out) {
    capture_trim(capture, 0);
    uint64_t dropped = capture->total - capture->head.length - capture->tail.length;
    buffer_add(out, capture->head.data, capture->head.length);
    if (dropped)
        buffer_format(out, "\n[... %llu bytes left out ...]\n", (unsigned long long)dropped);
    buffer_add(out, capture->tail.data, capture->tail.length);
    return dropped != 0;
}
