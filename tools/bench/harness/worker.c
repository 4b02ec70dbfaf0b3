/* The fake worker of the bench: one process on several loopback ports that computes nothing.
 *
 *   worker PORTS        listens on that many free ports, prints them on one line, ends at the end of stdin
 *
 * A POST has its parameters in a message, "#bench NAME EVENTS GAP_MS#", because routers that rewrite
 * bodies drop unknown keys and headers but keep the text of messages. EVENTS 0: ~350 bytes of JSON,
 * with kv_transfer_params if vLLM's NIXL protocol requests them. Otherwise SSE, one chunk per event,
 * each with its number and its time. GET /query is answered like Mooncake's bootstrap server. All
 * answers repeat NAME, so that the load generator detects swapped answers.
 * One timer ticks each millisecond for all streams, since a timer per stream would be slow in virtual
 * machines; events that are due within one millisecond are sent together. Late events are sent
 * later, so the average rate is kept under load. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PORTS = 512, MAX_STREAMS = 4096, TICK_NS = 1000000,
       IN_BYTES = 65536, OUT_BYTES = 32768, EVENT_BYTES = 320, BATCH = 256 };
enum kind { STDIN, LISTENER, CONN, TICKER };

struct conn;
struct source { enum kind kind; int fd; struct conn *conn; };

struct conn {
    struct source socket;
    struct conn *next_dead;
    int dead, slot;                       /* in streams; -1 = not streaming */
    long events_left, seq, owed;
    uint64_t gap_ns, due;
    size_t in_len, out_len, out_sent;
    char asker[64], in[IN_BYTES], out[OUT_BYTES];
};

static int poller, stream_count;
static struct conn *streams[MAX_STREAMS];
static struct source ticker = {TICKER, -1, NULL};
static struct conn *graveyard;            /* freed after the batch, whose events may still refer to them */

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void watch(struct source *source, uint32_t mask)
{
    struct epoll_event event = {.events = mask, .data.ptr = source};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, source->fd, &event) < 0) { perror("epoll_ctl"); exit(1); }
}

static void set_ticker(long period_ns)
{
    struct itimerspec spec = {{0, period_ns}, {0, period_ns}};
    timerfd_settime(ticker.fd, 0, &spec, NULL);
}

static void leave_streams(struct conn *conn)
{
    if (conn->slot < 0) return;
    streams[conn->slot] = streams[--stream_count];
    streams[conn->slot]->slot = conn->slot;
    conn->slot = -1;
    if (!stream_count) set_ticker(0);
}

static void bury(struct conn *conn)
{
    if (conn->dead) return;
    conn->dead = 1;
    leave_streams(conn);
    close(conn->socket.fd);
    conn->next_dead = graveyard;
    graveyard = conn;
}

static void put(struct conn *conn, const char *text, size_t len)
{
    if (conn->out_len + len > OUT_BYTES) { bury(conn); return; }
    memcpy(conn->out + conn->out_len, text, len);
    conn->out_len += len;
}

static int flush(struct conn *conn)       /* 1 = all bytes were sent */
{
    while (!conn->dead && conn->out_sent < conn->out_len) {
        ssize_t sent = send(conn->socket.fd, conn->out + conn->out_sent,
                            conn->out_len - conn->out_sent, MSG_NOSIGNAL);
        if (sent >= 0) conn->out_sent += (size_t)sent;
        else if (errno == EAGAIN) return 0;
        else if (errno != EINTR) bury(conn);
    }
    conn->out_len = conn->out_sent = 0;
    return !conn->dead;
}

static void put_event(struct conn *conn)
{
    char event[EVENT_BYTES], chunk[EVENT_BYTES + 16];
    int len = snprintf(event, sizeof event,
        "data: {\"seq\":%ld,\"t\":%llu,\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion.chunk\","
        "\"model\":\"bench\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"}}]}\n\n",
        conn->seq++, (unsigned long long)now_ns(), conn->asker);
    put(conn, chunk, (size_t)snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", len, event));
}

static void stream_on(struct conn *conn)
{
    static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    while (!conn->dead && conn->owed && flush(conn)) {
        while (conn->owed && conn->out_len + 2 * EVENT_BYTES < OUT_BYTES) {
            put_event(conn);
            conn->owed--;
            if (--conn->events_left == 0) {
                leave_streams(conn);
                conn->owed = 0;
                put(conn, end, sizeof end - 1);
            }
        }
    }
    flush(conn);
}

static void start_stream(struct conn *conn, long events, long gap_ms)
{
    static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                               "cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
    if (stream_count == MAX_STREAMS) { bury(conn); return; }
    conn->events_left = events;
    conn->seq = conn->owed = 0;
    conn->gap_ns = (uint64_t)gap_ms * 1000000u;
    conn->due = now_ns() + conn->gap_ns;
    conn->slot = stream_count;
    streams[stream_count++] = conn;
    if (stream_count == 1) set_ticker(TICK_NS);
    put(conn, head, sizeof head - 1);
    flush(conn);
}

static void answer(struct conn *conn, const char *status, const char *body)
{
    char head[256];
    put(conn, head, (size_t)snprintf(head, sizeof head,
        "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
        status, strlen(body)));
    put(conn, body, strlen(body));
    flush(conn);
}

static long header(const char *head, const char *name, long absent)
{
    const char *at = strcasestr(head, name);
    return at ? atol(at + strlen(name)) : absent;
}

static void respond(struct conn *conn, const char *head, const char *body)
{
    char text[1024];
    const char *order, *params = "";
    long events, gap_ms;
    if (!strncmp(head, "GET /health ", 12)) { answer(conn, "200 OK", "{\"status\":\"healthy\"}"); return; }
    if (!strncmp(head, "GET /v1/models ", 15)) {
        answer(conn, "200 OK", "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\"}]}");
        return;
    }
    if (!strncmp(head, "GET /query ", 11)) { answer(conn, "200 OK", "{\"0\":{\"engine_id\":\"bench\"}}"); return; }
    if (strncmp(head, "POST ", 5)) { answer(conn, "404 Not Found", "{\"detail\":\"Not Found\"}"); return; }
    order = strstr(body, "#bench ");
    if (!order || sscanf(order, "#bench %63[^ #] %ld %ld#", conn->asker, &events, &gap_ms) != 3
        || events < 0 || (events && gap_ms < 1)) {
        answer(conn, "400 Bad Request", "{\"detail\":\"no #bench NAME EVENTS GAP_MS# in the body\"}");
        return;
    }
    if (events) { start_stream(conn, events, gap_ms); return; }
    if (strstr(body, "\"do_remote_decode\":true"))
        params = ",\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
            "\"remote_block_ids\":[[1,2,3,4,5,6]],\"remote_engine_id\":\"bench\",\"remote_host\":\"127.0.0.1\","
            "\"remote_port\":5600,\"tp_size\":1}";
    snprintf(text, sizeof text,
        "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"bench\","
        "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"The fleet stands in line, "
        "each answer leaves as it came.\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":96,"
        "\"completion_tokens\":14,\"total_tokens\":110}%s}", conn->asker, params);
    answer(conn, "200 OK", text);
}

static void take_requests(struct conn *conn)
{
    while (!conn->dead && conn->slot < 0) {   /* a pipelined request waits for its stream's end */
        char *end, kept;
        size_t head_len;
        long body_len;
        conn->in[conn->in_len] = 0;
        end = strstr(conn->in, "\r\n\r\n");
        if (!end) return;
        head_len = (size_t)(end - conn->in) + 4;
        end[2] = 0;                               /* header() must not look into the body */
        body_len = header(conn->in, "\r\ncontent-length:", 0);
        if (body_len < 0 || head_len + (size_t)body_len >= IN_BYTES) { bury(conn); return; }
        if (conn->in_len < head_len + (size_t)body_len) { end[2] = '\r'; return; }
        kept = end[4 + body_len];
        end[4 + body_len] = 0;
        respond(conn, conn->in, end + 4);
        end[4 + body_len] = kept;
        conn->in_len -= head_len + (size_t)body_len;
        memmove(conn->in, end + 4 + body_len, conn->in_len);
    }
}

static void tick(void)
{
    uint64_t ticks, now = now_ns();
    if (read(ticker.fd, &ticks, sizeof ticks) != sizeof ticks) return;
    for (int i = stream_count - 1; i >= 0; i--) {      /* backwards: the last one fills a gap */
        struct conn *conn = streams[i];
        for (; conn->due <= now; conn->due += conn->gap_ns) conn->owed++;
        if (!conn->owed) continue;
        stream_on(conn);
        take_requests(conn);
    }
}

static void readable(struct conn *conn)
{
    while (!conn->dead) {
        ssize_t got = recv(conn->socket.fd, conn->in + conn->in_len, IN_BYTES - 1 - conn->in_len, 0);
        if (got > 0) { conn->in_len += (size_t)got; take_requests(conn); }
        else if (got < 0 && errno == EAGAIN) return;
        else if (got == 0 || errno != EINTR) bury(conn);  /* also if the request is larger than the buffer */
    }
}

static void accept_all(int listener)
{
    int fd, yes = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct conn *conn = calloc(1, sizeof *conn);
        if (!conn) { close(fd); return; }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        conn->socket = (struct source){CONN, fd, conn};
        conn->slot = -1;
        watch(&conn->socket, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
    }
}

static void listen_on_free_port(struct source *source)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof address;
    source->kind = LISTENER;
    source->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (bind(source->fd, (struct sockaddr *)&address, len) < 0 || listen(source->fd, 1024) < 0
        || getsockname(source->fd, (struct sockaddr *)&address, &len) < 0) { perror("listen"); exit(1); }
    watch(source, EPOLLIN);
    printf("%d ", ntohs(address.sin_port));
}

static void wake(struct source *source, uint32_t mask)
{
    if (source->kind == STDIN) exit(0);           /* the parent process has ended */
    if (source->kind == LISTENER) { accept_all(source->fd); return; }
    if (source->kind == TICKER) { tick(); return; }
    if (mask & EPOLLOUT) stream_on(source->conn);
    if (mask & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) readable(source->conn);
}

int main(int argc, char **argv)
{
    static struct source input = {STDIN, 0, NULL}, listeners[MAX_PORTS];
    struct epoll_event batch[BATCH];
    int ports = argc == 2 ? atoi(argv[1]) : 0;
    if (ports < 1 || ports > MAX_PORTS) { fprintf(stderr, "usage: worker PORTS (1 to 512)\n"); return 2; }
    poller = epoll_create1(EPOLL_CLOEXEC);
    watch(&input, EPOLLIN | EPOLLHUP);
    ticker.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    watch(&ticker, EPOLLIN);
    for (int i = 0; i < ports; i++) listen_on_free_port(&listeners[i]);
    puts("");
    fflush(stdout);
    for (;;) {
        int count = epoll_wait(poller, batch, BATCH, -1);
        for (int i = 0; i < count; i++) wake(batch[i].data.ptr, batch[i].events);
        while (graveyard) { struct conn *gone = graveyard; graveyard = gone->next_dead; free(gone); }
    }
}
