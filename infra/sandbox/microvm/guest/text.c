/* See text.h. Out of memory ends the process: nothing useful could follow. */
#include "text.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 16

static void *must(void *memory) {
    if (!memory) abort();
    return memory;
}

void buffer_add(Buffer *buffer, const void *data, size_t length) {
    if (buffer->length + length + 1 > buffer->capacity) {
        size_t capacity = buffer->capacity ? buffer->capacity : 256;
        while (capacity < buffer->length + length + 1) capacity *= 2;
        buffer->data = must(realloc(buffer->data, capacity));
        buffer->capacity = capacity;
    }
    if (length) memcpy(buffer->data + buffer->length, data, length);
    buffer->length += length;
    buffer->data[buffer->length] = 0;
}

void buffer_format(Buffer *buffer, const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (length >= (int)sizeof text) length = sizeof text - 1;
    buffer_add(buffer, text, length > 0 ? (size_t)length : 0);
}

void buffer_free(Buffer *buffer) {
    free(buffer->data);
    memset(buffer, 0, sizeof *buffer);
}

/* Bytes of the UTF-8 sequence at `text`; 0: not one. */
static int utf8_bytes(const unsigned char *text) {
    int length = text[0] < 0x80 ? 1 : (text[0] & 0xe0) == 0xc0 ? 2 : (text[0] & 0xf0) == 0xe0 ? 3
                 : (text[0] & 0xf8) == 0xf0 ? 4 : 0;
    for (int i = 1; i < length; i++)
        if ((text[i] & 0xc0) != 0x80) return 0;
    if (length == 2 && text[0] < 0xc2) return 0;
    if (length == 3 && text[0] == 0xe0 && text[1] < 0xa0) return 0;
    if (length == 3 && text[0] == 0xed && text[1] >= 0xa0) return 0;
    if (length == 4 && ((text[0] == 0xf0 && text[1] < 0x90) || text[0] > 0xf4 ||
                        (text[0] == 0xf4 && text[1] >= 0x90)))
        return 0;
    return length;
}

void buffer_add_quoted(Buffer *buffer, const char *text) {
    const unsigned char *at = (const unsigned char *)text;
    buffer_add(buffer, "\"", 1);
    while (*at) {
        int length = utf8_bytes(at);
        if (!length) {
            buffer_format(buffer, "\\udc%02x", *at);
            length = 1;
        } else if (*at < 0x20 || *at == '"' || *at == '\\' || *at == 0x7f) {
            buffer_format(buffer, "\\u%04x", *at);
        } else {
            buffer_add(buffer, at, (size_t)length);
        }
        at += length;
    }
    buffer_add(buffer, "\"", 1);
}

typedef struct {
    const char *at, *end;
} Reader;

static void skip_space(Reader *reader) {
    while (reader->at < reader->end && strchr(" \t\r\n", *reader->at)) reader->at++;
}

static int take(Reader *reader, char wanted) {
    skip_space(reader);
    if (reader->at >= reader->end || *reader->at != wanted) return 0;
    reader->at++;
    return 1;
}

static int read_unit(Reader *reader, unsigned *unit) {
    char digits[5] = {0}, *stop;
    if (reader->end - reader->at < 4) return 0;
    memcpy(digits, reader->at, 4);
    *unit = (unsigned)strtoul(digits, &stop, 16);
    reader->at += 4;
    return *stop == 0;
}

static void add_code_point(Buffer *out, unsigned point) {
    char bytes[4];
    int length = 0;
    if (point >= 0xdc80 && point <= 0xdcff) {
        bytes[length++] = (char)(point & 0xff); /* a raw byte that travelled as a lone surrogate */
    } else if (point < 0x80) {
        bytes[length++] = (char)point;
    } else if (point < 0x800) {
        bytes[length++] = (char)(0xc0 | point >> 6);
        bytes[length++] = (char)(0x80 | (point & 0x3f));
    } else if (point < 0x10000) {
        bytes[length++] = (char)(0xe0 | point >> 12);
        bytes[length++] = (char)(0x80 | (point >> 6 & 0x3f));
        bytes[length++] = (char)(0x80 | (point & 0x3f));
    } else {
        bytes[length++] = (char)(0xf0 | point >> 18);
        bytes[length++] = (char)(0x80 | (point >> 12 & 0x3f));
        bytes[length++] = (char)(0x80 | (point >> 6 & 0x3f));
        bytes[length++] = (char)(0x80 | (point & 0x3f));
    }
    buffer_add(out, bytes, (size_t)length);
}

static int read_escape(Reader *reader, Buffer *out) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (reader->at >= reader->end) return 0;
    char name = *reader->at++;
    if (name == 'u') {
        unsigned unit, low;
        if (!read_unit(reader, &unit)) return 0;
        if (unit >= 0xd800 && unit < 0xdc00 && reader->end - reader->at >= 6 &&
            reader->at[0] == '\\' && reader->at[1] == 'u') {
            reader->at += 2;
            if (!read_unit(reader, &low)) return 0;
            unit = 0x10000 + ((unit - 0xd800) << 10) + ((low - 0xdc00) & 0x3ff);
        }
        add_code_point(out, unit);
        return 1;
    }
    const char *found = name ? strchr(names, name) : NULL;
    if (!found) return 0;
    buffer_add(out, &values[found - names], 1);
    return 1;
}

static int read_text(Reader *reader, Buffer *out) {
    buffer_add(out, "", 0);
    while (reader->at < reader->end) {
        const char *start = reader->at;
        while (reader->at < reader->end && *reader->at != '"' && *reader->at != '\\') reader->at++;
        buffer_add(out, start, (size_t)(reader->at - start));
        if (reader->at >= reader->end) return 0;
        if (*reader->at++ == '"') return 1;
        if (!read_escape(reader, out)) return 0;
    }
    return 0;
}

static Json *read_value(Reader *reader, int depth);

static int read_members(Reader *reader, Json *parent, int depth) {
    char close = parent->kind == JSON_OBJECT ? '}' : ']';
    Json **tail = &parent->first;
    if (take(reader, close)) return 1;
    do {
        Buffer key = {0};
        if (parent->kind == JSON_OBJECT &&
            !(take(reader, '"') && read_text(reader, &key) && take(reader, ':'))) {
            buffer_free(&key);
            return 0;
        }
        Json *value = read_value(reader, depth + 1);
        if (!value) {
            buffer_free(&key);
            return 0;
        }
        value->key = key.data;
        *tail = value;
        tail = &value->next;
    } while (take(reader, ','));
    return take(reader, close);
}

static int read_plain(Reader *reader, Json *value) {
    static const struct { const char *word; JsonKind kind; int number; } words[] = {
        {"true", JSON_BOOLEAN, 1}, {"false", JSON_BOOLEAN, 0}, {"null", JSON_NULL, 0}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        size_t length = strlen(words[i].word);
        if ((size_t)(reader->end - reader->at) >= length &&
            !memcmp(reader->at, words[i].word, length)) {
            reader->at += length;
            value->kind = words[i].kind;
            value->number = value->integer = words[i].number;
            return 1;
        }
    }
    char digits[48], *stop;
    size_t length = 0;
    while (reader->at + length < reader->end && length < sizeof digits - 1 &&
           strchr("+-.eE0123456789", reader->at[length]))
        length++;
    if (!length) return 0;
    memcpy(digits, reader->at, length);
    digits[length] = 0;
    value->kind = JSON_NUMBER;
    value->number = strtod(digits, &stop);
    if (*stop) return 0;
    int64_t exact = strtoll(digits, &stop, 10);
    value->integer = *stop ? (int64_t)value->number : exact;
    reader->at += length;
    return 1;
}

static Json *read_value(Reader *reader, int depth) {
    Json *value = must(calloc(1, sizeof *value));
    int good = depth < MAX_DEPTH;
    if (good && take(reader, '{')) {
        value->kind = JSON_OBJECT;
        good = read_members(reader, value, depth);
    } else if (good && take(reader, '[')) {
        value->kind = JSON_LIST;
        good = read_members(reader, value, depth);
    } else if (good && take(reader, '"')) {
        Buffer text = {0};
        value->kind = JSON_TEXT;
        good = read_text(reader, &text);
        value->text = text.data;
        value->text_bytes = text.length;
    } else if (good) {
        good = read_plain(reader, value);
    }
    if (good) return value;
    json_free(value);
    return NULL;
}

Json *json_parse(const char *text, size_t length) {
    Reader reader = {text, text + length};
    Json *value = read_value(&reader, 0);
    skip_space(&reader);
    if (value && reader.at != reader.end) {
        json_free(value);
        return NULL;
    }
    return value;
}

void json_free(Json *json) {
    while (json) {
        Json *next = json->next;
        json_free(json->first);
        free(json->key);
        free(json->text);
        free(json);
        json = next;
    }
}

Json *json_get(const Json *object, const char *key) {
    for (Json *child = object ? object->first : NULL; child; child = child->next)
        if (child->key && !strcmp(child->key, key)) return child;
    return NULL;
}

const char *json_text(const Json *object, const char *key, const char *fallback) {
    const Json *value = json_get(object, key);
    return value && value->kind == JSON_TEXT ? value->text : fallback;
}

int64_t json_integer(const Json *object, const char *key, int64_t fallback) {
    const Json *value = json_get(object, key);
    return value && (value->kind == JSON_NUMBER || value->kind == JSON_BOOLEAN) ? value->integer
                                                                                : fallback;
}

double json_number(const Json *object, const char *key, double fallback) {
    const Json *value = json_get(object, key);
    return value && value->kind == JSON_NUMBER ? value->number : fallback;
}

static uint32_t rotate(uint32_t word, int count) { return word >> count | word << (32 - count); }

/* The constants are the fractions of the square and cube roots of the first primes. */
static const uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static void sha256_block(uint32_t state[8], const unsigned char *block) {
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | block[4 * i + 1] << 16 | block[4 * i + 2] << 8 |
               block[4 * i + 3];
    for (int i = 16; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] +
               (rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(s, state, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t one = s[7] + (rotate(s[4], 6) ^ rotate(s[4], 11) ^ rotate(s[4], 25)) +
                       ((s[4] & s[5]) ^ (~s[4] & s[6])) + ROUND[i] + w[i];
        uint32_t two = (rotate(s[0], 2) ^ rotate(s[0], 13) ^ rotate(s[0], 22)) +
                       ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += one;
        s[0] = one + two;
    }
    for (int i = 0; i < 8; i++) state[i] += s[i];
}

void sha256_hex(const void *data, size_t length, char hex[65]) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    unsigned char last[128] = {0};
    size_t whole = length / 64 * 64, rest = length - whole, total = rest < 56 ? 64 : 128;
    for (size_t i = 0; i < whole; i += 64) sha256_block(state, (const unsigned char *)data + i);
    if (rest) memcpy(last, (const char *)data + whole, rest);
    last[rest] = 0x80;
    for (int i = 0; i < 8; i++) last[total - 1 - (size_t)i] = (unsigned char)(length * 8ULL >> 8 * i);
    for (size_t i = 0; i < total; i += 64) sha256_block(state, last + i);
    for (int i = 0; i < 8; i++) snprintf(hex + 8 * i, 9, "%08x", state[i]);
}
