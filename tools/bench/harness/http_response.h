/* Parses one HTTP/1.1 response from reads of any size. Only content-length or chunked framing: a response
 * that ends with its connection could not be distinguished from a truncated one. */
#ifndef HTTP_RESPONSE_H
#define HTTP_RESPONSE_H
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

enum { HEAD_BYTES = 8192 };
enum response_state { IN_HEAD, IN_BODY, IN_SIZE, IN_CHUNK, IN_CHUNK_END, IN_TRAILER, COMPLETE, INVALID };

struct response {
    enum response_state state;
    int status, closes_connection;
    size_t bytes_left, line_len;                  /* of the body or chunk; of the size or trailer line */
    size_t head_len;
    char head[HEAD_BYTES], line[64];
};

typedef void body_callback(void *context, const char *text, size_t len);

static void response_reset(struct response *r)
{
    r->state = IN_HEAD;
    r->head_len = r->line_len = 0;
}

static enum response_state parse_head(struct response *r)
{
    const char *length = strcasestr(r->head, "\r\ncontent-length:");
    if (strncmp(r->head, "HTTP/1.1 ", 9)) return INVALID;
    r->status = atoi(r->head + 9);
    r->closes_connection = strcasestr(r->head, "\r\nconnection: close") != NULL;
    if (strcasestr(r->head, "\r\ntransfer-encoding: chunked")) return length ? INVALID : IN_SIZE;
    if (!length) return INVALID;
    r->bytes_left = strtoul(length + 17, NULL, 10);
    return r->bytes_left ? IN_BODY : COMPLETE;
}

static size_t read_head(struct response *r, const char *text, size_t len)
{
    size_t previous = r->head_len, available = HEAD_BYTES - 1 - previous;
    size_t consumed = len < available ? len : available;
    char *end;
    memcpy(r->head + previous, text, consumed);
    r->head[previous + consumed] = 0;
    end = strstr(r->head + (previous > 3 ? previous - 3 : 0), "\r\n\r\n");
    if (!end) {
        r->head_len += consumed;
        if (consumed < len) r->state = INVALID;
        return consumed;
    }
    end[2] = 0;
    r->head_len = (size_t)(end - r->head) + 4;
    r->state = parse_head(r);
    return r->head_len - previous;
}

/* r->line is complete at the newline. */
static size_t read_line(struct response *r, const char *text, size_t len)
{
    const char *end = memchr(text, '\n', len);
    size_t consumed = end ? (size_t)(end - text) + 1 : len;
    if (r->line_len + consumed >= sizeof r->line) { r->state = INVALID; return len; }
    memcpy(r->line + r->line_len, text, consumed);
    r->line_len += consumed;
    r->line[r->line_len] = 0;
    if (!end) return consumed;
    if (r->state == IN_SIZE) {
        char *end_of_number;
        r->bytes_left = strtoul(r->line, &end_of_number, 16);
        if (end_of_number == r->line || *end_of_number != '\r') r->state = INVALID;
        else r->state = r->bytes_left ? IN_CHUNK : IN_TRAILER;
    } else if (r->state == IN_CHUNK_END) r->state = r->line_len == 2 ? IN_SIZE : INVALID;
    else if (r->line_len == 2) r->state = COMPLETE;
    r->line_len = 0;
    return consumed;
}

static size_t read_body(struct response *r, size_t len)
{
    size_t consumed = len < r->bytes_left ? len : r->bytes_left;
    r->bytes_left -= consumed;
    if (!r->bytes_left) r->state = r->state == IN_BODY ? COMPLETE : IN_CHUNK_END;
    return consumed;
}

/* Bytes after the end of a complete response are an error, since requests are not pipelined. */
static void response_feed(struct response *r, const char *text, size_t len, body_callback *callback, void *context)
{
    while (len && r->state != INVALID) {
        size_t consumed = 0;
        if (r->state == COMPLETE) { r->state = INVALID; return; }
        if (r->state == IN_HEAD) consumed = read_head(r, text, len);
        else if (r->state == IN_BODY || r->state == IN_CHUNK) callback(context, text, consumed = read_body(r, len));
        else consumed = read_line(r, text, len);
        text += consumed;
        len -= consumed;
    }
}
#endif
