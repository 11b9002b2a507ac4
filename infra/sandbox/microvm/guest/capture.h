/* What a command printed: its first bytes and its last, so a flood costs nothing. */
#ifndef OSTINATO_CAPTURE_H
#define OSTINATO_CAPTURE_H

#include "text.h"

typedef struct {
    Buffer head, tail;
    size_t head_limit, tail_limit;
    uint64_t total;
} Capture;

/* Cuts the tail to its limit when it is longer by more than `slack`. */
void capture_trim(Capture *capture, size_t slack);
void capture_add(Capture *capture, const char *data, size_t length);
void capture_reset(Capture *capture, size_t head_limit, size_t tail_limit);
/* All of it, or head and tail around a note. Nonzero when something was left out. */
int capture_text(Capture *capture, Buffer *out);

#endif
