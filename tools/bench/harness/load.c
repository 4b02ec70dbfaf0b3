/* The load generator of the bench: closed loop, one thread, connects only to 127.0.0.1.
 *
 *   load unary  PORT CONNECTIONS WARM_MS MS [REQUESTS]
 *   load unique PORT CONNECTIONS WARM_MS MS [REQUESTS]
 *   load stream PORT STREAMS     WARM_MS MS GAP_MS
 *   load idle   PORT CONNECTIONS WARM_MS MS
 *
 * unary: each connection sends its next request after the complete answer to the last one, cycling
 * through 499 heads and bodies of different lengths; ends after MS or REQUESTS. unique: the same, but
 * one header field has a different value in every request. stream: each connection requests one SSE
 * answer with an event each GAP_MS; the starts are spread evenly over the gap. idle: each connection
 * sends one request, 64 at a time, and then stays idle; the window starts WARM_MS after the last
 * answer. Prints "open" when the window starts (after WARM_MS), "shut" when it ends, and one JSON line
 * when all answers are complete. The caller reads the proxy's CPU clock at the two words. Every answer
 * is checked: status, framing, that it answers this request; for streams also the number and order of
 * events and a clean end. */
#define _GNU_SOURCE
#include "reply.h"
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

enum { VARIANTS = 499, MAX_CONNS = 16384, MAX_MS = 60000, BATCH = 256, TEXT_BYTES = 2048,
       MAX_ERRORS = 1000, LATE_MS = 5000, RAMP_MS = 300, AT_ONCE = 64, CROWD_MS = 40000 };
#define MS UINT64_C(1000000)
#define UNIQUE "x-amzn-trace-id: Root=1-67891233-"

struct request { char *text, *unique; size_t len; char name[32]; };
struct samples { float *us; size_t len, room; };

struct conn {
    int fd, busy;
    struct request *request;
    uint64_t sent_at, piece_at;
    long events;
    int done;                                     /* [DONE] was seen */
    size_t text_len;
    struct reply reply;
    char text[TEXT_BYTES];
};

static struct { int stream, idle, unique, port, conns; long warm_ms, ms, gap_ms, max_requests, events; } want;
static struct request requests[VARIANTS];
static struct conn *conns;
static int poller, starter, open_window, shut, busy_conns, started;
static uint64_t now, begun, rested, opened, ended;
static long asked, whole, units, pieces, errors, reconnects;
static char first_error[160];
static struct samples waits, gaps;                /* from request or event to arrival; between pieces */

static uint64_t clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 * MS + (uint64_t)t.tv_nsec;
}

static void sample(struct samples *s, uint64_t ns)
{
    if (!open_window || shut) return;
    if (s->len == s->room) {
        s->room = s->room ? 2 * s->room : 65536;
        s->us = realloc(s->us, s->room * sizeof *s->us);
        if (!s->us) { perror("realloc"); exit(1); }
    }
    s->us[s->len++] = (float)((double)ns / 1000);
}

static int by_size(const void *a, const void *b)
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
    static const char line[] = "A proxy that adds nothing is heard by nobody; one that holds a word back is "
                               "heard by all. ";
    char filler[6 * sizeof line] = "";
    for (int i = 0; i < 5; i++) strcat(filler, line);
    for (int i = 0; i < VARIANTS; i++) {
        struct request *r = &requests[i];
        char body[1024], head[1024];
        int fill = 260 + i * 37 % 190, body_len;
        snprintf(r->name, sizeof r->name, "bench-%x-%d", (unsigned)i * 2654435761u, i);
        body_len = snprintf(body, sizeof body,
            "{\"model\":\"bench\",\"messages\":[{\"role\":\"system\",\"content\":\"Answer in one line.\"},"
            "{\"role\":\"user\",\"content\":\"#bench %s %ld %ld# %.*s\"}],\"max_tokens\":%d,"
            "\"temperature\":0.7,\"stream\":%s,\"user\":\"%s\"}", r->name, want.events, want.gap_ms,
            fill, filler, 16 + i, want.stream ? "true" : "false", r->name);
        r->len = (size_t)snprintf(head, sizeof head,
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:%d\r\naccept: application/json\r\n"
            "accept-encoding: gzip, deflate\r\nuser-agent: omni-proxy-bench/1\r\n"
            "content-type: application/json\r\nauthorization: Bearer bench\r\nx-stainless-lang: python\r\n"
            "%sx-request-id: req-%08x%.*s\r\ncontent-length: %d\r\n\r\n", want.port,
            want.unique ? UNIQUE "000000000000000000000000\r\n" : "",
            (unsigned)i * 40503u, i % 9, "-retried", body_len);
        r->text = malloc(r->len + (size_t)body_len);
        if (!r->text) { perror("malloc"); exit(1); }
        memcpy(r->text, head, r->len);
        memcpy(r->text + r->len, body, (size_t)body_len);
        r->unique = want.unique ? strstr(head, UNIQUE) - head + r->text + sizeof UNIQUE - 1 : NULL;
        r->len += (size_t)body_len;
    }
}

static void connect_one(struct conn *c)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)want.port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
    int yes = 1;
    /* Connect blocking, then switch: on loopback it returns immediately, since the backlog takes it. */
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&to, sizeof to) < 0) { perror("connect"); exit(1); }
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
}

static void fail(struct conn *c, const char *why)
{
    if (!errors++) snprintf(first_error, sizeof first_error, "%s (%.31s, status %d, event %ld)", why,
                            c->request ? c->request->name : "idle", c->reply.status, c->events);
}

static void ask(struct conn *c);

static void leave(struct conn *c)                 /* closes the connection */
{
    close(c->fd);
    c->fd = -1;
    if (c->busy) { c->busy = 0; busy_conns--; }
    if (want.stream || want.idle || shut || errors >= MAX_ERRORS) return;
    reconnects++;
    connect_one(c);
    ask(c);
}

static void ask(struct conn *c)
{
    if (shut || (want.max_requests && asked >= want.max_requests)) return;
    c->request = &requests[asked++ % VARIANTS];
    c->events = c->done = 0;
    c->text_len = 0;
    reply_reset(&c->reply);
    c->busy = 1;
    busy_conns++;
    if (want.unique) {
        char digits[25];
        memcpy(c->request->unique, digits, (size_t)snprintf(digits, sizeof digits, "%024lx", asked));
    }
    c->sent_at = clock_ns();
    /* A kilobyte on an idle connection always fits into the socket's buffer. */
    if (send(c->fd, c->request->text, c->request->len, MSG_NOSIGNAL | MSG_DONTWAIT)
        != (ssize_t)c->request->len) { fail(c, "the request could not be sent"); leave(c); }
}

static void take_event(struct conn *c)
{
    long seq;
    unsigned long long born;
    c->text[c->text_len] = 0;
    if (!strcmp(c->text, "data: [DONE]\n\n")) { c->done++; return; }
    if (sscanf(c->text, "data: {\"seq\":%ld,\"t\":%llu", &seq, &born) != 2 || seq != c->events
        || !strstr(c->text, c->request->name)) {
        fail(c, "an event that is not the next one of this stream");
        return;
    }
    c->events++;
    if (open_window && !shut) units++;
    sample(&waits, now > born ? now - born : 0);
}

static void take_body(void *owner, const char *text, size_t len)
{
    struct conn *c = owner;
    while (len) {
        const char *end = want.stream ? memchr(text, '\n', len) : NULL;
        size_t took = end ? (size_t)(end - text) + 1 : len;
        if (c->text_len + took >= TEXT_BYTES) { c->reply.at = BROKEN; return; }
        memcpy(c->text + c->text_len, text, took);
        c->text_len += took;
        if (end && c->text_len > 1 && c->text[c->text_len - 2] == '\n') {
            take_event(c);
            c->text_len = 0;
        }
        text += took;
        len -= took;
    }
}

static void welcome_next(void)                    /* opens one more connection */
{
    if (started == want.conns) return;
    connect_one(&conns[started]);
    ask(&conns[started++]);
}

static void take_answer(struct conn *c)
{
    c->text[c->text_len] = 0;
    c->busy = 0;
    busy_conns--;
    if (c->reply.status != 200) fail(c, "the status is not 200");
    else if (want.stream && (c->events != want.events || c->done != 1)) fail(c, "events are missing");
    else if (!want.stream && !strstr(c->text, c->request->name)) fail(c, "the answer to another request");
    else {
        whole++;
        if (!want.stream && open_window && !shut) units++;
        if (!want.stream) sample(&waits, now - c->sent_at);
    }
    if (want.idle && c->reply.closes) fail(c, "the connection is not kept");
    if (want.stream || c->reply.closes) leave(c);
    else if (!want.idle) ask(c);
    else if (whole == want.conns) rested = now;
    else welcome_next();
}

static void readable(struct conn *c)
{
    static char piece[65536];
    ssize_t got;
    if (c->fd < 0) return;
    got = recv(c->fd, piece, sizeof piece, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
        if (c->busy) fail(c, got ? "the connection was reset" : "the connection ended too early");
        else if (want.idle && !shut) fail(c, "an idle connection was closed");
        leave(c);
        return;
    }
    now = clock_ns();
    if (open_window && !shut) pieces++;
    if (want.stream && c->events) sample(&gaps, now - c->piece_at);
    c->piece_at = now;
    if (!c->busy) c->reply.at = BROKEN;
    reply_feed(&c->reply, piece, (size_t)got, take_body, c);
    if (c->reply.at == BROKEN) { fail(c, "invalid bytes instead of an answer"); leave(c); }
    else if (c->reply.at == WHOLE) take_answer(c);
}

/* Stream k starts k/STREAMS of a gap after the start of one of the ramp's gaps, so that phases are even. */
static uint64_t start_time(int nth, int *which)
{
    int gaps_of_ramp = want.gap_ms < RAMP_MS ? RAMP_MS / (int)want.gap_ms : 1, ramp = 0, k = nth;
    for (int len; k >= (len = (want.conns - ramp + gaps_of_ramp - 1) / gaps_of_ramp); k -= len) ramp++;
    *which = ramp + k * gaps_of_ramp;
    return begun + ((uint64_t)ramp * MS + (uint64_t)*which * MS / (uint64_t)want.conns)
                   * (uint64_t)want.gap_ms;
}

static void start_streams(void)
{
    uint64_t ticks;
    if (read(starter, &ticks, sizeof ticks) < 0 && errno != EAGAIN) return;
    while (started < want.conns) {
        int which;
        uint64_t at = start_time(started, &which);
        if (at > clock_ns()) {
            struct itimerspec spec = {.it_value = {(time_t)(at / (1000 * MS)), (long)(at % (1000 * MS))}};
            timerfd_settime(starter, TFD_TIMER_ABSTIME, &spec, NULL);
            return;
        }
        connect_one(&conns[which]);
        ask(&conns[which]);
        started++;
    }
}

static void start(void)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    conns = calloc((size_t)want.conns, sizeof *conns);
    if (!conns) { perror("calloc"); exit(1); }
    for (int i = 0; i < want.conns; i++) conns[i].fd = -1;
    poller = epoll_create1(EPOLL_CLOEXEC);
    starter = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    epoll_ctl(poller, EPOLL_CTL_ADD, starter, &event);
    begun = clock_ns();
    if (want.stream) { start_streams(); return; }
    for (int left = want.idle ? AT_ONCE : want.conns; left; left--) welcome_next();
}

static void say(const char *word)
{
    puts(word);
    fflush(stdout);
}

static int over(void)                             /* updates the window; 1 = no more answers are expected */
{
    int all_asked = want.stream ? started == want.conns : want.max_requests && asked >= want.max_requests;
    int broken = errors >= (want.idle ? 1 : MAX_ERRORS);
    uint64_t since = want.idle ? rested : begun;
    now = clock_ns();
    if (!open_window && ((since && now - since >= (uint64_t)want.warm_ms * MS) || broken)) {
        open_window = 1;
        opened = now;
        say("open");
    }
    if (open_window && !shut && (now - opened >= (uint64_t)want.ms * MS || broken
                                 || (all_asked && !busy_conns))) {
        shut = 1;
        ended = now;
        say("shut");
    }
    if (!shut) return 0;
    return !busy_conns || errors >= MAX_ERRORS || now - ended >= LATE_MS * MS;
}

static void report(void)
{
    double secs = (double)(ended - opened) / 1e9;
    if (busy_conns && errors < MAX_ERRORS) {
        if (!errors) snprintf(first_error, sizeof first_error, "answers were still missing 5 s after the end");
        errors += busy_conns;
    }
    qsort(waits.us, waits.len, sizeof *waits.us, by_size);
    qsort(gaps.us, gaps.len, sizeof *gaps.us, by_size);
    printf("{\"units\": %ld, \"secs\": %.4f, \"per_sec\": %.1f, \"whole\": %ld, \"pieces\": %ld, \"errors\": %ld, "
           "\"reconnects\": %ld, \"p50_us\": %.1f, \"p99_us\": %.1f, \"gap_p50_us\": %.1f, "
           "\"gap_p99_us\": %.1f, \"first_error\": \"%s\"}\n", units, secs, secs > 0 ? (double)units / secs : 0,
           whole, pieces, errors, reconnects, quantile(&waits, 0.5), quantile(&waits, 0.99),
           quantile(&gaps, 0.5), quantile(&gaps, 0.99), first_error);
}

static int read_arguments(int argc, char **argv)
{
    long last = argc == 7 ? atol(argv[6]) : 0;
    if (argc < 6 || argc > 7) return 0;
    want.stream = !strcmp(argv[1], "stream");
    want.idle = !strcmp(argv[1], "idle");
    want.unique = !strcmp(argv[1], "unique");
    want.port = atoi(argv[2]);
    want.conns = atoi(argv[3]);
    want.warm_ms = atol(argv[4]);
    want.ms = atol(argv[5]);
    if (want.stream) want.gap_ms = last;
    else want.max_requests = last;
    /* A stream ends a fifth of a second after the window, so that the rate is constant inside it. */
    if (want.gap_ms > 0) want.events = (want.warm_ms + want.ms + 200) / want.gap_ms + 1;
    return (want.stream ? want.gap_ms > 0 : want.idle ? !last : want.unique || !strcmp(argv[1], "unary"))
        && last >= 0
        && want.port > 0 && want.port < 65536 && want.conns > 0 && want.conns <= MAX_CONNS
        && want.warm_ms >= 0 && want.ms > 0 && want.warm_ms + want.ms <= MAX_MS;
}

int main(int argc, char **argv)
{
    struct epoll_event batch[BATCH];
    if (!read_arguments(argc, argv)) {
        fprintf(stderr, "usage: load unary|unique PORT CONNECTIONS WARM_MS MS [REQUESTS]\n"
                        "       load stream PORT STREAMS WARM_MS MS GAP_MS\n"
                        "       load idle PORT CONNECTIONS WARM_MS MS\n"
                        "at most %d connections and %d ms\n", MAX_CONNS, MAX_MS);
        return 2;
    }
    alarm((unsigned)((want.warm_ms + want.ms + LATE_MS + (want.idle ? CROWD_MS : 0)) / 1000 + 10));   /* always ends, also after errors */
    write_requests();
    start();
    while (!over()) {
        int count = epoll_wait(poller, batch, BATCH, 5);
        for (int i = 0; i < count; i++) {
            if (batch[i].data.ptr) readable(batch[i].data.ptr);
            else start_streams();
        }
    }
    report();
    return errors != 0;
}
