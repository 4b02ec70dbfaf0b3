/* The fake worker of the bench: one process on several loopback ports that computes nothing.
 *
 *   fake_worker PORTS   listens on that many free ports, prints them on one line, exits when stdin is closed
 *
 * A POST has its parameters in a message, "#bench NAME EVENTS GAP_MS#", because routers that rewrite
 * bodies drop unknown keys and headers but keep the text of messages. EVENTS 0: ~350 bytes of JSON,
 * with kv_transfer_params if vLLM's NIXL protocol requests them. Otherwise SSE, one chunk per event,
 * each with its number and its time. GET /query is answered as by Mooncake's bootstrap server. All
 * responses repeat NAME, so that the load generator detects swapped responses.
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
enum kind { STDIN, LISTENER, CONNECTION, TICKER };

struct connection;
struct source { enum kind kind; int fd; struct connection *connection; };

struct connection {
    struct source socket;
    struct connection *next_closed;
    int closed, stream_index;             /* in streams[]; -1 = not streaming */
    long events_left, seq, events_due;
    uint64_t gap_ns, next_event_at;
    size_t in_len, out_len, out_sent;
    char request_name[64], in[IN_BYTES], out[OUT_BYTES];
};

static int epoll_fd, stream_count;
static struct connection *streams[MAX_STREAMS];
static struct source ticker = {TICKER, -1, NULL};
static struct connection *closed_connections;   /* freed after the batch of events, which may still refer to them */

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void watch(struct source *source, uint32_t mask)
{
    struct epoll_event event = {.events = mask, .data.ptr = source};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, source->fd, &event) < 0) { perror("epoll_ctl"); exit(1); }
}

static void set_ticker(long period_ns)
{
    struct itimerspec spec = {{0, period_ns}, {0, period_ns}};
    timerfd_settime(ticker.fd, 0, &spec, NULL);
}

static void remove_stream(struct connection *connection)
{
    if (connection->stream_index < 0) return;
    streams[connection->stream_index] = streams[--stream_count];
    streams[connection->stream_index]->stream_index = connection->stream_index;
    connection->stream_index = -1;
    if (!stream_count) set_ticker(0);
}

static void close_connection(struct connection *connection)
{
    if (connection->closed) return;
    connection->closed = 1;
    remove_stream(connection);
    close(connection->socket.fd);
    connection->next_closed = closed_connections;
    closed_connections = connection;
}

static void append(struct connection *connection, const char *text, size_t len)
{
    if (connection->out_len + len > OUT_BYTES) { close_connection(connection); return; }
    memcpy(connection->out + connection->out_len, text, len);
    connection->out_len += len;
}

static int flush(struct connection *connection)       /* 1 = all bytes were sent */
{
    while (!connection->closed && connection->out_sent < connection->out_len) {
        ssize_t sent = send(connection->socket.fd, connection->out + connection->out_sent,
                            connection->out_len - connection->out_sent, MSG_NOSIGNAL);
        if (sent >= 0) connection->out_sent += (size_t)sent;
        else if (errno == EAGAIN) return 0;
        else if (errno != EINTR) close_connection(connection);
    }
    connection->out_len = connection->out_sent = 0;
    return !connection->closed;
}

static void append_event(struct connection *connection)
{
    char event[EVENT_BYTES], chunk[EVENT_BYTES + 16];
    int len = snprintf(event, sizeof event,
        "data: {\"seq\":%ld,\"t\":%llu,\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion.chunk\","
        "\"model\":\"bench\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" token\"}}]}\n\n",
        connection->seq++, (unsigned long long)now_ns(), connection->request_name);
    append(connection, chunk, (size_t)snprintf(chunk, sizeof chunk, "%x\r\n%s\r\n", len, event));
}

static void send_due_events(struct connection *connection)
{
    static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    while (!connection->closed && connection->events_due && flush(connection)) {
        while (connection->events_due && connection->out_len + 2 * EVENT_BYTES < OUT_BYTES) {
            append_event(connection);
            connection->events_due--;
            if (--connection->events_left == 0) {
                remove_stream(connection);
                connection->events_due = 0;
                append(connection, end, sizeof end - 1);
            }
        }
    }
    flush(connection);
}

static void start_stream(struct connection *connection, long events, long gap_ms)
{
    static const char head[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                               "cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
    if (stream_count == MAX_STREAMS) { close_connection(connection); return; }
    connection->events_left = events;
    connection->seq = connection->events_due = 0;
    connection->gap_ns = (uint64_t)gap_ms * 1000000u;
    connection->next_event_at = now_ns() + connection->gap_ns;
    connection->stream_index = stream_count;
    streams[stream_count++] = connection;
    if (stream_count == 1) set_ticker(TICK_NS);
    append(connection, head, sizeof head - 1);
    flush(connection);
}

static void respond_json(struct connection *connection, const char *status, const char *body)
{
    char head[256];
    append(connection, head, (size_t)snprintf(head, sizeof head,
        "HTTP/1.1 %s\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
        status, strlen(body)));
    append(connection, body, strlen(body));
    flush(connection);
}

static long header(const char *head, const char *name, long fallback)
{
    const char *at = strcasestr(head, name);
    return at ? atol(at + strlen(name)) : fallback;
}

static void respond(struct connection *connection, const char *head, const char *body)
{
    char text[1024];
    const char *parameters, *transfer_params = "";
    long events, gap_ms;
    if (!strncmp(head, "GET /health ", 12)) {
        respond_json(connection, "200 OK", "{\"status\":\"healthy\"}");
        return;
    }
    if (!strncmp(head, "GET /v1/models ", 15)) {
        respond_json(connection, "200 OK", "{\"object\":\"list\",\"data\":[{\"id\":\"bench\",\"object\":\"model\"}]}");
        return;
    }
    if (!strncmp(head, "GET /query ", 11)) {
        respond_json(connection, "200 OK", "{\"0\":{\"engine_id\":\"bench\"}}");
        return;
    }
    if (strncmp(head, "POST ", 5)) {
        respond_json(connection, "404 Not Found", "{\"detail\":\"Not Found\"}");
        return;
    }
    parameters = strstr(body, "#bench ");
    if (!parameters || sscanf(parameters, "#bench %63[^ #] %ld %ld#", connection->request_name, &events, &gap_ms) != 3
        || events < 0 || (events && gap_ms < 1)) {
        respond_json(connection, "400 Bad Request", "{\"detail\":\"no #bench NAME EVENTS GAP_MS# in the body\"}");
        return;
    }
    if (events) { start_stream(connection, events, gap_ms); return; }
    if (strstr(body, "\"do_remote_decode\":true"))
        transfer_params = ",\"kv_transfer_params\":{\"do_remote_prefill\":true,\"do_remote_decode\":false,"
            "\"remote_block_ids\":[[1,2,3,4,5,6]],\"remote_engine_id\":\"bench\",\"remote_host\":\"127.0.0.1\","
            "\"remote_port\":5600,\"tp_size\":1}";
    snprintf(text, sizeof text,
        "{\"id\":\"chatcmpl-%s\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"bench\","
        "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"The worker returns this "
        "text for each request it serves.\"},\"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":96,"
        "\"completion_tokens\":14,\"total_tokens\":110}%s}", connection->request_name, transfer_params);
    respond_json(connection, "200 OK", text);
}

static void process_requests(struct connection *connection)
{
    /* A pipelined request waits for the end of the stream. */
    while (!connection->closed && connection->stream_index < 0) {
        char *end, saved_byte;
        size_t head_len;
        long body_len;
        connection->in[connection->in_len] = 0;
        end = strstr(connection->in, "\r\n\r\n");
        if (!end) return;
        head_len = (size_t)(end - connection->in) + 4;
        end[2] = 0;                               /* header() must not look into the body */
        body_len = header(connection->in, "\r\ncontent-length:", 0);
        if (body_len < 0 || head_len + (size_t)body_len >= IN_BYTES) { close_connection(connection); return; }
        if (connection->in_len < head_len + (size_t)body_len) { end[2] = '\r'; return; }
        saved_byte = end[4 + body_len];
        end[4 + body_len] = 0;
        respond(connection, connection->in, end + 4);
        end[4 + body_len] = saved_byte;
        connection->in_len -= head_len + (size_t)body_len;
        memmove(connection->in, end + 4 + body_len, connection->in_len);
    }
}

static void send_streams(void)
{
    uint64_t ticks, now = now_ns();
    if (read(ticker.fd, &ticks, sizeof ticks) != sizeof ticks) return;
    for (int i = stream_count - 1; i >= 0; i--) {      /* backwards: a removed stream is replaced by the last one */
        struct connection *connection = streams[i];
        for (; connection->next_event_at <= now; connection->next_event_at += connection->gap_ns)
            connection->events_due++;
        if (!connection->events_due) continue;
        send_due_events(connection);
        process_requests(connection);
    }
}

static void read_connection(struct connection *connection)
{
    while (!connection->closed) {
        ssize_t received = recv(connection->socket.fd, connection->in + connection->in_len,
                                IN_BYTES - 1 - connection->in_len, 0);
        if (received > 0) { connection->in_len += (size_t)received; process_requests(connection); }
        else if (received < 0 && errno == EAGAIN) return;
        /* 0 also if the request is larger than the buffer. */
        else if (received == 0 || errno != EINTR) close_connection(connection);
    }
}

static void accept_all(int listener)
{
    int fd, yes = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct connection *connection = calloc(1, sizeof *connection);
        if (!connection) { close(fd); return; }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        connection->socket = (struct source){CONNECTION, fd, connection};
        connection->stream_index = -1;
        watch(&connection->socket, EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
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

static void dispatch(struct source *source, uint32_t mask)
{
    if (source->kind == STDIN) exit(0);           /* the parent process has ended */
    if (source->kind == LISTENER) { accept_all(source->fd); return; }
    if (source->kind == TICKER) { send_streams(); return; }
    if (mask & EPOLLOUT) send_due_events(source->connection);
    if (mask & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) read_connection(source->connection);
}

int main(int argc, char **argv)
{
    static struct source input = {STDIN, 0, NULL}, listeners[MAX_PORTS];
    struct epoll_event batch[BATCH];
    int ports = argc == 2 ? atoi(argv[1]) : 0;
    if (ports < 1 || ports > MAX_PORTS) { fprintf(stderr, "usage: fake_worker PORTS (1 to 512)\n"); return 2; }
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    watch(&input, EPOLLIN | EPOLLHUP);
    ticker.fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    watch(&ticker, EPOLLIN);
    for (int i = 0; i < ports; i++) listen_on_free_port(&listeners[i]);
    puts("");
    fflush(stdout);
    for (;;) {
        int count = epoll_wait(epoll_fd, batch, BATCH, -1);
        for (int i = 0; i < count; i++) dispatch(batch[i].data.ptr, batch[i].events);
        while (closed_connections) {
            struct connection *closed = closed_connections;
            closed_connections = closed->next_closed;
            free(closed);
        }
    }
}
