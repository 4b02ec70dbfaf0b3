/* Reads one HTTP/1.1 answer from pieces of any size. Only content-length or chunked framing: an answer
 * that ends with its connection could not be distinguished from a truncated one. */
#ifndef REPLY_H
#define REPLY_H
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

enum { HEAD_BYTES = 8192 };
enum reply_at { IN_HEAD, IN_BODY, IN_SIZE, IN_CHUNK, IN_CHUNK_END, IN_TRAILER, WHOLE, BROKEN };

struct reply {
    enum reply_at at;
    int status, closes;
    size_t left, line_len;                        /* of the body or chunk; of the size or trailer line */
    size_t head_len;
    char head[HEAD_BYTES], line[64];
};

typedef void body_sink(void *owner, const char *text, size_t len);

static void reply_reset(struct reply *r)
{
    r->at = IN_HEAD;
    r->head_len = r->line_len = 0;
}

static enum reply_at reply_framing(struct reply *r)
{
    const char *length = strcasestr(r->head, "\r\ncontent-length:");
    if (strncmp(r->head, "HTTP/1.1 ", 9)) return BROKEN;
    r->status = atoi(r->head + 9);
    r->closes = strcasestr(r->head, "\r\nconnection: close") != NULL;
    if (strcasestr(r->head, "\r\ntransfer-encoding: chunked")) return length ? BROKEN : IN_SIZE;
    if (!length) return BROKEN;
    r->left = strtoul(length + 17, NULL, 10);
    return r->left ? IN_BODY : WHOLE;
}

static size_t reply_head(struct reply *r, const char *text, size_t len)
{
    size_t old = r->head_len, room = HEAD_BYTES - 1 - old, took = len < room ? len : room;
    char *end;
    memcpy(r->head + old, text, took);
    r->head[old + took] = 0;
    end = strstr(r->head + (old > 3 ? old - 3 : 0), "\r\n\r\n");
    if (!end) {
        r->head_len += took;
        if (took < len) r->at = BROKEN;
        return took;
    }
    end[2] = 0;
    r->head_len = (size_t)(end - r->head) + 4;
    r->at = reply_framing(r);
    return r->head_len - old;
}

static size_t reply_line(struct reply *r, const char *text, size_t len)   /* r->line is complete at '\n' */
{
    const char *end = memchr(text, '\n', len);
    size_t took = end ? (size_t)(end - text) + 1 : len;
    if (r->line_len + took >= sizeof r->line) { r->at = BROKEN; return len; }
    memcpy(r->line + r->line_len, text, took);
    r->line_len += took;
    r->line[r->line_len] = 0;
    if (!end) return took;
    if (r->at == IN_SIZE) {
        char *junk;
        r->left = strtoul(r->line, &junk, 16);
        if (junk == r->line || *junk != '\r') r->at = BROKEN;
        else r->at = r->left ? IN_CHUNK : IN_TRAILER;
    } else if (r->at == IN_CHUNK_END) r->at = r->line_len == 2 ? IN_SIZE : BROKEN;
    else if (r->line_len == 2) r->at = WHOLE;
    r->line_len = 0;
    return took;
}

static size_t reply_body(struct reply *r, size_t len)
{
    size_t took = len < r->left ? len : r->left;
    r->left -= took;
    if (!r->left) r->at = r->at == IN_BODY ? WHOLE : IN_CHUNK_END;
    return took;
}

/* Bytes after the end of a complete answer are an error: there is no request that they could answer. */
static void reply_feed(struct reply *r, const char *text, size_t len, body_sink *sink, void *owner)
{
    while (len && r->at != BROKEN) {
        size_t took = 0;
        if (r->at == WHOLE) { r->at = BROKEN; return; }
        if (r->at == IN_HEAD) took = reply_head(r, text, len);
        else if (r->at == IN_BODY || r->at == IN_CHUNK) sink(owner, text, took = reply_body(r, len));
        else took = reply_line(r, text, len);
        text += took;
        len -= took;
    }
}
#endif
