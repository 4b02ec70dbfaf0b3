/* The feed: a snapshot of the proxy each second, and the reconnects. */
const HISTORY_SECS = 900, FEED_TIMEOUT_SECS = 6;
let snapshot = null, points = [], feedNumber = 0, skipWait = null, feedAbort = null, dataReceivedAt = 0, failedAttempts = 0;

function stopFeed() { feedNumber += 1; feedAbort?.abort(); skipWait?.(); }
function startFeed() { stopFeed(); failedAttempts = 0; runFeed(feedNumber); }
$("reconnect").addEventListener("click", startFeed);
document.addEventListener("visibilitychange", () => { if (!document.hidden && !$("disconnected").hidden) startFeed(); });
/* The back/forward cache keeps pages that the user left. Each would use one of the six connections that a browser opens to a host. */
addEventListener("pagehide", stopFeed);
addEventListener("pageshow", (event) => { if (event.persisted) startFeed(); });

async function runFeed(number) {
  while (number === feedNumber) {
    const reason = await readFeed(number);
    if (number !== feedNumber) return;
    const secs = Math.min(10, 0.5 * 2 ** failedAttempts) * (0.75 + Math.random() / 2);
    failedAttempts += 1;
    await waitToReconnect(number, secs, reason);
  }
}
/* Reads until the stream ends; returns the reason. */
async function readFeed(number) {
  const abort = feedAbort = new AbortController();
  dataReceivedAt = Date.now();
  const timer = setInterval(() => { if (Date.now() - dataReceivedAt > FEED_TIMEOUT_SECS * 1000) abort.abort(); }, 500);
  try {
    const response = await fetch("feed", { headers: withAdminKey({ Accept: "text/event-stream" }), signal: abort.signal, cache: "no-store", credentials: "omit" });
    if (response.status === 401 || response.status === 403) {
      const body = await response.json().catch(() => ({}));
      if (number === feedNumber) showSignIn(response.status, body);
      return "";
    }
    if (!response.ok) {
      const body = await response.json().catch(() => ({}));
      return `status ${response.status}${body.error?.message ? `, ${body.error.message}` : ""}`;
    }
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return "the proxy closed the connection";
      dataReceivedAt = Date.now();
      const events = (buffer + value).replaceAll("\r\n", "\n").split("\n\n");
      buffer = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length && number === feedNumber) applySnapshot(JSON.parse(data.join("\n")));
      }
    }
  } catch (error) {
    if (error instanceof SyntaxError) return "the proxy sent invalid data";
    return abort.signal.aborted ? `no data for ${FEED_TIMEOUT_SECS} s` : "the proxy is unreachable";
  } finally {
    clearInterval(timer);
    abort.abort();
  }
}
const LAST_KNOWN = "Last known: ";
async function waitToReconnect(number, secs, reason) {
  const until = Date.now() + secs * 1000;
  let skipped = false;
  while (number === feedNumber && !skipped && Date.now() < until) {
    const age = snapshot ? `Showing data of ${formatTime(snapshot.at)}, ${formatDuration(Date.now() / 1000 - snapshotReceivedAt)} ago. ` : "";
    setText($("disconnected-message"), `Connection lost: ${reason}.`);
    setText($("disconnected-age"), `${age}Reconnecting in ${Math.ceil((until - Date.now()) / 1000)} s.`);
    if (snapshot && !$("state").textContent.startsWith(LAST_KNOWN)) setText($("state"), LAST_KNOWN + $("state").textContent);
    setClass($("state"), "muted");
    setVisible($("disconnected"), true);
    setClass(document.body, "stale");
    setText($("connection"), "connection lost");
    document.title = "connection lost · omni-proxy";
    await new Promise((resume) => {
      const timer = setTimeout(resume, 250);
      skipWait = () => { skipped = true; clearTimeout(timer); resume(); };
    });
  }
}
let snapshotReceivedAt = 0;
function applySnapshot(body) {
  failedAttempts = 0;
  snapshotReceivedAt = Date.now() / 1000;
  if (body.history) {
    const newest = points.length ? points.at(-1).at : -Infinity;
    /* The first event has the whole history; later ones have only new points. */
    points = body.history.length > 5 || !points.length ? body.history : points.concat(body.history.filter((point) => point.at > newest));
    points = points.slice(-HISTORY_SECS);
  }
  snapshot = body;
  setVisible($("disconnected"), false);
  setVisible($("content"), true);
  setVisible($("sign-out"), Boolean(adminKey));
  setClass(document.body, "");
  render();
}

