/* The load generator of the bench: closed loop, one thread, connects only to 127.0.0.1.
 *
 *   load_generator unary  PORT CONNECTIONS WARM_MS MS [REQUESTS]
 *   load_generator unique PORT CONNECTIONS WARM_MS MS [REQUESTS]
 *   load_generator stream PORT STREAMS     WARM_MS MS GAP_MS
 *   load_generator idle   PORT CONNECTIONS WARM_MS MS
 *
 * unary: each connection sends its next request after the complete response to the last one, cycling
 * through 499 heads and bodies of different lengths; ends after MS or REQUESTS. unique: the same, but
 * one header field has a different value in every request. stream: each connection requests one SSE
 * stream with an event each GAP_MS; the starts are spread evenly over the gap. idle: each connection
 * sends one request, 64 at a time, and then stays idle; the window starts WARM_MS after the last
 * response. Prints "window_opened" when the window starts (after WARM_MS), "window_closed" when it ends,
 * and one JSON line when all responses are complete. The caller reads the proxy's CPU clock at these two
 * lines. Every response is checked: status, framing, that it belongs to this request; for streams also
 * the number and order of events and a clean end. */
#define _GNU_SOURCE
#include "http_response.h"
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { VARIANTS = 499, MAX_CONNECTIONS = 16384, MAX_MS = 60000, BATCH = 256, TEXT_BYTES = 2048,
       MAX_ERRORS = 1000, GRACE_MS = 5000, RAMP_MS = 300, CONCURRENT_OPENS = 64, IDLE_OPEN_MS = 40000 };
#define MS UINT64_C(1000000)
#define UNIQUE "x-amzn-trace-id: Root=1-67891233-"

struct request { char *text, *unique; size_t len; char name[32]; };
struct samples { float *us; size_t len, capacity; };

struct connection {
    int fd, busy;
    struct request *request;
    uint64_t sent_at, last_read_at;
    long events;
    int done;                                     /* [DONE] was seen */
    size_t text_len;
    struct response response;
    char text[TEXT_BYTES];
};

static struct {
    int stream, idle, unique, port, connections;
    long warm_ms, ms, gap_ms, max_requests, events;
} options;
static struct request requests[VARIANTS];
static struct connection *connections;
static int epoll_fd, start_timer, window_opened, window_closed, busy_connections, connections_started;
static uint64_t now, started_at, idle_at, opened_at, closed_at;
static long requests_sent, responses, units, reads, errors, reconnects;
static char first_error[160];
static struct samples latencies, gaps;            /* from request or event to arrival; between reads */

static uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 * MS + (uint64_t)t.tv_nsec;
}

static void sample(struct samples *s, uint64_t ns)
{
    if (!window_opened || window_closed) return;
    if (s->len == s->capacity) {
        s->capacity = s->capacity ? 2 * s->capacity : 65536;
        s->us = realloc(s->us, s->capacity * sizeof *s->us);
        if (!s->us) { perror("realloc"); exit(1); }
    }
    s->us[s->len++] = (float)((double)ns / 1000);
}

static int compare_floats(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double quantile(const struct samples *s, double q)      /* of sorted samples */
{
    return s->len ? (double)s->us[(size_t)(q * (double)(s->len - 1))] : 0;
}

static void write_requests(void)
{
    static const char line[] = "The proxy relays the request to a worker and then relays its "
                               "response back to the client. ";
    char filler[6 * sizeof line] = "";
    for (int i = 0; i < 5; i++) strcat(filler, line);
    for (int i = 0; i < VARIANTS; i++) {
        struct request *r = &requests[i];
        char body[1024], head[1024];
        int filler_length = 260 + i * 37 % 190, body_len;
        snprintf(r->name, sizeof r->name, "bench-%x-%d", (unsigned)i * 2654435761u, i);
        body_len = snprintf(body, sizeof body,
            "{\"model\":\"bench\",\"messages\":[{\"role\":\"system\",\"content\":\"Answer in one line.\"},"
            "{\"role\":\"user\",\"content\":\"#bench %s %ld %ld# %.*s\"}],\"max_tokens\":%d,"
            "\"temperature\":0.7,\"stream\":%s,\"user\":\"%s\"}", r->name, options.events, options.gap_ms,
            filler_length, filler, 16 + i, options.stream ? "true" : "false", r->name);
        r->len = (size_t)snprintf(head, sizeof head,
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\naccept: application/json\r\n"
            "accept-encoding: gzip, deflate\r\nuser-agent: omni-proxy-bench/1\r\n"
            "content-type: application/json\r\nauthorization: Bearer bench\r\nx-stainless-lang: python\r\n"
            "%sx-request-id: req-%08x%.*s\r\ncontent-length: %d\r\n\r\n", options.port,
            options.unique ? UNIQUE "000000000000000000000000\r\n" : "",
            (unsigned)i * 40503u, i % 9, "-retried", body_len);
        r->text = malloc(r->len + (size_t)body_len);
        if (!r->text) { perror("malloc"); exit(1); }
        memcpy(r->text, head, r->len);
        memcpy(r->text + r->len, body, (size_t)body_len);
        r->unique = options.unique ? strstr(head, UNIQUE) - head + r->text + sizeof UNIQUE - 1 : NULL;
        r->len += (size_t)body_len;
    }
}

static void connect_one(struct connection *c)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)options.port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
    int yes = 1;
    /* Connect blocking, then switch: on loopback it returns immediately, since the backlog takes it. */
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&to, sizeof to) < 0) { perror("connect"); exit(1); }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event);
}

static void record_error(struct connection *c, const char *reason)
{
    if (!errors++) snprintf(first_error, sizeof first_error, "%s (%.31s, status %d, event %ld)", reason,
                            c->request ? c->request->name : "idle", c->response.status, c->events);
}

static void send_request(struct connection *c);

static void close_connection(struct connection *c)   /* and opens another one for unary loads */
{
    close(c->fd);
    c->fd = -1;
    if (c->busy) { c->busy = 0; busy_connections--; }
    if (options.stream || options.idle || window_closed || errors >= MAX_ERRORS) return;
    reconnects++;
    connect_one(c);
    send_request(c);
}

static void send_request(struct connection *c)
{
    if (window_closed || (options.max_requests && requests_sent >= options.max_requests)) return;
    c->request = &requests[requests_sent++ % VARIANTS];
    c->events = c->done = 0;
    c->text_len = 0;
    response_reset(&c->response);
    c->busy = 1;
    busy_connections++;
    if (options.unique) {
        char digits[25];
        memcpy(c->request->unique, digits, (size_t)snprintf(digits, sizeof digits, "%024lx", requests_sent));
    }
    c->sent_at = clock_ns();
    /* A kilobyte on an idle connection always fits into the socket's buffer. */
    if (send(c->fd, c->request->text, c->request->len, MSG_NOSIGNAL | MSG_DONTWAIT)
        != (ssize_t)c->request->len) { record_error(c, "the request could not be sent"); close_connection(c); }
}

static void check_event(struct connection *c)
{
    long seq;
    unsigned long long created_at;
    c->text[c->text_len] = 0;
    if (!strcmp(c->text, "data: [DONE]\n\n")) { c->done++; return; }
    if (sscanf(c->text, "data: {\"seq\":%ld,\"t\":%llu", &seq, &created_at) != 2 || seq != c->events
        || !strstr(c->text, c->request->name)) {
        record_error(c, "an event that is not the next one of this stream");
        return;
    }
    c->events++;
    if (window_opened && !window_closed) units++;
    sample(&latencies, now > created_at ? now - created_at : 0);
}

static void read_body_chunk(void *context, const char *text, size_t len)
{
    struct connection *c = context;
    while (len) {
        const char *end = options.stream ? memchr(text, '\n', len) : NULL;
        size_t length = end ? (size_t)(end - text) + 1 : len;
        if (c->text_len + length >= TEXT_BYTES) { c->response.state = INVALID; return; }
        memcpy(c->text + c->text_len, text, length);
        c->text_len += length;
        if (end && c->text_len > 1 && c->text[c->text_len - 2] == '\n') {
            check_event(c);
            c->text_len = 0;
        }
        text += length;
        len -= length;
    }
}

static void open_next_connection(void)
{
    if (connections_started == options.connections) return;
    connect_one(&connections[connections_started]);
    send_request(&connections[connections_started++]);
}

static void finish_response(struct connection *c)
{
    c->text[c->text_len] = 0;
    c->busy = 0;
    busy_connections--;
    if (c->response.status != 200) record_error(c, "the status is not 200");
    else if (options.stream && (c->events != options.events || c->done != 1)) record_error(c, "events are missing");
    else if (!options.stream && !strstr(c->text, c->request->name)) record_error(c, "the response to another request");
    else {
        responses++;
        if (!options.stream && window_opened && !window_closed) units++;
        if (!options.stream) sample(&latencies, now - c->sent_at);
    }
    if (options.idle && c->response.closes_connection) record_error(c, "the connection is not kept");
    if (options.stream || c->response.closes_connection) close_connection(c);
    else if (!options.idle) send_request(c);
    else if (responses == options.connections) idle_at = now;
    else open_next_connection();
}

static void read_connection(struct connection *c)
{
    static char buffer[65536];
    ssize_t received;
    if (c->fd < 0) return;
    received = recv(c->fd, buffer, sizeof buffer, MSG_DONTWAIT);
    if (received < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (received <= 0) {
        if (c->busy) record_error(c, received ? "the connection was reset" : "the connection ended too early");
        else if (options.idle && !window_closed) record_error(c, "an idle connection was closed");
        close_connection(c);
        return;
    }
    now = clock_ns();
    if (window_opened && !window_closed) reads++;
    if (options.stream && c->events) sample(&gaps, now - c->last_read_at);
    c->last_read_at = now;
    if (!c->busy) c->response.state = INVALID;
    response_feed(&c->response, buffer, (size_t)received, read_body_chunk, c);
    if (c->response.state == INVALID) { record_error(c, "invalid bytes instead of a response"); close_connection(c); }
    else if (c->response.state == COMPLETE) finish_response(c);
}

/* Stream k starts k/STREAMS of a gap after the start of one of the gaps in the ramp, so that phases are even. */
static uint64_t start_time(int number, int *stream)
{
    int gaps_of_ramp = options.gap_ms < RAMP_MS ? RAMP_MS / (int)options.gap_ms : 1, gap_of_ramp = 0, k = number;
    for (int len; k >= (len = (options.connections - gap_of_ramp + gaps_of_ramp - 1) / gaps_of_ramp); k -= len)
        gap_of_ramp++;
    *stream = gap_of_ramp + k * gaps_of_ramp;
    return started_at + ((uint64_t)gap_of_ramp * MS + (uint64_t)*stream * MS / (uint64_t)options.connections)
                   * (uint64_t)options.gap_ms;
}

static void start_streams(void)
{
    uint64_t ticks;
    if (read(start_timer, &ticks, sizeof ticks) < 0 && errno != EAGAIN) return;
    while (connections_started < options.connections) {
        int stream;
        uint64_t at = start_time(connections_started, &stream);
        if (at > clock_ns()) {
            struct itimerspec spec = {.it_value = {(time_t)(at / (1000 * MS)), (long)(at % (1000 * MS))}};
            timerfd_settime(start_timer, TFD_TIMER_ABSTIME, &spec, NULL);
            return;
        }
        connect_one(&connections[stream]);
        send_request(&connections[stream]);
        connections_started++;
    }
}

static void start_load(void)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    connections = calloc((size_t)options.connections, sizeof *connections);
    if (!connections) { perror("calloc"); exit(1); }
    for (int i = 0; i < options.connections; i++) connections[i].fd = -1;
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    start_timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, start_timer, &event);
    started_at = clock_ns();
    if (options.stream) { start_streams(); return; }
    for (int left = options.idle ? CONCURRENT_OPENS : options.connections; left; left--) open_next_connection();
}

static void print_line(const char *line)
{
    puts(line);
    fflush(stdout);
}

static int update_window(void)                    /* 1 = no more responses are expected */
{
    int all_sent = options.stream ? connections_started == options.connections
                                  : options.max_requests && requests_sent >= options.max_requests;
    int broken = errors >= (options.idle ? 1 : MAX_ERRORS);
    uint64_t since = options.idle ? idle_at : started_at;
    now = clock_ns();
    if (!window_opened && ((since && now - since >= (uint64_t)options.warm_ms * MS) || broken)) {
        window_opened = 1;
        opened_at = now;
        print_line("window_opened");
    }
    if (window_opened && !window_closed && (now - opened_at >= (uint64_t)options.ms * MS || broken
                                 || (all_sent && !busy_connections))) {
        window_closed = 1;
        closed_at = now;
        print_line("window_closed");
    }
    if (!window_closed) return 0;
    return !busy_connections || errors >= MAX_ERRORS || now - closed_at >= GRACE_MS * MS;
}

static void print_report(void)
{
    double secs = (double)(closed_at - opened_at) / 1e9;
    if (busy_connections && errors < MAX_ERRORS) {
        if (!errors) snprintf(first_error, sizeof first_error, "responses were still missing 5 s after the end");
        errors += busy_connections;
    }
    qsort(latencies.us, latencies.len, sizeof *latencies.us, compare_floats);
    qsort(gaps.us, gaps.len, sizeof *gaps.us, compare_floats);
    printf("{\"units\": %ld, \"secs\": %.4f, \"per_sec\": %.1f, \"responses\": %ld, \"reads\": %ld, \"errors\": %ld, "
           "\"reconnects\": %ld, \"p50_us\": %.1f, \"p99_us\": %.1f, \"gap_p50_us\": %.1f, "
           "\"gap_p99_us\": %.1f, \"first_error\": \"%s\"}\n", units, secs, secs > 0 ? (double)units / secs : 0,
           responses, reads, errors, reconnects, quantile(&latencies, 0.5), quantile(&latencies, 0.99),
           quantile(&gaps, 0.5), quantile(&gaps, 0.99), first_error);
}

static int read_arguments(int argc, char **argv)
{
    long last = argc == 7 ? atol(argv[6]) : 0;
    if (argc < 6 || argc > 7) return 0;
    options.stream = !strcmp(argv[1], "stream");
    options.idle = !strcmp(argv[1], "idle");
    options.unique = !strcmp(argv[1], "unique");
    options.port = atoi(argv[2]);
    options.connections = atoi(argv[3]);
    options.warm_ms = atol(argv[4]);
    options.ms = atol(argv[5]);
    if (options.stream) options.gap_ms = last;
    else options.max_requests = last;
    /* A stream ends a fifth of a second after the window, so that the rate is constant inside it. */
    if (options.gap_ms > 0) options.events = (options.warm_ms + options.ms + 200) / options.gap_ms + 1;
    return (options.stream ? options.gap_ms > 0 : options.idle ? !last : options.unique || !strcmp(argv[1], "unary"))
        && last >= 0
        && options.port > 0 && options.port < 65536
        && options.connections > 0 && options.connections <= MAX_CONNECTIONS
        && options.warm_ms >= 0 && options.ms > 0 && options.warm_ms + options.ms <= MAX_MS;
}

int main(int argc, char **argv)
{
    struct epoll_event batch[BATCH];
    if (!read_arguments(argc, argv)) {
        fprintf(stderr, "usage: load_generator unary|unique PORT CONNECTIONS WARM_MS MS [REQUESTS]\n"
                        "       load_generator stream PORT STREAMS WARM_MS MS GAP_MS\n"
                        "       load_generator idle PORT CONNECTIONS WARM_MS MS\n"
                        "at most %d connections and %d ms\n", MAX_CONNECTIONS, MAX_MS);
        return 2;
    }
    /* Always ends, also after errors. */
    alarm((unsigned)((options.warm_ms + options.ms + GRACE_MS + (options.idle ? IDLE_OPEN_MS : 0)) / 1000 + 10));
    write_requests();
    start_load();
    while (!update_window()) {
        int count = epoll_wait(epoll_fd, batch, BATCH, 5);
        for (int i = 0; i < count; i++) {
            if (batch[i].data.ptr) read_connection(batch[i].data.ptr);
            else start_streams();
        }
    }
    print_report();
    return errors != 0;
}
