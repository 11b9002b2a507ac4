/* Growing buffers, the little JSON that frames need, and SHA-256. Knows nothing of the agent. */
#ifndef OSTINATO_TEXT_H
#define OSTINATO_TEXT_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    char *data;
    size_t length, capacity;
} Buffer;

void buffer_add(Buffer *buffer, const void *data, size_t length);
void buffer_format(Buffer *buffer, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* A JSON string with quotes; bytes that are not UTF-8 become lone surrogates, as in Python. */
void buffer_add_quoted(Buffer *buffer, const char *text);
void buffer_free(Buffer *buffer);

typedef enum { JSON_NULL, JSON_BOOLEAN, JSON_NUMBER, JSON_TEXT, JSON_LIST, JSON_OBJECT } JsonKind;

typedef struct Json {
    JsonKind kind;
    char *key;            /* inside an object */
    char *text;           /* JSON_TEXT, ends with a zero byte */
    size_t text_bytes;    /* more than strlen(text) when it holds a zero byte */
    double number;        /* JSON_NUMBER; JSON_BOOLEAN: 0 or 1 */
    int64_t integer;      /* the same, exact */
    struct Json *first, *next;
} Json;

/* NULL when it is not JSON. */
Json *json_parse(const char *text, size_t length);
void json_free(Json *json);
Json *json_get(const Json *object, const char *key);
const char *json_text(const Json *object, const char *key, const char *fallback);
int64_t json_integer(const Json *object, const char *key, int64_t fallback);
double json_number(const Json *object, const char *key, double fallback);

void sha256_hex(const void *data, size_t length, char hex[65]);

#endif
